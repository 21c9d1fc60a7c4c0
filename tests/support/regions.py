"""A hub and a region for tests: two servers, the keeper of the region, and perhaps a relay on the link between them."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Final, Self

from atoll.base.background_tasks import LoopThread
from atoll.bus.nats.region_keeper import RegionKeeper
from atoll.bus.regions import HubSide, RegionSide
from atoll.bus.server import EmbeddedBroker
from support.links import LinkProxy

CALL_S: Final = 10.0
SOON_S: Final = 120.0
POLL_S: Final = 0.05


def free_port() -> int:
    """Return a port of the loopback that nobody listens on now."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def hub(folder: Path) -> tuple[EmbeddedBroker, int]:
    """Return a broker that lets leaves in, and the port for them; it does not run yet."""
    port = free_port()
    broker = EmbeddedBroker(folder)
    broker.link = HubSide(port)
    return broker, port


async def until(is_so: Callable[[], Awaitable[bool]]) -> None:
    async with asyncio.timeout(SOON_S):
        while True:
            if await is_so():
                return
            await asyncio.sleep(POLL_S)


def leaf(folder: Path, link: str) -> EmbeddedBroker:
    """Return the leaf of a region whose link goes to an address; it does not run yet."""
    broker = EmbeddedBroker(folder)
    broker.link = RegionSide("eu", (link,))
    return broker


@contextmanager
def region(broker: EmbeddedBroker, *, keeper: bool = True) -> Iterator[EmbeddedBroker]:
    """Run the leaf of a region, with its keeper."""
    with ExitStack() as ends:
        ends.enter_context(broker)
        if keeper:
            keeping = RegionKeeper(broker.url, broker.link.keeper if isinstance(broker.link, RegionSide) else None)
            keeping.start()
            ends.callback(keeping.stop)
        yield broker


class RelayedRegion:
    """A hub and a region whose link goes through a relay in a thread of its own, for whoever has no loop; a context manager."""

    def __init__(self, folder: Path, bytes_s: float | None = None) -> None:
        """Prepare; with `bytes_s` the link carries so many bytes a second each way."""
        self.folder, self._bytes_s = folder, bytes_s
        self._home = LoopThread("link")
        self._ends = ExitStack()
        self.hub, self.port = hub(folder / "hub")
        self.leaf: EmbeddedBroker
        self.link: LinkProxy

    def __enter__(self) -> Self:
        self._ends.callback(self._home.stop)
        self._ends.enter_context(self.hub)
        self.link = LinkProxy(self.port, self._bytes_s)
        self._home.submit(self.link.__aenter__()).result(CALL_S)
        self._ends.callback(lambda: self._home.submit(self.link.__aexit__()).result(CALL_S))
        self.leaf = self._ends.enter_context(region(self.new_leaf()))
        return self

    def new_leaf(self) -> EmbeddedBroker:
        return leaf(self.folder / "eu", self.link.url)

    def __exit__(self, *error: object) -> None:
        self._ends.close()

    def cut(self) -> None:
        self._home.submit(self.link.cut()).result(CALL_S)

    def heal(self) -> None:
        self._home.loop.call_soon_threadsafe(self.link.heal)
