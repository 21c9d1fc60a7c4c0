"""The only place that reads the clocks; everything else gets a `Clock`.

`monotonic` measures durations. `wall` is for people and for messages. Tests and simulators pass clocks of their own.
"""

from __future__ import annotations

import time
from datetime import datetime
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


def unix_s(text: str) -> float | None:
    """Return a date of RFC 3339, as a broker writes them, in seconds since the Unix epoch; None for another text."""
    try:
        return datetime.fromisoformat(text).timestamp()
    except ValueError:
        return None
