"""`atoll broker`: a broker for islands, with the limits that Atoll needs, until Ctrl-C; `status` looks at its nodes.

It is nats-server itself, from the wheel or the machine. A server that dies is started again; one whose disk was full, as soon
as there is room. With `--cluster` it is one of several nodes (`atoll.bus.server`). With `--keys` it is behind a locked door:
TLS, and only who is on the roll of that folder (`atoll keys`), each with the rights of its kind. For accounts of another kind,
add a file of nats-server's own configuration (`--include`).

**Regions.** With `--leaf-port` it is the hub of regions, and with `--leaf-of` the broker of one (`atoll.bus.regions`). A locked
hub lets a region in by an identity of kind `region`. The region's broker is locked, too: it has a copy of the hub's folder of
keys, from which its door follows, and lets in learners, readers and evaluators of the run that its identity is of, and the
premerger of this region. The region has the name of its identity: by that the hub knows what it may hear.

**status** says which roll each node of a locked broker follows, its versions, its peers, and leaves with 1 if one differs.
Every address is looked at by itself: a node that nobody reaches, or that has lost the others, is a line of its own. Then one
question goes to all nodes at once (`ManagingBus.nodes`). The newest roll is the one that was changed last: of those that
nodes follow, and with `--keys` also the one of that folder. The broker of a region is no node: look at it by its own address.
"""

from __future__ import annotations

import asyncio
import ipaddress
import json as json_text
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final, Literal
from urllib.parse import urlsplit

import typer

from atoll.base.errors import SettingsError
from atoll.bus.options import CLUSTER_PORT, LEAF_PORT, PORT
from atoll.cli.options import Assignments, Broker, Config
from atoll.cli.output import say
from atoll.cli.reading import check_kind, managing_bus, settings_of

if TYPE_CHECKING:
    from atoll.bus.interface import NodeStatus
    from atoll.bus.options import Credentials
    from atoll.bus.regions import RegionSide, ServerLink
    from atoll.bus.server import ClusterNode
    from atoll.keys.identity import HeldIdentity
    from atoll.keys.locked import LockedDoor, LockedRegion
    from atoll.keys.roll import RollStamp
    from atoll.settings import Settings

DURABLE: Final = {
    "always": "an answer means that the disk has it",
    "os": "a power cut may lose the last seconds; a killed process loses nothing",
}
LeafPort = Annotated[
    int | None, typer.Option(help="Be a hub: TCP port for the brokers of regions, often 7422.", min=1, max=65535)
]
LeafOf = Annotated[
    str | None, typer.Option(help="Be the broker of a region: where the hub's --leaf-port is, nats://host:7422.")
]
Region = Annotated[
    str | None, typer.Option(help="The name of this region, another one for each.  [default: one is made up]")
]
RegionIdentity = Annotated[
    Path | None, typer.Option(help="Who this region is at a locked hub (`atoll keys add --kind region`).")
]
STALE: Final = "old roll"


verbs = typer.Typer(add_completion=False, rich_markup_mode=None, invoke_without_command=True)


