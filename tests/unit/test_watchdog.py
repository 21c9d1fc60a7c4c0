"""The watchdog of a connection: from when on a broker that says nothing is away, and when its connection is cut."""

from __future__ import annotations

import asyncio
import contextlib
from typing import cast

from atoll.base.retry import Unanswered
from atoll.bus.nats.connection import Connection, Movement, watch
from atoll.bus.options import BusOptions
from atoll.wire.traffic import BusStats

WATCH_S = 0.01
DEADLINE_S = 120.0


class EchoedConnection:
    """A connection whose echoes come back as the test says; `cuts` counts how often it was cut."""

    options = BusOptions(watch_s=WATCH_S, echo_s=0.05)
    url = "nats://hub:4222"
    nodes = 1
    is_bulk = False
    is_up = True
    queued = 0

    def __init__(self, echoes: list[bool]) -> None:
        self.stats = BusStats(home=self.url)
        self.cuts = 0
        self.away: list[bool] = []
        self._echoes = echoes
        self.done = asyncio.Event()

    def moved(self) -> Movement:
        return (0, 0, 0)

    async def echo(self, timeout_s: float) -> None:
        """Answer, or not; note whether the broker counted as away before."""
        del timeout_s
        self.away.append(self.stats.is_away)
        if not self._echoes:
            self.done.set()
        elif not self._echoes.pop(0):
            raise Unanswered("no echo")

    async def cut(self) -> None:
        self.cuts += 1


async def watched(echoes: list[bool]) -> tuple[EchoedConnection, float]:
    """Return a connection after its echoes, and the seconds that this took."""
    loop = asyncio.get_running_loop()
    connection, began_s = EchoedConnection(echoes), loop.time()
    watching = asyncio.create_task(watch(cast("Connection", connection)))
    async with asyncio.timeout(DEADLINE_S):
        await connection.done.wait()
        while connection.stats.is_away:  # noqa: ASYNC110  (nobody is told of that)
            await asyncio.sleep(WATCH_S)
    watching.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await watching
    return connection, loop.time() - began_s


async def test_a_silence_that_ends_counts_from_the_first_echo_that_was_late() -> None:
    connection, took_s = await watched([True, False, False])

    assert connection.away[:4] == [False, False, True, True]
    assert connection.cuts == 0
    assert 2 * WATCH_S <= connection.stats.away_s(0.0) <= took_s


async def test_a_third_late_echo_cuts_the_connection() -> None:
    connection, _ = await watched([False, False, False])

    assert connection.cuts == 1
