"""Large work in parts, on all cores: the same bits with one thread or sixteen.

`parts` cuts a vector at multiples of `PART` elements, wherever the work begins or ends and however many cores there are. Sums
are taken per part and added in the order of the parts, so the number of threads changes the time and nothing else. A part also
fits into a cache: do everything to one part before you go on to the next.

`for_each` lets the calling thread take parts one after the other, and idle helper threads take parts too. The caller waits only
for helpers that have begun, so many callers share the cores and none blocks another.

`off_loop` keeps arithmetic beside an event loop. Small work runs at once: handing it to a thread costs about as much as folding
the smallest fragments. A forked child makes its own helpers.
"""

from __future__ import annotations

import asyncio
import functools
import itertools
import os
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Final, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

PART: Final = 1 << 19
SPREAD_ELEMENTS: Final = 1 << 20
INLINE_ELEMENTS_MAX: Final = 1 << 16


def parts(start: int, stop: int) -> list[tuple[int, int]]:
    """Return the parts of elements `start` to `stop`, in order."""
    cuts = [start, *range((start // PART + 1) * PART, stop, PART), stop]
    return list(itertools.pairwise(cuts)) if start < stop else []


def for_each(work: Callable[[T], None], items: Iterable[T], elements: int) -> None:
    """Do `work` with every item, in any order; `elements` says how large they are together.

    Raises what `work` raised; some items may then be left undone.
    """
    if elements < SPREAD_ELEMENTS:
        for item in items:
            work(item)
        return
    waiting = deque(items)

    def take() -> None:
        while waiting:
            try:
                item = waiting.popleft()
            except IndexError:  # another thread was faster
                return
            work(item)

    helpers = _helpers(os.getpid()) if len(waiting) > 1 else None
    begun = [helpers.submit(take) for _ in range(min(cores(), len(waiting)) - 1)] if helpers else []
    try:
        take()
    finally:
        waiting.clear()
        failures = [helper.exception() for helper in begun if not helper.cancel()]
    for failure in failures:
        if failure is not None:
            raise failure


async def off_loop(elements: int, work: Callable[P, T], *arguments: P.args, **named: P.kwargs) -> T:
    """Return what `work` on so many elements returns."""
    if elements <= INLINE_ELEMENTS_MAX:
        return work(*arguments, **named)
    return await asyncio.to_thread(work, *arguments, **named)


@functools.cache
def cores() -> int:
    """Return how many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@functools.cache
def _helpers(process: int) -> ThreadPoolExecutor | None:
    del process  # threads do not survive a fork
    return ThreadPoolExecutor(cores() - 1, thread_name_prefix="atoll-kernels") if cores() > 1 else None
