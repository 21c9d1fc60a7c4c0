"""Opens a bus from an address."""

from __future__ import annotations

from atoll.base.errors import SettingsError
from atoll.bus.addresses import ADDRESSES, is_address
from atoll.bus.nats.bus import JetStreamBus
from atoll.bus.options import DEFAULTS, BusOptions


async def open_bus(url: str, run: str, *, name: str, options: BusOptions = DEFAULTS) -> JetStreamBus:
    """Open the bus of `run` at `url` (see `atoll.bus.addresses`) as `name`; see `JetStreamBus.open`."""
    if not is_address(url):
        raise SettingsError(
            "this is not the address of a broker",
            got=repr(url),
            allowed=ADDRESSES,
            todo="correct broker.url",
        )
    return await JetStreamBus.open(url, run, name=name, options=options)
