"""Honest fleets lose nothing to protection, and liars cannot turn it against them: real training in virtual time."""

from __future__ import annotations

from functools import partial
from typing import Final, Literal

import numpy as np
import pytest

from atoll.base.large_arrays import Vector
from support.numeric_fleet import LearnerPlan, NumericFleet, adam, sgd

LOW, HIGH = range(5), range(5, 10)
ADOPTIONS: Final = ("overwrite", "carry")
CLOSE: Final = 0.02
"""So close is the accuracy to that of a run in which any length counts."""


def lengths_refused(fleet: NumericFleet) -> dict[tuple[str, str], int]:
    return {whose: count for whose, count in fleet.refused.items() if whose[1] != "stale"}


def as_without_protection(plans: dict[str, LearnerPlan], until_s: float, **settings: object) -> NumericFleet:
    """Run a fleet at defaults; nothing is refused, and it learns as much as one in which any length counts."""
    fleet = NumericFleet(plans, **settings).run(until_s)
    free = NumericFleet(plans, **settings, outlier_ratio=0.0).run(until_s)

    assert not fleet.refused
    assert not fleet.isolated
    assert fleet.accuracy() >= free.accuracy() - CLOSE
    return fleet


@pytest.mark.parametrize("adoption", ADOPTIONS)
def test_a_late_joiner_with_other_data_is_heard(adoption: str) -> None:
    """An island has converged on five classes; one joins with the other five, and its pushes are far longer."""
    plans = {"a": LearnerPlan(classes=LOW), "b": LearnerPlan(classes=HIGH, joins_s=9.0)}
    before = NumericFleet(plans, adoption=adoption).run(9.0).accuracy()

    assert as_without_protection(plans, 16.0, adoption=adoption).accuracy() > before + 0.2


@pytest.mark.second_tier
@pytest.mark.parametrize("adoption", ADOPTIONS)
def test_one_with_other_data_among_four_loses_nothing_by_protection(adoption: str) -> None:
    """Four have converged: it is clipped to a tenth of the parameters' length, and the run goes where it would go anyway."""
    plans = {f"a{number}": LearnerPlan(classes=LOW) for number in range(4)} | {
        "b": LearnerPlan(classes=HIGH, joins_s=12.0)
    }
    fleet = as_without_protection(plans, 24.0, adoption=adoption)

    assert min(fleet.clipped["b"]) > 0.1


@pytest.mark.second_tier
@pytest.mark.parametrize("adoption", ADOPTIONS)
def test_the_tutorials_loop_keeps_its_founder_for_ten_minutes(adoption: str) -> None:
    """Two islands with half of the classes each, ten milliseconds a step: after two minutes the founder was thrown out."""
    plans = {"one": LearnerPlan(classes=LOW), "two": LearnerPlan(classes=HIGH, joins_s=5.0)}

    assert as_without_protection(plans, 600.0, adoption=adoption).accuracy() > 0.9


@pytest.mark.parametrize("adoption", ADOPTIONS)
def test_one_that_begins_anew_beside_a_converged_peer_is_heard(adoption: str) -> None:
    plans = {"a": LearnerPlan(classes=LOW), "b": LearnerPlan(classes=HIGH, restarts_s=(2.0, 12.0))}

    assert as_without_protection(plans, 17.0, adoption=adoption).accuracy() > 0.9


THREE: Final = {name: LearnerPlan() for name in ("a", "b", "c")}
HONEST: Final[dict[str, dict[str, LearnerPlan]]] = {
    "late": {**THREE, "d": LearnerPlan(joins_s=3.0)},
    "disjoint": {
        "a": LearnerPlan(classes=LOW),
        "b": LearnerPlan(classes=HIGH),
        "c": LearnerPlan(classes=LOW),
        "d": LearnerPlan(classes=HIGH),
    },
    "restarted": {**THREE, "d": LearnerPlan(restarts_s=(2.0, 3.0))},
    "slow": {**THREE, "d": LearnerPlan(step_s=0.08)},
    "fast": {**THREE, "d": LearnerPlan(step_s=0.0025)},
    "tiny batches": {**THREE, "d": LearnerPlan(batch=1)},
    "converged peers": {
        "a": LearnerPlan(classes=LOW),
        "b": LearnerPlan(classes=LOW),
        "c": LearnerPlan(classes=LOW),
        "d": LearnerPlan(joins_s=3.0),
    },
    "two learners": {"a": LearnerPlan(), "b": LearnerPlan(classes=HIGH, joins_s=2.0)},
    "one learner": {"a": LearnerPlan()},
    "other optimizer": {**THREE, "d": LearnerPlan(optimizer=partial(sgd, 0.5))},
    "larger batch": {**THREE, "d": LearnerPlan(batch=128, step_s=0.02)},
    "larger rate": {**THREE, "d": LearnerPlan(optimizer=partial(adam, 0.02))},
    "after an outage": {**THREE, "d": LearnerPlan(away_s=(2.0, 4.0))},
}


