"""Samples of heartbeats in the event log, and the curves that views, the report and the dashboard make of them."""

from __future__ import annotations

import itertools

import msgspec
import pytest

from atoll.base.wording import DAY_S
from atoll.client.options import DEFAULTS
from atoll.client.session import pause_of
from atoll.report.collect import LEARNERS_MAX, curves_of_run
from atoll.run.curves import BINS_MAX, NOW_S, POINTS_MAX, PresentTime, lines_of, rates, silence
from atoll.run.history import History
from atoll.run.process_views import SAMPLES_MAX, Curve, Noted
from atoll.wire.events import SampleEvent, log_entry, sample_of
from atoll.wire.messages import Beat, Event, decode, encode
from atoll.wire.traffic import LinkTraffic
from support.events import event, fields


def written_in(life_s: float) -> int:
    age_s, written = pause_of(0.0, DEFAULTS.sample_s), 0
    while age_s <= life_s:
        written += 1
        age_s += pause_of(age_s, DEFAULTS.sample_s)
    return written


def beat(step: int) -> Beat:
    """Return a heartbeat with every field set, as wide as those of a long run."""
    return Beat(
        learner="learner-17",
        incarnation=3,
        run_nonce="0123456789abcdef",
        state="training",
        at_s=1_764_000_000.0 + step,
        step=step,
        step_s=0.123456789,
        tokens=4096 * step,
        tokens_per_s=12345.678901,
        loss=2.3456789012,
        pushed=10,
        superseded=0,
        overhead=0.0123456789,
        lag_versions=1,
        moved=LinkTraffic(*(10**11 + step for _ in range(9))),
    )


def sample(step: int, who: str = "a") -> Event:
    return decode(Event, encode(log_entry(sample_of(beat(step)), who, float(step))))


def test_a_young_learner_writes_a_curve_and_an_old_one_few_samples() -> None:
    assert written_in(60.0) >= 45
    assert 2900 <= written_in(DAY_S) <= 3000
    assert written_in(2 * DAY_S) - written_in(DAY_S) == DAY_S / DEFAULTS.sample_s


def test_a_view_draws_curves_and_sums_from_samples_alone() -> None:
    view = History()
    for step in range(1, 6):
        view.on_event(sample(step))

    seen = view.learners["a"]
    assert [line.fields.step for line in seen.curve] == [1, 2, 3, 4, 5]
    assert [line.at_s for line in seen.curve] == [1.0, 2.0, 3.0, 4.0, 5.0]
    assert seen.tokens == 5 * 4096
    assert seen.lives[3].meter.moved == beat(5).moved


