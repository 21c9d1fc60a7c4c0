"""A place as a compose file: each service in a container that is closed as far as it can be.

Containers run as user 10001 of our images. Identities are files that nobody but their owner may read, so on the machine the
folder `services` belongs to that number. The whole hub is on one host; only the ports of the broker's nodes are published, and
to that host the monitor's. A region with a broker of its own is on one host, too, and publishes nothing. Its learners start
beside a broker that the hub does not answer: docker calls that one unhealthy, and leaves it alone.
"""

from __future__ import annotations

from typing import Any

from atoll.base.errors import SettingsError
from atoll.bus.options import LEAF_PORT, PORT
from atoll.deploy.description import DeploymentDescription, processors, size_bytes
from atoll.deploy.services import (
    DOOR,
    MONITOR_PORT,
    RUN_FILE,
    PlannedLeaf,
    PlannedNode,
    PlannedService,
    archive_folders,
    broker_environment,
    folders_of_container,
    leaf_command,
    leaf_of,
    node_command,
    nodes,
    services,
)
from atoll.deploy.texts import yaml
from atoll.wire.subjects import HUB

HEAD = """{run}, {place}: written by `atoll deploy render`; change the description and render again.

  sudo chown -R {user} services       identities are their owner's alone, and the containers run as this one
{folders}  docker compose up -d"""
HEAD_FOLDER = "  sudo install -d -o {user} -g {group} -m 0700 {folder}    {what}\n"
USER = "10001:10001"
FOLDER = "/service"
HEALTH = "/tmp/health"  # noqa: S108  (of a container)


def compose_files(described: DeploymentDescription, place: str) -> dict[str, str]:
    """Return the files of a place by their names."""
    found: dict[str, Any] = {}
    if place == HUB:
        found |= {node.name: _node(described, node) for node in nodes(described)}
    if (leaf := leaf_of(described, place)) is not None:
        found[leaf.name] = _leaf(described, leaf)
    found |= {one.name: _service(described, place, one) for one in services(described, place)}
    volumes: dict[str, dict[str, Any]] = {
        volume.partition(":")[0]: {}
        for one in found.values()
        for volume in one["volumes"]
        if isinstance(volume, str) and volume[0] not in "./~"
    }
    tree = {"name": f"atoll-{described.run}-{place}".lower(), "services": found} | (
        {"volumes": volumes} if volumes else {}
    )
    head = HEAD.format(run=described.run, place=place, user=USER, folders=_head_folders(described, place))
    return {"compose.yml": yaml(tree, head=head)}


def _head_folders(described: DeploymentDescription, place: str) -> str:
    told = {folder: f"for {one.name}" for one in services(described, place) for folder in folders_of_container(one)}
    if place == HUB and (archive := archive_folders(described).written):
        told[archive] = "the archive, to which synchronizers write"
    user, _, group = USER.partition(":")
    return "".join(
        HEAD_FOLDER.format(user=user, group=group, folder=folder, what=what) for folder, what in told.items()
    )


def _hardened_service(image: str, memory: str, heartbeat: list[str]) -> dict[str, Any]:
    """Return what every service has: no root, no rights, nothing to write but what it is given, and a health check."""
    return {
        "image": image,
        "user": USER,
        "read_only": True,
        "tmpfs": ["/tmp:mode=1777,size=512m"],  # noqa: S108  (of a container)
        "cap_drop": ["ALL"],
        "security_opt": ["no-new-privileges:true"],
        "init": True,
        "restart": "unless-stopped",
        "stop_grace_period": "60s",
        "logging": {"driver": "json-file", "options": {"max-size": "10m", "max-file": "3"}},
        "healthcheck": {
            "test": ["CMD", "atoll", "health", *heartbeat],
            "interval": "10s",
            "timeout": "5s",
            "retries": 6,
        }
        | {"start_period": "60s"},
        "deploy": {"resources": {"limits": {"memory": _compose_size(memory), "pids": 256}}},
    }