@verbs.callback()
def broker(  # noqa: PLR0913  (one option each)
    context: typer.Context,
    *,
    store: Annotated[Path, typer.Option(help="Folder of its data; what is there goes on.")] = Path("atoll-broker"),
    host: Annotated[str, typer.Option(help="Address to listen on; 0.0.0.0 for other machines.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="TCP port.", min=1, max=65535)] = PORT,
    sync: Annotated[
        Literal["always", "os"],
        typer.Option(help="When data must be on the disk: before each answer, or when the system likes."),
    ] = "always",
    include: Annotated[
        Path | None, typer.Option(help="A file of nats-server's configuration to add: TLS, accounts.")
    ] = None,
    cluster: Annotated[
        str | None, typer.Option(help="Be a node of the cluster of this name, which is the same for all its nodes.")
    ] = None,
    node: Annotated[int | None, typer.Option(help="The number of this node in the cluster, for good.")] = None,
    route: Annotated[
        list[str] | None, typer.Option(help="Where another node's --cluster-port is, nats://host:6222; once for each.")
    ] = None,
    cluster_port: Annotated[
        int | None,
        typer.Option(help=f"TCP port for the other nodes.  [default: {CLUSTER_PORT}]", min=1, max=65535),
    ] = None,
    leaf_port: LeafPort = None,
    leaf_of: LeafOf = None,
    region: Region = None,
    identity: RegionIdentity = None,
    keys: Annotated[
        Path | None, typer.Option(help="Folder of keys (`atoll keys new`): let in only who is on its roll.")
    ] = None,
    health_file: Annotated[
        Path | None,
        typer.Option(help="File to touch while the server lives, for `atoll health`.", envvar="ATOLL_HEALTH_FILE"),
    ] = None,
) -> None:
    """Run a broker for islands, with its data in a folder, until Ctrl-C."""
    if context.invoked_subcommand is not None:
        return
    from atoll.base.logs import configure  # noqa: PLC0415
    from atoll.bus.server import broker_of  # noqa: PLC0415
    from atoll.local.brokers import keep_running  # noqa: PLC0415

    configure(role="broker")
    member = _cluster_node(cluster, node, tuple(route or ()), cluster_port)
    side = link_side(LinkOptions(leaf_port, leaf_of, region, identity), store, is_node=member is not None, keys=keys)
    door = _locked_door(keys, store, include, member, side)
    served = broker_of(
        store, port, member, door, include=_include_path(include), sync_always=sync == "always", host=host
    )
    served.link = link = None if side is None else side.server_link(door)

    def ready(url: str) -> None:
        say(f"broker at {url}, listening on {host}:{port}")
        say(f"data in {store.absolute()}; sync {sync}: {DURABLE[sync]}; log in {served.log_path}")
        if member is not None:
            _say_node(member, host, locked=door is not None)
        if link is not None:
            say_link(link, host)
        if door is not None:
            _say_door(door, keys, host)
        elif include is None:
            say("no accounts and no TLS: whoever reaches this port can read and write every run (see --keys)")
        say("Ctrl-C ends it; the data stays")

    keep_running(served, ready, door, health_file)


def _include_path(file: Path | None) -> Path | None:
    from atoll.base.files import read_text  # noqa: PLC0415

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
    """Say who may enter, by which names the broker is reached, and for how long its certificate holds."""
    from atoll.base.wording import as_time  # noqa: PLC0415

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
    keys: Path | None, store: Path, include: Path | None, node: ClusterNode | None, side: LinkSide | None
) -> LockedDoor | None:
    from atoll.keys.locked import LockedDoor  # noqa: PLC0415
    from atoll.keys.roll import KeyFolder  # noqa: PLC0415

    if keys is None:
        return None
    if include is not None:
        raise SettingsError(
            "two answers to who may enter",
            got="--include beside --keys",
            allowed="one of them",
            todo="leave --include away; --keys brings TLS and accounts",
        )
    is_hub, region = (False, None) if side is None else (side.region is None, side.locked_region())
    return LockedDoor(KeyFolder(keys), store, node=node is not None, hub=is_hub, region=region)


def _cluster_node(
    cluster: str | None, node: int | None, routes: tuple[str, ...], cluster_port: int | None
) -> ClusterNode | None:
    from atoll.bus.server import ClusterNode  # noqa: PLC0415

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
    """Say what this node is part of, and what a person must know of it."""
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


@dataclass(frozen=True, slots=True)
class LinkOptions:
    """The options as they were given."""

    leaf_port: int | None
    leaf_of: str | None
    region: str | None
    identity: Path | None


@dataclass(frozen=True, slots=True)
class LinkSide:
    """Which side of a link a broker is: the hub's at `port`, or that of a `region`, perhaps with an identity."""

    port: int = LEAF_PORT
    region: RegionSide | None = None
    identity: HeldIdentity | None = None

    def locked_region(self) -> LockedRegion | None:
        """Return the region as the door of its leaf must know it."""
        from atoll.keys.locked import LockedRegion  # noqa: PLC0415

        if self.region is None or self.identity is None:
            return None
        return LockedRegion(self.identity, self.region.domain, self.region.hubs)

    def server_link(self, door: LockedDoor | None) -> ServerLink:
        """Return what the server is told, behind its door."""
        from atoll.bus.regions import HubSide, RegionSide  # noqa: PLC0415

        if self.region is None:
            return HubSide(self.port, None if door is None else door.leaves)
        if door is None or self.identity is None:
            return self.region
        return RegionSide(self.region.domain, self.region.hubs, door.remote, keeper_credentials(self.identity))


def keeper_credentials(identity: HeldIdentity) -> Credentials:
    """Return what the keeper shows at the leaf beside it, which it reaches by an address that no certificate need name."""
    from atoll.bus.options import Credentials  # noqa: PLC0415

    mine = identity.credentials()
    return Credentials(mine.name, mine.seed, mine.public, mine.authority, any_host=True)


def link_side(options: LinkOptions, store: Path, *, is_node: bool, keys: Path | None) -> LinkSide | None:
    """Return the side that the options mean, None for a broker without regions; raise `SettingsError` for nonsense."""
    from atoll.bus.regions import RegionSide, domain_of, hub_addresses  # noqa: PLC0415

    if options.leaf_of is None:
        for flag, value in (("--region", options.region), ("--identity", options.identity)):
            if value is not None:
                raise SettingsError(
                    f"{flag} is for the broker of a region",
                    got="no --leaf-of",
                    todo=f"give --leaf-of, or leave {flag} away",
                )
        return None if options.leaf_port is None else LinkSide(options.leaf_port)
    if options.leaf_port is not None or is_node:
        raise SettingsError(
            "the broker of a region is a single server, and no hub of others",
            got=f"{'--cluster' if is_node else '--leaf-port'} beside --leaf-of",
            todo="leave one of them away",
        )
    hubs = hub_addresses(options.leaf_of)
    if (options.identity is None) != (keys is None):
        raise SettingsError(
            "a region of a locked hub needs its identity there, and a door of its own",
            got="--keys without --identity" if options.identity is None else "--identity without --keys",
            allowed="both, or none of them for an open hub",
            todo="give --identity (`atoll keys add --kind region`) and --keys, a copy of the hub's folder",
        )
    identity = None if options.identity is None else _region_identity(options.identity)
    if identity is not None and options.region not in (None, identity.name):
        raise SettingsError(
            "the identity is that of another region",
            got=f"--region {options.region} with the identity of {identity.name!r}",
            allowed=f"--region {identity.name}, or no --region",
            todo="give the region the name of its identity, or another identity",
        )
    named = options.region if identity is None else identity.name
    return LinkSide(region=RegionSide(domain_of(store, named), hubs), identity=identity)


def _region_identity(path: Path) -> HeldIdentity:
    from atoll.keys.identity import read_identity  # noqa: PLC0415

    held = read_identity(path)
    if held.kind != "region":
        raise SettingsError(
            "this identity is not that of a region",
            got=f"{path}: {held.kind} {held.name!r}",
            allowed="kind region",
            todo="ask the hub's operator for one: atoll keys add FOLDER NAME --kind region --run RUN",
        )
    return held


def say_link(link: ServerLink, host: str) -> None:
    """Say whose leaf this broker is, or where it takes leaves."""
    from atoll.bus.regions import HubSide, RegionSide  # noqa: PLC0415

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
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    config: Config = None,
    assignments: Assignments = None,
) -> None:
    """Say which roll each node of a locked broker follows, its version, its peers; leave with 1 if one differs."""
    from atoll.base.logs import configure  # noqa: PLC0415  (a verb loads what it needs when it runs)
    from atoll.keys.roll import KeyFolder, stamp_of  # noqa: PLC0415

    with settings_of(None, None, broker, config, assignments) as settings:
        check_kind(settings, ("operator",), "`atoll broker status` asks what only an operator may")
        configure(settings.log.format, "error", role="status")
        ours = None if keys is None else stamp_of(KeyFolder(keys).read())
        rows = asyncio.run(_rows(settings, wait_s, ours))
    if json:
        sys.stdout.write(json_text.dumps([asdict(row) for row in rows], indent=2) + "\n")
    else:
        show_nodes(rows)
    if any(row.faults for row in rows):
        raise typer.Exit(1)


