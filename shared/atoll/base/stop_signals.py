"""SIGTERM and SIGINT as something that the main thread waits for.

A handler runs in the main thread between two of its steps, so also where `threading.Event.wait` holds the lock of its event for
a moment. There `Event.set` would wait for that lock, and the process for itself, for ever. `queue.SimpleQueue` of Python 3.11
was seen to keep a signal that came at such a moment to itself. A byte in a pipe has no lock: the handler writes it, and the
main thread waits until there is one.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
from types import FrameType


class StopSignals:
    """Hears SIGTERM and SIGINT from now on; of the main thread, for the rest of the process."""

    def __init__(self) -> None:
        """Take both over."""
        self._heard, self._told = os.pipe()
        os.set_blocking(self._told, False)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_signal)

    def wait(self, timeout_s: float) -> bool:
        """Return True once one has come, False if none has within `timeout_s`; each is told once."""
        if not select.select([self._heard], [], [], timeout_s)[0]:
            return False
        os.read(self._heard, 1)
        return True

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        del number, frame
        with contextlib.suppress(BlockingIOError):  # a pipe full of signals says it, too
            os.write(self._told, b"!")
