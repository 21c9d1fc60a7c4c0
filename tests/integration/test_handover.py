"""Synchronizers come and go while a run goes on: shards are shared, handed over, and every token has one fate."""

from __future__ import annotations

import pytest

from atoll.run.history import History
from atoll.run.links import byte_ledger
from support.islands import DEADLINE_S, IslandProcess, end, unforked

pytestmark = pytest.mark.second_tier

SHARED = {"ATOLL_PROTOCOL__SHARDS": "2"}


def serving(island: IslandProcess, name: str) -> list[int]:
    return [line["shard"] for line in island.lines(name, "shard.serving")]


async def test_shards_are_shared_with_who_comes_and_handed_over_by_who_leaves(island: IslandProcess) -> None:
    """One process serves both shards; a second is given one; the first leaves, the second has both, nobody waits a lease.

    What every process moved is on the event log when it has left, whoever listened.
    """
    first = island.start("first", "synchronizer", **SHARED)
    island.start("a", "learner", "--id", "a", **SHARED)
    island.start("b", "learner", "--id", "b", **SHARED)
    island.wait_for("first", "shard.serving", 2)
    island.wait_for("first", "round.committed", 12)
    island.start("second", "synchronizer", **SHARED)
    island.wait_for("second", "shard.serving", 1)
    island.wait_for("second", "round.committed", 8)
    first.terminate()
    assert first.wait(DEADLINE_S) == 0
    island.wait_for("second", "shard.serving", 2)
    island.wait_for("second", "round.committed", 24)
    await end(island, ["a", "b"])
    island.process("second").terminate()
    assert island.process("second").wait(DEADLINE_S) == 0
    settled = await island.settlement()

    assert settled.exact, settled.errors
    assert settled.fates["lost"] == 0
    assert unforked(await island.events("round"))
    assert sorted(serving(island, "first")) == [0, 1]
    assert sorted(serving(island, "second")) == [0, 1]
    assert [line["reason"] for line in island.lines("first", "shard.given_up")] == ["handed over"]
    view = History()
    for one in [*await island.events("moved"), *await island.events("hosted")]:
        view.on_event(one)
    links = {link.name: link for link in byte_ledger(view, 1).links}
    assert {name: link.processes for name, link in links.items()} == {"a": 1, "b": 1, "shard-0, shard-1": 2}
    assert all(link.moved.wire_up > link.moved.payload_up > link.moved.frames_up > 0 for link in links.values())
    reasons = {line["reason"] for line in island.lines("first", "shard.finished")}
    assert reasons == {"handed over", "nothing to own"}
