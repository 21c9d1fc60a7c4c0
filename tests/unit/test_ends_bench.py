"""The round of `make bench-ends`: its stages are methods that exist."""

from __future__ import annotations

import pytest

from benchmarks.network.ends import STAGES
from benchmarks.network.ends_roles import LEARNER, SHARD, TimedStage


@pytest.mark.parametrize("watched", [*SHARD, *LEARNER], ids=lambda each: f"{each.owner.__name__}.{each.name}")
def test_what_is_watched_is_there(watched: TimedStage) -> None:
    """Private methods are watched, too, and whoever renames one is told here."""
    assert callable(getattr(watched.owner, watched.name))


def test_every_stage_of_the_page_is_watched() -> None:
    """And none twice."""
    stages = [watched.stage for watched in (*SHARD, *LEARNER)]
    assert len(stages) == len(set(stages))
    assert set(STAGES) <= set(stages)
