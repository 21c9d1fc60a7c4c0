"""What every `Bus` must do, written once; `test_bus_memory` and `test_bus_jetstream` bind it.

A binding gives the fixture `make_bus`, which opens another bus of the same run and broker.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import pytest

from atoll.base.errors import (
    BlobCorrupt,
    BlobGone,
    BrokerUnavailable,
    PeerMisbehaved,
    ProtocolMisuse,
    QueueFull,
    RecordConflict,
    StorageFull,
)
from atoll.bus.interface import Bus, Delivery, Subscription
from atoll.bus.streams import Places
from atoll.wire.blobs import BlobRef
from atoll.wire.limits import INFO_HEADER, MESSAGE_BYTES_MAX, Info
from atoll.wire.subjects import Subjects

MakeBus = Callable[[], Awaitable[Bus]]
SOON_S = 120.0
NEVER_S = 0.15
MIB = 1 << 20
ROOM_BYTES = 16 * MIB
"""What the buses of a contract provide: as much as is more than the room of a tensor stream."""


@asynccontextmanager
async def buses(open_one: Callable[[int], Awaitable[Any]], *provided: Any) -> AsyncIterator[MakeBus]:  # noqa: ANN401
    """Yield what opens another bus, by its number, and has it provide what a run needs; all are closed at the end."""
    opened: list[Bus] = []

    async def make() -> Bus:
        opened.append(await open_one(len(opened)))
        if provided:
            await opened[-1].provision(*provided)
        return opened[-1]

    yield make
    for bus in opened:
        await bus.close()


async def until(true: Callable[[], bool]) -> None:
    """Give way until `true`, at most `SOON_S`."""
    async with asyncio.timeout(SOON_S):
        while not true():  # noqa: ASYNC110  # counters of another thread set no event
            await asyncio.sleep(0.01)


def noise(size: int, seed: int = 0) -> bytes:
    """Return bytes that do not compress and differ by seed."""
    return np.random.default_rng(seed).bytes(size)


class BlobContract:
    """Large bytes."""

    @pytest.mark.parametrize("size", [0, 1, MIB - 1, MIB, MIB + 1, 5 * MIB + 12_345])
    async def test_a_blob_comes_back_whole(self, make_bus: MakeBus, run: str, size: int) -> None:
        writer, reader = await make_bus(), await make_bus()
        data = noise(size)

        ref = await writer.put_blob(Subjects(run).global_stem(0, 1, "n"), data)

        assert (size, -(-size // MIB)) == (ref.size_bytes, ref.chunks)
        assert data == await reader.get_blob(ref, size)

    async def test_any_buffer_may_be_stored(self, make_bus: MakeBus, run: str) -> None:
        """A view of float32 is stored as its bytes."""
        bus = await make_bus()
        values = np.arange(1000, dtype=np.float32)

        ref = await bus.put_blob(Subjects(run).state_stem(0, 1, "n"), memoryview(values.data))

        assert values.tobytes() == await bus.get_blob(ref, MIB)

    async def test_storing_twice_changes_nothing(self, make_bus: MakeBus, run: str) -> None:
        """The same bytes under the same stem give the same reference and one set of chunks."""
        bus = await make_bus()
        stem, data = Subjects(run).global_stem(0, 1, "n"), noise(3 * MIB)

        first = await bus.put_blob(stem, data)
        second = await bus.put_blob(stem, data)

        assert first == second
        assert await bus.purge(f"{stem}.*") == 3

    async def test_a_purged_blob_is_gone_and_can_be_stored_again(self, make_bus: MakeBus, run: str) -> None:
        """Purge removes just one version, and ids remembered by the broker do not swallow a second writing."""
        bus, subjects = await make_bus(), Subjects(run)
        old, new = subjects.global_stem(0, 1, "n"), subjects.global_stem(0, 2, "n")
        ref_old, ref_new = await bus.put_blob(old, noise(2 * MIB)), await bus.put_blob(new, noise(MIB))

        assert await bus.purge(f"{subjects.prefix}.gl.c.0.1.>") == 2
        with pytest.raises(BlobGone):
            await bus.get_blob(ref_old, 4 * MIB)
        assert noise(MIB) == await bus.get_blob(ref_new, 4 * MIB)

        await bus.put_blob(old, noise(2 * MIB))
        assert noise(2 * MIB) == await bus.get_blob(ref_old, 4 * MIB)

    async def test_a_purge_may_keep_the_newest(self, make_bus: MakeBus, run: str) -> None:
        """What a sender has stored is counted by subject, and all but the newest of it removed; a few are not even named."""
        bus, s = await make_bus(), Subjects(run)
        for push in range(1, 6):
            await bus.put_blob(s.contribution_stem("m", 0, 1, push, "0" * 16), noise(9, push))
        everything = f"{s.prefix}.up.c.>"

        stored = await bus.count_stored(everything, more_than=4)
        assert stored.by_subject == {f"{s.contribution_stem('m', 0, 1, push, '0' * 16)}.0": 1 for push in range(1, 6)}
        assert 0 < stored.size_bytes < stored.bytes_max
        assert (await bus.count_stored(everything, more_than=5)).by_subject == {}
        assert await bus.purge(f"{s.prefix}.up.c.m.0.>", keep=2) == 3
        assert set((await bus.count_stored(everything, more_than=0)).by_subject) == {
            f"{s.contribution_stem('m', 0, 1, push, '0' * 16)}.0" for push in (4, 5)
        }

    async def test_streams_are_narrowed_to_the_places_of_the_run(self, make_bus: MakeBus, run: str) -> None:
        """What fits goes through, what was queued stays, a second narrowing changes nothing, and nothing else is taken."""
        bus, s = await make_bus(), Subjects(run)
        await bus.publish(s.contribution(0, 0, "m"), b"before", msg_id="1")
        places = Places((0, 1), 2)

        assert await bus.fit(places) in (2, 4)  # of a spread bus, at both brokers
        assert await bus.fit(places) == 0
        consumer = await bus.consume(s.contributions_of(0), durable="shard-0")
        await bus.publish(s.contribution(0, 0, "m"), b"after", msg_id="2")
        for expected in (b"before", b"after"):
            delivery = await consumer.next(SOON_S)
            assert delivery is not None
            assert expected == delivery.data
            await delivery.ack()
        await bus.put_blob(s.contribution_stem("m", 1, 1, 1, "0" * 16), b"x")
        await bus.put_blob(s.partial_stem("eu", 1, 1, "n"), b"x")
        with pytest.raises(ProtocolMisuse):
            await bus.publish(s.contribution(0, 0, "m"), noise(1 << 16), msg_id="3")

    async def test_the_first_writer_of_a_chunk_of_a_contribution_wins(self, make_bus: MakeBus, run: str) -> None:
        """Other bytes change nothing, the same ones sent again are stored, and where it was removed others may lie."""
        bus, other = await make_bus(), await make_bus()
        stem, data, foreign = (
            Subjects(run).contribution_stem("a", 0, 1, 1, "0" * 16),
            noise(2 * MIB),
            noise(2 * MIB, seed=9),
        )
        ref = await bus.put_blob(stem, data)

        await other.put_blob(stem, foreign)
        assert await other.get_blob(ref, 2 * MIB) == data
        assert await bus.put_blob(stem, data) == ref
        assert await other.get_blob(ref, 2 * MIB) == data

        await bus.purge(f"{stem}.*")
        assert await bus.get_blob(await other.put_blob(stem, foreign), 2 * MIB) == foreign

    async def test_in_a_run_of_an_earlier_version_the_newest_chunk_counts(self, make_bus: MakeBus, run: str) -> None:
        """Its stems may be given out again, with other bytes: whoever serves it has the streams replace them, or not."""
        bus, stem, refs = await make_bus(), Subjects(run).contribution_stem("a", 0, 1, 1, "0" * 16), []
        for written, (keeps_first, there) in enumerate(((False, 0), (False, 1), (True, 1), (False, 3))):
            await bus.fit(Places((0,), 1, keeps_first=keeps_first))
            refs.append(await bus.put_blob(stem, noise(100, seed=written)))
            assert await bus.get_blob(refs[there], 100) == noise(100, seed=there)

    async def test_a_foreign_chunk_is_found_out(self, make_bus: MakeBus, run: str) -> None:
        """Bytes that do not match the digest are never returned."""
        bus, stem = await make_bus(), Subjects(run).global_stem(0, 1, "n")
        ref = await bus.put_blob(stem, noise(2 * MIB))

        await bus.put_record(f"{stem}.1", noise(MIB, seed=9), expected=None)

        with pytest.raises(BlobCorrupt):
            await bus.get_blob(ref, 4 * MIB)

    async def test_a_reader_bounds_what_it_takes(self, make_bus: MakeBus, run: str) -> None:
        """References larger than allowed, or impossible, are refused before anything is read."""
        bus, stem = await make_bus(), Subjects(run).global_stem(0, 1, "n")
        ref = await bus.put_blob(stem, noise(100))

        with pytest.raises(PeerMisbehaved, match="larger than allowed"):
            await bus.get_blob(ref, 99)
        with pytest.raises(PeerMisbehaved, match="do not fit"):
            await bus.get_blob(BlobRef(stem, 101, 100, ref.digest), 1000)
        with pytest.raises(PeerMisbehaved, match="not a subject"):
            await bus.get_blob(BlobRef(f"{stem[:-2]}.*", 1, 100, ref.digest), 1000)

    async def test_a_full_stream_says_so(self, make_bus: MakeBus, run: str) -> None:
        bus, subjects = await make_bus(), Subjects(run)
        ref = await bus.put_blob(subjects.contribution_stem("a", 0, 1, 1, "0" * 16), noise(MIB))

        with pytest.raises(StorageFull):
            await bus.put_blob(subjects.contribution_stem("a", 0, 1, 2, "0" * 16), bytes(ROOM_BYTES))

        assert noise(MIB) == await bus.get_blob(ref, MIB)


class RecordContract:
    """Last values by compare-and-set."""

    async def test_a_record_is_created_read_and_replaced(self, make_bus: MakeBus, run: str) -> None:
        """Expected 0 creates, the revision replaces, None overwrites."""
        bus, head = await make_bus(), Subjects(run).head(0)
        assert await bus.get_record(head) is None

        first = await bus.put_record(head, b"a", expected=0)
        second = await bus.put_record(head, b"b", expected=first)
        third = await bus.put_record(head, b"", expected=None)

        record = await bus.get_record(head)
        assert first < second < third
        assert record is not None
        assert (head, b"", third) == (record.subject, record.data, record.revision)

    async def test_a_stale_expectation_is_a_conflict(self, make_bus: MakeBus, run: str) -> None:
        bus, zombie, head = await make_bus(), await make_bus(), Subjects(run).head(0)
        old = await bus.put_record(head, b"a", expected=0)
        await bus.put_record(head, b"b", expected=old)

        for expected in (old, 0, old + 17):
            with pytest.raises(RecordConflict, match="first"):
                await zombie.put_record(head, b"z", expected=expected)

        record = await bus.get_record(head)
        assert record is not None
        assert record.data == b"b"

    async def test_one_of_twenty_writers_wins(self, make_bus: MakeBus, run: str) -> None:
        """Concurrent creators: one revision, nineteen conflicts."""
        buses, lease = [await make_bus() for _ in range(2)], Subjects(run).lease(0)

        async def write(i: int) -> str:
            try:
                await buses[i % 2].put_record(lease, str(i).encode(), expected=0)
            except RecordConflict:
                return ""
            return str(i)

        winners = [name for name in await asyncio.gather(*map(write, range(20))) if name]

        record = await buses[0].get_record(lease)
        assert record is not None
        assert [record.data.decode()] == winners

    async def test_records_are_listed_by_filter(self, make_bus: MakeBus, run: str) -> None:
        """All heads in one call, the newest of each, and nothing else."""
        bus, subjects = await make_bus(), Subjects(run)
        for fragment in range(30):
            await bus.put_record(subjects.head(fragment), b"old", expected=None)
        await bus.put_record(subjects.head(7), b"new", expected=None)
        await bus.put_record(subjects.lease(0), b"x", expected=None)

        found = {record.subject: record.data for record in await bus.get_records(subjects.head("*"))}

        assert {subjects.head(i): b"new" if i == 7 else b"old" for i in range(30)} == found
        assert await bus.get_records(subjects.member("*")) == []


class QueueContract:
    """Acknowledged messages, each consumed once."""

    async def test_an_acknowledged_message_is_delivered_once(self, make_bus: MakeBus, run: str) -> None:
        bus, subjects = await make_bus(), Subjects(run)
        for i in range(5):
            await bus.publish(subjects.contribution(0, i, "a"), str(i).encode(), msg_id=f"m{i}")
        consumer = await bus.consume(subjects.contributions_of(0), durable="shard-0")

        seen = []
        for _ in range(5):
            delivery = await consumer.next(SOON_S)
            assert delivery is not None
            assert not delivery.redelivered
            seen.append(delivery.data)
            await delivery.hold()
            await delivery.ack()

        assert seen == [b"0", b"1", b"2", b"3", b"4"]
        assert await consumer.next(NEVER_S) is None
        await consumer.close()
        again = await bus.consume(subjects.contributions_of(0), durable="shard-0")
        assert await again.next(NEVER_S) is None

    async def test_a_message_that_comes_later_wakes_the_reader(self, make_bus: MakeBus, run: str) -> None:
        """A reader that waits gets what is published meanwhile, and only what its filter covers."""
        bus, subjects = await make_bus(), Subjects(run)
        consumer = await bus.consume(subjects.contributions_of(1), durable="shard-1")
        waiting = asyncio.create_task(consumer.next(SOON_S))

        await bus.publish(subjects.contribution(0, 0, "a"), b"other", msg_id="m0")
        await bus.publish(subjects.contribution(1, 0, "a"), b"mine", msg_id="m1")

        delivery = await waiting
        assert delivery is not None
        assert (subjects.contribution(1, 0, "a"), b"mine") == (delivery.subject, delivery.data)

    async def test_closing_gives_back_what_was_not_settled(self, make_bus: MakeBus, run: str) -> None:
        """A successor gets the unacknowledged message, marked as redelivered; the acknowledged one stays away."""
        bus, successor, subjects = await make_bus(), await make_bus(), Subjects(run)
        for i in range(2):
            await bus.publish(subjects.contribution(0, i, "a"), str(i).encode(), msg_id=f"m{i}")
        consumer = await bus.consume(subjects.contributions_of(0), durable="shard-0")
        first, second = await consumer.next(SOON_S), await consumer.next(SOON_S)
        assert first is not None
        assert second is not None
        await first.ack()
        await consumer.close()

        heir = await successor.consume(subjects.contributions_of(0), durable="shard-0")
        delivery = await heir.next(SOON_S)

        assert delivery is not None
        assert (delivery.data, delivery.redelivered) == (b"1", True)
        await delivery.ack()
        assert await heir.next(NEVER_S) is None

    async def test_who_takes_over_gets_at_once_what_a_frozen_reader_holds(self, make_bus: MakeBus, run: str) -> None:
        """The former reader has closed nothing and gives nothing back; its late acknowledgement harms nobody."""
        bus, successor, subjects = await make_bus(), await make_bus(), Subjects(run)
        for i in range(2):
            await bus.publish(subjects.contribution(0, i, "a"), str(i).encode(), msg_id=f"m{i}")
        frozen = await bus.consume(subjects.contributions_of(0), durable="shard-0-1", takeover=True)
        held = [await frozen.next(SOON_S) for _ in range(2)]
        heir = await successor.consume(subjects.contributions_of(0), durable="shard-0-2", takeover=True)
        stolen = await frozen.next(NEVER_S)
        taken = [await heir.next(SOON_S) for _ in range(2)]
        assert stolen is None
        assert not await heir.drained()
        with pytest.raises(RecordConflict, match="somebody else reads"):
            await frozen.drained()

        assert [delivery.data for delivery in held if delivery is not None] == [b"0", b"1"]
        assert [delivery.data for delivery in taken if delivery is not None] == [b"0", b"1"]
        for delivery in taken:
            assert delivery is not None
            await delivery.ack()
        assert await heir.next(NEVER_S) is None
        assert await heir.drained()

    async def test_a_long_queue_is_read_and_removed_many_at_a_time(self, make_bus: MakeBus, run: str) -> None:
        """What has arrived is there without waiting, in order; what is dropped is gone, without a word of the broker."""
        bus, subjects = await make_bus(), Subjects(run)
        for i in range(40):
            await bus.publish(subjects.contribution(0, i, "a"), str(i).encode(), msg_id=f"m{i}")
        consumer = await bus.consume(subjects.contributions_of(0), durable="shard-0")
        found: list[Delivery] = []
        while len(found) < 40:
            delivery = await consumer.next(SOON_S)
            assert delivery is not None
            found += [delivery, *await consumer.arrived(7)]
        assert [each.data for each in found] == [str(i).encode() for i in range(40)]
        assert list(await consumer.arrived(7)) == []

        for delivery in found:
            await delivery.drop()
        async with asyncio.timeout(SOON_S):
            while not await consumer.drained():  # noqa: ASYNC110  (the broker says it when it is asked)
                await asyncio.sleep(0.02)
        assert await consumer.next(NEVER_S) is None

    async def test_a_queue_that_is_never_empty_is_drained_of_what_was_there(self, make_bus: MakeBus, run: str) -> None:
        """A message that comes later does not hide that all is settled that was queued when it was asked last."""
        bus, subjects = await make_bus(), Subjects(run)
        consumer = await bus.consume(subjects.contributions_of(0), durable="shard-0")
        await bus.publish(subjects.contribution(0, 0, "a"), b"0", msg_id="m0")
        first = await consumer.next(SOON_S)
        assert first is not None
        assert [await consumer.drained() for _ in range(2)] == [False, False]
        await first.ack()
        await bus.publish(subjects.contribution(0, 1, "a"), b"1", msg_id="m1")

        assert await consumer.drained()
        assert not await consumer.drained()

    async def test_a_queue_turns_whenever_all_is_settled_that_it_held_at_one_moment(
        self, make_bus: MakeBus, run: str
    ) -> None:
        """However often it was asked meanwhile, and whatever came after that moment; an empty queue turns each time."""
        bus, subjects = await make_bus(), Subjects(run)
        consumer = await bus.consume(subjects.contributions_of(0), durable="shard-0")
        held = []
        for number in range(3):
            await bus.publish(subjects.contribution(0, number, "a"), b"%d" % number, msg_id=f"m{number}")
            held.append(await consumer.next(SOON_S))
            assert [await consumer.drained() for _ in range(2)] == [False, False]
        turns = [consumer.turns]
        for delivery in held:
            assert delivery is not None
            await delivery.ack()
            await consumer.drained()
            turns.append(consumer.turns)
        assert turns == [0, 1, 1, 2]

        before = consumer.turns
        assert await consumer.drained()
        assert consumer.turns == before + 1

    async def test_a_reader_that_gave_up_takes_no_news_from_the_next(self, make_bus: MakeBus, run: str) -> None:
        bus, subjects = await make_bus(), Subjects(run)
        consumer = await bus.consume(subjects.contributions_of(0), durable="shard-0")
        first = asyncio.create_task(consumer.next(10 * SOON_S))
        await asyncio.sleep(NEVER_S)  # it waits for news now
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)
        second = asyncio.create_task(consumer.next(10 * SOON_S))
        await asyncio.sleep(NEVER_S)
        await bus.publish(subjects.contribution(0, 0, "a"), b"x", msg_id="m")

        async with asyncio.timeout(SOON_S):
            delivery = await second
        assert delivery is not None

    async def test_a_broker_that_is_there_is_reached(self, make_bus: MakeBus) -> None:
        assert await (await make_bus()).reach(SOON_S)

    async def test_a_released_message_comes_again(self, make_bus: MakeBus, run: str) -> None:
        """Release is a refusal for now, not for ever."""
        bus, subjects = await make_bus(), Subjects(run)
        await bus.publish(subjects.contribution(0, 0, "a"), b"x", msg_id="m")
        consumer = await bus.consume(subjects.contributions_of(0), durable="shard-0")
        delivery = await consumer.next(SOON_S)
        assert delivery is not None

        await delivery.release()
        again = await consumer.next(SOON_S)

        assert again is not None
        assert again.redelivered

    async def test_a_subject_holds_two_and_no_more(self, make_bus: MakeBus, run: str) -> None:
        """The third unread manifest of a learner is refused; others and a freed place are not affected."""
        bus, subjects = await make_bus(), Subjects(run)
        mine = subjects.contribution(0, 0, "a")
        await bus.publish(mine, b"0", msg_id="m0")
        await bus.publish(mine, b"1", msg_id="m1")

        with pytest.raises(QueueFull):
            await bus.publish(mine, b"2", msg_id="m2")

        await bus.publish(subjects.contribution(0, 0, "b"), b"0", msg_id="n0")
        consumer = await bus.consume(subjects.contributions_of(0), durable="shard-0")
        delivery = await consumer.next(SOON_S)
        assert delivery is not None
        await delivery.ack()
        await bus.publish(mine, b"2", msg_id="m2")

    async def test_an_id_is_stored_once(self, make_bus: MakeBus, run: str) -> None:
        bus, subjects = await make_bus(), Subjects(run)

        for _ in range(3):
            await bus.publish(subjects.event("round", "shard-0"), b"x", msg_id="same")

        assert len(await bus.replay(subjects.event("*", ">"))) == 1


class EventLogContract:
    """Ordered reading."""

    async def test_the_event_log_replays_in_order_and_by_pages(self, make_bus: MakeBus, run: str) -> None:
        """2500 entries of two kinds come back in order, whole or page by page, and by kind."""
        bus, subjects = await make_bus(), Subjects(run)
        numbers = iter(range(2500))

        async def write() -> None:
            for i in numbers:
                await bus.publish(subjects.event(f"kind{i % 2}", "w"), str(i).encode(), msg_id=str(i))

        await asyncio.gather(*(write() for _ in range(32)))

        whole = await bus.replay(subjects.event("*", ">"), limit=10_000)
        pages, after = [], 0
        while page := await bus.replay(subjects.event("*", ">"), after=after, limit=700):
            assert len(page) <= 700
            pages += page
            after = page[-1].sequence
        odd = await bus.replay(subjects.event("kind1", "w"), limit=10_000)

        assert len({entry.data for entry in whole}) == 2500
        assert sorted(entry.sequence for entry in whole) == [entry.sequence for entry in whole]
        assert whole == pages
        assert all(entry.stored_s for entry in whole), "the broker says when it stored each"
        assert [entry for entry in whole if int(entry.data) % 2] == odd

    async def test_the_event_log_cannot_be_cut(self, make_bus: MakeBus, run: str) -> None:
        bus, subjects = await make_bus(), Subjects(run)
        await bus.publish(subjects.event("a", "b"), b"x", msg_id="m")

        with pytest.raises(ProtocolMisuse):
            await bus.purge(subjects.event("*", ">"))

        assert len(await bus.replay(subjects.event("*", ">"))) == 1


class CoreMessageContract:
    """At most once."""

    async def test_core_messages_reach_who_listens(self, make_bus: MakeBus, run: str) -> None:
        """Exact and wildcard listeners on other buses hear; the wrong subject and the silent do not matter."""
        bus, other, subjects = await make_bus(), await make_bus(), Subjects(run)
        await bus.tell(subjects.call(0), b"nobody")
        one, every = await other.listen(subjects.call(3)), await other.listen(subjects.call("*"))

        await bus.tell(subjects.call(2), b"two")
        await bus.tell(subjects.call(3), b"three")

        heard = [await every.next(SOON_S), await every.next(SOON_S)]
        single = await one.next(SOON_S)
        assert [core_message.data for core_message in heard if core_message] == [b"two", b"three"]
        assert single is not None
        assert subjects.call(3) == single.subject
        assert await one.next(NEVER_S) is None

    async def test_a_listener_that_lets_messages_be_late_hears_them_all(self, make_bus: MakeBus, run: str) -> None:
        """In order, together with those of another such listener, and nothing after it was closed."""
        bus, other, subjects = await make_bus(), await make_bus(), Subjects(run)
        beats = await other.listen(subjects.beat("*"), late_s_max=0.05)
        calls = await other.listen(subjects.call("*"), late_s_max=0.05)

        for i in range(20):
            await bus.tell(subjects.beat("a"), str(i).encode())
        await bus.tell(subjects.call(0), b"call")

        heard = [await beats.next(SOON_S) for _ in range(20)]
        call = await calls.next(SOON_S)
        assert [core_message.data for core_message in heard if core_message] == [str(i).encode() for i in range(20)]
        assert call is not None
        await beats.close()
        await bus.tell(subjects.beat("a"), b"late")
        assert await beats.next(NEVER_S) is None

    async def test_a_slow_listener_loses_the_oldest(self, make_bus: MakeBus, run: str) -> None:
        bus, subjects = await make_bus(), Subjects(run)
        feed, last = await bus.listen(subjects.beat("a"), len_max=3), await bus.listen(subjects.beat("end"))

        for i in range(10):
            await bus.tell(subjects.beat("a"), str(i).encode())
        await bus.tell(subjects.beat("end"), b"")
        assert await last.next(SOON_S) is not None

        kept = [await feed.next(SOON_S) for _ in range(3)]
        assert [core_message.data for core_message in kept if core_message] == [b"7", b"8", b"9"]
        assert bus.stats.core_messages_dropped == 7

    async def test_iteration_ends_with_close(self, make_bus: MakeBus, run: str) -> None:
        """`async for` yields what comes and stops when the feed is closed; afterwards nothing is heard."""
        bus, subjects = await make_bus(), Subjects(run)
        feed = await bus.listen(subjects.control("all"))
        await bus.tell(subjects.control("all"), b"stop")

        heard = []
        async for core_message in feed:
            heard.append(core_message.data)
            await feed.close()

        assert heard == [b"stop"]
        assert await feed.next(NEVER_S) is None

    async def test_a_question_gets_its_first_answer(self, make_bus: MakeBus, run: str) -> None:
        """`ask` returns the answer told to the reply subject, and None when nobody listens or nobody answers."""
        bus, other, subjects = await make_bus(), await make_bus(), Subjects(run)
        assert await bus.ask(subjects.control("x"), b"?", timeout_s=NEVER_S) is None
        feed = await other.listen(subjects.control("x"))
        assert await bus.ask(subjects.control("x"), b"?", timeout_s=NEVER_S) is None
        await feed.next(SOON_S)

        asking = asyncio.create_task(bus.ask(subjects.control("x"), b"?", timeout_s=SOON_S))
        question = await feed.next(SOON_S)
        assert question is not None
        assert question.reply is not None
        await other.tell(question.reply, b"!")

        assert await asking == b"!"

    async def test_taps_show_what_was_stored(self, make_bus: MakeBus, run: str) -> None:
        """Manifests, heads, members and events are republished with their bodies, `info` and ids; leases and chunks are not."""
        bus, monitor, subjects = await make_bus(), await make_bus(), Subjects(run)
        tap = await monitor.listen(subjects.tap())
        info: Info = {"tokens": 5, "loss": 2.5, "ok": True, "who": "ä"}

        await bus.put_record(subjects.lease(0), b"secret", expected=0)
        await bus.put_blob(subjects.global_stem(0, 1, "n"), b"secret")
        await bus.publish(subjects.contribution(0, 1, "a"), b"manifest", msg_id="m1", info=info)
        await bus.put_record(subjects.head(1), b"head", expected=0)
        await bus.put_record(subjects.member("a"), b"member", expected=0)
        await bus.put_record(subjects.data, b"secret", expected=0)
        await bus.publish(subjects.event("round", "s"), b"event", msg_id="m2")

        heard = [core_message for _ in range(4) if (core_message := await tap.next(SOON_S)) is not None]
        shown = {core_message.subject: core_message for core_message in heard}  # two brokers keep no common order
        assert {core_message.subject: core_message.data for core_message in heard} == {
            subjects.tap("up.m.0.1.a"): b"manifest",
            subjects.tap("gl.head.1"): b"head",
            subjects.tap("mb.learner.a"): b"member",
            subjects.tap("ev.round.s"): b"event",
        }
        headers = shown[subjects.tap("up.m.0.1.a")].headers
        assert info == json.loads(headers[INFO_HEADER])
        assert headers["Nats-Subject"] == subjects.contribution(0, 1, "a")
        assert headers["Nats-Msg-Id"]
        assert int(headers["Nats-Sequence"]) > 0
        assert await tap.next(NEVER_S) is None

    async def test_who_comes_late_has_the_last_heartbeat(self, make_bus: MakeBus, run: str) -> None:
        """Once a shard has come: of each sender the last one is kept, and all are on the tap, and the run record is."""
        bus, monitor, subjects = await make_bus(), await make_bus(), Subjects(run)
        tap = await monitor.listen(subjects.tap())
        shard = await bus.consume(subjects.contributions_of(0), durable="shard")
        await bus.put_record(subjects.run_record, b"record", expected=0)
        first = await tap.next(SOON_S)
        assert first is not None
        assert (first.subject, first.data) == (subjects.tap("gl.run"), b"record")

        for subject, data in ((subjects.beat("a"), b"1"), (subjects.presence("h"), b"2"), (subjects.beat("a"), b"3")):
            await bus.tell(subject, data)
        heard = [(await _next(tap)) for _ in range(3)]
        late = await make_bus()

        assert heard == [(subjects.tap("hb.a"), b"1"), (subjects.tap("sy.h"), b"2"), (subjects.tap("hb.a"), b"3")]
        assert [(one.subject, one.data) for one in await late.get_records(subjects.beat("*"))] == [
            (subjects.beat("a"), b"3")
        ]
        assert [one.data for one in await late.get_records(subjects.presence("*"))] == [b"2"]
        await shard.close()


async def _next(feed: Subscription) -> tuple[str, bytes]:
    message = await feed.next(SOON_S)
    assert message is not None
    return message.subject, message.data


class BusContract(BlobContract, RecordContract, QueueContract, EventLogContract, CoreMessageContract):
    """All of it, and what concerns every call."""

    async def test_it_is_a_bus(self, make_bus: MakeBus) -> None:
        assert isinstance(await make_bus(), Bus)

    async def test_oversized_messages_are_refused_at_home(self, make_bus: MakeBus, run: str) -> None:
        """A message the broker would hang up on never leaves, and the bus goes on working."""
        bus, subjects, large = await make_bus(), Subjects(run), bytes(MESSAGE_BYTES_MAX + 1)

        with pytest.raises(ProtocolMisuse, match="too large"):
            await bus.put_record(subjects.head(0), large, expected=None)
        with pytest.raises(ProtocolMisuse, match="too large"):
            await bus.tell(subjects.call(0), large)
        with pytest.raises(ProtocolMisuse, match="info"):
            await bus.publish(subjects.event("a", "b"), b"", msg_id="m", info={"x": "y" * 5000})

        assert await bus.put_record(subjects.head(0), large[:-1], expected=0)

    async def test_a_subject_nobody_keeps_is_a_mistake(self, make_bus: MakeBus, run: str) -> None:
        """Durable calls on subjects without a stream are our own bug, told at once."""
        bus = await make_bus()

        with pytest.raises(ProtocolMisuse, match="no stream"):
            await bus.publish(Subjects(run).call(0), b"", msg_id="m")

    async def test_traffic_is_counted(self, make_bus: MakeBus, run: str) -> None:
        """Payload bytes of both directions are in the stats, and those of blobs among them."""
        bus = await make_bus()
        ref = await bus.put_blob(Subjects(run).global_stem(0, 1, "n"), noise(MIB + 5))
        await bus.get_blob(ref, 2 * MIB)
        assert (bus.stats.blob_bytes_up, bus.stats.blob_bytes_down) == (MIB + 5, MIB + 5)

        stats = bus.stats
        assert (stats.bytes_up, stats.bytes_down) == (MIB + 5, MIB + 5)
        await bus.put_record(Subjects(run).head(0), b"small", expected=None)
        assert (stats.bytes_up, stats.blob_bytes_up) == (MIB + 10, MIB + 5)

    async def test_a_closed_bus_refuses_and_ends_its_feeds(self, make_bus: MakeBus, run: str) -> None:
        """Closing twice is harmless; later calls say that the bus is closed."""
        bus, subjects = await make_bus(), Subjects(run)
        feed = await bus.listen(subjects.call("*"))
        waiting = asyncio.create_task(feed.next(SOON_S))

        await bus.close()
        await bus.close()

        assert await waiting is None
        with pytest.raises(BrokerUnavailable, match="closed"):
            await bus.get_record(subjects.head(0))
