"""What nats-server and a person are told of regions: names, addresses, options that do not fit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from atoll.base.errors import EnvironmentFault, SettingsError
from atoll.bus.regions import REGION_FILE, domain_of
from atoll.client.join import check_joining
from atoll.client.options import JoinOptions
from atoll.deploy.description import DeploymentDescription, HubPlace, RegionPlace
from atoll.keys.rights import check_name, premerger_of
from atoll.keys.roll import KeyFolder
from atoll.settings import load
from atoll.wire.subjects import is_region_name
from atoll_synchronizer.process import check_region
from support.command_line import atoll


def test_a_region_keeps_its_name(tmp_path: Path) -> None:
    made = domain_of(tmp_path / "a", None)
    assert domain_of(tmp_path / "a", None) == domain_of(tmp_path / "a", made) == made
    assert domain_of(tmp_path / "b", "eu") == domain_of(tmp_path / "b", None) == "eu"
    with pytest.raises(SettingsError, match="another region"):
        domain_of(tmp_path / "b", "us")
    (tmp_path / "b" / REGION_FILE).write_text("{")
    with pytest.raises(EnvironmentFault, match="restore it"):
        domain_of(tmp_path / "b", None)


@pytest.mark.parametrize("name", ["hub", "a.b", "a b", "x" * 33, "EU", "eu_west", "1st", "eu-", "shard", "eu\n"])
def test_names_that_no_region_can_have_have_none_anywhere(tmp_path: Path, name: str) -> None:
    """One rule for a leaf, a learner, a synchronizer, an identity and a description: what one takes, all take."""
    doors: list[Callable[[], object]] = [
        lambda: domain_of(tmp_path, name),
        lambda: check_joining("a", None, JoinOptions(region=name)),
        lambda: check_region(load(None, [f"synchronizer.region={name}"]).settings),
        lambda: check_name("premerger", "ocean", premerger_of(name)),
    ]
    for door in doors:
        with pytest.raises(SettingsError):
            door()
    with pytest.raises(ValueError, match="no name of a region"):
        described(name)
    assert not (tmp_path / REGION_FILE).exists()


@pytest.mark.parametrize("name", ["eu", "a", "us-east-1", "x" * 32])
def test_names_that_a_region_may_have_everywhere(tmp_path: Path, name: str) -> None:
    check_joining("a", None, JoinOptions(region=name))
    check_name("premerger", "ocean", premerger_of(name))
    described(name)

    assert domain_of(tmp_path / "named", name) == name
    assert check_region(load(None, [f"synchronizer.region={name}"]).settings) == name
    assert is_region_name(domain_of(tmp_path / "unnamed", None))


def described(region: str) -> DeploymentDescription:
    hub, place = HubPlace(hosts=("hub.example.org",)), RegionPlace(learners=1, target="systemd")
    return DeploymentDescription(run="ocean", hub=hub, regions={region: place})


def test_options_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    keys = KeyFolder(tmp_path / "keys")
    keys.create(["127.0.0.1"], 0.0)
    operator = str(tmp_path / "keys" / "identities" / "operator.toml")
    region = str(keys.add("eu", "region", "demo", 0.0))
    leaf, store = ("--leaf-of", "nats://127.0.0.1:1"), ("--store", str(tmp_path / "store"))
    locked = ("--keys", str(keys.path))
    for words, said in (
        (("--region", "eu"), "no --leaf-of"),
        (("--identity", operator), "no --leaf-of"),
        ((*leaf, "--leaf-port", "7422"), "--leaf-port beside --leaf-of"),
        ((*leaf, "--cluster", "c", "--node", "1", "--route", "nats://127.0.0.1:2"), "--cluster beside --leaf-of"),
        ((*leaf, *locked), "--keys without --identity"),
        ((*leaf, "--identity", operator), "--identity without --keys"),
        ((*leaf, *locked, "--identity", operator), "not that of a region"),
        ((*leaf, *locked, "--identity", region, "--region", "us"), "the identity is that of another region"),
        (("--leaf-of", "here"), "lets leaves in"),
        ((*leaf, "--region", "hub"), "cannot have this name"),
    ):
        done = atoll("broker", *store, *words)
        assert done.returncode == 2, (words, done.stderr)
        assert said in done.stderr
        assert "Traceback" not in done.stderr
