"""A feed that is never empty leaves its loop room for everything else."""

from __future__ import annotations

import asyncio
import itertools
import threading
import time

from atoll.bus.interface import CoreMessage
from atoll.bus.subscriptions import RUN_LENGTH, BufferedSubscription


async def _nothing(_: BufferedSubscription) -> None:
    return


async def test_a_flood_takes_turns_with_the_rest_of_the_loop() -> None:
    """Between two turns of another task a reader takes no more than one run of messages, however many wait."""
    feed = BufferedSubscription(1 << 16, on_drop=lambda: None, on_close=_nothing)
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
    while taken < 40 * RUN_LENGTH:
        turns.append(taken)
        await asyncio.sleep(0)
    over.set()
    sender.join()
    reading.cancel()
    await feed.close()

    assert max(later - former for former, later in itertools.pairwise(turns)) <= RUN_LENGTH
