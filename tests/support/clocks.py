"""Clocks of tests: one that a test turns, and one whose wall time jumps while time goes on."""

from __future__ import annotations

import itertools

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
