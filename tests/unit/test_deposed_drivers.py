"""What a deposed owner may still do, on the real drivers and the in-memory bus: nothing that hurts its heir."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

from atoll.base.clock import SystemClock
from atoll.base.errors import RecordConflict
from atoll.bus.memory import MemoryBroker, MemoryBus
from atoll.merge.outer import make_outer
from atoll.protocol.events import PushKey
from atoll.wire.subjects import Subjects
from atoll_synchronizer.service import ShardService
from atoll_synchronizer.store import ShardStore
from support.protocol_world import one_commit
from support.small_run import founded

DEADLINE_S = 240.0


class DeafBus(MemoryBus):
    """A bus that does not hear the answer to its last write before somebody else has written."""

    heir: ShardStore | None = None

    async def put_record(self, subject: str, data: bytes, **how: Any) -> int:  # noqa: ANN401  (as the bus takes it)
        """Write; once an heir is waiting, let it fence before the answer is looked for."""
        revision = await super().put_record(subject, data, **how)
        if self.heir is not None:
            heir, self.heir = self.heir, None
            await heir.open(2)
            raise RecordConflict("someone else wrote the record first", got=revision)
        return revision


async def test_a_commit_that_a_later_owner_has_fenced_keeps_its_chunks() -> None:
    """It became visible, its answer was lost, an heir fenced it: refused or not, the head names these chunks now."""
    broker, run = MemoryBroker(), "deposed"
    record = await founded(broker, run)
    outer = make_outer("nesterov", 1.0, 0.0)
    deaf = DeafBus(run, broker)
    former = ShardStore(deaf, record, 0, outer)
    heir, third = (ShardStore(MemoryBus(run, broker), record, 0, outer) for _ in range(2))
    await former.open(1)
    deaf.heir = heir

    with pytest.raises(RecordConflict):
        await former.commit(one_commit(0), np.ones(4, dtype=np.float32))
    await third.open(3)

    assert third.holdings[0].head.version == heir.holdings[0].head.version == 1
    assert third.fragment_ledger[0].knows(PushKey("a", 1, 0, 1))


async def test_a_commit_that_never_became_visible_leaves_nothing_behind() -> None:
    broker, run = MemoryBroker(), "deposed"
    record = await founded(broker, run)
    outer = make_outer("nesterov", 1.0, 0.0)
    former, heir = (ShardStore(MemoryBus(run, broker), record, 0, outer) for _ in range(2))
    await former.open(1)
    await heir.open(2)

    with pytest.raises(RecordConflict):
        await former.commit(one_commit(0), np.ones(4, dtype=np.float32))

    kept = [kept.subject for stream in broker.streams.values() for kept in stream.kept.values()]
    assert [subject for subject in kept if ".st." in subject] == []


async def test_an_owner_whose_reader_was_removed_stands_down() -> None:
    """Somebody who was frozen on its way to the shard thawed and took the queue: without it there is nothing to own."""
    broker, run = MemoryBroker(), "deposed"
    record = await founded(broker, run)
    service = ShardService(MemoryBus(run, broker), record, 0, SystemClock())
    serving = asyncio.create_task(service.serve())
    async with asyncio.timeout(DEADLINE_S):
        while not service.owning:  # noqa: ASYNC110  (nobody sets an event when a service begins to own)
            await asyncio.sleep(0)
        late = MemoryBus(run, broker)
        await late.consume(Subjects(run).contributions_of(0), durable="shard-0-0", takeover=True)
        with pytest.raises(RecordConflict, match="somebody else reads"):
            await serving
