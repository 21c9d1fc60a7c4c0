"""`atoll broker`: a broker for islands, with the limits that Atoll needs, until Ctrl-C; `status` looks at its nodes.

It is nats-server itself, and is started again when it dies, or has room on its disk again. With `--cluster` it is one of
several nodes (`atoll.bus.cluster`). With `--keys` it is behind a locked door: TLS, and only who is on the roll of that folder
(`atoll keys`), each with the rights of its kind. For accounts of another kind, add a file of nats-server's own (`--include`).

**Regions.** With `--leaf-port` it is the hub of regions, and with `--leaf-of` the broker of one (`atoll.bus.regions`). A
locked hub lets a region in by an identity of kind `region`, whose name the region has: by that the hub knows what it may hear.
Its broker is locked, too, by a copy of the hub's folder of keys.

**status** says which roll each node of a locked broker follows, its versions, its peers, and leaves with 1 if one differs.
Every address is looked at by itself, then one question goes to all nodes at once (`atoll.bus.server_info`). The newest roll is
the one that was changed last, with `--keys` that of the folder included. The broker of a region is no node of its hub.
"""

from __future__ import annotations

import asyncio
import ipaddress
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Final, Literal
from urllib.parse import urlsplit

import typer

from atoll.base.errors import SettingsError
from atoll.base.files import read_text
from atoll.base.logs import configure
from atoll.base.wording import as_duration, as_time
from atoll.bus.interface import NodeStatus
from atoll.bus.options import CLUSTER_PORT, PORT, Credentials, addresses
from atoll.bus.regions import HubSide, RegionSide, ServerLink, domain_of, hub_addresses
from atoll.bus.server import ClusterNode, broker_of, greeting
from atoll.cli.options import Assignments, Broker, Config, Json
from atoll.cli.output import plain_table, print_table, say, say_json
from atoll.cli.reading import check_kind, managing_bus, settings_of
from atoll.keys.identity import HeldIdentity, read_identity
from atoll.keys.locked import LockedDoor, LockedRegion
from atoll.keys.roll import KeyFolder, RollStamp, read_tags, stamp_of
from atoll.local.brokers import keep_running
from atoll.settings import Settings

DURABLE: Final = {
    "always": "an answer means that the disk has it",
    "os": "a power cut may lose the last seconds; a killed process loses nothing",
}
STALE: Final = "old roll"
HeldRegion = tuple[RegionSide, HeldIdentity | None]
"""The broker of a region: where its hub is, and who it is there."""


verbs = typer.Typer(add_completion=False, rich_markup_mode=None, invoke_without_command=True)


Sync = Annotated[
    Literal["always", "os"],
    typer.Option(help="When data must be on the disk: before each answer, or when the system likes."),
]
Route = Annotated[
    list[str] | None, typer.Option(help="Where another node's --cluster-port is, nats://host:6222; once for each.")
]
ClusterPort = Annotated[
    int | None, typer.Option(help=f"TCP port for the other nodes.  [default: {CLUSTER_PORT}]", min=1, max=65535)
]
LeafPort = Annotated[
    int | None, typer.Option(help="Be a hub: TCP port for the brokers of regions, often 7422.", min=1, max=65535)
]
LeafOf = Annotated[
    str | None, typer.Option(help="Be the broker of a region: where the hub's --leaf-port is, nats://host:7422.")
]
HealthFile = Annotated[
    Path | None,
    typer.Option(help="File to touch while the server lives, for `atoll health`.", envvar="ATOLL_HEALTH_FILE"),
]


