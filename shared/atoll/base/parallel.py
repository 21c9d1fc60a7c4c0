"""Large work in parts, on all cores: with one thread or sixteen, the same bits.

A vector is cut into *parts* at multiples of `PART` elements, wherever a piece of work begins or ends and however many cores
there are. What is computed element by element does not see the cuts; sums are taken per part and added in the order of the
parts, by the caller. So the number of threads decides nothing but the time. A part is also small enough to stay in a
cache: who does several things with a vector does them part by part.

Whoever has large work does it: the calling thread takes parts, one after the other, and threads that have nothing else to
do take parts as well, each the next one that nobody has taken. Helpers are never waited for unless they have begun, so
many callers at once share the cores and none of them can block another. Kernels run without the interpreter's lock. Work
below `SPREAD_ELEMENTS` is done by the caller alone: waking a thread costs as much as folding in tens of thousands of elements.

There is nothing to set: as many threads as the cores that this process may use. A process that forks has its helpers made
anew in the child.
"""

from __future__ import annotations

import functools
import itertools
import os
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Final, TypeVar

T = TypeVar("T")

PART: Final = 1 << 19
SPREAD_ELEMENTS: Final = 1 << 20


def parts(start: int, stop: int) -> list[tuple[int, int]]:
    """Return the parts of elements `start` to `stop`, in order."""
    cuts = [start, *range((start // PART + 1) * PART, stop, PART), stop]
    return list(itertools.pairwise(cuts)) if start < stop else []


def each(work: Callable[[T], None], items: Iterable[T], elements: int) -> None:
    """Do `work` with every item, in any order, and return when all is done; `elements` says how large they are together.

    Raises:
        Exception: what `work` raised; some items may then be left undone.
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


@functools.cache
def cores() -> int:
    """Return how many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@functools.cache
def _helpers(process: int) -> ThreadPoolExecutor | None:
    """Return the threads that help in this process, None on a single core."""
    del process  # threads do not survive a fork
    return ThreadPoolExecutor(cores() - 1, thread_name_prefix="atoll-kernels") if cores() > 1 else None
