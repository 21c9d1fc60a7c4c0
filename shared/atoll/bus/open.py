"""Opens a bus from an address: one that signs and checks messages where our identity can."""

from __future__ import annotations

from atoll.base.errors import SettingsError
from atoll.bus.addresses import ADDRESSES, is_address
from atoll.bus.interface import Bus
from atoll.bus.nats.bus import JetStreamBus
from atoll.bus.options import DEFAULTS, BusOptions
from atoll.bus.signed import SignedBus


async def open_bus(url: str, run: str, *, name: str, options: BusOptions = DEFAULTS) -> Bus:
    """Open the bus of `run` at `url` (see `atoll.bus.addresses`) as `name`; see `JetStreamBus.open`."""
    bus = await open_jetstream(url, run, name=name, options=options)
    signatures = None if options.credentials is None else options.credentials.signatures
    return bus if signatures is None else SignedBus(bus, run, signatures)


async def open_jetstream(url: str, run: str, *, name: str, options: BusOptions = DEFAULTS) -> JetStreamBus:
    """Open a bus that also manages the broker's runs; it neither signs nor checks."""
    if not is_address(url):
        raise SettingsError(
            "this is not the address of a broker",
            got=repr(url),
            allowed=ADDRESSES,
            todo="correct broker.url",
        )
    return await JetStreamBus.open(url, run, name=name, options=options)
