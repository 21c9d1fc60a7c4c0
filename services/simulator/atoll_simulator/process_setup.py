"""Setup of a simulating process, before JAX is loaded: its cores, and its interrupts.

A simulation computes one thread per inner step, several steps side by side, and nothing else. Libraries read the environment
variables for that when they are loaded, so this module loads none of them.

The first signal lets all processes leave in good order, the second ends at once. The default handler raises wherever Python
happens to be, and an exception inside JAX's hook of the garbage collector is printed and lost.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


def one_thread_for_algebra() -> None:
    """Give NumPy's linear algebra one thread, unless the environment sets a number; only before NumPy is first loaded.

    Its threads wait for each other by spinning. On two busy cores the norm of a fragment took 20 ms with two threads
    and 0.1 ms with one.
    """
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")


def use_cores(learners: int) -> None:
    """Make JAX create as many one-thread CPU devices as can work side by side; only before JAX is first used."""
    devices = max(1, min(os.cpu_count() or 1, learners))
    # The count comes first: XLA stops reading at the first word that is not its own flag, and the last one is not.
    flags = f"--xla_force_host_platform_device_count={devices} --xla_cpu_multi_thread_eigen=false"
    told = os.environ.get("XLA_FLAGS", "")
    if flags not in told:
        os.environ["XLA_FLAGS"] = f"{told} {flags} intra_op_parallelism_threads=1".strip()


class InterruptHandler:
    """Whether a signal asked the simulation to end; a second signal raises `KeyboardInterrupt`."""

    def __init__(self) -> None:
        self.wanted = False

    @contextmanager
    def handle_signals(self) -> Iterator[None]:
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
