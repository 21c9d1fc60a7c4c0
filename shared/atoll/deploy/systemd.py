"""A place as units of systemd: one for each service, the same on every machine of the place.

A unit starts again what fails and not what has finished. After a boot it starts a service whose run is over once more, which
finds that out and leaves. Units write only below /var/lib and /run, into folders of their own that systemd makes, and into
folders that settings name (`own_folders`), such as the archive. Identities are files of the user `atoll` in /etc/atoll:
systemd's own credentials are opened to that user by an access list, whose mask looks as if a group might read them, and such
a file is refused.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from atoll.base.machine import huge_pages
from atoll.deploy.description import DeploymentDescription
from atoll.deploy.services import (
    DOOR,
    RUN_FILE,
    archive_folders,
    leaf_command,
    leaf_of,
    node_command,
    nodes,
    own_folders,
    services,
    unit_name,
)
from atoll.wire.subjects import HUB

USER: Final = "atoll"
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
TimeoutStopSec={stop_s}
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
{writes}ProtectHome={home}
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
# A folder that is not there cannot be made writable: the unit would not start (status=226/NAMESPACE), or, with a `-`, it would
# start with a folder that it may not make. So the unit makes the folder first; `+` is root, outside the sandbox. A folder
# that exists keeps its owner and its mode. A synchronizer merges also while its archive is away, and warns: so neither line may
# stop the unit (`-`), and it is started after remote file systems, which it does not require.
_MAKES: Final = """ExecStartPre=-+/bin/sh -c "test -d {folder} || install -d -o {user} -g {user} -m 0700 {folder}"\n"""
_WRITES: Final = "ReadWritePaths=-{folder}\n"
_AFTER: Final = " remote-fs.target"
TEMPORARY: Final = ("/tmp", "/var/tmp", "/dev/shm")  # noqa: S108  (a unit has its own of the first two)


def systemd_files(described: DeploymentDescription, place: str) -> dict[str, str]:
    """Return the files of a place by their names."""
    found = {}
    if place == HUB:
        for node in nodes(described):
            name = unit_name(described, node.name)
            words = list(
                node_command(described, node, store=f"/var/lib/{name}", keys=f"{config_folder(described)}/{DOOR}")
            )
            found[f"{name}.service"] = _unit(described, node.name, words, _broker_environment(name))
    if (leaf := leaf_of(described, place)) is not None:
        name = unit_name(described, leaf.name)
        words = list(leaf_command(leaf, store=f"/var/lib/{name}", keys=f"{config_folder(described)}/{leaf.name}"))
        found[f"{name}.service"] = _unit(described, leaf.name, words, _broker_environment(name))
    for service in services(described, place):
        words = [service.verb, "--config", f"{config_folder(described)}/{service.name}/{RUN_FILE}"]
        name = unit_name(described, service.name)
        folders = own_folders(service, (*TEMPORARY, f"/var/lib/{name}"))
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


def _broker_environment(name: str) -> str:
    return _assignments({"ATOLL_HEALTH_FILE": f"/run/{name}/health", "ATOLL_LOG__FORMAT": "json"})


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
        user=USER,
        command=" ".join((described.software.program, *words)),
        # A learner pushes what it has; a node of the broker hands its leaders over.
        stop_s="90s",
        environment=environment,
        makes="".join(_MAKES.format(folder=folder, user=USER) for folder in folders),
        writes="".join(_WRITES.format(folder=folder) for folder in folders),
        after=_AFTER if folders else "",
        unit=unit_name(described, name),
        # Token shards may be in somebody's home.
        home="read-only",
    )
