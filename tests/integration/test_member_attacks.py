"""A permitted learner sends what the door allows; nothing of the others is refused for it, and the run goes on."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from atoll.bus.interface import Bus
from atoll.protocol.ledger import Ledger, settle
from atoll.protocol.settings import ProtocolSettings
from atoll.run.ledger import read_ledger
from atoll.run.record import read_run
from atoll.wire.messages import RunRecord
from atoll.wire.subjects import Subjects
from support.door_attacks import INTRUDER, PREMERGER, connected
from support.honest_watch import HonestWatch, harm_in, unbelievable_lives
from support.links import unique_run
from support.locked_brokers import LockedBroker
from support.member_attacks import MEMBER_ATTACKS, Attacker
from support.memory_world import MEAN, STEP_S, MemoryWorld, settings

HONEST = ("a", "b", "c")
GOES_ON_S = 120.0
LOOK_S = 0.1
LOOKS_MAX = 1200


class LockedWorld(MemoryWorld):
    """A run inside one process, on a locked broker; shards and honest learners have its operator's key."""

    def __init__(self, locked: LockedBroker, run: str, protocol: ProtocolSettings) -> None:
        self.locked = locked
        locked.add(run, INTRUDER)
        locked.add(run, PREMERGER, "premerger")
        super().__init__(run, protocol)

    async def bus(self) -> Bus:
        """Open one more bus as the operator."""
        return await self.locked.bus(self.run, self.locked.operator)

    @contextlib.asynccontextmanager
    async def attacker(self, record: RunRecord) -> AsyncIterator[Attacker]:
        """Yield a learner with a key of its own, with that of a region's synchronizer."""
        mine, region = (self.locked.identity(self.run, name) for name in (INTRUDER, PREMERGER))
        bus, regions = await self.locked.bus(self.run, mine), await self.locked.bus(self.run, region)
        try:
            yield await Attacker.join(bus, record, INTRUDER, lambda: connected(self.locked.url, mine, []), regions)
        finally:
            await bus.close()
            await regions.close()


async def founded(bus: Bus, run: str) -> RunRecord:
    """Return the record of a run once there is one."""
    while (record := await read_run(bus, Subjects(run))) is None:
        pass
    return record


def honest_errors(ledger: Ledger, fragments: int) -> list[str]:
    """Return which accounts of honest learners do not add up."""
    return [error for error in settle(ledger, fragments).errors if INTRUDER not in error]


@pytest.mark.connected
@pytest.mark.second_tier
def test_every_row_on_a_locked_broker(tmp_path: Path) -> None:
    """Each is sent once, while three honest learners train; whatever harm there is, the row before it is named."""
    harm, standing, swollen, over = dict[str, str](), list[str](), list[str](), threading.Event()

    async def lie() -> Ledger:
        bus = await world.bus()
        try:
            record = await founded(bus, world.run)
            await send_all(record, HonestWatch(bus, record, {INTRUDER}))
        finally:
            over.set()
        await asyncio.to_thread(left.wait)
        swollen.extend(await unbelievable_lives(bus, record))
        ledger = await read_ledger(bus, record)
        for _ in range(LOOKS_MAX):
            if not honest_errors(ledger, record.protocol.fragments):
                break
            await asyncio.sleep(LOOK_S)  # what was queued last is merged yet
            ledger = await read_ledger(bus, record)
        await bus.close()
        return ledger

    async def send_all(record: RunRecord, watch: HonestWatch) -> None:
        assert not await watch.goes_on(await watch.look(), GOES_ON_S, LOOK_S)
        async with world.attacker(record) as attacker:
            for attack in MEMBER_ATTACKS:
                before = watch.looks[-1]
                await attacker.play(attack)
                if told := harm_in([before, await watch.look()], record):
                    harm[attack.name] = told
        standing.append(await watch.goes_on(watch.looks[-1], GOES_ON_S, LOOK_S))

    def train(name: str) -> None:
        with world.join(name) as island:
            params = island.params
            while not over.is_set():
                params = jax.tree.map(lambda leaf: leaf + 0.05 * (1.0 - leaf), params)
                time.sleep(STEP_S)
                params = island.step(params, tokens=10, loss=1.0)
            final.append(params)

    final, left = list[Any](), threading.Event()
    with LockedBroker(tmp_path) as locked:
        world = LockedWorld(locked, unique_run(), settings(**MEAN, outlier_ratio=10.0, tokens_target=0))
        liar = world.home.submit(lie())
        with ThreadPoolExecutor(len(HONEST)) as threads:
            list(threads.map(train, HONEST))
        left.set()
        ledger = liar.result(GOES_ON_S)
        for shard in world.shards:
            shard.cancel()
        world.home.stop()

    assert harm == {}
    assert standing == [""]
    assert swollen == []
    assert honest_errors(ledger, world.protocol.fragments) == []
    assert {name.partition("/")[0] for name in ledger.accounts} >= {*HONEST}
    assert all(np.isfinite(np.asarray(leaf)).all() for leaf in jax.tree.leaves(final))
