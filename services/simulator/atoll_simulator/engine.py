"""Virtual time: a queue of calls ordered by when they are due, and among equals by when they were asked for.

Nothing here waits and nothing here is random: the same requests give the same calls in the same order. An exception of
a call ends the run and reaches the caller of the engine: the run does not survive a broken safety property.
"""

from __future__ import annotations

from collections.abc import Callable
from heapq import heappop, heappush
from typing import Any


class Engine:
    """The clock of the simulation, `now_s` in seconds since the world began; no simulated process can see it."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.events = 0
        self._order = 0
        self._due: list[tuple[float, int, Callable[..., object], tuple[Any, ...]]] = []

    def after(self, wait_s: float, call: Callable[..., object], *arguments: Any) -> None:  # noqa: ANN401  (passed on)
        """Make `call(*arguments)` when `wait_s` (at least 0) have passed."""
        self._order += 1
        heappush(self._due, (self.now_s + max(0.0, wait_s), self._order, call, arguments))

    def run(self, until_s: float, done: Callable[[], bool] | None = None) -> bool:
        """Make the due calls until `until_s`, or until `done` returns true after a call; return its last result."""
        due = self._due
        while due and due[0][0] <= until_s:
            self.now_s, _, call, arguments = heappop(due)
            self.events += 1
            call(*arguments)
            if done is not None and done():
                return True
        self.now_s = max(self.now_s, until_s)
        return False
