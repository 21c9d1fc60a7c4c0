"""Schedules of absences: of the broker, of a process alone, of what a store has forgotten, of a quorum that never comes.

The owner of every shard stays, no shard is alone, no absence enters an estimate, no count but the run's own ends it. Two
schedules are played with every suite; the second tier plays hundreds of absences and plants every mistake again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

import pytest

from schedules import mutants
from schedules.schedule import play

PLANTED = {
    "an absence counts as stillness": (0, "no lease is taken from an owner that can renew it"),
    "an absence enters the pace": (34, "no absence enters the pace of a fleet"),
    "a shard's own absence enters its averages": (0, "no absence enters the time of a quorum"),
    "a store that went back is served": (0, "a store that went back is not served by who knows better"),
    "a store that went back is followed": (0, "who has had more than a store that went back ends"),
    "a run that merges nothing trains": (0, "a run that merges nothing does not train"),
    "a call ends a run": (1, "only the run's own records end a run"),
    "a learner's own count ends a run": (4, "only the run's own records end a run"),
}
"""Mutants, the first seed that may catch each, and what they break."""


def played(seeds: range, rates: Mapping[str, float], fixed: Mapping[str, Any]) -> Counter[str]:
    happened: Counter[str] = Counter()
    for seed in seeds:
        outcome = play(seed, rates=rates, fixed=fixed)
        assert outcome.violation == "", (seed, outcome.violation)
        happened.update(outcome.tally)
    return happened


def test_owners_stay_while_the_broker_is_away() -> None:
    """No shard changes hands, and no quorum wait, commit time or step time has an absence in it."""
    happened = played(range(3, 4), mutants.OUTAGE, mutants.LONG_STORM)

    assert happened["broker gone"] >= 2
    assert min(happened[f"{what} checked"] for what in ("quorum times", "commit times", "paces")) > 20


@pytest.mark.second_tier
def test_no_absence_of_the_broker_takes_a_shard_from_its_owner() -> None:
    """More than a hundred absences of 1 to 20 s, most of them longer than a lease."""
    happened = played(range(40), mutants.OUTAGE, mutants.LONG_STORM)

    assert happened["broker gone"] > 100
    assert min(happened[f"{what} checked"] for what in ("quorum times", "commit times", "paces")) > 1000


@pytest.mark.second_tier
def test_a_shard_that_alone_is_cut_off_is_not_alone() -> None:
    """It commits nothing below its quorum, and measures nothing of its absence. In seed 4 an heir finds a farewell first."""
    happened = played(range(12), mutants.CUT_OFF, mutants.ONE_HOST)

    assert happened["synchronizer cut off"] > 12


@pytest.mark.second_tier
def test_a_run_ends_by_what_is_merged_alone() -> None:
    """Learners and shards that are cut off near the target train on until records say that it is reached."""
    happened = played(range(16), mutants.ALONE, mutants.TARGET)

    assert happened["targets reached"] == 16
    assert happened["learner cut off"] > 40


def test_a_store_that_went_back_is_neither_served_nor_followed_by_who_knows_better() -> None:
    """It is restored from a copy that is seconds old: the shard and all learners that have had more end, and say so."""
    happened = played(range(2, 4), mutants.SET_BACK, mutants.ONE_SERVES)

    assert happened["stores set back"] == 2
    assert happened["ended by a store that went back"] >= 4


def test_a_run_whose_quorum_never_comes_is_not_told_to_train() -> None:
    """One of two learners reports steps of 0 tokens: whoever looks hears that nothing is merged, and because of whom."""
    happened = played(range(1), {}, mutants.TOKENLESS)

    assert happened["stood still"] == 1


@pytest.mark.second_tier
@pytest.mark.parametrize("name", PLANTED)
def test_a_mistake_about_absences_is_caught(name: str) -> None:
    first, promise = PLANTED[name]
    mutant = mutants.MUTANTS[name]
    with mutants.planted(name):
        found = (play(seed, rates=mutant.rates, fixed=mutant.fixed).what for seed in range(first, first + 12))

        assert promise in next(what for what in found if what)
