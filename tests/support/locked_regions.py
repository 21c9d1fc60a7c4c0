"""A locked hub and a locked region behind a relay, for tests: doors of their own, and identities by name."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

from atoll.bus.interface import Bus
from atoll.bus.open import open_bus
from atoll.bus.options import BusOptions
from atoll.bus.regions import HubSide, RegionSide
from atoll.bus.server import EmbeddedBroker
from atoll.cli.broker import keeper_credentials
from atoll.keys.identity import HeldIdentity, read_identity
from atoll.keys.locked import LockedDoor, LockedRegion
from atoll.keys.rights import Kind
from atoll.keys.roll import KeyFolder
from atoll.wire.messages import encode
from atoll.wire.subjects import Subjects
from support.founded_run import run_record
from support.regions import RelayedRegion

REGION = "eu"
ROOM_BYTES = 64 << 20
PATIENCE_S = 20.0
NOWHERE: Mapping[str, str] = {}

Opened = Callable[[str, EmbeddedBroker], Awaitable[Bus]]
"""Opens a bus as one of the roll, at the hub or at the leaf."""


class LockedRelayed(RelayedRegion):
    """A locked hub and a locked region behind a relay, with everybody of `kinds` on the roll.

    `founders` may found; `places` says of some learners where they are.
    """

    def __init__(
        self,
        folder: Path,
        run: str,
        kinds: Mapping[str, Kind],
        founders: tuple[str, ...] = (),
        places: Mapping[str, str] = NOWHERE,
    ) -> None:
        super().__init__(folder)
        self.run = run
        self.keys = KeyFolder(folder / "keys")
        self.keys.create(["127.0.0.1"], time.time())
        everybody: dict[str, Kind] = {REGION: "region", **kinds}
        for name, kind in everybody.items():
            self.keys.add(name, kind, run, time.time(), founds=name in founders, region=places.get(name, ""))
        self.hub_door = LockedDoor(self.keys, folder / "hub", hub=True)
        self.hub = EmbeddedBroker(folder / "hub", include=self.hub_door.config)
        self.hub.link = HubSide(self.port, self.hub_door.leaves)
        self.leaf_door: LockedDoor

    def new_leaf(self) -> EmbeddedBroker:
        """Return the region's broker, with a door of its own."""
        mine, hubs = self.identity(REGION), (self.link.url.replace("nats", "tls"),)
        self.leaf_door = LockedDoor(self.keys, self.folder / REGION, region=LockedRegion(mine, REGION, hubs))
        leaf = EmbeddedBroker(self.folder / REGION, include=self.leaf_door.config)
        leaf.link = RegionSide(REGION, hubs, self.leaf_door.remote, keeper_credentials(mine))
        return leaf

    def identity_path(self, name: str) -> Path:
        """Return where the identity of one of the roll is."""
        return self.keys.path / "identities" / self.run / f"{name}.toml"

    def identity(self, name: str) -> HeldIdentity:
        return read_identity(self.identity_path(name))

    def follow(self) -> None:
        """Have both brokers take over what has changed on the roll, and return when they have."""
        for door, server in ((self.hub_door, self.hub), (self.leaf_door, self.leaf)):
            if door.has_changed():
                server.reload()


@asynccontextmanager
async def locked_relayed(
    folder: Path, run: str, kinds: Mapping[str, Kind], places: Mapping[str, str] = NOWHERE
) -> AsyncIterator[LockedRelayed]:
    """Yield a locked hub and a locked region that run."""
    locked = LockedRelayed(folder, run, kinds, places=places)
    await asyncio.to_thread(locked.__enter__)
    try:
        yield locked
    finally:
        await asyncio.to_thread(locked.__exit__)


@asynccontextmanager
async def opener(there: LockedRelayed, options_of: Callable[[str], BusOptions]) -> AsyncIterator[Opened]:
    """Found the run as `shard`, and yield what opens buses; they are closed at the end, the newest first."""
    async with AsyncExitStack() as ends:

        async def one(name: str, broker: EmbeddedBroker) -> Bus:
            bus = await open_bus(broker.url, there.run, name=name, options=options_of(name))
            ends.push_async_callback(bus.close)
            return bus

        shard = await one("shard", there.hub)
        await shard.provision(ROOM_BYTES)
        await shard.put_record(Subjects(there.run).run_record, encode(run_record(there.run)), expected=0)
        yield one
