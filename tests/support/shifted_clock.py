"""A clock for tests that is wrong."""

from __future__ import annotations

import time


class ShiftedClock:
    """A wall clock that is wrong by so many seconds."""

    def __init__(self, by_s: float) -> None:
        self._by_s = by_s

    def wall(self) -> float:
        return time.time() + self._by_s

    def monotonic(self) -> float:
        return time.monotonic()
