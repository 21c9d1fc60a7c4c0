"""The services of each place as they follow from a description: their names, addresses and settings.

Every service has a folder of its own with a run file and, if it is not a broker's node, an identity. The broker of a region has
a door and an identity there, and no run file. A run file names its identity relative to itself, so the two can lie anywhere
together. A setting that the description decides (who we are, where the broker is) cannot be in its tables of settings: two
answers to one question would be one too many.

**Folders.** A unit or a container writes only where it is let, and a service fails late where it is not: a scratch file when
a fragment is large, a dump when there is a mistake to look at. So each target lets a service write to the folders of its
settings beside its own state. The folder of `archive.url` is given to the synchronizers, which alone write run checkpoints;
they read that of `synchronizer.restore`. All synchronizers need one and the same folder, since a run checkpoint is complete
when every shard is in it: a relative path, `~`, a folder of temporary files, and any folder for pods are refused.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeVar
from urllib.parse import urlsplit

from pydantic import ValidationError

from atoll.archive.object_store import FolderArchive, open_archive, resolved
from atoll.base.errors import SettingsError
from atoll.bus.options import CLUSTER_PORT, LEAF_PORT, PORT, bracketed
from atoll.deploy.description import DeploymentDescription, RegionPlace, go_memory, leaf_name
from atoll.keys.rights import Kind, premerger_of
from atoll.settings.sections import ArchiveSettings, Section, SynchronizerSettings
from atoll.wire.subjects import HUB

CLUSTER: Final = "hub"
NODES_SERVICE: Final = "hub-nodes"
IDENTITY_FILE: Final = "identity.toml"
RUN_FILE: Final = "atoll.toml"
DOOR: Final = "broker"
DECIDED: Final = (
    "run",
    "broker.url",
    "broker.identity",
    "broker.replicas",
    "learner.id",
    "learner.region",
    "synchronizer.region",
    "health_file",
    "stay",
    "data.dir",
    "monitor.folder",
    "monitor.port",
)
TABLES: Final = ("learner", "synchronizer", "data", "monitor", "broker", "log")
"""The tables that the description writes into."""
MONITOR: Final = "monitor"
MONITOR_PORT: Final = 9464
CONTAINED: Final = ("compose", "kubernetes")
STATE: Final = {"compose": "/state", "kubernetes": "/state", "skypilot": "state"}


@dataclass(frozen=True, slots=True)
class PlannedNode:
    """Node `number` of the broker: where clients, the other nodes and leaves reach it; without leaves, `leaf_port` is 0."""

    number: int
    host: str
    port: int
    cluster_port: int
    leaf_port: int

    @property
    def name(self) -> str:
        """Return the name of its service."""
        return f"broker-{self.number}"

    @property
    def door(self) -> str:
        """Return the name of the folder of its door, which all nodes share."""
        return DOOR

    @property
    def address(self) -> str:
        """Return its address for islands."""
        return f"tls://{bracketed(self.host)}:{self.port}"


@dataclass(frozen=True, slots=True)
class PlannedLeaf:
    """The broker of a region: where its learners reach it, and where it reaches the hub."""

    place: str
    host: str
    port: int
    hubs: tuple[str, ...]

    @property
    def name(self) -> str:
        """Return the name of its service, and of the folder of its door."""
        return leaf_name(self.place)

    door = name

    @property
    def address(self) -> str:
        """Return its address for the services of its region."""
        return f"tls://{bracketed(self.host)}:{self.port}"


@dataclass(frozen=True, slots=True)
class PlannedService:
    """One process with an identity: its name, which is that of the identity, its kind and its run file as tables."""

    name: str
    kind: Kind
    settings: Mapping[str, Any]

    @property
    def verb(self) -> str:
        """Return the verb of `atoll` that is this service."""
        return {"learner": "learner", "reader": MONITOR}.get(self.kind, "synchronizer")


def nodes(described: DeploymentDescription) -> list[PlannedNode]:
    """Return the nodes of the broker."""
    hub, shared = described.hub, len(described.hub.hosts) < described.hub.count
    leaves = any(region.broker == "leaf" for region in described.regions.values())
    return [
        PlannedNode(
            number,
            hub.hosts[0 if shared else number - 1],
            hub.port + (number - 1 if shared else 0),
            hub.cluster_port + (number - 1 if shared else 0),
            hub.leaf_port + (number - 1 if shared else 0) if leaves else 0,
        )
        for number in range(1, hub.count + 1)
    ]


def leaf_of(described: DeploymentDescription, place: str) -> PlannedLeaf | None:
    """Return the broker of a place that is a region with one of its own."""
    region = described.regions.get(place)
    if region is None or region.broker == "hub":
        return None
    contained = region.target in CONTAINED
    hubs = tuple(f"tls://{bracketed(node.host)}:{node.leaf_port}" for node in nodes(described))
    return PlannedLeaf(place, leaf_name(place) if contained else region.host, PORT if contained else region.port, hubs)


def brokers_at(described: DeploymentDescription, place: str) -> list[PlannedNode | PlannedLeaf]:
    """Return the brokers of a place: the nodes of the hub's, or that of a region which has one."""
    leaf = leaf_of(described, place)
    return [*nodes(described)] if place == HUB else [] if leaf is None else [leaf]


