"""Learners of one machine compile in turns, and nobody waits for ever."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

from atoll_learner.compiling import turn

HOLDER = """
import sys, time
from pathlib import Path
from atoll_learner.compiling import turn
with turn(Path(sys.argv[1])):
    print("mine", flush=True)
    time.sleep(600)
"""


def test_a_turn_is_had_by_one_and_given_back(tmp_path: Path) -> None:
    """While it is held others run out of patience and go on without it; afterwards it can be had again."""
    with turn(tmp_path) as first:
        with turn(tmp_path, patience_s=0.0) as second:
            assert not second
        assert first
    with turn(tmp_path, patience_s=0.0) as third:
        assert third


def test_without_a_cache_there_are_no_turns() -> None:
    """Nothing to share, nothing to wait for."""
    with turn(None) as had:
        assert not had


def test_a_killed_holder_gives_its_turn_back(tmp_path: Path) -> None:
    """The kernel frees the lock of a process that died while it compiled."""
    holder = subprocess.Popen([sys.executable, "-c", HOLDER, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert holder.stdout is not None
    assert holder.stdout.readline() == "mine\n"
    with turn(tmp_path, patience_s=0.0) as had:
        assert not had
    holder.send_signal(signal.SIGKILL)
    holder.wait(240)
    holder.stdout.close()
    with turn(tmp_path, patience_s=30.0) as had:
        assert had