@pytest.mark.parametrize("scene", HONEST)
def test_no_honest_token_is_refused_at_defaults(scene: str) -> None:
    """Whatever an honest learner is like, protection takes nothing from it but length; what it was cut off for is late."""
    fleet = NumericFleet(HONEST[scene], interval_steps=20).run(5.0)

    assert not lengths_refused(fleet)
    assert not fleet.isolated
    assert scene == "after an outage" or not fleet.refused
    assert all(fleet.merged[name] for name in HONEST[scene])
    assert fleet.accuracy() > (0.45 if scene == "converged peers" else 0.7)


# --- liars ------------------------------------------------------------------------------------------------------------------


def tiny(vector: Vector) -> Vector:
    return np.float32(1e-6) * vector


def backwards(vector: Vector) -> Vector:
    return np.float32(-100.0) * vector


@pytest.mark.parametrize(("honest", "liars"), [(3, 1), (3, 2), (2, 1)])
def test_tiny_contributions_do_not_make_honest_ones_outliers(honest: int, liars: int) -> None:
    """They come more often than the others', and are as many as can be without a majority: nothing honest is clipped much."""
    plans = {f"h{number}": LearnerPlan() for number in range(honest)}
    plans |= {f"liar{number}": LearnerPlan(step_s=0.002, lie=tiny) for number in range(liars)}
    fleet = NumericFleet(plans, interval_steps=20).run(4.0)

    assert not {whose: count for whose, count in lengths_refused(fleet).items() if whose[0].startswith("h")}
    assert min((min(scales) for name, scales in fleet.clipped.items() if name.startswith("h")), default=1.0) > 0.5


@pytest.mark.parametrize("flood", ["final", "not final"])
def test_a_flood_of_tiny_contributions_takes_nothing_from_the_honest(flood: Literal["final", "not final"]) -> None:
    """Final ones opened rounds early; honest intervals became too short to be measured, and the liar alone was the judge."""
    honest = {f"h{number}": LearnerPlan() for number in range(3)}
    alone = NumericFleet(honest, interval_steps=20).run(5.0)
    fleet = NumericFleet({**honest, "liar": LearnerPlan(step_s=0.05, flood=flood)}, interval_steps=20).run(5.0)

    assert not {whose: count for whose, count in fleet.refused.items() if whose[0].startswith("h")}
    assert not fleet.clipped
    assert sum(fleet.merged[name] for name in honest) >= 0.8 * sum(alone.merged.values())
    assert fleet.accuracy() >= alone.accuracy() - CLOSE


@pytest.mark.parametrize("liars", [1, 2])
def test_what_is_a_hundred_times_too_long_cannot_ruin_the_model_at_once(liars: int) -> None:
    """It counts at ten times the others' length at most; with any length, one such push undoes everything."""
    plans = {f"h{number}": LearnerPlan() for number in range(3)}
    plans |= {f"liar{number}": LearnerPlan(joins_s=3.0, lie=backwards) for number in range(liars)}
    worst = {}
    for ratio in (10.0, 0.0):
        fleet = NumericFleet(plans, interval_steps=20, outlier_ratio=ratio)
        worst[ratio] = max(float(np.abs(fleet.run(3.0 + 0.2 * tick).heads[0][1]).max()) for tick in range(10))

    assert worst[10.0] < 0.2 * worst[0.0]
