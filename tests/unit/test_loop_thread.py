"""Threads with a loop of their own, and loops of others that a signal ends: whatever happens, they end in order."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from atoll.base import background_tasks
from atoll.base.background_tasks import LoopThread

DEADLINE_S = 120.0


async def until(begun: threading.Event, end: threading.Event) -> None:
    """Wait in a thread of the loop's executor, which no cancellation ends."""

    def wait() -> None:
        begun.set()
        end.wait(DEADLINE_S)

    await asyncio.to_thread(wait)


def test_a_second_stop_does_not_end_what_the_first_waits_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(background_tasks, "STOP_S", 0.05)
    monkeypatch.setattr(background_tasks, "CANCEL_S", 0.05)
    home, begun, release = LoopThread("stubborn"), threading.Event(), threading.Event()
    home.submit(until(begun, release))
    assert begun.wait(DEADLINE_S)
    home.stop()
    assert not home.loop.is_closed()
    home.stop()
    release.set()
    home.join(DEADLINE_S)
    assert home.loop.is_closed()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_loop_that_is_left_is_closed() -> None:
    """By `sys.exit` in something that it calls, say."""
    home = LoopThread("left")
    home.loop.call_soon_threadsafe(sys.exit)
    home.join(DEADLINE_S)
    assert home.loop.is_closed()
    home.stop()


ROUNDS = 1500

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


PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "stop-and-continue.md"
LOOP = """
import time
import numpy as np
import atoll
from atoll.bus.memory import MemoryBroker, MemoryBus
{before}
async def opener():
    return MemoryBus("r", MemoryBroker())

with atoll.join(opener, run="r", learner="a", params={{"w": np.zeros((8, 2), np.float32)}}) as island:
    params = island.params
    while True:
        params = island.step(params, tokens=4)
        print("stepped", flush=True)
        time.sleep(0.01)
"""


def told_by_the_page() -> str:
    lines = PAGE.read_text(encoding="utf-8").splitlines()
    at = lines.index("import signal, sys")
    return "\n".join(lines[at : at + 2])


@pytest.mark.parametrize(("handles", "code"), [(True, 128 + signal.SIGTERM), (False, -signal.SIGTERM)])
def test_a_loop_leaves_on_sigterm_if_it_says_so(handles: bool, code: int) -> None:  # noqa: FBT001
    """Without the page's lines the process is killed where it is; Atoll takes no signal of somebody else's process."""
    program = LOOP.format(before=told_by_the_page() if handles else "")
    with subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        assert process.stdout is not None
        said = ""
        while "stepped" not in said:
            said += process.stdout.readline()
        process.send_signal(signal.SIGTERM)
        said += process.communicate(timeout=DEADLINE_S)[0]

    assert process.returncode == code
    assert ("learner.left" in said) == handles
