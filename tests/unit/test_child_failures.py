"""What `atoll up` says of a program of its own that ended by a fault: that program's own error, and where its log is."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from atoll.base.clock import SystemClock
from atoll.base.errors import AtollError, UserError
from atoll.local.processes import ChildPlan, Exit, ProcessGroup
from support.clocks import HandClock

DEADLINE_S = 60.0


def failure_of(program: str, folder: Path, **more: str) -> AtollError:
    group = ProcessGroup(folder, SystemClock())
    ours = {**os.environ, "PYTHONUNBUFFERED": "1", **more}  # as every child of a run has it: lines stand in their order
    group.start(ChildPlan("child", (sys.executable, "-c", program), ours))
    deadline_s = time.monotonic() + DEADLINE_S
    while group.alive(["child"]):
        group.poll()
        assert time.monotonic() < deadline_s
        time.sleep(0.01)
    return group.failure("child", "work failed")


RAISES = (
    "from atoll.base.exits import run_guarded\nfrom atoll.base.errors import SettingsError\ndef work():\n    raise "
)


@pytest.mark.parametrize("style", ["console", "json"])
@pytest.mark.parametrize("todo", ["", ", todo='mend it'"])
def test_an_error_of_ours_is_told_as_our_own(tmp_path: Path, style: str, todo: str) -> None:
    program = f"{RAISES}SettingsError('wrong', got=1, allowed=2{todo})\nrun_guarded(work)"
    error = failure_of(program, tmp_path, ATOLL_LOG__FORMAT=style)
    log = str(tmp_path / "child.jsonl")

    assert isinstance(error, UserError)
    assert (error.what, error.got, error.allowed) == ("work failed: wrong", "1", "2")
    assert error.todo == (f"mend it; its log is {log}" if todo else f"look at {log}")


def test_a_program_that_leaves_in_order_when_asked_has_left_well(tmp_path: Path) -> None:
    """Its exit code says that SIGTERM ended it, as a shell would; one that nobody asked has failed."""
    leaves = "import signal, sys\nsignal.signal(signal.SIGTERM, lambda *_: sys.exit(143))\nprint('ready', flush=True)\n"
    group = ProcessGroup(tmp_path, SystemClock())
    group.start(ChildPlan("child", (sys.executable, "-c", f"{leaves}signal.pause()"), dict(os.environ)))
    deadline_s = time.monotonic() + DEADLINE_S
    while not (tmp_path / "child.jsonl").read_text():
        assert time.monotonic() < deadline_s
        time.sleep(0.01)
    group.ask(["child"])
    while not (ends := group.poll()):
        assert time.monotonic() < deadline_s
        time.sleep(0.01)

    assert [(end.code, end.is_good, replace(end, asked=False).is_good) for end in ends] == [(143, True, False)]


def ended(group: ProcessGroup, clock: HandClock, lives: int) -> list[Exit]:
    """Return the ends of at least so many lives; by the clock each is longer than a crash at the start."""
    ends: list[Exit] = []
    deadline_s = time.monotonic() + DEADLINE_S
    while len(ends) < lives and time.monotonic() < deadline_s:
        ends += group.poll()
        clock.now_s += 20.0
        time.sleep(0.005)
    return ends


def test_a_child_that_never_does_what_it_is_for_is_given_up(tmp_path: Path) -> None:
    """It lives for longer than a crash at the start, and always dies: for ever, if only time counted."""
    clock = HandClock()
    group = ProcessGroup(tmp_path, clock)
    group.proven = lambda name: name == "useful"
    for name in ("useful", "hopeless"):
        group.start(ChildPlan(name, (sys.executable, "-c", "import sys; sys.exit(7)"), {}, restarts_max=2))
    ends = ended(group, clock, 9)

    assert len([end for end in ends if end.name == "hopeless"]) == 3
    assert not group.alive(["hopeless"])
    assert group.alive(["useful"])
    group.kill_all()


@pytest.mark.parametrize(
    ("kind", "away", "proven", "given_up"),
    [
        ("BrokerUnavailable", True, False, False),
        ("BrokerUnavailable", False, True, False),
        ("BrokerUnavailable", False, False, True),
        ("StorageFull", True, True, True),
    ],
)
def test_the_absence_of_the_broker_costs_no_restarts(
    tmp_path: Path, kind: str, *, away: bool, proven: bool, given_up: bool
) -> None:
    """Whether `up` misses it, too, or the child alone is cut off; one that has never reached it may have a wrong address."""
    clock = HandClock()
    group = ProcessGroup(tmp_path, clock)
    lives = iter([proven])
    group.proven = lambda _: next(lives, False)
    group.away_s = lambda: clock.now_s if away else 0.0
    word = tmp_path / "word"
    word.write_text(json.dumps({"event": "process.failed", "kind": kind, "what": "no broker answers"}))
    program = f"import sys; print(open({str(word)!r}).read()); sys.exit(3)"
    group.start(ChildPlan("child", (sys.executable, "-S", "-c", program), {}, restarts_max=2))
    ends = ended(group, clock, 3)
    if given_up:
        assert not ends[-1].restarting
    else:
        more = ended(group, clock, 2)
        assert all(end.restarting and end.absent for end in (*ends, *more))
        assert "the broker was away; starting it again" in more[-1].news
        word.write_text("another fault")
        assert ended(group, clock, 2)[-1].restarting
    assert bool(group.alive(["child"])) != given_up
    group.kill_all()


def test_a_restart_that_the_system_refuses_is_a_fault_of_that_child_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory is short right after somebody has run out of it; those who live must not pay for it."""
    clock = HandClock()
    group = ProcessGroup(tmp_path, clock)
    group.start(ChildPlan("victim", (sys.executable, "-c", "import sys; sys.exit(7)"), {}, restarts_max=2))
    (first,) = ended(group, clock, 1)

    def refused(*_: object, **__: object) -> None:
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    monkeypatch.setattr(subprocess, "Popen", refused)
    second = ended(group, clock, 1)[0]
    clock.now_s += 20.0
    third = ended(group, clock, 1)[0]

    assert [end.restarting for end in (first, second, third)] == [True, True, False]
    assert not group.alive(["victim"])
    monkeypatch.undo()
    group.kill_all()