def inner_host(described: DeploymentDescription, node: PlannedNode) -> str:
    """Return the name by which the services of the hub reach a node."""
    names = {"kubernetes": f"{CLUSTER}-{node.number}.{NODES_SERVICE}", "compose": node.name}
    return names.get(described.hub.target, node.host)


def broker_url(described: DeploymentDescription, place: str) -> str:
    """Return the address of the broker for the services of a place."""
    found, leaf = nodes(described), leaf_of(described, place)
    if leaf is not None:
        return leaf.address
    if place != HUB or described.hub.target == "systemd":
        return ",".join(node.address for node in found)
    return ",".join(f"tls://{inner_host(described, node)}:{PORT}" for node in found)


def hosts_of_broker(described: DeploymentDescription) -> list[str]:
    """Return all names and addresses that the broker's certificate must have."""
    names = [name for node in nodes(described) for name in (node.host, inner_host(described, node))]
    return list(dict.fromkeys([*names, "127.0.0.1"]))


def places(described: DeploymentDescription) -> dict[str, str]:
    """Return the target of each place, the hub first."""
    return {HUB: described.hub.target} | {name: region.target for name, region in described.regions.items()}


def services(described: DeploymentDescription, place: str) -> list[PlannedService]:
    """Return the services of a place that have an identity.

    Raises:
        SettingsError: a table of settings sets what the description decides.
    """
    if place == HUB:
        names = [f"synchronizer-{number}" for number in range(1, described.hub.synchronizers + 1)]
        target = described.hub.target
        stays = target != "systemd"
        told = [
            PlannedService(name, "synchronizer", _service_tables(described, place, name, target, stay=stays))
            for name in names
        ]
        return [*told, *([PlannedService(MONITOR, "reader", _monitor(described))] if described.hub.monitor else [])]
    region = described.regions[place]
    found = [
        PlannedService(name, "learner", _learner(described, place, name, region))
        for name in (f"{place}-{number}" for number in range(1, region.learners + 1))
    ]
    if region.premerge:
        name = premerger_of(place)
        found.append(PlannedService(name, "premerger", _premerger(described, place, name, region)))
    return found


def kinds(described: DeploymentDescription, place: str) -> dict[str, Kind]:
    """Return the kind of each service of a place that has an identity, by its name."""
    return {service.name: service.kind for service in services(described, place)}


def learners_at(described: DeploymentDescription, place: str) -> list[str]:
    """Return the names of the learners of a place; the hub has none."""
    return [name for name, kind in kinds(described, place).items() if kind == "learner"]


def identities(described: DeploymentDescription, place: str) -> dict[str, Kind]:
    """Return the identities of a place, by name: those of its services, and of its broker, which has the region's name."""
    own: dict[str, Kind] = {} if leaf_of(described, place) is None else {place: "region"}
    return kinds(described, place) | own


def founders(described: DeploymentDescription) -> set[str]:
    """Return the learners that may found the run, and the regions through which they do."""
    return {
        name for place, region in described.regions.items() if region.founds for name in identities(described, place)
    }


def _learner(described: DeploymentDescription, place: str, name: str, region: RegionPlace) -> dict[str, Any]:
    told = _service_tables(described, place, name, region.target, stay=region.target == "compose", more=region.settings)
    state = STATE.get(region.target, f"/var/lib/{unit_name(described, name)}")
    mounted = region.target in ("compose", "kubernetes") or "://" in region.data
    data = "/data" if mounted else region.data
    learner = {"checkpoint_dir": f"{state}/checkpoints", "compile_cache": f"{state}/jax", **told.get("learner", {})}
    learner |= {"region": place} if region.premerge else {}
    return told | {
        "learner": {"id": name, **learner},
        "data": {**told.get("data", {}), "dir": data},
        "log": {"dump_dir": f"{state}/facts", **told.get("log", {})},
    }


