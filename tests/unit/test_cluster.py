"""Nodes of a cluster and regions: what is accepted, and what a server and a person are told of them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from atoll.base.errors import EnvironmentFault, SettingsError
from atoll.bus.options import SHORT_TRIES, BusOptions, is_address
from atoll.bus.regions import REGION_FILE, domain_of
from atoll.bus.server import ClusterNode, EmbeddedBroker, is_cluster, node_store, planned_nodes
from atoll.client.join import check_joining
from atoll.client.options import JoinOptions
from atoll.deploy.description import DeploymentDescription, HubPlace, RegionPlace
from atoll.keys.rights import check_name, premerger_of
from atoll.keys.roll import KeyFolder
from atoll.settings import load
from atoll.wire.subjects import is_region_name
from atoll_synchronizer.process import check_region
from support.command_line import atoll

NODE = ClusterNode("hub", 2, 6222, ("nats://a:6222", "nats://c:6222"))


@pytest.mark.parametrize(
    ("url", "known"),
    [
        ("nats://a:4222", True),
        ("nats://a:4222,nats://b:4222", True),
        ("nats://a:4222, tls://b:4222", True),
        ("nats://a", True),
        ("nats://a:4222,", False),
        ("nats://a:4222,b:4222", False),
        ("http://a:4222", False),
        ("", False),
    ],
)
def test_a_broker_has_one_address_or_several(url: str, known: bool) -> None:  # noqa: FBT001  (a parameter)
    """Each of them must be one."""
    assert is_address(url) is known


@pytest.mark.parametrize(
    ("node", "complaint"),
    [
        (ClusterNode("my hub", 1, 6222, NODE.routes), "no name of a cluster"),
        (ClusterNode("hub", 0, 6222, NODE.routes), "no number of a node"),
        (ClusterNode("hub", 10, 6222, NODE.routes), "no number of a node"),
        (ClusterNode("hub", 1, 6222, ("nats://a:6222", "a:6222")), "no route to a node"),
        (ClusterNode("hub", 1, 6222, ("nats://a",)), "no route to a node"),
        (ClusterNode("hub", 1, 6222, ()), "needs to know the others"),
    ],
)
def test_what_can_be_no_node_is_refused(node: ClusterNode, complaint: str) -> None:
    with pytest.raises(SettingsError, match=complaint):
        node.check()


def test_a_store_stays_its_owners(tmp_path: Path) -> None:
    """A node's store is no other node's and no single server's, nor the other way round: streams would be removed."""
    of_node, of_server = tmp_path / "node", tmp_path / "server"
    begun = EmbeddedBroker(of_node, node=NODE)
    begun._occupy()
    begun.stop()
    (of_server / "js").mkdir(parents=True)

    with pytest.raises(SettingsError, match="holds a node of a cluster"):
        EmbeddedBroker(of_node)._occupy()
    with pytest.raises(SettingsError, match=r"(?s)of another broker.*hub-2"):
        EmbeddedBroker(of_node, node=ClusterNode("hub", 3, 6222, NODE.routes))._occupy()
    with pytest.raises(SettingsError, match=r"(?s)of another broker.*a single server"):
        EmbeddedBroker(of_server, node=NODE)._occupy()
    (of_node / "node.json").write_text("{")
    with pytest.raises(EnvironmentFault, match="cannot be read"):
        EmbeddedBroker(of_node, node=NODE)._occupy()


def test_a_local_cluster_keeps_its_name_and_not_its_ports(tmp_path: Path) -> None:
    """Its nodes are the same the next time, whatever number is asked for; each knows the two others."""
    assert not is_cluster(tmp_path)
    first, again = planned_nodes(tmp_path, 3), planned_nodes(tmp_path)

    assert is_cluster(tmp_path)
    assert [node.server_name for node in first] == [node.server_name for node in again]
    assert {node.name for node in planned_nodes(tmp_path / "other", 3)} != {first[0].name}
    assert [len(node.check().routes) for node in first] == [2, 2, 2]
    assert first[0].routes == tuple(f"nats://127.0.0.1:{node.port}" for node in first[1:])
    assert node_store(tmp_path, 2) == tmp_path / "node-2"
    (tmp_path / "cluster.json").write_text("[]")
    with pytest.raises(EnvironmentFault, match="cannot be read"):
        planned_nodes(tmp_path)


def test_first_tries_are_short_where_another_node_may_take_over() -> None:
    options = BusOptions(try_s=10.0, first_try_s=2.0)

    assert [options.tries_s(attempts, 1) for attempts in (0, 50)] == [10.0, 10.0]
    assert [options.tries_s(attempts, 3) for attempts in (0, SHORT_TRIES, SHORT_TRIES + 1)] == [2.0, 2.0, 4.0]
    assert options.tries_s(50, 3) == 10.0


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
