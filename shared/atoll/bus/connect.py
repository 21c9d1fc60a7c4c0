"""From an address to a bus."""

from __future__ import annotations

from urllib.parse import urlsplit

from atoll.bus.jetstream import JetStreamBus
from atoll.bus.options import DEFAULTS, BusOptions
from atoll.errors import SettingsError

SCHEMES = ("nats", "tls")


async def open_bus(
    url: str, run: str, *, name: str, provision: bool = True, options: BusOptions = DEFAULTS
) -> JetStreamBus:
    """Open the bus of `run` at `url` (`nats://host:port` or `tls://host:port`) as `name`; see `JetStreamBus.open`."""
    try:
        parts = urlsplit(url)
        good = parts.scheme in SCHEMES and bool(parts.hostname) and parts.port != 0
    except ValueError:
        good = False
    if not good:
        raise SettingsError(
            "this is not the address of a broker",
            got=repr(url),
            allowed=" or ".join(f"{scheme}://host:port" for scheme in SCHEMES),
            todo="correct broker.url",
        )
    return await JetStreamBus.open(url, run, name=name, provision=provision, options=options)
