"""Notices a connection that stands and says nothing: its echo does not come back.

A peer may hold the socket open and answer nothing, or the client's read loop may have died. Three echoes in a row that are late
cut the connection. On a connection for bulk an echo waits behind megabytes in buffers that we cannot see. There it is late only
if meanwhile nothing came in and nothing was sent of a queue that still stands. The broker counts as away from the first echo
that is late (`BusStats.lose`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final, Protocol

import nats.errors

from atoll.base.retry import Unanswered, bounded
from atoll.bus.options import BusOptions
from atoll.wire.traffic import BusStats

MOVED: Final = (1 << 10, 1 << 10, 1)
"""Bytes sent, bytes received, and answers, that are more than echoes and pings."""
_FAILURES_MAX: Final = 3

Movement = tuple[int, int, int]


class WatchedConnection(Protocol):
    """What the watchdog needs of a connection."""

    options: BusOptions
    stats: BusStats
    url: str
    nodes: int
    is_bulk: bool

    @property
    def is_up(self) -> bool:
        """Return whether requests can be sent."""

    @property
    def queued(self) -> int:
        """Return how many bytes wait for the kernel."""

    def moved(self) -> Movement:
        """Return bytes sent and received, and answers."""

    async def echo(self, timeout_s: float) -> None:
        """Return once an echo is back."""

    async def cut(self) -> None:
        """Abort the socket and connect again."""


def movement_of(connection: WatchedConnection) -> Callable[[], bool]:
    """Return a function that says whether anything but an echo went or came since its last call."""
    before = connection.moved()

    def moves() -> bool:
        nonlocal before
        last, before = before, connection.moved()
        return any(abs(now - then) >= least for now, then, least in zip(before, last, MOVED, strict=True))

    return moves


async def watch(connection: WatchedConnection) -> None:
    """Cut `connection` after three echoes in a row that did not come back; for ever."""
    failures, silent_s = 0, 0.0
    clock = asyncio.get_running_loop().time
    watch_s, echo_s = connection.options.watch_of(connection.nodes)
    while True:
        await asyncio.sleep(watch_s)
        if not connection.is_up:
            failures = 0
            continue
        before, asked_s = connection.moved(), clock()
        try:
            await bounded(connection.echo(echo_s), 2 * echo_s)
            failures = 0
        except (Unanswered, TimeoutError, nats.errors.Error):
            silent_s = silent_s if failures else asked_s
            failures = 0 if connection.is_bulk and _is_busy(connection, before) else failures + 1
        if failures:
            connection.stats.lose(connection.url, id(connection), silent_s)
        elif connection.is_up:
            connection.stats.regain(id(connection), clock())
        if failures >= _FAILURES_MAX:
            failures = 0
            await connection.cut()


def _is_busy(connection: WatchedConnection, before: Movement) -> bool:
    """Return whether anything came in since `before`, or a queue that still stands was worked on."""
    sent, received, answers = connection.moved()
    came = received - before[1] >= MOVED[1] or answers != before[2]
    return came or (sent != before[0] and connection.queued > 0)
