"""Pre-merge: the synchronizer of a region folds its learners' contributions, and the run is what it is without."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial

import pytest
from structlog.testing import capture_logs

from atoll.base.clock import SystemClock
from atoll.base.errors import SettingsError
from atoll.protocol.ledger import Settlement, settle
from atoll.protocol.settings import ProtocolSettings
from atoll.settings import load
from atoll_synchronizer import regions as region_reader
from atoll_synchronizer.process import check_region, wait_for_run
from atoll_synchronizer.region_service import RegionService
from support.memory_world import MemoryWorld, settings

DEADLINE_S = 120.0
GOALS = {"a": -1.0, "b": 0.0, "c": 2.0}


class EastRegion:
    """The synchronizer of region `east` in a memory world."""

    def __init__(self, world: MemoryWorld) -> None:
        self._world = world
        self.service: RegionService | None = None
        self._stop: Future[asyncio.Event] = Future()
        self.served = world.home.submit(self._serve())

    async def _serve(self) -> str:
        bus, stop = await self._world.bus(), asyncio.Event()
        self._stop.set_result(stop)
        record = await wait_for_run(bus, self._world.run, stop)
        assert record is not None
        self.service = RegionService(bus, record, "east", SystemClock())
        return await self.service.serve(stop)

    def wait_for_sums(self, count: int) -> None:
        deadline_s = time.monotonic() + DEADLINE_S
        while self.service is None or self.service.sums < count:
            assert time.monotonic() < deadline_s, "no sums"
            assert not self.served.done(), self.served.result()
            time.sleep(0.005)

    def stop(self) -> str:
        """End it, and return why it says that it has ended."""
        stop = self._stop.result(DEADLINE_S)
        self._world.home.submit(_set(stop)).result(DEADLINE_S)
        return self.served.result(DEADLINE_S)


async def _set(event: asyncio.Event) -> None:
    event.set()


def patient(**changes: object) -> ProtocolSettings:
    """Return settings of a run that takes a contribution however late a busy machine makes it: what is lost, a region lost."""
    return settings(age_max=1000, **changes)


def wasted(settled: Settlement) -> dict[str, int]:
    """Return the fates, but for zeros, of what did not enter the model."""
    return {
        fate: count
        for fate, count in settled.fates.items()
        if count and fate not in ("merged", "merged_late", "superseded")
    }


def told(lines: list[dict[str, object]], event: str) -> list[dict[str, object]]:
    return [line for line in lines if line["event"] == event]


def goes(world: MemoryWorld, regions: dict[str, str], *others: Callable[[], None]) -> list[dict[str, object]]:
    """Train one learner for each goal, each in its region, beside others; return what was logged."""
    learners = [partial(world.train, name, goal, region=regions.get(name, "")) for name, goal in GOALS.items()]
    with capture_logs() as lines:
        world.go(*learners, *others)
    return [dict(line) for line in lines]


@pytest.mark.parametrize("changes", [{}, {"merge": "mean", "correction": "none"}, {"codec_up": "int4"}])
def test_a_region_sends_one_vector_for_all_its_learners(run: str, changes: dict[str, object]) -> None:
    """Two learners in a region and one outside: sums of two are merged, and every token has one fate.

    How many sums are those of both depends on how busy the machine is. That a sum waits for both is shown in
    `test_region_reader`.
    """
    protocol = patient(**changes)
    world = MemoryWorld(run, protocol)
    region = EastRegion(world)
    lines = goes(world, {"a": "east", "b": "east"})
    ended = region.served.result(DEADLINE_S)
    ledger = world.ledger()
    world.home.stop()

    settled = settle(ledger, protocol.fragments)
    assert settled.exact, settled.errors
    assert wasted(settled) == {}
    assert ended == "over"
    pushes = [line["pushes"] for line in told(lines, "region.sum_read")]
    assert set(pushes) <= {1, 2}
    assert 2 in pushes
    assert not told(lines, "region.away")


def test_a_region_without_a_synchronizer_costs_time_only(run: str) -> None:
    protocol = patient(tokens_target=3_000)
    world = MemoryWorld(run, protocol)
    lines = goes(world, {"a": "east", "b": "east"})
    settled = settle(world.ledger(), protocol.fragments)
    world.home.stop()

    assert settled.exact, settled.errors
    assert wasted(settled) == {}
    away = told(lines, "region.away")
    assert away
    assert {line["region"] for line in away} == {"east"}
    assert not told(lines, "region.sum_read")


@pytest.mark.second_tier
def test_a_region_that_dies_while_it_folds_loses_nothing(run: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it had read and not sent is read by the shards; a new one goes on where it is asked."""
    monkeypatch.setattr(region_reader, "AWAY_S", 0.1)
    monkeypatch.setattr(region_reader, "ASK_S", 0.3)
    protocol = patient(tokens_target=20_000, silence_s=5.0)
    world = MemoryWorld(run, protocol)
    regions = [EastRegion(world)]

    def breaks() -> None:
        for _ in range(2):
            regions[-1].wait_for_sums(4)
            regions[-1].stop()
            regions.append(EastRegion(world))

    lines = goes(world, dict.fromkeys(GOALS, "east"), breaks)
    settled = settle(world.ledger(), protocol.fragments)
    world.home.stop()

    assert settled.exact, settled.errors
    assert wasted(settled) == {}
    assert told(lines, "region.sum_read")


def test_a_process_folds_for_a_region_or_owns_shards() -> None:
    with pytest.raises(SettingsError, match="owns no shard"):
        check_region(load(assignments=("synchronizer.region=east", "synchronizer.shard=0")).settings)