def _premerger(described: DeploymentDescription, place: str, name: str, region: RegionPlace) -> dict[str, Any]:
    told = _service_tables(described, place, name, region.target, stay=region.target in CONTAINED)
    # It owns no shard, and rebuilds no run.
    kept = {key: value for key, value in told.get("synchronizer", {}).items() if key not in ("shard", "restore")}
    return told | {"synchronizer": {**kept, "region": place}}


def _monitor(described: DeploymentDescription) -> dict[str, Any]:
    """Return the tables of the monitor; in a container it serves outside, where its engine says who reaches it.

    A Prometheus reaches it there by the name of its service, which it has to know as one of its own.
    """
    target = described.hub.target
    told = _service_tables(described, HUB, MONITOR, target, stay=target != "systemd")
    own = {"folder": f"{STATE.get(target, f'/var/lib/{unit_name(described, MONITOR)}')}/records", "port": MONITOR_PORT}
    if target in CONTAINED:
        given = told.get("monitor", {}).get("names", ())
        named = (given,) if isinstance(given, str) else given
        own |= {"host": "0.0.0.0", "names": [*_monitor_names(described), *named]}  # noqa: S104  (see above)
    return merge_tables(told, {"monitor": own})


def _monitor_names(described: DeploymentDescription) -> list[str]:
    """Return the names of the monitor's service: in compose one, in Kubernetes also those by which other namespaces ask."""
    if described.hub.target == "compose":
        return [MONITOR]
    there = f"{MONITOR}.{described.hub.namespace}"
    return [MONITOR, there, f"{there}.svc", f"{there}.svc.cluster.local"]


