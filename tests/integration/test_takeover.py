"""A shard outlives its owner: killed or frozen, with a standby there. Real processes, a real broker, exact ledgers."""

from __future__ import annotations

import json
import os
import signal

import pytest

from support.islands import DEADLINE_S, IslandProcess, end, unforked

FOUR_BITS = {
    "ATOLL_PROTOCOL__CODEC_UP": "int4",
    "ATOLL_PROTOCOL__CODEC_DOWN": "int4",
    "ATOLL_PROTOCOL__KEYFRAME_VERSIONS": "5",
}


async def test_a_standby_takes_over_when_the_owner_is_killed(island: IslandProcess) -> None:
    """The learners train on, nothing is lost or merged twice, every token has one fate; with deltas of four bits, too."""
    island.environment |= FOUR_BITS
    owner = island.start("owner", "synchronizer", "--shard", "0")
    island.start("a", "learner", "--id", "a")
    island.start("b", "learner", "--id", "b")
    island.wait_for("owner", "round.committed", 20)
    island.start("heir", "synchronizer", "--shard", "0")
    island.wait_for("heir", "shard.standby")
    spare = island.start("spare", "synchronizer", "--shard", "0")
    island.wait_for("spare", "shard.standby")
    spare.terminate()
    assert spare.wait(DEADLINE_S) == 0
    owner.send_signal(signal.SIGKILL)
    fragment_ledger = json.loads(island.answer("fates", "--json"))
    assert sum(fragment_ledger["fates"].values()) == fragment_ledger["fragments"] * fragment_ledger["trained"]
    assert fragment_ledger["fates"]["merged"] > 0
    island.wait_for("heir", "shard.serving")
    island.wait_for("heir", "round.committed", 20)
    await end(island, ["a", "b"])
    island.process("heir").terminate()
    assert island.process("heir").wait(DEADLINE_S) == 0
    settled = await island.settlement()

    assert settled.exact, settled.errors
    assert settled.fates["lost"] == 0
    assert unforked(await island.events("round"))


@pytest.mark.second_tier
async def test_a_frozen_owner_that_wakes_up_finds_itself_deposed(island: IslandProcess) -> None:
    """What it had decided before it froze becomes visible nowhere; it stands by and takes over in its turn."""
    first = island.start("first", "synchronizer", "--shard", "0")
    island.start("a", "learner", "--id", "a")
    island.wait_for("first", "round.committed", 12)
    second = island.start("second", "synchronizer", "--shard", "0")
    island.wait_for("second", "shard.standby")
    first.send_signal(signal.SIGSTOP)
    island.wait_for("second", "round.committed", 12)
    first.send_signal(signal.SIGCONT)
    island.wait_for("first", "shard.standby")
    second.send_signal(signal.SIGKILL)
    island.wait_for("first", "shard.serving", 2)
    island.wait_for("first", "round.committed", 24)
    await end(island, ["a"])
    os.kill(first.pid, signal.SIGTERM)
    assert first.wait(DEADLINE_S) == 0
    settled = await island.settlement()

    assert settled.exact, settled.errors
    assert settled.fates["lost"] == 0
    assert unforked(await island.events("round"))
    assert [line["epoch"] for line in island.lines("first", "shard.serving")] == [1, 3]