@pytest.mark.parametrize("heard", [1, SAMPLES_MAX, SAMPLES_MAX + 1, 5000, 100_001])
def test_a_curve_stays_bounded_and_spread(heard: int) -> None:
    curve = Curve()
    for step in range(heard):
        curve.add(Noted(float(step), "a", fields(SampleEvent, incarnation=1, step=step, tokens=step)))

    steps = [line.fields.step for line in curve]
    gaps = {after - before for before, after in itertools.pairwise(steps[:-1])}
    assert curve.heard == heard
    assert min(heard, SAMPLES_MAX // 2) <= len(steps) <= SAMPLES_MAX + 1
    assert (steps[0], steps[-1]) == (0, heard - 1)
    assert len(gaps) <= 1
    assert msgspec.json.decode(msgspec.json.encode(curve.newest.fields if curve.newest else None))["step"] == heard - 1


BEGAN_S = 1000.0


def sampled(view: History, who: str, at_s: float, step: int, **more: object) -> None:
    """Write a sample of a learner whose step takes 0.5 s and trains 100 tokens, `at_s` after the beginning."""
    fields = {"incarnation": 1, "step": step, "tokens": 100 * step, "step_s": 0.5, "overhead": 0.01, **more}
    view.on_event(event("sample", who, BEGAN_S + at_s, **fields))


def two_learners() -> History:
    """A run in which b comes ten seconds later than a, and lags behind once."""
    view = History()
    view.on_event(event("joined", "a", BEGAN_S, incarnation=1, founder=True))
    view.on_event(event("joined", "b", BEGAN_S + 10.0, incarnation=1))
    for at_s in range(2, 41, 2):
        sampled(view, "a", at_s, 2 * at_s, loss=5.0 - 0.01 * at_s)
    for at_s in range(12, 41, 2):
        sampled(view, "b", at_s, at_s - 10, lag_versions=3 if at_s == 20 else 0)
    return view


def test_the_speed_of_the_learners_adds_up_to_that_of_the_run() -> None:
    """In every bin, and over the run to all tokens that were trained; before b has come, it has no speed and not 0."""
    curves = curves_of_run(two_learners())
    own = {one["learner"]: one["tokens_per_s"] for one in curves["learners"]}
    every, at_s = curves["rates"]["tokens_per_s"], curves["rates"]["at_s"]

    sums = [sum(told for told in both if told is not None) for both in zip(own["a"], own["b"], strict=True)]
    assert sums == pytest.approx(every)
    assert own["b"][0] is None
    assert own["b"][-1] == pytest.approx(100.0)
    bin_s = at_s[1] - at_s[0]
    assert sum(every) * bin_s == pytest.approx(100 * (80 + 30))
    assert curves["began_s"] == BEGAN_S
    assert curves["rates"]["goodput"][0] == 1.0


def test_curves_have_bounds_whatever_peers_do() -> None:
    """Many samples are thinned, with the first and the last; of many learners the rest is counted."""
    view = History()
    for at_s in range(3000):
        sampled(view, "a", at_s, at_s + 1)
    for number in range(LEARNERS_MAX + 5):
        sampled(view, f"x{number:03}", 1.0, 2)
    curves = curves_of_run(view)
    (a, *_) = curves["learners"]

    assert len(a["at_s"]) == POINTS_MAX
    assert (a["at_s"][0], a["at_s"][-1]) == (0.0, 2999.0)
    assert len(curves["rates"]["at_s"]) <= BINS_MAX
    assert len(curves["learners"]) == LEARNERS_MAX
    assert curves["learners_left_out"] == 6


def test_silence_is_presence_without_steps_and_a_farewell_ends_it() -> None:
    """From the newest sample on; of a learner that left, or that a clock puts after now, there is none."""
    view = two_learners()
    sampled(view, "b", 41.0, 30, state="left")
    a, b = (lines_of(view.learners[name]) for name in ("a", "b"))

    assert list(silence(a, BEGAN_S + 70.0)) == [PresentTime(BEGAN_S + 40.0, BEGAN_S + 70.0, 0, 0.0)]
    assert list(silence(b, BEGAN_S + 70.0)) == []
    assert list(silence(a, BEGAN_S + 39.0)) == []
    assert list(silence([], BEGAN_S + 70.0)) == []


def test_the_goodput_of_now_is_of_the_last_minute_alone() -> None:
    """A long time counts with its part in that minute; nobody's time in it is no figure, and without a moment there is none."""
    hour = PresentTime(0.0, 3600.0, 0, 0.0)
    minute = PresentTime(3600.0 - NOW_S, 3600.0, 600, NOW_S)

    assert rates([hour, minute], now_s=3600.0).now == 0.5
    assert rates([PresentTime(3000.0, 3600.0, 600, 300.0)], now_s=3630.0).now == 0.5
    assert rates([hour, minute], now_s=3600.0 + NOW_S).now is None
    assert rates([hour, minute]).now is None


def test_a_clock_that_is_set_back_takes_no_sample_away() -> None:
    view = History()
    for step in range(1, 11):
        sampled(view, "a", 10.0 * step - (3600.0 if step > 5 else 0.0), step)

    assert [line.fields.step for line in lines_of(view.learners["a"])] == list(range(1, 11))