def _service_tables(
    described: DeploymentDescription,
    place: str,
    name: str,
    target: str,
    *,
    stay: bool,
    more: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    given = merge_tables(merge_tables({"log": {"format": "json"}}, described.settings), more or {})
    if flat := next((one for one in TABLES if not isinstance(given.get(one, {}), Mapping)), None):
        raise SettingsError(
            "this is a table of settings",
            got=f"{flat} = {given[flat]!r}",
            todo=f"write [settings.{flat}] and its settings",
        )
    if wrong := next((one for one in DECIDED if _is_set(given, one)), None):
        raise SettingsError(
            "the description itself decides this setting", got=f"{wrong} in the settings of {place}", todo="take it out"
        )
    broker = {"url": broker_url(described, place), "identity": IDENTITY_FILE, "replicas": described.hub.count}
    health = {"systemd": f"/run/{unit_name(described, name)}/health", "skypilot": "health"}.get(target, "/tmp/health")  # noqa: S108
    # A unit's folder for temporary files ends with it, and a dump is looked at afterwards.
    kept = {"log": {"dump_dir": f"/var/lib/{unit_name(described, name)}/facts"}} if target == "systemd" else {}
    decided = {"run": described.run, "stay": stay, "health_file": health, "broker": broker}
    return merge_tables(merge_tables(kept, given), decided)


def unit_name(described: DeploymentDescription, name: str) -> str:
    """Return the name of a service on a machine that may have those of other runs."""
    return f"atoll-{described.run}-{name}"


def merge_tables(under: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """Return two trees of tables as one; `over` wins."""
    found = dict(under)
    for key, value in over.items():
        below = found.get(key)
        found[key] = merge_tables(below, value) if isinstance(below, Mapping) and isinstance(value, Mapping) else value
    return found


def _is_set(tables: Mapping[str, Any], name: str) -> bool:
    here: Any = tables
    for key in name.split("."):
        if not isinstance(here, Mapping) or key not in here:
            return False
        here = here[key]
    return True


def broker_command(
    described: DeploymentDescription, broker: PlannedNode | PlannedLeaf, *, store: str, keys: str
) -> list[str]:
    """Return the words that start a broker with its data and its door at these paths."""
    if isinstance(broker, PlannedLeaf):
        return list(leaf_command(broker, store=store, keys=keys))
    return list(_node_command(described, broker, store=store, keys=keys))


def _node_command(described: DeploymentDescription, node: PlannedNode, **paths: str) -> Iterator[str]:
    """Yield the words that start a node, as its own machine knows the others."""
    yield from ("broker", "--host", "0.0.0.0")  # noqa: S104  (islands come from outside)
    for flag, path in paths.items():
        yield from (f"--{flag}", path)
    contained = described.hub.target != "systemd"
    if not contained and node.port != PORT:
        yield from ("--port", str(node.port))
    if node.leaf_port:
        yield from ("--leaf-port", str(LEAF_PORT if contained else node.leaf_port))
    if described.hub.count == 1:
        return
    yield from ("--cluster", CLUSTER, "--node", str(node.number))
    if not contained and node.cluster_port != CLUSTER_PORT:
        yield from ("--cluster-port", str(node.cluster_port))
    for other in nodes(described):
        if other.number != node.number:
            port = CLUSTER_PORT if contained else other.cluster_port
            yield from ("--route", f"nats://{bracketed(inner_host(described, other))}:{port}")


def leaf_command(leaf: PlannedLeaf, *, store: str, keys: str, identity: str = "") -> Iterator[str]:
    """Yield the words that start the broker of a region, with its data, its door and its identity at these paths.

    Without a path of its own the identity is in the door's folder.
    """
    yield from ("broker", "--host", "0.0.0.0", "--store", store)  # noqa: S104  (learners come from outside)
    yield from ("--keys", keys, "--identity", identity or f"{keys}/{IDENTITY_FILE}")
    if leaf.port != PORT:
        yield from ("--port", str(leaf.port))
    yield from ("--leaf-of", ",".join(leaf.hubs))


def broker_environment(memory: str, health: str) -> dict[str, str]:
    """Return what the broker in a container with so much memory is told beside its command."""
    return {"ATOLL_HEALTH_FILE": health, "ATOLL_LOG__FORMAT": "json", "GOMEMLIMIT": go_memory(memory)}


_PLAIN: Final = re.compile(r"(/[\w.+@-]+)+/?")
"""Letters that mean nothing else to systemd (`%`, blanks), to compose (`:`, `$`) and to a shell."""
PLAIN_FOLDER: Final = "an absolute path of letters, digits and any of . _ + @ -"
_BY_HAND: Final = ("learner.checkpoint_dir", "learner.compile_cache")
"""These may be relative: beside the run file of a learner that a person starts by hand, as the page on deployments does."""
_EVERYBODY: Final = ("log.dump_dir",)
_SYNCHRONIZER: Final = (*_EVERYBODY, "synchronizer.scratch_dir")
_SETTINGS: Final[Mapping[Kind, tuple[str, ...]]] = {
    "learner": (
        *_EVERYBODY,
        "learner.scratch_dir",
        "learner.checkpoint_dir",
        "learner.compile_cache",
        "learner.profile",
    ),
    "synchronizer": _SYNCHRONIZER,
    "premerger": _SYNCHRONIZER,
}
OBJECT_STORE: Final = "s3"
TEMPORARY: Final = ("/tmp", "/var/tmp", "/dev", "/proc", "/run", "/sys")  # noqa: S108  (none of them is used here)
S = TypeVar("S", bound=Section)


def is_plain(folder: str) -> bool:
    """Return whether a folder's name means the same wherever it is written down (`PLAIN_FOLDER`)."""
    return _PLAIN.fullmatch(folder) is not None and ".." not in folder.split("/")


def own_folders(service: PlannedService, writable: Sequence[str]) -> list[str]:
    """Return the folders that a service must be given, once each; it may write below the `writable` ones anyway.

    Raises:
        SettingsError: a folder has no name that means the same wherever it is written down.
    """
    found: dict[str, None] = {}
    for setting in _SETTINGS.get(service.kind, ()):
        folder = _setting_of(service.settings, setting)
        if not isinstance(folder, str) or not folder:  # rendering tells of it where it tries run files
            continue
        if setting in _BY_HAND and not folder.startswith("/"):
            continue
        if not is_plain(folder):
            raise SettingsError(
                "a service cannot be let write into this folder",
                got=f"{setting} = {folder}",
                allowed=PLAIN_FOLDER,
                todo=f"correct {setting} in the settings of the description",
            )
        folder = posixpath.normpath(folder)
        if not any(f"{folder}/".startswith(f"{top}/") for top in writable):
            found[folder] = None
    return list(found)


def folders_of_container(service: PlannedService) -> list[str]:
    """Return the folders that a service in a container must be given beside its volume, which learners and monitors have."""
    state = ("/state",) if service.kind in ("learner", "reader") else ()
    return own_folders(service, ("/tmp", *state))  # noqa: S108  (of a container)


def _setting_of(tables: Mapping[str, Any], name: str) -> object:
    table, _, key = name.partition(".")
    there = tables.get(table)
    return there.get(key) if isinstance(there, Mapping) else None


@dataclass(frozen=True, slots=True)
class ArchiveFolders:
    """The folders that a synchronizer needs: one to write the archive, and one to rebuild a run; empty for none.

    A folder that is for both is in `written` alone.
    """

    written: str = ""
    read: str = ""


def archive_folders(described: DeploymentDescription) -> ArchiveFolders:
    """Return the folders that every synchronizer of the hub needs.

    Raises:
        SettingsError: a setting is no place for an archive, or a folder that not every synchronizer would find.
    """
    target, urls = described.hub.target, _archive_urls(described)
    found = {setting: _archive_folder(setting, url, target) for setting, url in urls.items()}
    written, read = found["archive.url"], found["synchronizer.restore"]
    return ArchiveFolders(written, "" if read == written else read)


def archive_notes(described: DeploymentDescription) -> list[str]:
    """Return what a person has to see to, which no file of ours can: that several machines have one folder."""
    folder, hosts = archive_folders(described).written, described.hub.hosts
    if not folder or len(hosts) == 1:
        return []
    todo = "mount one file system there on each that has a synchronizer, or no run checkpoint is complete"
    return [f"the archive is the folder {folder}, and the hub has {len(hosts)} machines: {todo}"]


def uses_object_store(described: DeploymentDescription) -> bool:
    """Return whether synchronizers write to an object store, or rebuild a run from one."""
    return any(_is_object_store_url(url) for url in _archive_urls(described).values())


def is_written(archive: ArchiveSettings) -> bool:
    """Return whether anything goes into an archive: run checkpoints, or rounds."""
    return bool(archive.url) and bool(archive.every_s or archive.contributions)


def archive_folder_of(url: str) -> Path | None:
    """Return the folder at an archive's URL; None for an object store.

    Raises:
        SettingsError: the URL is no place for an archive.
    """
    if _is_object_store_url(resolved(url)):
        return None
    store = open_archive(url)
    return Path(store.where) if isinstance(store, FolderArchive) else None


def _archive_urls(described: DeploymentDescription) -> dict[str, str]:
    """Return the places that the settings of all services name, by setting; an archive that nothing goes into is none."""
    archive = _validate_section(ArchiveSettings, described.settings.get("archive"))
    restore = _validate_section(SynchronizerSettings, described.settings.get("synchronizer")).restore
    return {"archive.url": archive.url if is_written(archive) else "", "synchronizer.restore": restore}


def _validate_section(kind: type[S], table: Any) -> S:  # noqa: ANN401  (as somebody wrote it)
    """Return a table of settings; one that cannot be as if it were empty: rendering tells of it where it tries run files."""
    try:
        return kind.model_validate(table or {})
    except ValidationError:
        return kind()


def _is_object_store_url(url: str) -> bool:
    try:
        return urlsplit(url).scheme == OBJECT_STORE
    except ValueError:  # `resolved` and `open_archive` say what is wrong with it
        return False


def _archive_folder(setting: str, url: str, target: str) -> str:
    folder = archive_folder_of(url) if url else None
    if folder is None:
        return ""
    if target == "kubernetes":
        # A claim that pods on several machines can write to is a rare thing, and an object store outlives the cluster, too.
        raise SettingsError(
            "a folder of a pod is gone with the pod, and no archive",
            got=f"{setting} = {url}, and the hub is in Kubernetes",
            allowed="an object store: s3://bucket/prefix",
            todo=f"set {setting} to an object store in [settings]",
        )
    # Of a path the text as it was written: as a folder it is absolute already, counted from where we are.
    text = str(folder) if urlsplit(url).scheme else url
    if not is_plain(text):
        raise SettingsError(
            "synchronizers would not all find the archive in one folder",
            got=f"{setting} = {url}",
            allowed=f"{PLAIN_FOLDER}, or s3://bucket/prefix",
            todo=f"correct {setting} in [settings]",
        )
    text = posixpath.normpath(text)
    if any(f"{text}/".startswith(f"{top}/") for top in TEMPORARY):
        raise SettingsError(
            "what a service keeps in a folder of temporary files is gone with its service",
            got=f"{setting} = {url}",
            allowed=f"a folder outside {', '.join(TEMPORARY)}, or s3://bucket/prefix",
            todo=f"set {setting} to a folder that stays, such as /srv/archive",
        )
    return text
