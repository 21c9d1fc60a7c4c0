"""A learner with fresh weights meets trained state: heads change by merged pseudo-gradients only."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest

from atoll.base.clock import Clock
from atoll.bus.interface import Bus, Record
from atoll.client import session
from atoll.client.join import IslandHandle
from atoll.client.membership import found_or_join, publish_origin
from atoll.model.pytrees import gather
from atoll.run.heads import wait_for_heads
from atoll.run.record import read_run
from atoll.wire.messages import Contribution, Head, RunRecord, decode
from atoll.wire.subjects import Subjects
from support.memory_world import MemoryWorld, parameters, settings

TOKENS = 600
FRESH = -3.0
STEP = 0.01


@pytest.fixture
def trained(run: str) -> MemoryWorld:
    """A run that was trained to its end; its shards are gone, so nothing that is pushed from now on is merged."""
    world = MemoryWorld(run, settings(tokens_target=TOKENS))
    world.go(lambda: world.train("early", 1.0))
    return world


def heads(world: MemoryWorld) -> dict[str, Record]:
    async def read() -> list[Record]:
        bus = await world.bus()
        return await bus.get_records(Subjects(world.run).head("*"))

    return {record.subject: record for record in world.home.submit(read()).result(240.0)}


def queued(world: MemoryWorld, learner: str) -> list[Contribution]:
    async def read() -> list[Contribution]:
        bus, found = await world.bus(), []
        for shard in range(world.protocol.shards):
            consumer = await bus.consume(Subjects(world.run).contributions_of(shard), durable="reader")
            while (delivery := await consumer.next(0.2)) is not None:
                if ".bye." not in delivery.subject:
                    found.append(decode(Contribution, delivery.data))
            await consumer.close()
        return [manifest for manifest in found if manifest.learner == learner]

    return world.home.submit(read()).result(240.0)


def trains_a_little(island: IslandHandle) -> None:
    params = island.params
    for _ in range(2):
        params = island.step(jax.tree.map(lambda leaf: leaf + STEP, params), tokens=10, loss=1.0)


def joins(world: MemoryWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    """Join with fresh values, as with a checkpoint (which holds no parameters) or a model file of one's own."""
    del monkeypatch
    with world.join("fresh", parameters(FRESH)) as island:
        trains_a_little(island)


def believes_the_founder_lost(world: MemoryWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    """Find no heads at first, as when a founder has died, and complete them with fresh values."""
    asked: list[bool] = []

    async def blind_at_first(bus: Bus, run: RunRecord, clock: Clock) -> dict[int, Head] | None:
        asked.append(True)
        return None if len(asked) == 1 else await wait_for_heads(bus, run, clock)

    monkeypatch.setattr(session, "wait_for_heads", blind_at_first)
    with world.join("fresh", parameters(FRESH)) as island:
        trains_a_little(island)
    assert len(asked) == 2


def believes_to_be_the_founder(world: MemoryWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    """Win the race for the run record in its own eyes only, and publish fresh values as the origin."""
    offers: list[bool] = []

    async def won(bus: Bus, offer: RunRecord) -> tuple[RunRecord, bool]:
        run, founder = await found_or_join(bus, offer)
        offers.append(founder)
        return run, True

    monkeypatch.setattr(session, "found_or_join", won)
    with world.join("fresh", parameters(FRESH)) as island:
        trains_a_little(island)
    assert offers == [False]


@pytest.mark.parametrize("come", [joins, believes_the_founder_lost, believes_to_be_the_founder])
def test_fresh_weights_change_no_head_and_push_only_what_was_learnt_since_adoption(
    trained: MemoryWorld, monkeypatch: pytest.MonkeyPatch, come: Callable[[MemoryWorld, pytest.MonkeyPatch], None]
) -> None:
    """Heads keep their bytes and revisions; pseudo-gradients are from the adopted anchors and as small as the two steps."""
    before = heads(trained)
    versions = {decode(Head, record.data).fragment: decode(Head, record.data).version for record in before.values()}
    come(trained, monkeypatch)
    after = heads(trained)
    pushed = queued(trained, "fresh")
    trained.home.stop()

    assert min(versions.values()) > 0
    assert before == after
    assert pushed
    assert all(manifest.base_version == versions[manifest.fragment] for manifest in pushed)
    largest = 2 * STEP * np.sqrt(sum(np.size(leaf) for leaf in parameters().values()))
    assert all(0.0 < norm <= 1.01 * largest for manifest in pushed for norm in manifest.norms)


def test_an_origin_published_over_trained_heads_leaves_nothing_behind(trained: MemoryWorld) -> None:
    async def publish() -> int:
        bus, subjects = await trained.bus(), Subjects(trained.run)
        run = await read_run(bus, subjects)
        assert run is not None
        fresh: dict[str, Any] = parameters(FRESH)
        origin = {p: gather(run.layout, fresh, p) for p in range(len(run.layout.fragments))}
        await bus.purge(f"{subjects.prefix}.gl.c.*.0.*.*")
        await publish_origin(bus, run, origin)
        return await bus.purge(f"{subjects.prefix}.gl.c.*.0.*.*")

    before = heads(trained)
    left = trained.home.submit(publish()).result(240.0)
    after = heads(trained)
    trained.home.stop()

    assert left == 0
    assert before == after
