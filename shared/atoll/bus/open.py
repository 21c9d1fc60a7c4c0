"""Opens a bus from an address."""

from __future__ import annotations

from urllib.parse import urlsplit

from atoll.base.errors import SettingsError
from atoll.bus.nats.bus import JetStreamBus
from atoll.bus.options import DEFAULTS, BusOptions

SCHEMES = ("nats", "tls")
ADDRESSES = " or ".join(f"{scheme}://host:port" for scheme in SCHEMES)


def is_address(url: str) -> bool:
    """Return whether `url` can be the address of a broker."""
    try:
        parts = urlsplit(url)
        return parts.scheme in SCHEMES and bool(parts.hostname) and parts.port != 0
    except ValueError:
        return False


async def open_bus(url: str, run: str, *, name: str, options: BusOptions = DEFAULTS) -> JetStreamBus:
    """Open the bus of `run` at `url` (`nats://host:port` or `tls://host:port`) as `name`; see `JetStreamBus.open`."""
    if not is_address(url):
        raise SettingsError(
            "this is not the address of a broker",
            got=repr(url),
            allowed=ADDRESSES,
            todo="correct broker.url",
        )
    return await JetStreamBus.open(url, run, name=name, options=options)
