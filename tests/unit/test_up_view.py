"""Goodput as heartbeats tell it: steps shorter and longer than heartbeats are apart, idling, restarts, goodbyes."""

from __future__ import annotations

import itertools

import pytest

from atoll.run.history import History
from atoll.wire.messages import Beat, LearnerState
from support.events import heartbeat


def beat(step: int, step_s: float, *, incarnation: int = 1, state: LearnerState = "training") -> Beat:
    return heartbeat("a", incarnation=incarnation, state=state, step=step, step_s=step_s, tokens=10 * step)


def heard(spans: list[tuple[str, float]], step_s: float, every_s: float = 1.0) -> History:
    """Return the view of a learner that steps or idles for so many seconds, told of every `every_s`."""
    ends, now_s = [], 0.0
    for what, lasts_s in spans:
        if what == "steps":
            ends += [now_s + (n + 1) * step_s for n in range(round(lasts_s / step_s))]
        now_s += lasts_s
    view = History()
    for tick in itertools.count():
        at_s = tick * every_s
        if at_s > now_s + 1e-9:
            return view
        view.on_beat(beat(sum(end <= at_s + 1e-9 for end in ends), step_s), at_s)
    return view


@pytest.mark.parametrize("step_s", [0.05, 0.3, 1.0, 1.5, 5.0, 20.0])
def test_one_that_always_steps_has_all_of_its_time(step_s: float) -> None:
    view = heard([("steps", 300.0)], step_s)

    assert view.present_s == pytest.approx(300.0)
    assert view.stepping_s == pytest.approx(300.0, rel=1e-6)


@pytest.mark.parametrize("step_s", [0.1, 1.0, 2.0, 5.0])
def test_idling_is_not_stepping(step_s: float) -> None:
    """Half of the time idle, in one stretch or in many: half, within one step for each return to work."""
    once = heard([("steps", 100.0), ("idles", 100.0), ("steps", 100.0), ("idles", 100.0)], step_s)
    often = heard([("steps", 10.0), ("idles", 10.0)] * 20, step_s)

    assert once.stepping_s == pytest.approx(200.0, abs=2 * step_s)
    assert often.stepping_s == pytest.approx(200.0, abs=20 * 0.05)


def test_a_step_time_that_is_said_too_long_makes_no_time() -> None:
    """Never more than the time that has passed: a first step that compiled still weighs in the mean that a learner reports."""
    view = History()
    for second in range(101):
        view.on_beat(beat(second, 3.0), float(second))

    assert view.stepping_s == pytest.approx(100.0)


def test_between_two_lives_nobody_steps() -> None:
    """The time from a kill to the next life's first heartbeat is presence only, and its first step is its own."""
    view = heard([("steps", 50.0)], 5.0)
    view.on_beat(beat(0, 5.0, incarnation=2), 80.0)
    view.on_beat(beat(1, 5.0, incarnation=2), 85.0)

    assert view.present_s == pytest.approx(85.0)
    assert view.stepping_s == pytest.approx(55.0)


def test_nobody_is_present_after_goodbye() -> None:
    view = heard([("steps", 50.0)], 0.5)
    view.on_beat(beat(100, 0.5, state="left"), 51.0)
    view.on_beat(beat(120, 0.5), 90.0)
    view.on_beat(beat(0, 0.5, incarnation=2), 100.0)

    assert view.present_s == pytest.approx(51.0)
    assert view.stepping_s == pytest.approx(50.0)
