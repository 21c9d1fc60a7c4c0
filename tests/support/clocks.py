"""Clocks of tests: turned or set by a test, jumping, or wrong; and coroutines whose time passes when everybody waits for it."""

from __future__ import annotations

import asyncio
import functools
import itertools
import time
from collections.abc import Callable, Coroutine
from typing import Any, ParamSpec, TypeVar

from atoll.base.clock import SystemClock
from atoll_simulator.loop import VirtualLoop

JUMPS_S = (0.0, 86_400.0, -3_600.0, 7.5, -86_400.0, 0.25, 1e9, -2.0)
"""How far the wall clock is from the truth, from one reading to the next: set by hand, by NTP, over a leap second."""


class JumpingClock:
    """How wrong a wall clock is that somebody sets at every reading; code that measures by it waits for ever, or not at all."""

    def __init__(self) -> None:
        self._jumps_s = itertools.cycle(JUMPS_S)

    def jump_s(self) -> float:
        return next(self._jumps_s)


class HandClock:
    """Time that passes when a test says so; its wall clock jumps."""

    def __init__(self, now_s: float = 1_000.0) -> None:
        self.now_s = now_s
        self._jumping = JumpingClock()

    def monotonic(self) -> float:
        return self.now_s

    def wall(self) -> float:
        """Return a time of day that somebody has just set."""
        return 1.7e9 + self.now_s + self._jumping.jump_s()


class ShiftedClock:
    """A wall clock that is wrong by so many seconds."""

    def __init__(self, by_s: float) -> None:
        self._by_s = by_s

    def wall(self) -> float:
        return time.time() + self._by_s

    def monotonic(self) -> float:
        return time.monotonic()


P = ParamSpec("P")
T = TypeVar("T")


def virtually(work: Coroutine[Any, Any, T]) -> T:
    """Return what `work` returns on a virtual loop of its own."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(work)


def in_virtual_time(test: Callable[P, Coroutine[Any, Any, T]]) -> Callable[P, T]:
    """Make a test of a coroutine that runs on a virtual loop."""

    @functools.wraps(test)
    def run(*args: P.args, **named: P.kwargs) -> T:
        return virtually(test(*args, **named))

    return run


class SetClock(SystemClock):
    """A clock that shows what a test has set."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def monotonic(self) -> float:
        return self.now_s
