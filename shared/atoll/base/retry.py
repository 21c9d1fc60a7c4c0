"""Waiting for a broker: bounded waits, and the one policy of what is tried again, after which pauses, until when.

nats-py may swallow a cancellation while a send is stalled, so no bounded wait relies on one.

    await patiently(lambda: bus.publish(…), "the event")                            until the broker is back
    await patiently(attempt, "the blob", patience_s=60, progress=upload.missing)    while it gets on

Pauses double from `RETRY_S` to `RETRY_S_MAX`. Attempts are logged at powers of two, so that a long outage fills no log.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from typing import Any, Final, TypeVar

from atoll.base.errors import BrokerUnavailable, StorageFull
from atoll.base.logs import get, is_power_of_two

T = TypeVar("T")

RETRY_S = 0.1
RETRY_S_MAX = 5.0
CANCEL_AGAIN_S = 0.1
AWAY: Final[tuple[type[Exception], ...]] = (BrokerUnavailable, StorageFull)
"""What passes when the broker is back, or has room again."""

_chance = random.SystemRandom()

log = get(__name__)


class Unanswered(Exception):
    """No answer came: time-out, lost connection, or no responder. The request may have been carried out."""


async def wait_at_most(
    work: Awaitable[T], timeout_s: float, *also: asyncio.Future[None], moves: Callable[[], bool] | None = None
) -> T:
    """Return the result of `work`; raise `TimeoutError` after `timeout_s` or once one of `also` is done.

    If `moves` reports progress at the time-out, the wait begins again.
    """
    task = asyncio.ensure_future(work)
    waits: list[asyncio.Future[Any]] = [task, *also]
    done: set[asyncio.Future[Any]] = set()
    try:
        while not done:
            timeout_s = max(0.0, timeout_s)
            done, _ = await asyncio.wait(waits, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
            if not done and (moves is None or not moves()):
                break
    finally:
        if task not in done:
            # Cancelled, but not waited for. Its exception is read, so that asyncio does not report it.
            task.cancel()
            task.add_done_callback(lambda late: late.cancelled() or late.exception())
    if task not in done:
        raise TimeoutError
    return task.result()


async def cancel_all(tasks: Sequence[asyncio.Task[Any]]) -> None:
    """Cancel `tasks` until all of them have ended: one cancellation may be lost, also in `wait_for` of Python 3.11."""
    while running := [task for task in tasks if not task.done()]:
        for task in running:
            task.cancel()
        await asyncio.wait(running, timeout=CANCEL_AGAIN_S)
    await asyncio.gather(*tasks, return_exceptions=True)  # so that asyncio does not report what they raised


async def all_of(work: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Run all to the end and return the results in order; on the first failure stop the others and raise it."""
    tasks = [asyncio.ensure_future(each) for each in work]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def pause_s(attempts: int, first_s: float, longest_s: float, jitter: float = 0.0) -> float:
    """Return the pause after so many failed attempts; with `jitter` it is shortened by up to that share."""
    doubled = min(attempts - 1, 32)  # enough for any `longest_s`, and no number overflows
    return min(first_s * 2.0**doubled, longest_s) * (1.0 - jitter * _chance.random())


async def patiently(  # noqa: PLR0913  (what it is about, and three ways of giving up)
    attempt: Callable[[], Coroutine[Any, Any, T]],
    doing: str = "the broker",
    *,
    on: tuple[type[Exception], ...] = AWAY,
    patience_s: float | None = None,
    progress: Callable[[], object] | None = None,
    now_s: Callable[[], float] | None = None,
    hindered: Callable[[Exception, float], None] | None = None,
) -> T:
    """Return what `attempt` returns; raise its last error when the patience is over.

    Args:
        attempt: makes one attempt.
        doing: what it is about, for the log.
        on: errors after which it is tried again; all others get through at once.
        patience_s: seconds after which it is given up; None for never (the next thing rests on this one).
        progress: what must change within the patience, as a slow link is no reason; None: it counts from the beginning.
        now_s: the clock of the patience; None for the loop's.
        hindered: hears of each attempt that failed and is repeated: its error, and the seconds until the next one.
    """
    now_s = now_s or asyncio.get_running_loop().time
    since_s, seen, attempts = now_s(), object(), 0
    while True:
        began_s = now_s()
        try:
            return await attempt()
        except on as error:
            if patience_s is not None:
                there = seen if progress is None else progress()
                if there != seen:
                    since_s, seen = now_s(), there
                elif now_s() > since_s + patience_s:
                    raise
            attempts += 1
            wait_s = pause_s(attempts, RETRY_S, RETRY_S_MAX)
            if is_power_of_two(attempts):
                log.warning("broker.waiting", doing=doing, attempts=attempts, pause_s=wait_s, reason=str(error))
            await asyncio.sleep(wait_s)
            if hindered is not None:
                hindered(error, now_s() - began_s)
