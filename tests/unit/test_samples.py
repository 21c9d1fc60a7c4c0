"""Samples of heartbeats in the event log: how often they are written, and the curves that a view keeps of them."""

from __future__ import annotations

import itertools

import msgspec
import pytest

from atoll.base.wording import DAY_S
from atoll.client.options import DEFAULTS
from atoll.client.session import pause_of
from atoll.run.history import History
from atoll.run.process_views import SAMPLES_MAX, Curve, Noted
from atoll.wire.events import SampleEvent, log_entry, sample_of
from atoll.wire.messages import Beat, Event, decode, encode
from atoll.wire.traffic import LinkTraffic
from support.events import fields


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
