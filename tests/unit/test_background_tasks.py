"""Background tasks and timers of a driver: the first that fails is reported, and all of them end."""

from __future__ import annotations

import asyncio
import threading

import pytest

from atoll.base.background_tasks import BackgroundTasks
from atoll.base.parallel import INLINE_ELEMENTS_MAX, off_loop
from atoll.bus.interface import CoreMessage
from atoll.bus.subscriptions import BufferedSubscription
from atoll.wire.traffic import BusStats

DEADLINE_S = 120.0


async def test_a_timer_that_fails_is_reported_like_a_task() -> None:
    """Asyncio would log it and go on, and the timer would never come again: a silent stall in place of a restart."""
    failed: asyncio.Future[BaseException] = asyncio.get_running_loop().create_future()
    background = BackgroundTasks(failed.set_result)

    def broken(name: str) -> None:
        raise OverflowError(name)

    background.arm("due/3", 0.0, broken)
    error = await failed
    await background.stop()

    assert isinstance(error, OverflowError)
    assert error.args == ("due/3",)


async def test_a_reader_whose_news_came_in_the_turn_of_its_end_ends() -> None:
    """In Python 3.11 `asyncio.wait_for` swallows that cancellation: a deposed shard read heartbeats for ever."""

    async def closed(subscription: BufferedSubscription) -> None:
        """Forget it."""

    feed = BufferedSubscription(8, BusStats(), closed)
    heard: list[CoreMessage | None] = []

    async def hear() -> None:
        while True:
            heard.append(await feed.next(60.0))

    reader = asyncio.ensure_future(hear())
    await asyncio.sleep(0)  # it waits for news now
    feed.push(CoreMessage("hb.a", b"", ""))
    await asyncio.sleep(0)  # the news are there, and their reader has not run yet
    reader.cancel()

    await asyncio.wait([reader], timeout=DEADLINE_S)
    assert reader.cancelled()


async def test_the_end_waits_for_a_task_that_a_first_cancellation_did_not_end() -> None:
    begun, swallowed = asyncio.Event(), 0

    async def stubborn() -> None:
        nonlocal swallowed
        while swallowed < 2:
            begun.set()
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                swallowed += 1
        await asyncio.Event().wait()

    background = BackgroundTasks(print)
    background.spawn(stubborn())
    await begun.wait()
    async with asyncio.timeout(DEADLINE_S):
        await background.stop()
    assert swallowed == 2


@pytest.mark.parametrize(
    ("elements", "inline"), [(0, True), (INLINE_ELEMENTS_MAX, True), (INLINE_ELEMENTS_MAX + 1, False)]
)
async def test_large_work_goes_to_a_thread(elements: int, inline: bool) -> None:  # noqa: FBT001
    assert (await off_loop(elements, threading.get_ident) == threading.get_ident()) == inline
    assert await off_loop(elements, sorted, [2, 1], reverse=True) == [2, 1]
    with pytest.raises(ZeroDivisionError):
        await off_loop(elements, divmod, 1, 0)
