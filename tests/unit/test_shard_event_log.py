"""A shard's event log skips nothing, also when a tenure's end cancels whoever writes."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import msgspec
import pytest

from atoll.base.clock import SystemClock
from atoll.bus.memory import MemoryBroker, MemoryBus
from atoll.protocol.events import PushKey, Refuse
from atoll.wire.events import JunkEvent, LedgerEvent
from atoll.wire.messages import Event, decode
from atoll.wire.subjects import Subjects
from atoll_synchronizer.acknowledgements import PendingAcknowledgements
from atoll_synchronizer.garbage_collector import GarbageCollector
from atoll_synchronizer.shard_context import EventLog
from support.events import fields
from support.shard_owners import FixedOwner


class StoringLate(MemoryBus):
    """A bus whose answers are lost while it is `mute`: what is published is stored, and nobody hears so."""

    mute = "not"

    async def publish(self, subject: str, data: bytes, **more: Any) -> None:  # noqa: ANN401  (as the bus takes it)
        if self.mute != "before":
            await super().publish(subject, data, **more)
        if self.mute != "not":
            await asyncio.Event().wait()

    async def tell(self, subject: str, data: bytes) -> None:
        if self.mute == "verdict":
            await asyncio.Event().wait()
        await super().tell(subject, data)


@pytest.fixture
async def bus(run: str) -> StoringLate:
    return StoringLate(run, MemoryBroker())


def log_of(bus: StoringLate, run: str) -> EventLog:
    return EventLog(bus, Subjects(run), "shard-0", SystemClock())


async def cancelled(work: Any) -> None:  # noqa: ANN401  (a coroutine)
    task = asyncio.create_task(work)
    for _ in range(20):
        await asyncio.sleep(0)
    assert not task.done()
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task


async def kinds(bus: StoringLate, run: str) -> list[str]:
    return [decode(Event, line.data).kind for line in await bus.replay(Subjects(run).event("*", ">"))]


@pytest.mark.parametrize("mute", ["before", "after"], ids=["not stored", "stored, unanswered"])
async def test_an_event_whose_writer_was_cancelled_is_written_once(bus: StoringLate, run: str, mute: str) -> None:
    event_log = log_of(bus, run)
    bus.mute = mute
    await cancelled(event_log.record(fields(JunkEvent, reasons={})))
    bus.mute = "not"
    await event_log.finish()
    await event_log.record(fields(LedgerEvent, ledger={}))
    await event_log.finish()

    assert await kinds(bus, run) == ["junk", "ledger"]


@pytest.mark.parametrize("mute", ["verdict", "before", "after"])
async def test_refusals_that_are_being_told_at_a_tenures_end_are_told(bus: StoringLate, run: str, mute: str) -> None:
    event_log = log_of(bus, run)
    pending = PendingAcknowledgements(bus, Subjects(run), event_log, GarbageCollector(bus), FixedOwner())
    pending.refuse(Refuse(key=PushKey("a", 1, 0, 1), reason="stale"))
    bus.mute = mute
    await cancelled(pending.tell_refusals())
    bus.mute = "not"
    pending.refuse(Refuse(key=PushKey("a", 1, 0, 2), reason="stale"))
    await pending.tell_refusals()
    await event_log.finish()

    lines = [decode(Event, line.data) for line in await bus.replay(Subjects(run).event("refused", ">"))]
    told = [row["push"] for line in lines for row in msgspec.json.decode(line.fields["refusals"])]
    assert sorted(told) == [1, 2]
