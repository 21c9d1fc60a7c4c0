"""What is seen of a server that lives and does not serve."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from atoll.bus.server import EmbeddedBroker, greeting
from atoll.local.brokers import AGAIN_S, FROZEN_S, PROBE_EVERY_S, SilenceWatch, host_command
from support.islands import DEADLINE_S


class SilentServer:
    """A server whose answers and whose time a test sets."""

    def __init__(self) -> None:
        self.now_s = 100.0
        self.speaks: bool | None = True
        self.works = False
        self.tells = True
        self.asked = 0
        self.watch = SilenceWatch(self.ask, self.worked_s, lambda: self.now_s)

    def ask(self) -> bool | None:
        self.asked += 1
        return self.speaks

    def worked_s(self) -> float | None:
        return (self.now_s if self.works else 1.0) if self.tells else None

    def frozen_after(self, seconds: float) -> bool:
        """Look four times a second for so long; return whether it was said to be frozen."""
        until_s, told = self.now_s + seconds, False
        while self.now_s < until_s:
            self.now_s += 0.25
            told = self.watch.is_frozen() or told
        return told


def test_a_server_that_answers_is_asked_now_and_then() -> None:
    """One question in `PROBE_EVERY_S`, however often somebody looks."""
    server = SilentServer()
    assert not server.frozen_after(60.0)
    assert server.asked == 60.0 / PROBE_EVERY_S
    assert server.watch.answers


def test_silence_is_told_once_it_has_lasted() -> None:
    """Not before `FROZEN_S`, and health says at once that nobody answers."""
    server = SilentServer()
    server.speaks = False
    assert not server.frozen_after(PROBE_EVERY_S + FROZEN_S - 0.5)
    assert not server.watch.answers
    assert server.frozen_after(1.0)


def test_a_server_that_speaks_again_is_left_alone() -> None:
    server = SilentServer()
    for _ in range(5):
        server.speaks = False
        assert not server.frozen_after(FROZEN_S - PROBE_EVERY_S)
        server.speaks = True
        assert not server.frozen_after(2 * PROBE_EVERY_S)


def test_a_silent_server_that_works_is_crowded_and_not_frozen() -> None:
    """Strangers hold its door; who is inside is served. So is one of which nobody knows whether it works."""
    for tells in (True, False):
        server = SilentServer()
        server.speaks, server.works, server.tells = False, True, tells
        assert not server.frozen_after(60.0)
        assert not server.watch.answers


def test_a_question_that_could_not_be_asked_is_no_silence() -> None:
    server = SilentServer()
    server.speaks = None
    assert not server.frozen_after(60.0)
    assert server.watch.answers


def test_restarts_are_rare() -> None:
    server = SilentServer()
    server.speaks = False
    assert server.frozen_after(20.0)
    assert not server.frozen_after(AGAIN_S - 20.0)
    assert server.frozen_after(40.0)


def test_who_was_frozen_beside_the_server_does_not_blame_it() -> None:
    server = SilentServer()
    assert not server.frozen_after(10.0)
    server.now_s += 3600.0
    server.speaks = False
    assert not server.frozen_after(FROZEN_S - 0.5)


@pytest.mark.connected
def test_a_stopped_server_says_nothing(tmp_path: Path) -> None:
    with EmbeddedBroker(tmp_path) as broker:
        assert broker.answers()
        os.kill(broker.pid, signal.SIGSTOP)
        wait_until(lambda: broker.answers() is False)
        os.kill(broker.pid, signal.SIGCONT)
        wait_until(lambda: broker.answers() is True)


@pytest.mark.connected
@pytest.mark.second_tier
def test_a_stopped_server_is_started_anew(tmp_path: Path) -> None:
    url_file, store = tmp_path / "url", tmp_path / "store"
    host = subprocess.Popen(host_command(store, url_file, 0), stderr=subprocess.PIPE, text=True)
    try:
        wait_until(url_file.exists)
        (former,) = pids_of(store)
        os.kill(former, signal.SIGSTOP)
        wait_until(lambda: pids_of(store) not in ([], [former]))
        port = int(url_file.read_text().rpartition(":")[2])
        wait_until(lambda: greeting("127.0.0.1", port) is not None)
    finally:
        host.terminate()
        _, said = host.communicate(timeout=DEADLINE_S)
    assert f"it said and did nothing for {FROZEN_S:g} s" in said


def pids_of(store: Path) -> list[int]:
    """Return the process of the server that has written its ports last."""
    return [int(file.stem.rpartition("_")[2]) for file in store.glob("nats-server_*.ports")]


def wait_until(true: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + DEADLINE_S
    while not true():
        assert time.monotonic() < deadline_s
        time.sleep(0.05)
