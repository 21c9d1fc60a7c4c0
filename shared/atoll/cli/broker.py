"""`atoll broker`: a broker for islands, with the limits that Atoll needs, until Ctrl-C.

It is nats-server itself, from the wheel or the machine. A server that dies is started again; one whose disk was full, as soon
as there is room. With `--cluster` it is one of several nodes (`atoll.bus.cluster`). With `--keys` it is behind a locked door:
TLS, and only who is on the roll of that folder (`atoll keys`), each with the rights of its kind. For accounts of another kind,
add a file of nats-server's own configuration (`--include`).
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from atoll.cli.look import say

if TYPE_CHECKING:
    from atoll.bus.cluster import ClusterNode
    from atoll.keys.locked import LockedDoor

PORT, CLUSTER_PORT = 4222, 6222


def register(app: typer.Typer) -> None:
    """Add the verb."""
    app.command(name="broker", help="Run a broker for islands, with its data in a folder, until Ctrl-C.")(broker)


def broker(  # noqa: PLR0913  (one option each)
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
    keys: Annotated[
        Path | None, typer.Option(help="Folder of keys (`atoll keys new`): let in only who is on its roll.")
    ] = None,
) -> None:
    """Run nats-server until SIGINT or SIGTERM."""
    from atoll.base.errors import SettingsError  # noqa: PLC0415  (a verb loads what it needs when it runs)
    from atoll.base.logs import configure  # noqa: PLC0415
    from atoll.bus.cluster import ClusteredBroker  # noqa: PLC0415
    from atoll.bus.server import EmbeddedBroker  # noqa: PLC0415
    from atoll.local.brokers import keep  # noqa: PLC0415

    configure(role="broker")
    if include is not None and not include.is_file():
        raise SettingsError("there is no such file", got=include, todo="correct --include")
    member = _node(cluster, node, tuple(route or ()), cluster_port)
    door = _door(keys, store, include, member)
    added = include if door is None else door.config
    added = None if added is None else added.absolute()
    always = sync == "always"
    served = (
        EmbeddedBroker(store, port, sync_always=always, host=host, include=added)
        if member is None
        else ClusteredBroker(store, member, port, sync_always=always, host=host, include=added)
    )
    durable = {
        "always": "an answer means that the disk has it",
        "os": "a power cut may lose the last seconds; a killed process loses nothing",
    }

    def ready(url: str) -> None:
        say(f"broker at {url}, listening on {host}:{port}")
        say(f"data in {store.absolute()}; sync {sync}: {durable[sync]}; log in {served.log_path}")
        if member is not None:
            _say_node(member, host)
        if door is not None:
            say(f"locked: TLS, and {door.entrants} identities of {keys} may enter (`atoll keys list {keys}`)")
        elif include is None:
            say("no accounts and no TLS: whoever reaches this port can read and write every run (see --keys)")
        say("Ctrl-C ends it; the data stays")

    keep(served, ready, (lambda: False) if door is None else door.has_changed)


def _door(keys: Path | None, store: Path, include: Path | None, node: ClusterNode | None) -> LockedDoor | None:
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
    if node is not None:
        # A cluster may forget for ever what a new account imports (nats-server issue 8560); a single server does not.
        raise SettingsError(
            "a node of a cluster cannot be locked yet",
            got="--cluster beside --keys",
            allowed="one of them",
            todo="keep the ports of the cluster inside a network that you trust",
        )
    return LockedDoor(KeyFolder(keys), store)


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


def _say_node(node: ClusterNode, host: str) -> None:
    """Say what this node is part of, and what a person must know of it."""
    say(
        f"node {node.node} of cluster {node.name}, for the others at {host}:{node.port}; they are at {', '.join(node.routes)}"
    )
    say(
        "it answers once more than half of the nodes are up; clients take the addresses of all nodes, separated by commas, "
        "and a run keeps copies on them if it is founded with broker.replicas=3"
    )
    say(
        f"no lock on port {node.port} either: who reaches it can join the cluster; keep it inside a network that you trust"
    )
