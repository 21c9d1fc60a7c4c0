"""The takeover bench: who is killed when, and what its figures say of a run that is made up."""

from __future__ import annotations

import pytest

from benchmarks.faults.extracts import Course, Extract, ExtractRound, ExtractShare, Row
from benchmarks.faults.storm import Fault
from benchmarks.faults.takeover import EVERY_S, figures, interval, outage_figures, ratio

SECONDS = 60.0
REPORT = {"learners": [{"incarnations": [{"overhead": 0.004}, {"overhead": None}, {"overhead": 0.006}]}]}


@pytest.mark.parametrize(("rate", "holds"), [(10.0, True), (9.0, False)])
def test_pace_is_that_of_the_same_learner_in_quiet_time(rate: float, holds: bool) -> None:  # noqa: FBT001
    """Steps at 10 a second, and at `rate` from each kill to the commit three seconds later."""
    found = {figure.name: figure for figure in figures(run(rate), REPORT, 0)}
    assert found["next commit of the shard"].value == pytest.approx(3.0)
    assert found["pace during a takeover"].value == pytest.approx(rate / 10.0, abs=0.005)
    assert found["pace during a takeover"].holds is holds
    assert found["share of their time inside island.step"].value == 0.006
    assert found["owners killed"].value == 2


def test_the_interval_holds_the_ratio_and_narrows_with_windows() -> None:
    pairs = [(9.0, 10.0), (10.0, 10.0), (11.0, 10.0)]
    low, high = interval(pairs, 0)
    closer, above = interval(pairs * 30, 0)
    assert low < closer < ratio(pairs) < above < high


@pytest.mark.parametrize("taken", [0, 2])
def test_an_owner_that_changes_in_an_absence_is_a_miss(taken: int) -> None:
    """Each shard's next version comes three seconds after the broker is back."""
    extract = run(10.0)
    extract.faults = [Fault(1000.0 + 7.0, "freeze", "broker", "broker", -1, 1000.0 + 13.0)]
    extract.tenures, extract.report = {0: taken, 1: 0}, {"fates_exact": True}
    found = {figure.name: figure for figure in outage_figures(extract)}
    assert found["absences of the broker"].value == 1
    assert found["shards taken from an owner that lives"].value == taken
    assert found["shards taken from an owner that lives"].holds is (taken == 0)
    assert found["next commit of a shard after an absence"].value == pytest.approx((3.0 + 17.0) / 2.0)


def run(rate: float) -> Extract:
    """Return a run of two takeovers of one shard each, with a learner that is heard ten times a second."""
    faults = [Fault(1000.0 + 13.0, "kill", "owner", "shard-0", 0), Fault(1000.0 + 40.0, "kill", "owner", "shard-1", 1)]
    slow = [(13.0, 16.0), (40.0, 43.0)]
    rows: list[Row] = []
    steps = 0.0
    for tick in range(int(SECONDS * 10) + 1):
        at_s = tick / 10.0
        rows.append((at_s, round(steps), 0, 0.1))
        steps += 0.1 * (rate if any(a <= at_s < b for a, b in slow) else 10.0)
    rounds = [
        ExtractRound(at_s, f"shard-{shard}", shard, number, [ExtractShare("learner-1", 0, number, 0, 1)])
        for shard, times in ((0, (5.0, 16.0, 30.0)), (1, (5.0, 30.0, 43.0)))
        for number, at_s in enumerate(times)
    ]
    course = Course("takeovers", "atoll", 60.0 / EVERY_S, 0, SECONDS, 0.0, 1)
    return Extract(
        course=course,
        sources="",
        machine="",
        commit="",
        began_s=1000.0,
        faults=faults,
        lives={"learner-1/0": rows},
        rounds=rounds,
    )
