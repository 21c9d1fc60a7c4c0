"""The live picture: a row for every process, and what its link carries."""

from __future__ import annotations

import contextlib
import os
from dataclasses import replace

import pytest
from rich.console import Console

from atoll.base.clock import SystemClock
from atoll.base.units import as_size
from atoll.local import console as console_module
from atoll.local.console import WIDE, ConsolePicture, LastingConsole, PlainConsole, draw, draw_once, status_line
from atoll.local.console_tables import TopMoment, with_age
from atoll.protocol.settings import ProtocolSettings
from atoll.run.timeline import TimedView
from atoll.run.view import RunView
from atoll.wire.messages import Beat, Presence, event
from atoll.wire.traffic import LinkTraffic


def drawn(view: RunView, now_s: float, width: int) -> list[str]:
    """Return the lines of the picture."""
    console = Console(width=width)
    with console.capture() as capture:
        console.print(draw(ConsolePicture(view, "r", ProtocolSettings(), 0.0, now_s), width))
    return capture.get().splitlines()


def running() -> RunView:
    """Return a learner and a shard that were heard at 1 and 2 s."""
    view = RunView()
    for second in (1, 2):
        moved = LinkTraffic(wire_up=1000 * second, wire_down=500_000 * second)
        told = Beat(
            learner="learner-1",
            incarnation=3,
            run_nonce="n",
            state="training",
            at_s=0.0,
            step=7,
            step_s=0.1,
            tokens=70,
            tokens_per_s=123.0,
            loss=2.5,
            pushed=0,
            superseded=0,
            overhead=0.25,
            lag_versions=4,
            moved=moved,
        )
        view.on_beat(told, float(second))
        view.on_presence(Presence(name="p", host="h", pid=1, wants=(), owns=(0,), moved=moved), float(second))
    return view


def test_every_process_has_a_row_with_its_pace_and_its_bytes() -> None:
    """Learners with steps, loss, speed and lag; shards with what is known of them."""
    lines = drawn(running(), 2.0, 2 * WIDE)

    learner = ["learner-1", "training", "3", "7", "2.500", "123", "4", "25.0%"]
    carried = ["1.0", "kB", "500.0", "kB", "2.0", "kB", "1.0", "MB"]
    assert lines[1].split() == learner + carried
    assert lines[2].split() == ["shard-0", "serving", *("-",) * 6, *carried]


def test_a_narrow_terminal_shows_whole_columns() -> None:
    """Life and overhead make room; nothing is cut in the middle."""
    lines = drawn(running(), 2.0, 80)

    assert lines[0].split() == ["process", "state", "step", "loss", "tokens/s", "lag", "up/s", "down/s", "up", "down"]
    assert "25.0%" not in lines[1]
    assert "…" not in "".join(lines)


def test_who_is_not_heard_any_more_is_silent_or_gone() -> None:
    """A learner is shown as silent; a synchronizer process makes room for the one that took over."""
    lines = drawn(running(), 100.0, 80)

    assert lines[1].split()[1] == "silent"
    assert lines[1].split()[-6:] == ["-", "-", "2.0", "kB", "1.0", "MB"]
    assert not any(line.startswith("shard-0") for line in lines)


def test_a_fleet_below_its_quorum_says_so() -> None:
    told = [status_line(ConsolePicture(running(), "r", ProtocolSettings(quorum=quorum), 0.0, 2.0)) for quorum in (1, 3)]

    assert ["below the quorum of 3" in line for line in told] == [False, True]


def test_bytes_for_people() -> None:
    """Decimal units; beyond the last one numbers grow."""
    assert [as_size(count) for count in (999, 1000, 1_500_000, 2 * 10**15)] == [
        "999 B",
        "1.0 kB",
        "1.5 MB",
        "2000.0 TB",
    ]


def test_the_time_to_go_follows_from_what_counts() -> None:
    """Of 70 tokens trained 35 were merged: 1000 more take twice as long as it takes to train them."""
    view = running()
    picture = ConsolePicture(view, "r", ProtocolSettings(tokens_target=1035), 0.0, 2.0)
    assert picture.left_s == 1035 / picture.tokens_per_s

    view.run_tokens = 35
    assert picture.left_s == pytest.approx(2 * 1000 / picture.tokens_per_s)


def test_a_watcher_tells_the_age_of_the_run_and_the_goodput_of_now() -> None:
    """It has listened for two seconds; the process that began the run keeps its own clock."""
    begun = ConsolePicture(running(), "r", ProtocolSettings(), 0.0, 2.0)
    own, watching = status_line(begun), status_line(replace(begun, run_s=3_600.0))

    assert own.startswith("0:02 · ")
    assert watching.startswith("1:00:00 · ")
    assert begun.goodput is not None
    assert ("goodput now" in own, "goodput now" in watching) == (False, True)


def test_whoever_begins_a_run_is_told_why_nothing_trains_yet() -> None:
    """With a cold cache that takes a minute; a watcher may have come to a run that has long begun."""
    empty = ConsolePicture(RunView(), "r", ProtocolSettings(), 0.0, 2.0)
    lines = [status_line(picture) for picture in (empty, replace(empty, run_s=2.0), replace(empty, view=running()))]

    assert ["no step yet" in line for line in lines] == [True, False, False]


def test_a_picture_that_is_drawn_once_has_the_age_of_its_run(capsys: pytest.CaptureFixture[str]) -> None:
    """From its founding, or by its first entry; a run that has ended gets no older."""
    view = TimedView()
    view.on_event(event("joined", "a", 2_800.0, incarnation=1, founder=True, took_s=0.5))
    now = TopMoment(ConsolePicture(view, "r", ProtocolSettings(), 0.0, 2.0), view.timeline, 10_000.0)
    for picture in (with_age(now), with_age(now, 2_740.0), with_age(replace(now, closing=True), 2_740.0)):
        draw_once(picture)

    ages = [line.partition(" · ")[0] for line in capsys.readouterr().out.splitlines() if " · " in line]
    assert ages == ["2:00:00", "2:01:00", "1:00"]


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


def test_times_of_a_simulated_run_are_told_as_virtual() -> None:
    picture = ConsolePicture(running(), "r", ProtocolSettings(tokens_target=100_000), 0.0, 2.0)
    real, virtual = status_line(picture), status_line(replace(picture, virtual=True))

    assert "virtual" not in real
    assert virtual.startswith("virtual ")
    assert virtual.count("virtual ") == real.count("/s") + 1 + real.count(" to go")