def _node(described: DeploymentDescription, node: PlannedNode) -> dict[str, Any]:
    image, memory = described.software.hub_image, described.hub.memory
    return _hardened_service(image, memory, ["--file", HEALTH]) | {
        "command": list(node_command(described, node, store="/data", keys="/door")),
        "environment": broker_environment(memory, HEALTH),
        "ports": [f"{node.port}:{PORT}", *([f"{node.leaf_port}:{LEAF_PORT}"] if node.leaf_port else [])],
        "volumes": [f"{node.name}:/data", f"./services/{DOOR}:/door:ro"],
    }


def _leaf(described: DeploymentDescription, leaf: PlannedLeaf) -> dict[str, Any]:
    image, memory = described.software.hub_image, described.hub.memory
    return _hardened_service(image, memory, ["--file", HEALTH]) | {
        "command": list(leaf_command(leaf, store="/data", keys="/door")),
        "environment": broker_environment(memory, HEALTH),
        "volumes": [f"{leaf.name}:/data", f"./services/{leaf.name}:/door:ro"],
    }


def _service(described: DeploymentDescription, place: str, service: PlannedService) -> dict[str, Any]:
    config = ["--config", f"{FOLDER}/{RUN_FILE}"]
    mounts: list[str | dict[str, Any]] = [f"./services/{service.name}:{FOLDER}:ro"]
    leaf = leaf_of(described, place)
    waits = (
        {leaf.name: {"condition": "service_started"}}
        if leaf is not None
        else {node.name: {"condition": "service_healthy"} for node in nodes(described)}
    )
    if service.kind == "learner":
        region = described.regions[place]
        mounts += [f"{service.name}:/state", f"{_mountable_path(region.data)}:/data:ro"]
        made = _hardened_service(described.software.learner_image, region.memory, config)
        made["deploy"]["resources"]["limits"]["cpus"] = processors(region.cpus)
        mounts += [_bind(folder) for folder in folders_of_container(service)]
        made |= {"command": [service.verb, *config], "volumes": mounts}
        return made if leaf is None else made | {"depends_on": waits}
    made = _hardened_service(described.software.hub_image, described.hub.memory, config)
    if service.kind == "reader":
        mounts.append(f"{service.name}:/state")
        made["ports"] = [f"127.0.0.1:{MONITOR_PORT}:{MONITOR_PORT}"]
    own = folders_of_container(service)
    mounts += [_bind(folder) for folder in own]
    if service.kind == "synchronizer":
        mounts += [mount for mount in _archive(described) if mount["source"] not in own]
    return made | {"command": [service.verb, *config], "volumes": mounts, "depends_on": waits}


def _archive(described: DeploymentDescription) -> list[dict[str, Any]]:
    """Return the mounts of a synchronizer for the archive, at the paths that its run file names."""
    folders = archive_folders(described)
    return [
        _bind(folder, read_only=read_only)
        for folder, read_only in ((folders.written, False), (folders.read, True))
        if folder
    ]


def _bind(folder: str, *, read_only: bool = False) -> dict[str, Any]:
    """Return the mount of a folder of the host, at its own path.

    The short form would let docker make a folder that is missing. It would be root's, and every checkpoint would fail, which
    is only a warning in the log. This form refuses to start the service.
    """
    bind = {"create_host_path": False}
    return {"type": "bind", "source": folder, "target": folder, "read_only": read_only, "bind": bind}


def _mountable_path(path: str) -> str:
    """Return a path as compose takes it for a folder and not for a volume.

    Raises:
        SettingsError: compose would split it, or put the value of a variable into it.
    """
    if any(letter in ":$" or not letter.isprintable() for letter in path):
        raise SettingsError(
            "compose cannot mount a folder of this name",
            got=f"data = {path!r}",
            allowed="a path without ':', '$' and control characters",
            todo="rename the folder, or name a link to it",
        )
    return path if path.startswith(("/", "./", "../", "~")) else f"./{path}"


def _compose_size(quantity: str) -> str:
    """Return a size in compose's words: its letters mean powers of 1024, with and without an i."""
    return f"{size_bytes(quantity)}b"
