"""The first connection to a broker, as a person waits for it: for how long we are still trying, and why in vain so far.

A broker that does not answer may be starting. So may a host that no name server knows: the name of a container comes with the
container. Both are asked again and again, and a person is told which of the two it is.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Iterator
from typing import Final
from urllib.parse import urlsplit

from atoll.base.logs import get
from atoll.bus.addresses import addresses

log = get(__name__)

TOLD_EVERY_S: Final = 5.0


@contextlib.contextmanager
def told_while_waiting(url: str, patience_s: float) -> Iterator[None]:
    """Say every few seconds for how long we go on to try, and whether a host is unknown."""
    hosts = [urlsplit(each).hostname or "" for each in addresses(url)]

    async def tell() -> None:
        for waited in range(1, int(patience_s / TOLD_EVERY_S) + 1):
            await asyncio.sleep(TOLD_EVERY_S)
            unknown = await _unknown(hosts)
            why = f"no name server knows {', '.join(unknown)}" if unknown else "no broker answers there"
            left_s = max(0.0, patience_s - waited * TOLD_EVERY_S)
            log.warning("bus.waiting", hosts=", ".join(hosts), why=why, still_trying_for_s=left_s)

    telling = asyncio.ensure_future(tell())
    try:
        yield
    finally:
        telling.cancel()


async def _unknown(hosts: list[str]) -> list[str]:
    """Return the hosts that do not exist; a name server that does not answer says nothing about a host."""
    loop, unknown = asyncio.get_running_loop(), []
    for host in hosts:
        try:
            await loop.getaddrinfo(host, None)
        except socket.gaierror as error:
            unknown += [host] if error.errno == socket.EAI_NONAME else []
    return unknown
