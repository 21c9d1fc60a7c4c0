"""A broker of several nodes: what a node is told, and a whole cluster on this machine.

Each node is a nats-server with a store of its own. The nodes know each other by *routes*, elect leaders, and keep as many
copies of a stream as it was created with (`broker.replicas`). With three nodes and three copies any one node may die: the two
others have all that was acknowledged, elect within seconds, and clients go on there.

Rules that a node keeps, because breaking them loses data:

* **Its name is its identity.** A node is known by its name, and the name follows from the cluster's and the node's number. With
  another name after a restart it would be one node more, and the former would be missed for ever.
* **Its store is its own.** In a cluster the streams of a former single server belong to nobody, and what belongs to nobody is
  removed. A single server, in turn, does not know what a node has. So a file in the store says whose it is, and anything else
  is refused.

A stranger who reaches the port of the routes of an open broker can join the cluster: it must stay inside a network that is
trusted. A locked one lets in nodes with its own certificate only.
"""

from __future__ import annotations

import contextlib
import json
import re
import secrets
import socket
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Final, Protocol, Self
from urllib.parse import urlsplit

import msgspec

from atoll.base.atomic_files import write_whole
from atoll.base.errors import EnvironmentFault, SettingsError
from atoll.base.parsing import parsed
from atoll.base.quantities import ID, ID_IN_WORDS
from atoll.base.regular_files import DOCUMENT_BYTES_MAX, read_file
from atoll.bus.options import bracketed
from atoll.bus.server import NODE_FILE, EmbeddedBroker

NODES_MAX: Final = 9
CLUSTER_FILE: Final = "cluster.json"
PID_FILE: Final = "nats-server.pid"
_NAME: Final = re.compile(ID)


class ClusterNode(msgspec.Struct, frozen=True):
    """Node number `node` of the cluster `name`; it listens for the others on `port`, whose `routes` are `nats://host:port`."""

    name: str
    node: int
    port: int
    routes: tuple[str, ...]

    @property
    def server_name(self) -> str:
        """Return the name by which the other nodes know it."""
        return f"{self.name}-{self.node}"

    def check(self) -> Self:
        """Raise `SettingsError` unless this can be a node; return it."""
        if not _NAME.fullmatch(self.name):
            raise SettingsError(
                "this is no name of a cluster",
                got=repr(self.name),
                allowed=ID_IN_WORDS,
                todo="correct --cluster; all nodes have the same name",
            )
        if not 1 <= self.node <= NODES_MAX:
            raise SettingsError(
                "this is no number of a node",
                got=self.node,
                allowed=f"1 to {NODES_MAX}, another one for each node",
                todo="correct --node",
            )
        for route in self.routes:
            if not _is_route(route):
                raise SettingsError(
                    "this is no route to a node", got=repr(route), allowed="nats://host:port", todo="correct --route"
                )
        if not self.routes:
            raise SettingsError(
                "a node of a cluster needs to know the others",
                got="no route",
                allowed="nats://host:port of each other node's --cluster-port",
                todo="give --route once for each other node",
            )
        return self

    def config(self, host: str, lock: str = "") -> str:
        """Return the lines of nats-server's configuration that make a server this node, which listens at `host`.

        `lock` are more lines of its block.
        """
        routes = ", ".join(json.dumps(route) for route in self.routes)
        return (
            f"cluster {{ name: {json.dumps(self.name)}, listen: {json.dumps(f'{bracketed(host)}:{self.port}')}, "
            # Clients keep to the addresses that they were given (`atoll.bus.options`).
            f"no_advertise: true, routes: [{routes}]\n{lock}}}\n"
        )


def _is_route(route: str) -> bool:
    try:
        parts = urlsplit(route)
        return parts.scheme in ("nats", "tls", "nats-route") and bool(parts.hostname) and bool(parts.port)
    except ValueError:
        return False


class Door(Protocol):
    """The lock of a server (`atoll.keys.locked`): files of its configuration, for clients and for the other nodes."""

    config: Path
    routes: Path | None

    def has_changed(self) -> bool:
        """Return whether the server must read its configuration again."""
        ...

    def cuts_off(self) -> bool:
        """Return once whether somebody stays connected, who was let go, until the server starts again."""
        ...

    def put_back(self) -> None:
        """Write the former configuration again, because the server refuses the new one."""
        ...

    def tell_again(self) -> None:
        """Say at the next look that it has changed: nobody knows whether the server has taken it over."""
        ...


