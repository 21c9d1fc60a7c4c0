"""What is stored without end on one's subjects costs that one chunks, is told, and takes nobody else's room."""

from __future__ import annotations

import asyncio

import pytest

from atoll.base.errors import BrokerUnavailable, ProtocolMisuse
from atoll.bus.interface import StoredCounts
from atoll.bus.memory import MemoryBroker, MemoryBus
from atoll.run.stream_room import SHARE, ChunkShares
from atoll.wire.events import FilledEvent, event_of, fields_of
from atoll.wire.messages import RunRecord
from atoll_simulator.loop import LoopClock
from atoll_synchronizer.garbage_collector import LOOK_S, ShareKeeper
from atoll_synchronizer.shard_context import EventLog, ShardContext
from support.clocks import in_virtual_time
from support.founded_run import FRAGMENTS, one_fragment_run, run_record
from support.links import unique_run

NONCE = "0" * 16


def made() -> tuple[MemoryBus, RunRecord, ShareKeeper]:
    run = run_record(unique_run())
    bus, clock = MemoryBus(run.run, MemoryBroker()), LoopClock(asyncio.get_running_loop())
    context = ShardContext(bus, run, 0, clock)
    return bus, run, ShareKeeper(context, EventLog(bus, run.subjects, context.name, clock))


async def held(bus: MemoryBus, run: RunRecord, learner: str) -> int:
    return len(await bus.get_records(f"{run.subjects.prefix}.up.c.{learner}.>"))


@in_virtual_time
async def test_of_what_fills_the_stream_a_share_stays() -> None:
    bus, run, keeper = made()
    subjects = run.subjects
    await bus.put_blob(subjects.contribution_stem("ada", 0, 1, 1, NONCE), b"x")
    for push in range(1, 100):
        await bus.put_blob(subjects.contribution_stem("mallory", 0, 1, push, NONCE), b"x")
    keeping = asyncio.create_task(keeper.keep())
    await asyncio.sleep(2 * LOOK_S)
    keeping.cancel()

    assert await held(bus, run, "mallory") == SHARE
    assert await held(bus, run, "ada") == 1
    assert await bus.get_record(f"{subjects.contribution_stem('mallory', 0, 1, 99, NONCE)}.0") is not None
    [entry] = await bus.replay(subjects.event("filled", "*"))
    told = fields_of(event_of(entry.subject, entry.data), FilledEvent)
    assert told == FilledEvent(subjects_of="mallory", removed=99 - SHARE)


@in_virtual_time
async def test_what_an_honest_learner_gave_up_is_removed_without_a_word() -> None:
    bus, run, keeper = made()
    for push in range(1, SHARE + 3):
        await bus.put_blob(run.subjects.contribution_stem("ada", 1, 1, push, NONCE), b"x")

    assert await keeper.look()
    assert not await keeper.look()
    assert await held(bus, run, "ada") == SHARE
    assert await bus.replay(run.subjects.event("filled", "*")) == []


@in_virtual_time
async def test_no_shard_and_no_fragment_that_does_not_exist() -> None:
    """Once somebody serves the run, the broker takes nothing there; what lay there before is removed."""
    bus, run, keeper = made()
    subjects = run.subjects
    for push in range(1, 9):
        await bus.put_blob(subjects.contribution_stem("mallory", 77, 1, push, NONCE), b"x")
    keeping = asyncio.create_task(keeper.keep())
    await asyncio.sleep(2 * LOOK_S)
    keeping.cancel()

    assert await held(bus, run, "mallory") == 0
    for subject in (subjects.contribution(3000, 1, "m"), subjects.contribution(0, 1, "m"), subjects.farewell(9, "m")):
        with pytest.raises(BrokerUnavailable):
            await bus.publish(subject, b"{}", msg_id=subject)
    with pytest.raises(BrokerUnavailable):
        await bus.put_blob(subjects.contribution_stem("mallory", FRAGMENTS, 1, 1, NONCE), b"x")
    with pytest.raises(ProtocolMisuse):  # a share of the queue is so many messages, and of so many bytes
        await bus.publish(subjects.contribution(0, 0, "m"), b"x" * (1 << 16), msg_id="large")
    await bus.publish(subjects.contribution(0, 0, "m"), b"{}", msg_id="small")


@in_virtual_time
async def test_a_chunk_is_written_once() -> None:
    bus, run, keeper = made()
    keeping = asyncio.create_task(keeper.keep())
    await asyncio.sleep(2 * LOOK_S)
    keeping.cancel()
    stem = run.subjects.contribution_stem("ada", 0, 1, 1, NONCE)
    for written in (b"first", b"second"):
        await bus.put_blob(stem, written)

    chunk = await bus.get_record(f"{stem}.0")
    assert chunk is not None
    assert chunk.data == b"first"


def test_a_region_has_a_share_of_its_own() -> None:
    run = one_fragment_run(100)
    shares, subjects = ChunkShares(run), run.subjects
    sums = {f"{subjects.partial_stem('eu', 0, base, 'ab')}.0": 1 for base in range(50)}
    other = {f"{subjects.partial_stem('us', 0, 1, 'ab')}.0": 1}

    [excess] = shares.excesses(StoredCounts(sums | other, 0, 0))

    assert (excess.subjects_of, excess.subject_filter) == ("eu", f"{subjects.prefix}.up.c.sum.0.eu.>")