async def _rows(settings: Settings, wait_s: float, ours: RollStamp | None) -> list[NodeRow]:
    from atoll.bus.options import addresses  # noqa: PLC0415

    async with managing_bus(settings, "broker status") as bus:
        greeted = await asyncio.gather(*(_greet(address) for address in addresses(settings.broker.url)))
        told = await bus.nodes(wait_s)
    return rows_of(dict(greeted), told, ours)


async def _greet(address: str) -> tuple[str, str]:
    from atoll.bus.server import greeting  # noqa: PLC0415

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
    from atoll.keys.roll import read_tags  # noqa: PLC0415

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
    from atoll.keys.roll import read_tags  # noqa: PLC0415

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
    from rich.console import Console  # noqa: PLC0415
    from rich.table import Table  # noqa: PLC0415

    from atoll.base.wording import as_duration  # noqa: PLC0415

    table = Table(box=None, pad_edge=False, header_style="dim")
    for heading in ("node", "address", "roll of", "digest", "nats-server", "atoll", "peers"):
        table.add_column(heading)
    for heading in ("clients", "up"):
        table.add_column(heading, justify="right")
    table.add_column("state")
    for row in rows:
        changed = "-" if row.roll_changed_s is None else _as_date(row.roll_changed_s)
        told = [row.node, row.address, changed, row.roll_digest, row.nats_server, row.atoll, ", ".join(row.peers)]
        clients = "-" if row.connections is None else f"{row.connections:,}"
        up = "-" if row.up_s is None else as_duration(row.up_s)
        table.add_row(*(text or "-" for text in told), clients, up, "; ".join(row.faults) or "ok")
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = 240
    console.print(table)
    if any(STALE in row.faults for row in rows):
        say(
            "to do: copy roll.json of your folder of keys to the nodes with an old roll; they take it over within a second"
        )


def _as_date(seconds: int) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M:%S UTC") if seconds else "empty"
