"""The live picture: a row for every process, what its link carries, who is heard, and what each learner does."""

from __future__ import annotations

import contextlib
import os

import pytest
from rich.console import Console

from atoll.base.clock import SystemClock
from atoll.local import console as console_module
from atoll.local.console import WIDE, ConsolePicture, LastingConsole, PlainConsole, draw, status_line
from atoll.protocol.settings import ProtocolSettings
from atoll.run.history import History
from atoll.run.process_views import Hearing, HostView, LearnerLife, LearnerView
from atoll.wire.messages import LearnerState, Presence
from atoll.wire.traffic import LinkTraffic
from support.events import heartbeat
from support.watched_runs import beat


def drawn(view: History, now_s: float, width: int) -> list[str]:
    console = Console(width=width)
    with console.capture() as capture:
        console.print(draw(ConsolePicture(view, "r", ProtocolSettings(), 0.0, now_s), width))
    return capture.get().splitlines()


def running() -> History:
    view = History()
    for second in (1, 2):
        moved = LinkTraffic(wire_up=1000 * second, wire_down=500_000 * second)
        known = {"incarnation": 3, "step": 7, "step_s": 0.1, "tokens": 70, "tokens_per_s": 123.0}
        told = heartbeat("learner-1", **known, overhead=0.25, lag_versions=4, moved=moved)
        view.on_beat(told, float(second))
        view.on_presence(Presence(name="p", host="h", pid=1, wants=(), owns=(0,), moved=moved), float(second))
    return view


def test_every_process_has_a_row_with_its_pace_and_its_bytes() -> None:
    lines = drawn(running(), 2.0, 2 * WIDE)

    learner = ["learner-1", "training", "3", "7", "2.500", "123", "4", "25.0%"]
    carried = ["1.0", "kB", "500.0", "kB", "2.0", "kB", "1.0", "MB"]
    assert lines[1].split() == learner + carried
    assert lines[2].split() == ["shard-0", "serving", *("-",) * 6, *carried]


def test_who_is_not_heard_any_more_is_silent_or_gone() -> None:
    """A learner is shown as silent; a synchronizer process makes room for the one that took over."""
    lines = drawn(running(), 100.0, 80)

    assert lines[1].split()[1] == "silent"
    assert lines[1].split()[-6:] == ["-", "-", "2.0", "kB", "1.0", "MB"]
    assert not any(line.startswith("shard-0") for line in lines)


def test_a_fleet_below_its_quorum_says_so() -> None:
    told = [status_line(ConsolePicture(running(), "r", ProtocolSettings(quorum=quorum), 0.0, 2.0)) for quorum in (1, 3)]

    assert ["below the quorum of 3" in line for line in told] == [False, True]


def test_the_time_to_go_follows_from_what_counts() -> None:
    """Of 70 tokens trained 35 were merged: 1000 more take twice as long as it takes to train them."""
    view = running()
    picture = ConsolePicture(view, "r", ProtocolSettings(tokens_target=1035), 0.0, 2.0)
    assert picture.left_s == 1035 / picture.tokens_per_s

    view.run_tokens = 35
    assert picture.left_s == pytest.approx(2 * 1000 / picture.tokens_per_s)


def test_a_console_whose_reader_has_gone_ends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """`atoll up | tee log` and Ctrl-C: the shell ends `tee` as well, before the run has said that it drains."""
    quiet: list[bool] = []
    monkeypatch.setattr(console_module, "silence_stdout", lambda: quiet.append(True))
    reading, writing = os.pipe()
    file = os.fdopen(writing, "w", buffering=1)
    console = LastingConsole(file=file)
    face = PlainConsole(console, SystemClock())
    face.say("there")
    os.close(reading)
    face.say("gone")
    face.say("nothing any more")
    with face.stage("a stage"):
        pass
    with contextlib.suppress(BrokenPipeError):
        file.close()

    assert quiet == [True]
    assert console.quiet


PROTOCOL = ProtocolSettings(silence_s=5.0, lease_s=3.0)
WALL_S = 10_000.0


def hearing(now_s: float, *, dated: bool = True, over: bool = False) -> Hearing:
    return Hearing(PROTOCOL, now_s, WALL_S + now_s if dated else None, 0.0, over)


def beaten(state: LearnerState = "training", *, heard_s: float | None = 10.0, left: bool = False) -> LearnerView:
    life = LearnerLife(1, joined_at_s=WALL_S, left=left, beat=beat("a", state=state))
    return LearnerView("a", {1: life}, heard_s)


def unbeaten(joined_s: float | None) -> LearnerView:
    return LearnerView("a", {1: LearnerLife(1, joined_at_s=None if joined_s is None else WALL_S + joined_s)})


@pytest.mark.parametrize(
    ("learner", "now_s", "expected"),
    [
        (beaten(), 15.0, "training"),
        (beaten("draining"), 15.0, "draining"),
        (beaten(), 15.1, "silent"),
        (beaten(heard_s=None), 15.0, "silent"),
        (beaten(left=True), 10.0, "left"),
        (LearnerView("a"), 10.0, "left"),
    ],
)
def test_a_learner_does_what_it_says_while_it_is_heard(learner: LearnerView, now_s: float, expected: str) -> None:
    assert hearing(now_s).state(learner) == expected
    assert hearing(now_s).hears(learner) is (expected in ("training", "draining"))


@pytest.mark.parametrize(
    ("joined_s", "now_s", "over", "expected"),
    [
        (-100.0, 1.0, False, "ended"),
        (-100.0, 2.0, False, "silent"),
        (-4.0, 1.0, False, "joining"),
        (8.0, 10.0, False, "joining"),
        (8.0, 10.0, True, "ended"),
        (None, 1.0, False, "ended"),
        (-100.0, 2.0, True, "ended"),
    ],
)
def test_without_a_heartbeat_its_beginning_tells(
    joined_s: float | None, now_s: float, *, over: bool, expected: str
) -> None:
    assert hearing(now_s, over=over).state(unbeaten(joined_s)) == expected


def test_without_a_date_a_life_without_a_heartbeat_joins_until_it_must_have_been_heard() -> None:
    assert [hearing(now_s, dated=False).state(unbeaten(-100.0)) for now_s in (1.0, 2.0)] == ["joining", "silent"]


def test_a_synchronizer_may_miss_one_beat() -> None:
    host = HostView(heard_s=10.0)

    assert [hearing(now_s).hears_host(host) for now_s in (14.9, 15.1)] == [True, False]
    assert not hearing(10.0).hears_host(HostView())
