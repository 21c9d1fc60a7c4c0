"""What a region that is at work for too long costs its learners: a small part of their time, however it goes about it."""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import pytest

from atoll.bus.memory import MemoryBroker, MemoryBus
from atoll.codec import FrameEncoder, Framing
from atoll.protocol.events import Fact, PushKey
from atoll.wire.blobs import Upload
from atoll.wire.messages import Contribution, RegionAsk, decode, encode
from atoll_simulator.loop import LoopClock
from atoll_synchronizer.aggregator import Aggregator
from atoll_synchronizer.garbage_collector import GarbageCollector
from atoll_synchronizer.region_service import AT_WORK, RegionService
from atoll_synchronizer.regions import LOST_SHARE, RegionReader
from atoll_synchronizer.shard_context import ShardContext
from support.clocks import virtually
from support.founded_run import run_record
from support.links import unique_run
from support.shard_owners import FixedOwner, first_head

INTERVAL_S = 20.0
PUSHES = 720
ANSWERED_S = 0.5
Stall = Callable[[str, int], float]
"""For how long a region is at work, by the verb of a question and by how many of them there were before."""


class StallingBus(MemoryBus):
    """A bus behind which a region answers that it is at work, before it works."""

    def __init__(self, run: str, broker: MemoryBroker, stall: Stall) -> None:
        super().__init__(run, broker)
        self._stall = stall
        self._until_s: dict[bytes, float] = {}
        self.asked = Counter[str]()

    async def ask(self, subject: str, data: bytes, *, timeout_s: float, answer_at: str = "") -> bytes | None:
        loop, verb = asyncio.get_running_loop(), decode(RegionAsk, data).verb
        if data not in self._until_s:
            self._until_s[data] = loop.time() + self._stall(verb, self.asked[verb])
            self.asked[verb] += 1
        if loop.time() < self._until_s[data]:
            await asyncio.sleep(ANSWERED_S)
            return encode(AT_WORK)
        return await super().ask(subject, data, timeout_s=timeout_s, answer_at=answer_at)


@dataclass
class StalledRun:
    """A shard and a region with one learner, which pushes once an interval."""

    stall: Stall
    facts: list[Fact] = field(default_factory=list)
    sums: int = 0
    late: int = 0

    async def work(self) -> None:
        """Push for four hours, and count what the machine heard of later than an interval after it had come."""
        run, broker, loop = (run_record(unique_run()), MemoryBroker(), asyncio.get_running_loop())
        bus, clock, stop = StallingBus(run.run, broker, self.stall), LoopClock(loop), asyncio.Event()
        serving = asyncio.create_task(RegionService(MemoryBus(run.run, broker), run, "eu", clock).serve(stop))
        elements, slices = run.layout.fragment_sizes()[0], run.layout.slices(0)
        step_s = INTERVAL_S / run.protocol.interval_steps
        owner = FixedOwner(self.facts.append, median_s=step_s, head=first_head(run))
        reader = RegionReader(ShardContext(bus, run, 0, clock), Aggregator(bus, run), GarbageCollector(bus), owner)

        async def push(number: int) -> None:
            encoder = FrameEncoder(
                Framing(elements, run.protocol.codec_up), lambda start, stop: np.ones(stop - start, np.float32), slices
            )
            blob = await bus.put_blob(run.subjects.contribution_stem("a", 0, 1, number, "0" * 16), Upload(encoder))
            manifest = Contribution(
                learner="a", incarnation=1, fragment=0, push=number, base_version=number, tokens=10, steps=2,
                trained_tokens=10, loss=None, norms=tuple(encoder.norms()), layout=run.layout.fingerprint,
                run_nonce=run.nonce, blob=blob,
            )  # fmt: skip
            came_s = loop.time()
            self.sums += await reader.take("eu", PushKey("a", 1, 0, number), manifest, "cause")
            self.late += loop.time() - came_s > INTERVAL_S

        pushes = []
        for number in range(1, PUSHES + 1):
            pushes.append(asyncio.create_task(push(number)))
            await asyncio.sleep(INTERVAL_S)
        await asyncio.gather(*pushes)
        stop.set()
        await serving
        for task in owner.works:
            task.cancel()
        await asyncio.gather(*owner.works, return_exceptions=True)


STALLS: dict[str, Stall] = {
    "for ever": lambda _verb, _number: math.inf,
    "at every sum": lambda verb, _number: math.inf if verb == "fold" else 0.0,
    "at every other sum": lambda verb, number: math.inf if verb == "fold" and number % 2 else 0.0,
    "at one sum of ten": lambda verb, number: math.inf if verb == "fold" and number % 10 == 9 else 0.0,
    "until a sum is too late": lambda verb, _number: 1.5 * INTERVAL_S if verb == "fold" else 0.0,
    "at each reading for almost an interval": lambda verb, _number: 0.9 * INTERVAL_S if verb == "read" else 0.0,
}


@pytest.mark.parametrize("stall", STALLS.values(), ids=STALLS)
def test_a_region_that_stalls_costs_its_learners_little(stall: Stall) -> None:
    """It may say that it is at work for ever, and cost them more than a third of their tokens."""
    stalled = StalledRun(stall)
    virtually(stalled.work())
    at_once = 3  # what a new region may lose, and what the last of them is in the middle of
    assert stalled.late <= LOST_SHARE * PUSHES + at_once


def test_a_region_that_works_makes_every_sum() -> None:
    stalled = StalledRun(lambda verb, _number: 0.7 * INTERVAL_S if verb == "fold" else 0.0)
    virtually(stalled.work())
    assert (stalled.sums, stalled.late) == (PUSHES, 0)
    assert len(stalled.facts) == PUSHES
