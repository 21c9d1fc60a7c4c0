"""A cluster on this machine whose routes between nodes can be cut: each goes through a relay of its own."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final, Self

import msgspec

from atoll.base.background_tasks import LoopThread
from atoll.bus.server import EmbeddedBroker, node_store, planned_nodes
from atoll.local.brokers import WATCH_S, SilenceWatch, processor_s
from support.links import LinkProxy

UNREACHABLE: Final = "127.0.0.1:1"
CALL_S: Final = 10.0


class RelayedNode(EmbeddedBroker):
    """A node whose peers reach it through relays only."""

    def _node_config(self) -> str:
        return super()._node_config().replace("no_advertise: true,", f'no_advertise: true, advertise: "{UNREACHABLE}",')


class RelayedCluster:
    """A cluster on this machine whose routes can be cut; a context manager."""

    def __init__(self, folder: Path, nodes: int = 3, *, watched: bool = False) -> None:
        """Prepare so many nodes; if they are `watched`, one that is frozen is started anew, as by its host (`atoll broker`)."""
        self._folder = folder
        self._count = nodes
        self._home = LoopThread("routes")
        self._relays: dict[tuple[int, int], LinkProxy] = {}
        self._watched = watched
        self._watchers: list[threading.Thread] = []
        self._over = threading.Event()
        self.nodes: list[EmbeddedBroker] = []

    def __enter__(self) -> Self:
        planned = planned_nodes(self._folder, self._count)
        for near in planned:
            for far in planned:
                if near is not far:
                    relay = LinkProxy(far.port)
                    self._home.submit(relay.__aenter__()).result(CALL_S)
                    self._relays[near.node, far.node] = relay
        for node in planned:
            routes = tuple(relay.url for (near, _), relay in self._relays.items() if near == node.node)
            relayed = msgspec.structs.replace(node, routes=routes)
            self.nodes.append(RelayedNode(node_store(self._folder, node.node), node=relayed))
        for broker in self.nodes:
            broker.start()
            if self._watched:
                self._watchers.append(threading.Thread(target=self._watch, args=(broker,)))
                self._watchers[-1].start()
        return self

    def _watch(self, broker: EmbeddedBroker) -> None:
        """Start a node anew that is frozen; one that a test has ended is the test's."""
        frozen = SilenceWatch(broker.answers, lambda: processor_s(broker.pid))
        while not self._over.wait(WATCH_S):
            if frozen.is_frozen() and broker.pid:
                broker.kill()
                broker.restart()

    def __exit__(self, *error: object) -> None:
        self._over.set()
        for watcher in self._watchers:
            watcher.join()
        for broker in self.nodes:
            broker.stop()
        for relay in self._relays.values():
            self._home.submit(relay.__aexit__()).result(CALL_S)
        self._home.stop()

    @property
    def url(self) -> str:
        return ",".join(node.url for node in self.nodes)

    @contextmanager
    def cut_off(self, node: int) -> Iterator[None]:
        """Cut all routes of a node for a while."""
        routes = [relay for pair, relay in self._relays.items() if node in pair]
        for relay in routes:
            self._home.submit(relay.cut()).result(CALL_S)
        yield
        for relay in routes:
            relay.heal()
