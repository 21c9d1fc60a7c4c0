"""SIGTERM and SIGINT as something that the main thread waits for.

A handler runs in the main thread between two of its steps, so also where `threading.Event.wait` holds the lock of its event for
a moment. There `Event.set` would wait for that lock, and the process for itself, for ever. `SimpleQueue.put` may be called
anywhere, so the handler puts the signal into a queue.
"""

from __future__ import annotations

import queue
import signal
from types import FrameType


class StopSignals:
    """Hears SIGTERM and SIGINT from now on; of the main thread."""

    def __init__(self) -> None:
        """Take both over."""
        self._came: queue.SimpleQueue[int] = queue.SimpleQueue()
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_signal)

    def wait(self, timeout_s: float) -> bool:
        """Return True once one has come, False if none has within `timeout_s`; each is told once."""
        try:
            self._came.get(timeout=timeout_s)
        except queue.Empty:
            return False
        return True

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        del frame
        self._came.put(number)
