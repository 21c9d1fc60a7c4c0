"""The only place that reads the clocks; everything else gets a `Clock`.

`monotonic` measures durations. `wall` is for people and for messages. Tests and simulators pass clocks of their own.
"""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """Two readings, both in seconds."""

    def monotonic(self) -> float:
        """Return a time that never goes back; its zero means nothing."""

    def wall(self) -> float:
        """Return seconds since the Unix epoch."""


class SystemClock:
    """The machine's own clocks."""

    monotonic = staticmethod(time.monotonic)
    wall = staticmethod(time.time)
