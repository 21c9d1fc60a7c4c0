"""A signal ends a process that waits for it, wherever it comes in the loop."""

from __future__ import annotations

import subprocess
import sys

ROUNDS = 1500
DEADLINE_S = 60.0
PROGRAM = f"""
import random, signal, os
from atoll.base.exits import StopSignals

chance = random.Random(1)
signal.signal(signal.SIGALRM, lambda *_: os.kill(os.getpid(), signal.SIGTERM))
stop = StopSignals()
for _ in range({ROUNDS}):
    signal.setitimer(signal.ITIMER_REAL, 1e-5 + 5e-4 * chance.random())
    while not stop.wait(1e-6):
        pass
print("left", {ROUNDS}, "times")
"""


def test_a_signal_at_any_moment_is_heard() -> None:
    """With `threading.Event` the process waited for a lock that it held itself; a `SimpleQueue` kept one of thousands back."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=DEADLINE_S, check=False
    )

    assert (done.stdout, done.returncode) == (f"left {ROUNDS} times\n", 0), done.stderr
