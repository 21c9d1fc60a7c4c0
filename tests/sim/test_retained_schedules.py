"""Schedules whose shards retain their rounds: whoever was killed when, every whole round is replayed to the same bits."""

from __future__ import annotations

from collections import Counter

import pytest

from schedules import campaign
from schedules.schedule import play

pytestmark = pytest.mark.second_tier

SEEDS = range(200, 208)
RETAINING = {"retains": True, "archive_every_s": 2}


def test_rounds_that_survived_kills_are_replayed() -> None:
    """Killed and frozen owners, archives that are away, runs that are rebuilt: versions follow from what is retained."""
    happened: Counter[str] = Counter()
    for seed in SEEDS:
        outcome = play(seed, fixed=RETAINING)
        assert outcome.violation == "", campaign.told(outcome)
        happened.update(outcome.tally)

    assert happened["crashes of hosts"] + happened["crashes of learners"] > 0
    assert happened["rounds replayed"] > happened["last heads replayed"] > 0
    assert happened["rounds identical"] > 0.8 * happened["rounds replayed"]