class ClusteredBroker(EmbeddedBroker):
    """A nats-server that is a node of a cluster."""

    def __init__(  # noqa: PLR0913  (as `EmbeddedBroker`, and two more)
        self,
        store_dir: Path | str,
        node: ClusterNode,
        port: int | None = None,
        *,
        sync_always: bool = False,
        host: str = "127.0.0.1",
        include: Path | None = None,
        routes: Path | None = None,
    ) -> None:
        """Prepare `node`; `routes` is a file with more lines of its block (TLS); everything else as for `EmbeddedBroker`."""
        super().__init__(store_dir, port, sync_always=sync_always, host=host, include=include)
        self.node = node.check()
        self._routes = routes
        self._name = node.server_name

    def _more_config(self) -> str:
        """Return the block that makes it a node, and where a person who ends one of several servers finds its process."""
        pid_file = json.dumps(str(self.store_dir / PID_FILE))
        return f"{self.node.config(self._host, self._include_line(self._routes))}pid_file: {pid_file}\n"

    def _check_store(self) -> None:
        """Refuse a store of another node, or of a single server; note whose an empty one is from now on."""
        kept, ours = self.store_dir / NODE_FILE, {"server_name": self._name}
        try:
            there = parsed(read_file(kept, DOCUMENT_BYTES_MAX), dict[str, str])
        except FileNotFoundError:
            there = {}
        except (OSError, msgspec.MsgspecError) as error:
            raise EnvironmentFault(f"{kept} cannot be read", got=error, todo="restore it") from error
        if not there and not (self.store_dir / "js").exists():
            write_whole(kept, json.dumps(ours).encode())
        elif there != ours:
            raise SettingsError(
                "this directory is of another broker",
                got=f"{self.store_dir} holds {there.get('server_name', 'a single server')}",
                allowed=f"an empty directory, or that of {self._name}",
                todo="choose another directory (--store): a cluster deletes streams that it does not know",
            )


def broker_of(  # noqa: PLR0913  (as `ClusteredBroker`)
    store_dir: Path,
    port: int,
    node: ClusterNode | None,
    door: Door | None,
    *,
    include: Path | None = None,
    sync_always: bool = False,
    host: str = "127.0.0.1",
) -> EmbeddedBroker:
    """Return a server that is this `node`, or a single one, behind a `door`, or with the configuration of `include`."""
    config, routes = (include, None) if door is None else (door.config, door.routes)
    if node is None:
        return EmbeddedBroker(store_dir, port, sync_always=sync_always, host=host, include=config)
    return ClusteredBroker(store_dir, node, port, sync_always=sync_always, host=host, include=config, routes=routes)


class LocalCluster:
    """All nodes of a cluster, on this machine's loopback, with their stores under one directory; a context manager."""

    def __init__(
        self,
        store_dir: Path,
        nodes: int = 0,
        *,
        sync_always: bool = False,
        door: Callable[[Path], Door] | None = None,
    ) -> None:
        """Prepare so many nodes, or those that the directory holds; `start` does the work.

        `door` makes the door of the node with a store; without it the nodes are open.
        """
        self.nodes = []
        for node in planned_nodes(store_dir, nodes):
            store = node_store(store_dir, node.node)
            lock = None if door is None else door(store)
            config, routes = (None, None) if lock is None else (lock.config, lock.routes)
            self.nodes.append(ClusteredBroker(store, node, sync_always=sync_always, include=config, routes=routes))

    @property
    def url(self) -> str:
        """Return the addresses of all nodes."""
        return ",".join(node.url for node in self.nodes)

    def start(self) -> Self:
        """Start every node; raise what `EmbeddedBroker.start` raises."""
        try:
            for node in self.nodes:
                node.start()
        except BaseException:
            self.stop()
            raise
        return self

    def stop(self) -> None:
        """End every node; harmless if they do not run."""
        for node in self.nodes:
            node.stop()

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()


def node_store(store_dir: Path, node: int) -> Path:
    """Return where node number `node` of a cluster on this machine keeps its data."""
    return store_dir / f"node-{node}"


def planned_nodes(store_dir: Path, nodes: int = 0) -> list[ClusterNode]:
    """Return the nodes of the cluster in `store_dir`, or of a new one of so many; their ports are free at this moment.

    The ports may be others the next time: nodes know each other by name.
    """
    kept = store_dir / CLUSTER_FILE
    try:
        cluster = parsed(read_file(kept, DOCUMENT_BYTES_MAX), dict[str, str | int])
        name, nodes = str(cluster["name"]), int(cluster["nodes"])
    except FileNotFoundError:
        name = f"atoll-{secrets.token_hex(4)}"
        store_dir.mkdir(parents=True, exist_ok=True)
        write_whole(kept, json.dumps({"name": name, "nodes": nodes}).encode())
    except (OSError, msgspec.MsgspecError, LookupError, ValueError) as error:
        raise EnvironmentFault(f"{kept} cannot be read", got=error, todo="restore it") from error
    ports = _free_ports(nodes)
    return [
        ClusterNode(name, number, port, tuple(f"nats://127.0.0.1:{other}" for other in ports if other != port))
        for number, port in enumerate(ports, 1)
    ]


def is_cluster(store_dir: Path) -> bool:
    """Return whether a directory holds the stores of a `LocalCluster`."""
    return (store_dir / CLUSTER_FILE).exists()


def _free_ports(count: int) -> Sequence[int]:
    with contextlib.ExitStack() as held:
        sockets = [held.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [int(each.getsockname()[1]) for each in sockets]
