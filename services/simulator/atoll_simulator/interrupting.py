"""Interrupts of a simulation: the first signal lets all processes leave in good order, the second ends at once.

The handler is installed before JAX is loaded. The default handler raises wherever Python happens to be, and an
exception inside JAX's hook of the garbage collector is printed and lost.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class Interrupted:
    """Whether a signal asked the simulation to end; a second signal raises `KeyboardInterrupt`."""

    def __init__(self) -> None:
        """Begin without a signal."""
        self.wanted = False

    @contextmanager
    def heard(self) -> Iterator[None]:
        """Handle SIGINT and SIGTERM while the block runs."""
        former = {number: signal.signal(number, self._on_signal) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in former.items():
                signal.signal(number, handler)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        del number, frame
        if self.wanted:
            raise KeyboardInterrupt
        self.wanted = True
