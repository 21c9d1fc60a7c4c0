"""`atoll broker`: a broker for islands, with the limits that Atoll needs, until Ctrl-C.

It is nats-server itself, from the wheel or the machine. A server that dies is started again; one whose disk was full, as soon
as there is room. With `--cluster` it is one of several nodes (`atoll.bus.cluster`). With `--keys` it is behind a locked door:
TLS, and only who is on the roll of that folder (`atoll keys`), each with the rights of its kind. For accounts of another kind,
add a file of nats-server's own configuration (`--include`).

With `--leaf-port` it is the hub of regions, and with `--leaf-of` the broker of one (`broker_links`). `atoll broker status` asks
the nodes of a locked one what they are (`broker_status`).
"""

from __future__ import annotations

import ipaddress
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final, Literal

import typer

from atoll.bus.addresses import CLUSTER_PORT, PORT
from atoll.cli.look import say

if TYPE_CHECKING:
    from atoll.bus.cluster import ClusterNode
    from atoll.cli.broker_links import Side
    from atoll.keys.locked import LockedDoor

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


def register(app: typer.Typer) -> None:
    """Add the verbs."""
    from atoll.cli.broker_status import status  # noqa: PLC0415  (it is loaded with this verb)

    verbs = typer.Typer(rich_markup_mode=None, invoke_without_command=True)
    verbs.callback(help="Run a broker for islands, with its data in a folder, until Ctrl-C.")(broker)
    verbs.command(name="status", help="Say which roll each node of a locked broker follows, its version, its peers.")(
        status
    )
    app.add_typer(verbs, name="broker")


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
    """Run nats-server until SIGINT or SIGTERM."""
    if context.invoked_subcommand is not None:
        return
    from atoll.base.logs import configure  # noqa: PLC0415
    from atoll.bus.cluster import broker_of  # noqa: PLC0415
    from atoll.cli.broker_links import LinkOptions, say_link, side_of  # noqa: PLC0415
    from atoll.local.brokers import keep  # noqa: PLC0415

    configure(role="broker")
    member = _node(cluster, node, tuple(route or ()), cluster_port)
    side = side_of(LinkOptions(leaf_port, leaf_of, region, identity), store, is_node=member is not None, keys=keys)
    door = _door(keys, store, include, member, side)
    served = broker_of(store, port, member, door, include=_included(include), sync_always=sync == "always", host=host)
    served.link = link = None if side is None else side.behind(door)

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

    keep(served, ready, door, health_file)


def _included(file: Path | None) -> Path | None:
    """Return where a file to include is, if there is one; raise `SettingsError` for one that the server could not read."""
    from atoll.base.errors import SettingsError  # noqa: PLC0415
    from atoll.base.regular_files import read_text  # noqa: PLC0415

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
    from atoll.base.units import as_time  # noqa: PLC0415

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


def _door(
    keys: Path | None, store: Path, include: Path | None, node: ClusterNode | None, side: Side | None
) -> LockedDoor | None:
    """Return the door that `--keys` means, None for an open broker."""
    from atoll.base.errors import SettingsError  # noqa: PLC0415
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


def _node(
    cluster: str | None, node: int | None, routes: tuple[str, ...], cluster_port: int | None
) -> ClusterNode | None:
    """Return the node that the options mean, None for a single server."""
    from atoll.base.errors import SettingsError  # noqa: PLC0415
    from atoll.bus.cluster import ClusterNode  # noqa: PLC0415

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
