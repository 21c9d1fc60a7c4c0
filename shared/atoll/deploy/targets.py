"""A place as files of what starts its services: compose, systemd or SkyPilot; Kubernetes has a module of its own.

**compose.** Each service is in a container that is closed as far as it can be, as user 10001 of our images. Identities are
files that nobody but their owner may read, so the folder `services` belongs to that number. The whole hub is on one host, which
publishes only the ports of the broker's nodes, and to itself the monitor's. A region with a broker of its own is on one host,
too, and publishes nothing. Its learners start beside a broker that the hub does not answer: docker calls that one unhealthy,
and leaves it alone.

**systemd.** A unit for each service, the same on every machine of the place. It starts again what fails and not what has
finished; after a boot a service whose run is over finds that out and leaves. Units write only below /var/lib and /run, and into
folders that settings name (`own_folders`), such as the archive. Identities are files of the user `atoll` in /etc/atoll:
systemd's own credentials are opened to that user by an access list, whose mask looks as if a group might read them, and such
a file is refused.

**SkyPilot.** A task for each learner of a region, on machines that may be taken back. The identity is a *secret* of the task,
which `sky` asks for at launch. A managed job that loses its machine begins anew on another one: the learner takes the run's
values, and goes on with fresh moments of its inner optimizer.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from typing import Any, Final

import tomli_w

from atoll.base.errors import SettingsError
from atoll.base.machine import huge_pages
from atoll.bus.options import LEAF_PORT, PORT
from atoll.deploy.description import DeploymentDescription, processors, size_bytes
from atoll.deploy.services import (
    IDENTITY_FILE,
    MONITOR_PORT,
    RUN_FILE,
    PlannedLeaf,
    PlannedNode,
    PlannedService,
    archive_folders,
    broker_command,
    broker_environment,
    brokers_at,
    folders_of_container,
    leaf_of,
    nodes,
    own_folders,
    services,
    unit_name,
)
from atoll.deploy.texts import yaml
from atoll.wire.subjects import HUB

COMPOSE_HEAD = """{run}, {place}: written by `atoll deploy render`; change the description and render again.

  sudo chown -R {user} services       identities are their owner's alone, and the containers run as this one
{folders}  docker compose up -d"""
HEAD_FOLDER = "  sudo install -d -o {user} -g {group} -m 0700 {folder}    {what}\n"
CONTAINER_USER = "10001:10001"
FOLDER = "/service"
CONTAINER_HEALTH = "/tmp/health"  # noqa: S108  (of a container)


def compose_files(described: DeploymentDescription, place: str) -> dict[str, str]:
    """Return the files of a place by their names."""
    found: dict[str, Any] = {}
    found |= {broker.name: _broker(described, broker) for broker in brokers_at(described, place)}
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
    head = COMPOSE_HEAD.format(
        run=described.run, place=place, user=CONTAINER_USER, folders=_head_folders(described, place)
    )
    return {"compose.yml": yaml(tree, head=head)}


def _head_folders(described: DeploymentDescription, place: str) -> str:
    told = {folder: f"for {one.name}" for one in services(described, place) for folder in folders_of_container(one)}
    if place == HUB and (archive := archive_folders(described).written):
        told[archive] = "the archive, to which synchronizers write"
    user, _, group = CONTAINER_USER.partition(":")
    return "".join(
        HEAD_FOLDER.format(user=user, group=group, folder=folder, what=what) for folder, what in told.items()
    )


def _hardened_service(image: str, memory: str, heartbeat: list[str]) -> dict[str, Any]:
    return {
        "image": image,
        "user": CONTAINER_USER,
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


def _broker(described: DeploymentDescription, broker: PlannedNode | PlannedLeaf) -> dict[str, Any]:
    image, memory = described.software.hub_image, described.hub.memory
    made = _hardened_service(image, memory, ["--file", CONTAINER_HEALTH]) | {
        "command": broker_command(described, broker, store="/data", keys="/door"),
        "environment": broker_environment(memory, CONTAINER_HEALTH),
    }
    if isinstance(broker, PlannedNode):
        leaves = [f"{broker.leaf_port}:{LEAF_PORT}"] if broker.leaf_port else []
        made["ports"] = [f"{broker.port}:{PORT}", *leaves]
    return made | {"volumes": [f"{broker.name}:/data", f"./services/{broker.door}:/door:ro"]}


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
    """Return a path as compose takes it for a folder and not for a volume."""
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


UNIT_USER: Final = "atoll"
_UNIT: Final = """# Written by `atoll deploy render`; change the description and render again.
[Unit]
Description=Atoll {run}: {name}
Documentation=https://arxiv.org/abs/2604.21428
Wants=network-online.target
After=network-online.target{after}
StartLimitIntervalSec=0

[Service]
Type=exec
User={user}
Group={user}
{makes}ExecStart={command}
Restart=on-failure
RestartSec=5s
KillMode=mixed
TimeoutStopSec=90s
{environment}StateDirectory={unit}
StateDirectoryMode=0700
RuntimeDirectory={unit}
RuntimeDirectoryMode=0755
UMask=0077
LimitNOFILE=65536
NoNewPrivileges=yes
CapabilityBoundingSet=
AmbientCapabilities=
ProtectSystem=strict
{writes}ProtectHome=read-only
PrivateTmp=yes
ProtectControlGroups=yes
ProtectKernelModules=yes
ProtectKernelTunables=yes
ProtectKernelLogs=yes
ProtectClock=yes
ProtectHostname=yes
RestrictNamespaces=yes
RestrictRealtime=yes
RestrictSUIDSGID=yes
LockPersonality=yes
RestrictAddressFamilies=AF_INET AF_INET6 AF_UNIX AF_NETLINK
SystemCallArchitectures=native