@verbs.callback()
def broker(  # noqa: PLR0913  (one option each)
    context: typer.Context,
    *,
    store: Annotated[Path, typer.Option(help="Folder of its data; what is there goes on.")] = Path("atoll-broker"),
    host: Annotated[str, typer.Option(help="Address to listen on; 0.0.0.0 for other machines.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="TCP port.", min=1, max=65535)] = PORT,
    sync: Sync = "always",
    include: Annotated[
        Path | None, typer.Option(help="A file of nats-server's configuration to add: TLS, accounts.")
    ] = None,
    cluster: Annotated[
        str | None, typer.Option(help="Be a node of the cluster of this name, which is the same for all its nodes.")
    ] = None,
    node: Annotated[int | None, typer.Option(help="The number of this node in the cluster, for good.")] = None,
    route: Route = None,
    cluster_port: ClusterPort = None,
    leaf_port: LeafPort = None,
    leaf_of: LeafOf = None,
    region: Annotated[
        str | None, typer.Option(help="The name of this region, another one for each.  [default: one is made up]")
    ] = None,
    identity: Annotated[
        Path | None, typer.Option(help="Who this region is at a locked hub (`atoll keys add --kind region`).")
    ] = None,
    keys: Annotated[
        Path | None, typer.Option(help="Folder of keys (`atoll keys new`): let in only who is on its roll.")
    ] = None,
    health_file: HealthFile = None,
) -> None:
    """Run a broker for islands, with its data in a folder, until Ctrl-C."""
    if context.invoked_subcommand is not None:
        return
    configure(role="broker")
    member = _cluster_node(cluster, node, tuple(route or ()), cluster_port)
    beside = "--cluster" if member is not None else "" if leaf_port is None else "--leaf-port"
    side = _region_side(leaf_of, region, identity, store, keys, beside=beside)
    door = _locked_door(keys, store, include, member, side, is_hub=leaf_port is not None)
    served = broker_of(
        store, port, member, door, include=_include_path(include), sync_always=sync == "always", host=host
    )
    served.link = _link(side, leaf_port, door)

    def ready(url: str) -> None:
        say(f"broker at {url}, listening on {host}:{port}")
        say(f"data in {store.absolute()}; sync {sync}: {DURABLE[sync]}; log in {served.log_path}")
        if member is not None:
            _say_node(member, host, locked=door is not None)
        _say_link(served.link, host)
        if door is not None:
            _say_door(door, keys, host)
        elif include is None:
            say("no accounts and no TLS: whoever reaches this port can read and write every run (see --keys)")
        say("Ctrl-C ends it; the data stays")

    keep_running(served, ready, door, health_file)


def _include_path(file: Path | None) -> Path | None:
    if file is None:
        return None
    try:
        read_text(file)
    except OSError as error:
        raise SettingsError(
            "a file to include cannot be read", got=f"{file}: {error.strerror}", todo="correct --include"
        ) from error
    return file.absolute()


def _say_door(door: LockedDoor, keys: Path | None, host: str) -> None:
    say(f"locked: TLS, and {door.entrants} identities of {keys} may enter (`atoll keys list {keys}`)")
    say(f"its certificate is for {', '.join(door.hosts)} and holds for {as_time(door.left_s(time.time()))}")
    if (elsewhere := [name for name in door.hosts if not _is_loopback(name)]) and _is_loopback(host):
        say(
            f"it listens on {host} only, where no other machine reaches it: for {', '.join(elsewhere)} give --host 0.0.0.0"
        )


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"


def _locked_door(
    keys: Path | None,
    store: Path,
    include: Path | None,
    node: ClusterNode | None,
    side: HeldRegion | None,
    *,
    is_hub: bool,
) -> LockedDoor | None:
    if keys is None:
        return None
    if include is not None:
        raise SettingsError(
            "two answers to who may enter",
            got="--include beside --keys",
            allowed="one of them",
            todo="leave --include away; --keys brings TLS and accounts",
        )
    held = side and side[1]
    region = LockedRegion(held, side[0].domain, side[0].hubs) if side and held else None
    return LockedDoor(KeyFolder(keys), store, node=node is not None, hub=is_hub, region=region)


def _cluster_node(
    cluster: str | None, node: int | None, routes: tuple[str, ...], cluster_port: int | None
) -> ClusterNode | None:

    given = {"--node": node, "--route": routes or None, "--cluster-port": cluster_port}
    if cluster is None:
        if alone := [flag for flag, value in given.items() if value is not None]:
            raise SettingsError(
                f"{alone[0]} is for a node of a cluster",
                got="no --cluster",
                todo="give --cluster NAME, or leave it away",
            )
        return None
    if node is None:
        raise SettingsError(
            "a node of a cluster needs a number",
            got="no --node",
            allowed="another one for each node, and the same again after a restart",
            todo="give --node 1, 2 or 3",
        )
    return ClusterNode(cluster, node, cluster_port or CLUSTER_PORT, routes).check()


def _say_node(node: ClusterNode, host: str, *, locked: bool) -> None:
    say(
        f"node {node.node} of cluster {node.name}, for the others at {host}:{node.port}; they are at {', '.join(node.routes)}"
    )
    say(
        "it answers once more than half of the nodes are up; clients take the addresses of all nodes, separated by commas, "
        "and a run keeps copies on them if it is founded with broker.replicas=3"
    )
    if locked:
        say(f"port {node.port} takes nodes with the certificate of that folder, and nobody else")
    else:
        say(
            f"no lock on port {node.port}: who reaches it can join the cluster; keep it inside a network that you trust"
        )


def _link(side: HeldRegion | None, leaf_port: int | None, door: LockedDoor | None) -> ServerLink | None:
    if side is None:
        return None if leaf_port is None else HubSide(leaf_port, None if door is None else door.leaves)
    region, held = side
    if door is None or held is None:
        return region
    return RegionSide(region.domain, region.hubs, door.remote, keeper_credentials(held))


def keeper_credentials(identity: HeldIdentity) -> Credentials:
    """Return what the keeper shows at the leaf beside it, which it reaches by an address that no certificate need name."""
    mine = identity.credentials()
    return Credentials(mine.name, mine.seed, mine.public, mine.authority, any_host=True)


def _region_side(
    leaf_of: str | None, region: str | None, identity: Path | None, store: Path, keys: Path | None, *, beside: str
) -> HeldRegion | None:
    """Return the side of a region's broker; `beside` is what makes it another one as well."""
    if leaf_of is None:
        for flag, value in (("--region", region), ("--identity", identity)):
            if value is not None:
                raise SettingsError(
                    f"{flag} is for the broker of a region",
                    got="no --leaf-of",
                    todo=f"give --leaf-of, or leave {flag} away",
                )
        return None
    if beside:
        raise SettingsError(
            "the broker of a region is a single server, and no hub of others",
            got=f"{beside} beside --leaf-of",
            todo="leave one of them away",
        )
    hubs = hub_addresses(leaf_of)
    if (identity is None) != (keys is None):
        raise SettingsError(
            "a region of a locked hub needs its identity there, and a door of its own",
            got="--keys without --identity" if identity is None else "--identity without --keys",
            allowed="both, or none of them for an open hub",
            todo="give --identity (`atoll keys add --kind region`) and --keys, a copy of the hub's folder",
        )
    held = None if identity is None else _region_identity(identity)
    if held is not None and region not in (None, held.name):
        raise SettingsError(
            "the identity is that of another region",
            got=f"--region {region} with the identity of {held.name!r}",
            allowed=f"--region {held.name}, or no --region",
            todo="give the region the name of its identity, or another identity",
        )
    return RegionSide(domain_of(store, region if held is None else held.name), hubs), held


def _region_identity(path: Path) -> HeldIdentity:
    held = read_identity(path)
    if held.kind != "region":
        raise SettingsError(
            "this identity is not that of a region",
            got=f"{path}: {held.kind} {held.name!r}",
            allowed="kind region",
            todo="ask the hub's operator for one: atoll keys add FOLDER NAME --kind region --run RUN",
        )
    return held


def _say_link(link: ServerLink | None, host: str) -> None:
    if isinstance(link, HubSide):
        scheme = "nats" if link.lock is None else "tls"
        say(f"hub of regions: they come to {host}:{link.port} (`atoll broker --leaf-of {scheme}://HOST:{link.port}`)")
    elif isinstance(link, RegionSide):
        say(f"region {link.domain}, a leaf of {', '.join(link.hubs)}: its learners need this broker's address only")
        say("while the hub is away, contributions wait here")


@dataclass(frozen=True, slots=True)
class NodeRow:
    """One node, or an address where none answers; what is not known is empty or None.

    Attributes:
        node: its name.
        address: where clients reach it; empty if none of the addresses that were given leads to it.
        roll_changed_s: when its roll was changed last, in seconds since the epoch.
        roll_digest: a digest of that roll.
        nats_server, atoll: versions.
        peers: the nodes that it is connected to.
        connections: of clients.
        up_s: for how long it has run.
        faults: what is wrong with it, in words; none if all is well.
    """

    node: str
    address: str
    roll_changed_s: int | None = None
    roll_digest: str = ""
    nats_server: str = ""
    atoll: str = ""
    peers: tuple[str, ...] = ()
    connections: int | None = None
    up_s: float | None = None
    faults: tuple[str, ...] = ()


@verbs.command(name="status")
def broker_status(
    *,
    broker: Broker = None,
    keys: Annotated[
        Path | None, typer.Option(help="Your folder of keys: nodes that do not follow its roll are named, too.")
    ] = None,
    wait_s: Annotated[float, typer.Option("--wait", help="Seconds to wait for nodes.", min=0.5, max=60.0)] = 3.0,
    json: Json = False,
    config: Config = None,
    assignments: Assignments = None,
) -> None:
    """Say which roll each node of a locked broker follows, its version, its peers; leave with 1 if one differs."""
    with settings_of(None, None, broker, config, assignments) as settings:
        check_kind(settings, ("operator",), "`atoll broker status` asks what only an operator may")
        configure(settings.log.format, "error", role="status")
        ours = None if keys is None else stamp_of(KeyFolder(keys).read())
        rows = asyncio.run(_rows(settings, wait_s, ours))
    (say_json if json else show_nodes)(rows)
    if any(row.faults for row in rows):
        raise typer.Exit(1)


async def _rows(settings: Settings, wait_s: float, ours: RollStamp | None) -> list[NodeRow]:
    async with managing_bus(settings, "broker status") as bus:
        greeted = await asyncio.gather(*(_greet(address) for address in addresses(settings.broker.url)))
        told = await bus.nodes(wait_s)
    return rows_of(dict(greeted), told, ours)


async def _greet(address: str) -> tuple[str, str]:
    parts = urlsplit(address)
    host, port = parts.hostname or "", parts.port or PORT
    said = await asyncio.to_thread(greeting, host, port)
    return f"{host}:{port}", "" if said is None else str(said.get("server_name", ""))


def rows_of(greeted: dict[str, str], told: Sequence[NodeStatus], ours: RollStamp | None = None) -> list[NodeRow]:
    """Return a row for each node and for each address that leads to none, by name.

    Args:
        greeted: the name of the server that greets at each address, "" if none does.
        told: what the nodes say.
        ours: the stamp of the operator's roll, if it is known.
    """
    stamps = {node.name: read_tags(node.tags)[0] for node in told}
    newest = max((stamp for stamp in (*stamps.values(), ours) if stamp is not None), default=None)
    heard = {node.name for node in told}
    # On one machine a name may have several addresses; one is shown.
    address_of = {name: address for address, name in greeted.items() if name}
    everybody = heard.union(address_of, *(node.peers for node in told))
    rows = [_row(node, address_of.get(node.name, ""), everybody, newest) for node in told]
    rows += [NodeRow(name, "", faults=("it does not answer",)) for name in everybody - heard - {*address_of}]
    for address, name in greeted.items():
        if not name:
            rows.append(NodeRow("", address, faults=("nobody answers here",)))
        elif name not in heard:
            rows.append(NodeRow(name, address, faults=("it runs, and the others do not hear it",)))
    return sorted(rows, key=lambda row: (row.node or "~", row.address))


def _row(node: NodeStatus, address: str, everybody: Iterable[str], newest: RollStamp | None) -> NodeRow:
    stamp, software = read_tags(node.tags)
    faults = [f"no route to {name}" for name in sorted({*everybody} - {node.name} - {*node.peers})]
    if stamp is None:
        faults.append("it does not say which roll it has: an Atoll before this command")
    elif newest is not None and stamp != newest:
        faults.append(STALE)
    return NodeRow(
        node=node.name,
        address=address,
        roll_changed_s=None if stamp is None else stamp.changed_s,
        roll_digest="" if stamp is None else stamp.digest,
        nats_server=node.version,
        atoll=software,
        peers=node.peers,
        connections=node.connections,
        up_s=node.up_s,
        faults=tuple(faults),
    )


def show_nodes(rows: Sequence[NodeRow]) -> None:
    """Print a table, and below it what to do."""
    names = ("node", "address", "roll of", "digest", "nats-server", "atoll", "peers")
    table = plain_table((*names, "clients", "up", "state"), right=("clients", "up"))
    for row in rows:
        changed = "-" if row.roll_changed_s is None else _as_date(row.roll_changed_s)
        told = [row.node, row.address, changed, row.roll_digest, row.nats_server, row.atoll, ", ".join(row.peers)]
        clients = "-" if row.connections is None else f"{row.connections:,}"
        up = "-" if row.up_s is None else as_duration(row.up_s)
        table.add_row(*(text or "-" for text in told), clients, up, "; ".join(row.faults) or "ok")
    print_table(table, 240)
    if any(STALE in row.faults for row in rows):
        say(
            "to do: copy roll.json of your folder of keys to the nodes with an old roll; they take it over within a second"
        )


def _as_date(seconds: int) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M:%S UTC") if seconds else "empty"
