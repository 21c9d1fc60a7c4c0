"""A feed that is never empty leaves its loop room for everything else."""

from __future__ import annotations

import asyncio
import itertools
import threading
import time

import pytest

from atoll.bus import subscriptions
from atoll.bus.interface import CoreMessage
from atoll.bus.subscriptions import RUN_LENGTH, BufferedSubscription
from atoll.wire.traffic import BusStats

DEADLINE_S = 120.0


async def _nothing(_: BufferedSubscription) -> None:
    return


@pytest.mark.second_tier
async def test_a_flood_takes_turns_with_the_rest_of_the_loop() -> None:
    """Between two turns of another task a reader takes no more than one run of messages, however many wait."""
    feed = BufferedSubscription(1 << 16, BusStats(), _nothing)
    over, taken, turns = threading.Event(), 0, list[int]()

    def flood() -> None:
        while not over.is_set():
            feed.push(CoreMessage("a", b""))

    async def read() -> None:
        nonlocal taken
        async for _ in feed:
            taken += 1
            time.sleep(1e-5)  # noqa: ASYNC251  (the work of a handler)

    sender = threading.Thread(target=flood)
    sender.start()
    reading = asyncio.create_task(read())
    try:
        async with asyncio.timeout(DEADLINE_S):
            while taken < 40 * RUN_LENGTH:
                turns.append(taken)
                await asyncio.sleep(0)
    finally:
        over.set()
        sender.join()
        reading.cancel()
        await feed.close()

    assert max(later - former for former, later in itertools.pairwise(turns)) <= RUN_LENGTH


async def test_large_messages_are_held_up_to_a_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """The oldest are dropped and counted; one that is larger than all together is still told."""
    monkeypatch.setattr(subscriptions, "BYTES_MAX", 10)
    stats = BusStats()
    feed = BufferedSubscription(100, stats, _nothing)
    for text in (b"1" * 4, b"2" * 4, b"3" * 4):
        feed.push(CoreMessage("a", text))
    first, second = await feed.next(0.0), await feed.next(0.0)
    feed.push(CoreMessage("a", b"4" * 100))
    large = await feed.next(0.0)
    for text in (b"5" * 5, b"6" * 5):
        feed.push(CoreMessage("a", text))
    last = [await feed.next(0.0), await feed.next(0.0)]

    assert [each and each.data[:1] for each in (first, second, large, *last)] == [b"2", b"3", b"4", b"5", b"6"]
    assert stats.core_messages_dropped == 1
