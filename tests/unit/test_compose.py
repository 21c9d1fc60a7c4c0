"""`docker-compose.yml` tells its services only what they understand."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import yaml

COMPOSE: dict[str, Any] = yaml.safe_load((Path(__file__).parents[2] / "docker-compose.yml").read_text(encoding="utf-8"))
OURS = [name for name, service in COMPOSE["services"].items() if "ATOLL_RUN" in service.get("environment", {})]
NODES = [name for name in COMPOSE["services"] if name.startswith("nats-")]
LEAVES = [name for name in COMPOSE["services"] if name.startswith("leaf-")]
LEARNERS = [name for name in COMPOSE["services"] if name.startswith("learner-")]


def environment(service: str) -> dict[str, str]:
    return {name: str(value) for name, value in COMPOSE["services"][service]["environment"].items()}


def networks(service: str) -> set[str]:
    return set(COMPOSE["services"][service].get("networks", ()))


def test_an_island_has_a_network_of_its_own_and_only_its_leaf_stands_in_another() -> None:
    """Learners of an island reach each other and their leaf; brokers meet in `wan`, and nobody else is there."""
    islands = {name: f"island-{name.removeprefix('learner-')[0]}" for name in LEARNERS}
    members = {
        place: {name for name in COMPOSE["services"] if place in networks(name)} for place in COMPOSE["networks"]
    }

    assert {name: networks(name) for name in LEARNERS} == {name: {place} for name, place in islands.items()}
    for place in set(islands.values()):
        assert members[place] & {*NODES} == set()
        assert members[place] - {*LEARNERS} == {place.replace("island", "leaf")}
        assert COMPOSE["networks"][place] == {"internal": True}
    assert members["wan"] == {*NODES, *LEAVES}


def test_a_leaf_goes_to_every_node_of_the_hub_and_its_learners_come_to_it() -> None:
    """A region of its own for each, in a store of its own; its certificate has the name by which its learners reach it."""
    stores = set()
    for leaf in LEAVES:
        words = dict(itertools.pairwise(COMPOSE["services"][leaf]["command"]))
        assert words["--leaf-of"] == ",".join(f"tls://{name}:7422" for name in NODES)
        assert (words["--keys"], words["--identity"]) == ("/door", "/door/identity.toml")
        # The region has the name of its identity.
        assert "--region" not in words
        stores.add(mounts(leaf)["/data"])
    known = [word for flag, word in itertools.pairwise(COMPOSE["services"]["keys"]["command"]) if flag == "--region"]

    assert len(stores) == len(LEAVES)
    assert known == LEAVES
    for node in NODES:
        assert dict(itertools.pairwise(COMPOSE["services"][node]["command"]))["--leaf-port"] == "7422"
    for name in LEARNERS:
        leaf = f"leaf-{name.removeprefix('learner-')[0]}"
        assert environment(name)["ATOLL_BROKER__URL"] == f"tls://{leaf}:4222"
        # A leaf that is cut off is unhealthy, and its learners start all the same.
        assert COMPOSE["services"][name]["depends_on"][leaf] == {"condition": "service_started"}


def mounts(service: str) -> dict[str, str]:
    """Return the volumes of a service, by the place at which it sees them."""
    parts = (mount.split(":") for mount in COMPOSE["services"][service].get("volumes", ()))
    return {part[1]: part[0] for part in parts}


def test_each_service_has_its_own_identity_and_nobody_elses() -> None:
    """`keys` alone has the operator's folder; what it hands out is what the others mount."""
    handed = {place.removeprefix("/handed/"): name for place, name in mounts("keys").items() if place != "/keys"}
    words = COMPOSE["services"]["keys"]["command"]
    kinds = ("--region", "--learner", "--synchronizer", "--evaluator", "--reader")
    named = [word for flag, word in itertools.pairwise(words) if flag in kinds]
    held = {name: mounts(name)["/identity"] for name in OURS}

    assert set(handed) == {*named, "broker"}
    assert len(set(held.values())) == len(OURS)
    assert held == {name: handed[name.removeprefix("learner-")] for name in OURS}
    assert {mounts(name)["/door"] for name in NODES} == {handed["broker"]}
    assert {name: mounts(name)["/door"] for name in LEAVES} == {name: handed[name] for name in LEAVES}
    for name in set(COMPOSE["services"]) - {"keys"}:
        seen = mounts(name)
        assert {"keys", *handed.values()} & set(seen.values()) == {
            seen[at] for at in ("/identity", "/door") if at in seen
        }
        assert ("/identity" in seen) + ("/door" in seen) <= 1
        assert all(
            mount.endswith(":ro")
            for mount in COMPOSE["services"][name].get("volumes", ())
            if mount.split(":")[0] in {"keys", *handed.values()}
        )


def test_the_monitors_port_alone_is_published_to_this_host_and_every_connection_is_encrypted() -> None:
    """The broker is reached inside its networks, by TLS; a Prometheus there asks the monitor by the name of its service."""
    assert environment("monitor")["ATOLL_MONITOR__NAMES"] == "monitor"
    published = {name: service["ports"] for name, service in COMPOSE["services"].items() if "ports" in service}
    assert published == {"monitor": ["127.0.0.1:9464:9464"]}
    at_hub = {environment(name)["ATOLL_BROKER__URL"] for name in OURS if name not in LEARNERS}
    assert at_hub == {",".join(f"tls://{name}:4222" for name in NODES)}
    for name in (*NODES, *LEAVES):
        assert ("--keys", "/door") in itertools.pairwise(COMPOSE["services"][name]["command"])


@pytest.mark.parametrize("service", OURS)
def test_every_folder_that_a_service_is_told_to_write_to_is_a_volume(service: str) -> None:
    targets = {volume.split(":")[1] for volume in COMPOSE["services"][service].get("volumes", ())}
    told = [value for value in environment(service).values() if value.startswith("/state")]

    assert all(any(value.startswith(target) for target in targets) for value in told)
