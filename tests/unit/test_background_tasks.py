"""Background tasks and timers of a driver: the first that fails is reported, whichever it is."""

from __future__ import annotations

import asyncio

from atoll.base.background_tasks import BackgroundTasks


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