[Install]
WantedBy=multi-user.target
"""
# In the time to stop a learner pushes what it has, and a node of the broker hands its leaders over. Token shards may be in
# somebody's home.
# A folder that is not there cannot be made writable: the unit would not start (status=226/NAMESPACE), or, with a `-`, it would
# start with a folder that it may not make. So the unit makes the folder first; `+` is root, outside the sandbox. A folder
# that exists keeps its owner and its mode. A synchronizer merges also while its archive is away, and warns: so neither line may
# stop the unit (`-`), and it is started after remote file systems, which it does not require.
_MAKES: Final = """ExecStartPre=-+/bin/sh -c "test -d {folder} || install -d -o {user} -g {user} -m 0700 {folder}"\n"""
_WRITES: Final = "ReadWritePaths=-{folder}\n"
_AFTER: Final = " remote-fs.target"
UNIT_TEMPORARY: Final = ("/tmp", "/var/tmp", "/dev/shm")  # noqa: S108  (a unit has its own of the first two)


def systemd_files(described: DeploymentDescription, place: str) -> dict[str, str]:
    """Return the files of a place by their names."""
    found = {}
    for broker in brokers_at(described, place):
        name = unit_name(described, broker.name)
        keys = f"{config_folder(described)}/{broker.door}"
        words = broker_command(described, broker, store=f"/var/lib/{name}", keys=keys)
        told = _assignments({"ATOLL_HEALTH_FILE": f"/run/{name}/health", "ATOLL_LOG__FORMAT": "json"})
        found[f"{name}.service"] = _unit(described, broker.name, words, told)
    for service in services(described, place):
        words = [service.verb, "--config", f"{config_folder(described)}/{service.name}/{RUN_FILE}"]
        name = unit_name(described, service.name)
        folders = own_folders(service, (*UNIT_TEMPORARY, f"/var/lib/{name}"))
        if (
            service.kind == "synchronizer"
            and (archive := archive_folders(described).written)
            and archive not in folders
        ):
            folders.append(archive)
        trains = _assignments(huge_pages({})) if service.kind == "learner" else ""
        found[f"{name}.service"] = _unit(described, service.name, words, trains, folders)
    return found


def config_folder(described: DeploymentDescription) -> str:
    """Return the folder on a machine that has the folders of its services."""
    return f"/etc/atoll/{described.run}"


def _assignments(environment: Mapping[str, str]) -> str:
    return f"Environment={' '.join(f'{name}={value}' for name, value in environment.items())}\n"


def _unit(
    described: DeploymentDescription,
    name: str,
    words: Sequence[str],
    environment: str = "",
    folders: Sequence[str] = (),
) -> str:
    return _UNIT.format(
        run=described.run,
        name=name,
        user=UNIT_USER,
        command=" ".join((described.software.program, *words)),
        environment=environment,
        makes="".join(_MAKES.format(folder=folder, user=UNIT_USER) for folder in folders),
        writes="".join(_WRITES.format(folder=folder) for folder in folders),
        after=_AFTER if folders else "",
        unit=unit_name(described, name),
    )


SECRET: Final = "ATOLL_IDENTITY_BASE64"  # noqa: S105  (a name)
_TASK_HEAD: Final = """{name}: written by `atoll deploy render`; change the description and render again.

  sky jobs launch {file} --secret {secret}="$(base64 -w0 services/{service}/identity.toml)" """


def skypilot_files(described: DeploymentDescription, place: str) -> dict[str, str]:
    """Return the tasks of a region by their names; a run file holds no secret, and travels in the task's own text."""
    found = {}
    for service in services(described, place):
        file = f"{service.name}.sky.yaml"
        head = _TASK_HEAD.format(
            name=unit_name(described, service.name), file=file, secret=SECRET, service=service.name
        )
        found[file] = yaml(_skypilot_task(described, place, service), head=head.rstrip())
    return found


def _skypilot_task(described: DeploymentDescription, place: str, service: PlannedService) -> dict[str, Any]:
    region = described.regions[place]
    resources: dict[str, Any] = {"accelerators": region.accelerators} if region.accelerators else {}
    resources |= {"use_spot": region.spot, "disk_size": 256}
    run = (
        "umask 077\nmkdir -p ~/atoll && cd ~/atoll\n"
        f'printf %s "${SECRET}" | base64 -d > {IDENTITY_FILE}\n'
        f"cat > {RUN_FILE} <<'END_OF_RUN_FILE'\n{tomli_w.dumps(service.settings)}END_OF_RUN_FILE\n"
        f"exec atoll learner --config {RUN_FILE}\n"
    )
    mounted = {"file_mounts": {"/data": region.data}} if "://" in region.data else {}
    return {
        "name": unit_name(described, service.name).lower(),
        "resources": resources,
        "num_nodes": 1,
        **mounted,
        "envs": huge_pages({}),
        "secrets": {SECRET: None},
        "setup": f"python3 -m pip install --upgrade {shlex.quote(described.software.package)}\n",
        "run": run,
    }
