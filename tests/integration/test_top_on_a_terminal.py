"""`atoll top` as a person sees it: a real run, a real terminal, keys."""

from __future__ import annotations

import fcntl
import os
import pty
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest

from atoll.run.standing import RunStatus
from support.command_line import atoll
from support.links import unique_run
from support.whole_runs import DEADLINE_S, UNHURRIED, finish, start, wait_for_line

pytestmark = [pytest.mark.connected, pytest.mark.second_tier]

HIDDEN = b"\x1b[?1049l"
"""What an application writes when it gives the terminal back."""


class TopTerminal:
    """`atoll top` on a terminal of 60 columns and 20 lines."""

    def __init__(self, *words: str) -> None:
        self._ours, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 20, 60, 0, 0))
        self._theirs = theirs
        self.before = termios.tcgetattr(theirs)
        self.said = b""
        environment = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES")}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "atoll.cli", "top", *words],
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            env=environment | {"TERM": "xterm-256color"},
            start_new_session=True,
        )

    def wait_for(self, *texts: str) -> None:
        self._read(lambda: all(text.encode() in self.said for text in texts), f"{texts} never came")
        self.said = b""

    def press(self, keys: bytes) -> None:
        os.write(self._ours, keys)

    def ended(self) -> int:
        self._read(lambda: self.process.poll() is not None, "it did not end")
        while select.select([self._ours], [], [], 0.0)[0]:
            self.said += os.read(self._ours, 1 << 16)
        return self.process.wait()

    def is_whole(self) -> bool:
        return termios.tcgetattr(self._theirs) == self.before and HIDDEN in self.said

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        os.close(self._ours)
        os.close(self._theirs)

    def _read(self, done: Callable[[], bool], complaint: str) -> None:
        deadline_s = time.monotonic() + DEADLINE_S
        while not done():
            assert time.monotonic() < deadline_s, f"{complaint}: {self.said[-2000:]!r}"
            if select.select([self._ours], [], [], 0.1)[0]:
                self.said += os.read(self._ours, 1 << 16)


@contextmanager
def terminal(*words: str) -> Iterator[TopTerminal]:
    """Yield `atoll top` on a terminal."""
    here = TopTerminal(*words)
    try:
        yield here
    finally:
        here.close()


def test_a_run_is_watched_with_keys_and_left(run_dir: Path, corpus: Path) -> None:
    """The panels fill from a run that trains; q, Ctrl-C and a signal give the terminal back as it was."""
    process = start(run_dir, corpus, "--learners", "2", "--tokens", "0", *UNHURRIED)
    for name in ("learner-1", "learner-2"):
        wait_for_line(run_dir / "logs" / f"{name}.jsonl", "learner.joined")
    for keys, number, code in ((b"q", None, 0), (b"\x03", None, 130), (b"", signal.SIGINT, 130)):
        with terminal("--out", str(run_dir)) as top:
            top.wait_for("learner-1", "training", "commits", "1-6")
            top.press(b"2")
            top.wait_for("shard-0", "serving")
            top.press(b"4")
            top.wait_for("quorum s", "p3")
            top.press(keys)
            if number is not None:
                top.process.send_signal(number)
            assert top.ended() == code
            assert top.is_whole()
    said = atoll("status", "--json", "--out", str(run_dir))
    told = msgspec.json.decode(said.stdout, type=RunStatus)
    assert (said.returncode, told.standing, told.waits_for) == (0, "training", ())
    assert [each.state for each in told.learners] == ["training"] * 2
    assert all(shard.served for shard in told.shards)
    assert told.commits >= len(told.fragments) == 4
    process.send_signal(signal.SIGINT)
    finish(process)
    later = atoll("status", "--json", "--out", str(run_dir))
    assert msgspec.json.decode(later.stdout, type=RunStatus).standing == "stopped"
    assert atoll("status", "--out", str(run_dir)).stdout.endswith(f"  to continue:   atoll up --out {run_dir}\n")


def test_a_broker_that_nobody_reaches_is_named_and_no_picture_is_drawn() -> None:
    with terminal("--run", unique_run(), "--broker", "nats://127.0.0.1:1", "--set", "broker.patience_s=1") as top:
        assert top.ended() == 3
        assert b"nats://127.0.0.1:1" in top.said
        assert HIDDEN not in top.said
