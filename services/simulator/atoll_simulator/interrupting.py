"""The wish to end a simulation: the first signal lets everybody leave in good order, the second ends at once.

It is heard from before JAX is loaded: the default handler raises wherever Python happens to be, and what is raised inside
JAX's hook of the garbage collector is printed and lost.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class Interrupted:
    """Whether a simulation was asked to end; who asks again is a `KeyboardInterrupt`."""

    def __init__(self) -> None:
        """None came."""
        self.wanted = False

    @contextmanager
    def heard(self) -> Iterator[None]:
        """Take SIGINT and SIGTERM over while the block runs."""
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
