"""Waits with a bound. nats-py may swallow a cancellation while a send is stalled, so these waits never rely on one."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from typing import Any, TypeVar

T = TypeVar("T")


class Unanswered(Exception):
    """No answer came: time-out, lost connection, or no responder. The request may have been carried out."""


def _abandon(task: asyncio.Future[Any]) -> None:
    """Cancel `task` without waiting for it, and read its exception so that asyncio does not report it."""
    task.cancel()
    task.add_done_callback(lambda done: done.cancelled() or done.exception())


async def first_of(timeout_s: float, *futures: asyncio.Future[Any]) -> None:
    """Return when one of `futures` is done or `timeout_s` has gone by."""
    await asyncio.wait(futures, timeout=max(0.0, timeout_s), return_when=asyncio.FIRST_COMPLETED)


async def bounded(
    work: Awaitable[T], timeout_s: float, *also: asyncio.Future[None], moves: Callable[[], bool] | None = None
) -> T:
    """Return the result of `work`; raise `TimeoutError` after `timeout_s` or once one of `also` is done.

    If `moves` reports progress at the time-out, the wait begins again.
    """
    task = asyncio.ensure_future(work)
    try:
        await first_of(timeout_s, task, *also)
        while not (task.done() or any(each.done() for each in also)) and moves is not None and moves():
            await first_of(timeout_s, task, *also)
    except asyncio.CancelledError:
        _abandon(task)
        raise
    if not task.done():
        _abandon(task)
        raise TimeoutError
    return task.result()


async def all_of(work: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Run all to the end and return the results in order; on the first failure stop the others and raise it."""
    tasks = [asyncio.ensure_future(each) for each in work]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
