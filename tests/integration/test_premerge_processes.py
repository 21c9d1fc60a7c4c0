"""Pre-merge with real processes: a region's synchronizer is killed while its learners train, and comes back."""

from __future__ import annotations

import signal

import pytest

from support.islands import DEADLINE_S, IslandProcess, end

pytestmark = pytest.mark.second_tier


async def test_a_regions_synchronizer_is_killed_and_comes_back(island: IslandProcess) -> None:
    """Sums are merged before and after, single contributions meanwhile, and every token has one fate."""
    island.environment |= {"ATOLL_LEARNER__REGION": "east"}
    island.start("shard", "synchronizer", "--shard", "0")
    first = island.start("first", "synchronizer", "--region", "east")
    for learner in ("a", "b"):
        island.start(learner, "learner", "--id", learner)
    # One learner may join rounds after the other; from then on most sums are those of both.
    island.wait_for("first", "region.folded", 4, pushes=2)
    first.send_signal(signal.SIGKILL)
    island.wait_for("shard", "region.away")
    sums = len(island.lines("shard", "region.sum_read"))
    island.wait_for("shard", "round.committed", len(island.lines("shard", "round.committed")) + 8)
    island.start("second", "synchronizer", "--region", "east")
    island.wait_for("shard", "region.sum_read", sums + 8)
    await end(island, ["a", "b"])
    island.process("shard").terminate()
    assert island.process("shard").wait(DEADLINE_S) == 0
    settled = await island.settlement()

    assert settled.exact, settled.errors
    assert settled.fates["lost"] == 0
    # A learner that the machine leaves no time is stale, with and without a region.
    assert {fate for fate, count in settled.fates.items() if count} <= {
        "merged",
        "merged_late",
        "superseded",
        "refused:stale",
    }
