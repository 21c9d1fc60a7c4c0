"""What a region's leaf is handed: a door of its own, which opens no other."""

from __future__ import annotations

import stat
import time
from pathlib import Path

import pytest

from atoll.base.errors import SettingsError
from atoll.keys.certificates import Certified, broker_certificate, hosts_of, pin
from atoll.keys.identity import read_identity
from atoll.keys.roll import LOOPBACK, KeyFolder, ensure, hand_out, hand_out_region_door
from support.command_line import atoll

NAMES = ["authority.pem", "broker.key", "broker.pem", "identity.toml", "roll.json"]
HOSTS = {"leaf-eu", *LOOPBACK}
REGIONS = {"leaf-eu": ["leaf-eu"]}


@pytest.fixture
def keys(tmp_path: Path) -> KeyFolder:
    """The operator's folder, with a region and a learner on its roll."""
    folder = KeyFolder(tmp_path / "keys")
    ensure(folder, "demo", {"leaf-eu": "region", "ada": "learner"}, ["nats"])
    return folder


def test_a_region_is_provided_with_what_its_leaf_needs(tmp_path: Path) -> None:
    """Its identity, which lets its learners begin the run, and a door with the hub's people: nothing else, and only once."""
    into = tmp_path / "handed"
    words = ("keys", "provide", str(tmp_path / "keys"), "--into", str(into), "--run", "demo", "--host", "nats")
    done = atoll(*words, "--region", "leaf-eu", "--learner", "ada")

    assert done.returncode == 0, done.stderr
    assert sorted(path.name for path in (into / "leaf-eu").iterdir()) == NAMES
    secret = ("broker.key", "identity.toml")
    assert {stat.S_IMODE((into / "leaf-eu" / name).stat().st_mode) for name in secret} == {0o600}
    held = read_identity(into / "leaf-eu" / "identity.toml")
    assert (held.kind, held.run, held.founds) == ("region", "demo", True)
    assert (into / "leaf-eu" / "roll.json").read_bytes() == (into / "broker" / "roll.json").read_bytes()
    assert "0 files changed" in atoll(*words, "--region", "leaf-eu", "--learner", "ada").stdout
    for given, place in (("ada=leaf-eu", "leaf-eu"), ("ada", "leaf-eu"), ("ada=hub", "hub")):
        assert atoll(*words, "--region", "leaf-eu", "--learner", given).returncode == 0
        ada = KeyFolder(into / "leaf-eu").read().of("demo", "ada")
        assert ada is not None
        assert ada.region == place
    assert atoll(*words, "--region", "us=us.example.org,10.0.0.7").returncode == 0
    assert set(hosts_of(KeyFolder(into / "us").shown(time.time()).certificate)) == {
        "us.example.org",
        "10.0.0.7",
        *LOOPBACK,
    }
    refused = atoll(*words, "--region", "no_host")
    assert refused.returncode != 0
    assert "name of a host" in refused.stderr
    assert "Traceback" not in refused.stderr


def test_the_key_of_the_hubs_broker_stays_with_the_hub(keys: KeyFolder, tmp_path: Path) -> None:
    """Whoever had it would be a node of the cluster; the region's certificate names the region's hosts and no other."""
    hand_out(keys, "demo", ("leaf-eu", "ada"), tmp_path, REGIONS)
    hub, leaf = (KeyFolder(tmp_path / name).shown(time.time()) for name in ("broker", "leaf-eu"))

    assert hub.key == keys.key_path.read_text(encoding="utf-8")
    assert leaf.key != hub.key
    assert pin(leaf.certificate) != pin(hub.certificate)
    assert set(hosts_of(leaf.certificate)) == HOSTS


@pytest.mark.parametrize("how", ["ends soon", "is of other hosts", "is of another key"])
def test_a_certificate_that_serves_a_region_no_more_is_replaced(keys: KeyFolder, tmp_path: Path, how: str) -> None:
    hand_out_region_door(keys, "leaf-eu", ["leaf-eu"], tmp_path)
    door, authority = KeyFolder(tmp_path / "leaf-eu"), keys.path / "authority"
    assert hand_out_region_door(keys, "leaf-eu", ["leaf-eu"], tmp_path) == []
    signer = Certified(*(authority.with_suffix(suffix).read_text(encoding="utf-8") for suffix in (".pem", ".key")))
    hosts = ("elsewhere",) if how == "is of other hosts" else tuple(HOSTS)
    other = broker_certificate(signer, hosts, days=29 if how == "ends soon" else 31)
    door.certificate_path.write_text(other.certificate, encoding="utf-8")
    if how != "is of another key":
        door.key_path.write_text(other.key, encoding="utf-8")

    assert hand_out_region_door(keys, "leaf-eu", ["leaf-eu"], tmp_path) == [door.key_path, door.certificate_path]
    assert set(hosts_of(door.shown(time.time()).certificate)) == HOSTS
    assert stat.S_IMODE(door.key_path.stat().st_mode) == 0o600


def test_a_region_that_is_revoked_loses_its_identity(keys: KeyFolder, tmp_path: Path) -> None:
    hand_out(keys, "demo", REGIONS, tmp_path, REGIONS)
    keys.revoke("leaf-eu", "demo", time.time())
    hand_out(keys, "demo", REGIONS, tmp_path, REGIONS)

    assert not (tmp_path / "leaf-eu" / "identity.toml").exists()
    with pytest.raises(SettingsError, match="name of a host"):
        hand_out_region_door(keys, "leaf-eu", ["no_host"], tmp_path)


def test_an_identity_that_its_operator_has_deleted_stays_with_its_holder(keys: KeyFolder, tmp_path: Path) -> None:
    """We tell operators to delete it once its holder has it; handing out again must not take it away."""
    hand_out(keys, "demo", ("leaf-eu", "ada"), tmp_path)
    held = (tmp_path / "ada" / "identity.toml").read_bytes()
    (keys.path / "identities" / "demo" / "ada.toml").unlink()
    hand_out(keys, "demo", ("leaf-eu", "ada"), tmp_path)

    assert (tmp_path / "ada" / "identity.toml").read_bytes() == held
