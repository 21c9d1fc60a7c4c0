"""`docker-compose.yml` tells its services only what they understand."""

from __future__ import annotations

import itertools
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from atoll.settings import load

COMPOSE: dict[str, Any] = yaml.safe_load((Path(__file__).parents[2] / "docker-compose.yml").read_text(encoding="utf-8"))
DOCKERFILE = (Path(__file__).parents[2] / "infra" / "docker" / "Dockerfile").read_text(encoding="utf-8")
PYPROJECT = Path(__file__).parents[2] / "pyproject.toml"
OURS = [name for name, service in COMPOSE["services"].items() if "ATOLL_RUN" in service.get("environment", {})]
NODES = [name for name in COMPOSE["services"] if name.startswith("nats-")]
LEAVES = [name for name in COMPOSE["services"] if name.startswith("leaf-")]
LEARNERS = [name for name in COMPOSE["services"] if name.startswith("learner-")]


def environment(service: str) -> dict[str, str]:
    """Return what a service is told, as text."""
    return {name: str(value) for name, value in COMPOSE["services"][service]["environment"].items()}


@pytest.mark.parametrize("service", OURS)
def test_every_variable_is_a_setting(service: str) -> None:
    """An unknown or impossible setting would keep the container from starting."""
    loaded = load(None, (), environment(service))

    assert set(loaded.origins) >= {"run", "broker.url"}


def test_synchronizers_share_all_shards_and_learners_have_ids_of_their_own() -> None:
    """Two candidates for every shard; two learners in each of three islands, one of them in a profile."""
    settings = {name: load(None, (), environment(name)).settings for name in OURS}
    wanted = [s.synchronizer.shard for name, s in settings.items() if name.startswith("synchronizer")]
    learners = [settings[name].learner.id for name in LEARNERS]
    more = {name for name in LEARNERS if COMPOSE["services"][name].get("profiles") == ["two"]}

    assert wanted == [None, None]
    assert len(set(learners)) == len(learners) == 6
    assert more == {"learner-a2", "learner-b2", "learner-c2"}


def test_each_image_is_built_once() -> None:
    services = COMPOSE["services"].values()
    built = [service["image"] for service in services if "build" in service]

    assert sorted(built) == sorted({service["image"] for service in services})


def networks(service: str) -> set[str]:
    """Return in which networks a service stands."""
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


def test_the_nodes_of_the_broker_know_each_other_and_keep_copies() -> None:
    """Each has a number, a store of its own and a route to each other one; every founder makes a copy for each."""
    commands = {name: COMPOSE["services"][name]["command"] for name in NODES}
    for number, (name, command) in enumerate(commands.items(), 1):
        routes = {word for flag, word in itertools.pairwise(command) if flag == "--route"}
        assert routes == {f"nats://{other}:6222" for other in NODES if other != name}
        assert command[command.index("--node") + 1] == str(number)
    stores = {mounts(name)["/data"] for name in NODES}
    hosts = {word for flag, word in itertools.pairwise(COMPOSE["services"]["keys"]["command"]) if flag == "--host"}

    assert len(stores) == len(NODES)
    assert set(NODES) <= hosts
    assert {environment(name)["ATOLL_BROKER__REPLICAS"] for name in OURS} == {str(len(NODES))}


def test_what_ran_comes_back_after_a_reboot_and_what_is_over_stays() -> None:
    """An engine starts `unless-stopped` again after a reboot, and after every exit: so a finished service does not leave."""
    policies = {name: service["restart"] for name, service in COMPOSE["services"].items()}
    asked, once = {"watch", "export"}, {"keys", "data"}

    assert {policies.pop(name) for name in asked} == {"no"}
    assert {policies.pop(name) for name in once} == {"on-failure:2"}
    assert set(policies.values()) == {"unless-stopped"}
    assert all(load(None, (), environment(name)).settings.stay for name in set(policies) & set(OURS))


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


def test_the_image_has_a_folder_of_the_user_for_each_volume() -> None:
    """A volume that is mounted for the first time takes the owner of the folder it covers; else it would be root's."""
    made = DOCKERFILE.split()
    places = {
        place for name in COMPOSE["services"] for place in mounts(name) if not place.startswith(("/data", "/door"))
    }

    assert places <= set(made)


def test_an_image_has_what_its_services_import() -> None:
    """The extra of each command that a service runs, but for the compilers: kernels are compiled when images are built."""
    extras = tomllib.loads(PYPROJECT.read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    services = COMPOSE["services"].values()
    targets = {service["image"]: service["build"]["target"] for service in services if "build" in service}
    stages = {text.split("\n", 1)[0]: text for text in DOCKERFILE.split("\nFROM tools AS ")[1:]}
    needed = {
        (targets[service["image"]], service["command"][0]) for service in services if service["command"][0] in extras
    }

    assert {("synchronizer", "monitor"), ("learner", "learner")} <= needed
    for target, extra in needed:
        if any(not package.startswith("numba") for package in extras[extra]):
            assert f"--extra {extra}" in stages[f"environment-{target}"]


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
    """The root of each container is read-only; without one the evaluator could not start."""
    targets = {volume.split(":")[1] for volume in COMPOSE["services"][service].get("volumes", ())}
    told = [value for value in environment(service).values() if value.startswith("/state")]

    assert all(any(value.startswith(target) for target in targets) for value in told)
