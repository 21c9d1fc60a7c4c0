"""A thread with a loop of its own: whatever happens in it, its loop is closed in the end."""

from __future__ import annotations

import asyncio
import sys
import threading

import pytest

from atoll.base import loop_thread
from atoll.base.loop_thread import LoopThread

DEADLINE_S = 120.0


async def until(begun: threading.Event, end: threading.Event) -> None:
    """Wait in a thread of the loop's executor, which no cancellation ends."""

    def wait() -> None:
        begun.set()
        end.wait(DEADLINE_S)

    await asyncio.to_thread(wait)


def test_a_second_stop_does_not_end_what_the_first_waits_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop_thread, "STOP_S", 0.05)
    monkeypatch.setattr(loop_thread, "CANCEL_S", 0.05)
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
