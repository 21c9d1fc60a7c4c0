"""Opens a bus from an address. It finds the run's further brokers, and it signs and checks messages where our identity can."""

from __future__ import annotations

from atoll.bus.interface import Bus, ManagingBus
from atoll.bus.nats.bus import JetStreamBus
from atoll.bus.nats.region import RegionBus
from atoll.bus.options import DEFAULTS, BusOptions
from atoll.bus.regions import is_region
from atoll.bus.signed import Founding, SignedBus
from atoll.bus.spread import SpreadBus
from atoll.wire.traffic import BusStats


async def open_bus(url: str, run: str, *, name: str, options: BusOptions = DEFAULTS) -> Bus:
    """Open the bus of `run` at `url` (see `atoll.bus.options`) as `name`; see `JetStreamBus.open`."""
    signatures = None if options.credentials is None else options.credentials.signatures
    stats, founding = BusStats(home=url), Founding()

    async def open_one(address: str) -> Bus:
        broker = await JetStreamBus.open(address, run, name=name, options=options, stats=stats)
        bus: Bus = RegionBus(broker) if is_region(broker.connection.domain) else broker
        return bus if signatures is None else SignedBus(bus, run, signatures, founding)

    return SpreadBus(await open_one(url), run, open_one, own_addresses=options.bulk)


async def open_managing_bus(url: str, run: str, *, name: str, options: BusOptions = DEFAULTS) -> ManagingBus:
    """Open a bus at one broker, which also manages that broker's runs; it neither signs nor checks."""
    return await JetStreamBus.open(url, run, name=name, options=options)
