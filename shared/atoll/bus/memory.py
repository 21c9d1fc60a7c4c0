"""The `Bus` in memory, for tests and the simulator: many buses share one `MemoryBroker` in one event loop.

Deterministic: sequences count up, queues deliver in order, time is a `Clock` that may be simulated. Every call yields to other
tasks once, so that races show here too. It does not survive its process, replicate, or redeliver after silence (an unsettled
message returns when its consumer releases it or closes).
"""
# ruff: noqa: D102  (a method without a docstring is the one of `Bus`, `Consumer` or `Delivery`)

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections import deque
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from atoll.base.clock import Clock, SystemClock
from atoll.base.errors import BlobGone, BrokerUnavailable, ProtocolMisuse, QueueFull, RecordConflict
from atoll.bus.interface import CoreMessage, QueueTurns, Record, Signatures, StoredCounts, StoredEvent
from atoll.bus.streams import (
    GIB,
    Places,
    StreamPlan,
    check_size,
    fitted_plan,
    info_header,
    live_plan,
    no_room,
    queue_full,
    record_conflict,
    stream_of,
    stream_plan,
)
from atoll.bus.subscriptions import BufferedSubscription
from atoll.wire.blobs import BlobRef, Download, Portion, Upload, whole
from atoll.wire.limits import Buffer, Info
from atoll.wire.subjects import Subjects, matches, token
from atoll.wire.traffic import BusStats

OVERHEAD_BYTES = 32
SEQUENCE_FIRST = 1 << 20
"""A stream of a real broker begins above all numbers of a lost one (`atoll.bus.nats.provision`), far above any count."""


@dataclass(frozen=True, slots=True)
class StoredMessage:
    """One stored message; `at_s` is the clock's monotonic reading, `stored_s` the date."""

    sequence: int
    subject: str
    data: bytes
    msg_id: str
    at_s: float
    stored_s: float

    @property
    def size_bytes(self) -> int:
        """Return its size as counted against the stream's bound."""
        return OVERHEAD_BYTES + len(self.subject) + len(self.data)


@dataclass(slots=True)
class QueuePlace:
    """A durable consumer: its waiting readers, the unsettled messages, and those delivered before."""

    subject_filter: str
    out: set[int] = field(default_factory=set)
    delivered: set[int] = field(default_factory=set)
    waiting: deque[asyncio.Future[None]] = field(default_factory=deque)
    gone: bool = False


class MemoryStream:
    """One stream by its `StreamPlan`: bounds, dedup, compare-and-set and work queues as the broker's; a tap to `tell`."""

    def __init__(self, plan: StreamPlan, prefix: str, clock: Clock, tell: Callable[[CoreMessage], None]) -> None:
        self.plan = plan
        self.kept: dict[int, StoredMessage] = {}
        self.places: dict[str, QueuePlace] = {}
        self.size_bytes = 0
        self.newest = SEQUENCE_FIRST
        """The largest sequence number that was given out."""
        self._prefix = prefix
        self._clock = clock
        self._tell = tell
        self._by_subject: dict[str, list[int]] = {}
        self._ids: dict[str, tuple[int, float]] = {}

    def store(
        self, subject: str, data: bytes, msg_id: str, *, expected: int | None = None, info: Mapping[str, str]
    ) -> int:
        """Store and return the sequence; a known `msg_id` returns the sequence it got before. `info` is a header."""
        self._forget_old()
        current = self.revision(subject)
        if expected is not None and expected != current:
            raise record_conflict(subject, current, expected)
        if msg_id in self._ids:
            return self._ids[msg_id][0]
        kept = StoredMessage(self.newest + 1, subject, data, msg_id, self._clock.monotonic(), self._clock.wall())
        self._make_room(kept)
        self.newest = kept.sequence
        self.kept[kept.sequence] = kept
        self.size_bytes += kept.size_bytes
        self._by_subject.setdefault(subject, []).append(kept.sequence)
        self._ids[msg_id] = (kept.sequence, kept.at_s)
        self._tap(kept, info)
        self.wake(subject)
        return kept.sequence

    def store_piece(self, subject: str, data: bytes, msg_id: str) -> None:
        """Store a piece of a blob; where the stream keeps the first one, that is there already."""
        with contextlib.suppress(QueueFull):
            self.store(subject, data, msg_id, info={})

    def _make_room(self, kept: StoredMessage) -> None:
        plan = self.plan
        keeps = (*plan.subjects, *((plan.copies[1],) if plan.copies else ()))
        if not any(matches(subject, kept.subject) for subject in keeps):
            raise BrokerUnavailable("no stream keeps this subject", got=kept.subject, allowed=", ".join(keeps))
        if plan.message_bytes_max and len(kept.data) > plan.message_bytes_max:
            raise ProtocolMisuse(
                "JetStream refused", got=f"{kept.subject}: {len(kept.data)} bytes", allowed=f"{plan.message_bytes_max}"
            )
        of_subject = self._by_subject.get(kept.subject, [])
        crowded = bool(plan.per_subject) and len(of_subject) >= plan.per_subject
        if crowded and plan.keeps_first:
            raise queue_full(kept.subject, f"{plan.per_subject} per subject")
        if plan.discard == "new" and self.size_bytes + kept.size_bytes > plan.bytes_max:
            raise no_room(f"{kept.subject}: {self.size_bytes} of {plan.bytes_max} bytes")
        if crowded:
            self.remove(of_subject[0])
        while self.kept and self.size_bytes + kept.size_bytes > plan.bytes_max:
            self.remove(next(iter(self.kept)))

    def _tap(self, kept: StoredMessage, info: Mapping[str, str]) -> None:
        tap = self.plan.tap
        if tap is None or not matches(f"{self._prefix}.{tap}.>" if tap else f"{self._prefix}.>", kept.subject):
            return
        headers = {
            "Nats-Msg-Id": kept.msg_id,
            "Nats-Stream": self.plan.name,
            "Nats-Subject": kept.subject,
            "Nats-Sequence": str(kept.sequence),
            **info,
        }
        tail = kept.subject.removeprefix(f"{self._prefix}.")
        self._tell(CoreMessage(f"{self._prefix}.tap.{tail}", kept.data, None, headers))

    def _forget_old(self) -> None:
        now_s = self._clock.monotonic()
        while self._ids and now_s - next(iter(self._ids.values()))[1] > self.plan.dedup_s:
            del self._ids[next(iter(self._ids))]
        while self.plan.age_max_s and self.kept and now_s - next(iter(self.kept.values())).at_s > self.plan.age_max_s:
            self.remove(next(iter(self.kept)))

    def revision(self, subject: str) -> int:
        """Return the sequence of the last message of `subject`, or 0."""
        of_subject = self._by_subject.get(subject)
        return of_subject[-1] if of_subject else 0

    def last(self, subject: str) -> StoredMessage | None:
        """Return the last message of `subject`, or None."""
        self._forget_old()
        return self.kept.get(self.revision(subject))

    def select(self, subject_filter: str, after: int = 0) -> list[StoredMessage]:
        """Return what matches, in order, above `after`."""
        self._forget_old()
        if after:
            # Sequences only grow: a reader of the event log's end need not look at its beginning.
            tail = itertools.takewhile(lambda kept: kept.sequence > after, reversed(self.kept.values()))
            return [kept for kept in list(tail)[::-1] if matches(subject_filter, kept.subject)]
        return [kept for kept in self.kept.values() if matches(subject_filter, kept.subject)]

    def subjects(self, subject_filter: str) -> list[str]:
        """Return the subjects that match and hold messages, sorted."""
        self._forget_old()
        return sorted(subject for subject in self._by_subject if matches(subject_filter, subject))

    def remove(self, sequence: int) -> None:
        """Remove one message; harmless if it is gone."""
        kept = self.kept.pop(sequence, None)
        if kept is None:
            return
        self.size_bytes -= kept.size_bytes
        of_subject = self._by_subject[kept.subject]
        of_subject.remove(sequence)
        if not of_subject:
            del self._by_subject[kept.subject]
        for place in self.places.values():
            place.out.discard(sequence)
            place.delivered.discard(sequence)

    def count_stored(self, subject_filter: str, more_than: int) -> StoredCounts:
        """Return how many messages there are of each subject that matches; none if there are not `more_than` in all."""
        self._forget_old()
        named = self._by_subject if len(self.kept) > more_than else {}
        counts = {subject: len(of_it) for subject, of_it in named.items() if matches(subject_filter, subject)}
        return StoredCounts(counts, self.size_bytes, self.plan.bytes_max)

    def purged(self, subject_filter: str, keep: int) -> list[StoredMessage]:
        """Return what matches, but for the newest `keep`."""
        matching = self.select(subject_filter)
        return matching[: max(0, len(matching) - keep)]

    def purge(self, subject_filter: str, keep: int = 0) -> int:
        """Remove what matches, but for the newest `keep`, and return the number."""
        if self.plan.append_only:
            raise ProtocolMisuse("this stream is append-only", got=subject_filter)
        purged = self.purged(subject_filter, keep)
        for kept in purged:
            self.remove(kept.sequence)
        return len(purged)

    def place(self, durable: str, subject_filter: str) -> QueuePlace:
        """Return the durable place, new or as it was left."""
        return self.places.setdefault(durable, QueuePlace(subject_filter))

    def remove_places(self, subject_filter: str) -> None:
        """Remove the queue places of all readers of exactly this filter."""
        for durable, place in list(self.places.items()):
            if place.subject_filter == subject_filter:
                place.gone = True
                del self.places[durable]

    def take(self, place: QueuePlace) -> tuple[StoredMessage, bool] | None:
        """Return the oldest message that is not out, and whether it was delivered before."""
        if place.gone:
            return None
        for kept in self.select(place.subject_filter):
            if kept.sequence not in place.out:
                before = kept.sequence in place.delivered
                place.out.add(kept.sequence)
                place.delivered.add(kept.sequence)
                return kept, before
        return None

    def wake(self, subject: str) -> None:
        """Let one reader of each place that covers `subject` look again."""
        for place in self.places.values():
            if matches(place.subject_filter, subject):
                while place.waiting:
                    reader = place.waiting.popleft()
                    if not reader.done():
                        reader.set_result(None)
                        break


class MemoryBroker:
    """The shared state of a process's buses: streams by name, live feeds. `stream_bytes_max` bounds tensor streams."""

    def __init__(self, *, stream_bytes_max: int = GIB, clock: Clock | None = None) -> None:
        self.stream_bytes_max = stream_bytes_max
        self.streams: dict[str, MemoryStream] = {}
        self.feeds: dict[BufferedSubscription, str] = {}
        self.nonces = itertools.count(1)
        self._clock = clock or SystemClock()

    def provision(self, run: str) -> None:
        """Create the streams of `run` that do not exist yet."""
        prefix = Subjects(run).prefix
        for plan in (*stream_plan(run, self.stream_bytes_max), live_plan(run)):
            if plan.name not in self.streams:
                self.streams[plan.name] = MemoryStream(plan, prefix, self._clock, self.core_message)

    def fit(self, run: str, places: Places) -> int:
        """Narrow the streams of `run`; return how many changed."""
        changed = 0
        for plan in fitted_plan(run, places):
            stream = self.streams[plan.name]
            fitted = replace(
                stream.plan,
                subjects=plan.subjects,
                dedup_s=plan.dedup_s,
                message_bytes_max=plan.message_bytes_max,
                keeps_first=plan.keeps_first,
            )
            changed += fitted != stream.plan
            stream.plan = fitted
        return changed

    def core_message(self, core_message: CoreMessage) -> None:
        """Hand a core message to every feed that covers its subject."""
        for feed in [feed for feed, wanted in self.feeds.items() if matches(wanted, core_message.subject)]:
            feed.push(core_message)

    def hears(self, subject: str) -> bool:
        """Return whether any feed listens to `subject`."""
        return any(matches(wanted, subject) for wanted in self.feeds.values())


class MemoryDelivery:
    """One message that its consumer holds."""

    def __init__(self, owner: MemoryConsumer, kept: StoredMessage, *, redelivered: bool) -> None:
        self.subject = kept.subject
        self.data = kept.data
        self.redelivered = redelivered
        self.sequence = kept.sequence
        self._owner = owner

    async def ack(self) -> None:
        await asyncio.sleep(0)
        self._owner.stream.remove(self.sequence)

    async def drop(self) -> None:
        await self.ack()

    async def hold(self) -> None:
        """Keep it; in memory a message is never redelivered after silence."""
        await asyncio.sleep(0)

    async def release(self) -> None:
        await asyncio.sleep(0)
        self._owner.give_back(self)


class MemoryConsumer:
    """A `Consumer` of a memory stream."""

    def __init__(self, stream: MemoryStream, place: QueuePlace) -> None:
        self.stream = stream
        self._place = place
        self._unsettled: dict[int, MemoryDelivery] = {}
        self._newest_then = 0
        self._turns = QueueTurns()
        self._closed = False

    @property
    def turns(self) -> int:
        return self._turns.count

    async def next(self, timeout_s: float) -> MemoryDelivery | None:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_s
        await asyncio.sleep(0)
        while not self._closed:
            if (delivery := self._take()) is not None:
                return delivery
            left = deadline - loop.time()
            if left <= 0:
                return None
            news: asyncio.Future[None] = loop.create_future()
            self._place.waiting.append(news)
            try:
                await asyncio.wait({news}, timeout=left)
            except asyncio.CancelledError:
                if news.done():  # the news was for us alone: let another reader look
                    self.stream.wake(self._place.subject_filter)
                raise
            finally:
                if not news.done():
                    self._place.waiting.remove(news)
        return None

    def _take(self) -> MemoryDelivery | None:
        taken = None if self._closed else self.stream.take(self._place)
        if taken is None:
            return None
        delivery = self._unsettled[taken[0].sequence] = MemoryDelivery(self, taken[0], redelivered=taken[1])
        return delivery

    async def arrived(self, most: int) -> list[MemoryDelivery]:
        found: list[MemoryDelivery] = []
        while len(found) < most and (delivery := self._take()) is not None:
            found.append(delivery)
        return found

    async def drained(self) -> bool:
        await asyncio.sleep(0)
        if self._place.gone:
            raise RecordConflict("somebody else reads this queue", got=self._place.subject_filter)
        oldest = next((kept.sequence for kept in self.stream.select(self._place.subject_filter)), None)
        before, self._newest_then = self._newest_then, self.stream.newest
        self._turns.see(self.stream.newest, self.stream.newest if oldest is None else oldest - 1)
        return oldest is None or 0 < before < oldest

    def give_back(self, delivery: MemoryDelivery) -> None:
        """Let the message be delivered again."""
        self._unsettled.pop(delivery.sequence, None)
        self._place.out.discard(delivery.sequence)
        self.stream.wake(delivery.subject)

    async def close(self) -> None:
        await asyncio.sleep(0)
        self._closed = True
        for delivery in list(self._unsettled.values()):
            self.give_back(delivery)


class MemoryBus:
    """One service's bus on a shared `MemoryBroker`."""

    def __init__(self, run: str, broker: MemoryBroker) -> None:
        self.stats = BusStats()
        self.signatures: Signatures | None = None
        self._broker = broker
        self._run = run
        broker.provision(run)
        self._live = live_plan(run)
        self._plans = (*stream_plan(run, broker.stream_bytes_max), self._live)
        self._feeds: list[BufferedSubscription] = []
        self._consumers: list[MemoryConsumer] = []
        self._closed = False

    def reconnects(self, subject: str) -> int:
        """Return the count in `stats`: 0, unless somebody simulates lost connections."""
        del subject  # one broker keeps all
        return self.stats.reconnects

    async def provision(self, stream_bytes_max: int, bulk: Sequence[str] = ()) -> None:
        """Nothing is left to do: a memory broker has the streams of all its runs, with bounds of its own."""
        del stream_bytes_max, bulk
        await self._give_way()

    async def _stream(self, subject: str) -> MemoryStream:
        plan = stream_of(self._plans, subject)
        await self._give_way()
        return self._broker.streams[plan.name]

    async def _give_way(self) -> None:
        await asyncio.sleep(0)
        if self._closed:
            raise BrokerUnavailable("the bus is closed", todo="open a new one")

    async def put_blob(self, stem: str, payload: Buffer | Upload) -> BlobRef:
        stream = await self._stream(f"{stem}.0")
        upload = Upload.of(payload)
        async with contextlib.aclosing(upload.pieces()) as pieces:
            async for number, piece in pieces:
                subject = f"{stem}.{number}"
                stream.store_piece(subject, bytes(piece), f"c{next(self._broker.nonces)}")
                self.stats.bytes_up += len(piece)
                self.stats.blob_bytes_up += len(piece)
                upload.stored.add(number)
        return upload.ref(stem)

    async def get_blob(self, ref: BlobRef, size_bytes_max: int) -> bytes:
        return await whole(self, Download(ref, size_bytes_max))

    async def pieces(self, download: Download) -> AsyncGenerator[Portion]:
        stream = await self._stream(f"{download.ref.stem}.0")
        for number in itertools.chain.from_iterable(download.pages()):
            kept = stream.last(f"{download.ref.stem}.{number}")
            if kept is None:
                got = f"{download.ref.stem}.{number} of {download.ref.chunks}"
                raise BlobGone("chunks of a blob are missing", got=got)
            self.stats.bytes_down += len(kept.data)
            self.stats.blob_bytes_down += len(kept.data)
            download.take(number, kept.data)
            yield [(number, kept.data)]
        download.verify()

    async def fit(self, places: Places) -> int:
        await self._give_way()
        return self._broker.fit(self._run, places)

    async def count_stored(self, subject_filter: str, *, more_than: int) -> StoredCounts:
        return (await self._stream(subject_filter)).count_stored(subject_filter, more_than)

    async def purge(self, subject_filter: str, *, keep: int = 0) -> int:
        return (await self._stream(subject_filter)).purge(subject_filter, keep)

    async def put_record(
        self,
        subject: str,
        data: bytes,
        *,
        expected: int | None,
        info: Info | None = None,
        reconnects: int | None = None,
    ) -> int:
        del reconnects  # there is one connection
        check_size(subject, data)
        stream = await self._stream(subject)
        nonce = f"r{next(self._broker.nonces)}"
        revision = stream.store(subject, bytes(data), nonce, expected=expected, info=info_header(info))
        if self._live.copies == (stream.plan.name, subject):
            self._keep_last(subject, bytes(data))
        self.stats.bytes_up += len(data)
        return revision

    def _keep_last(self, subject: str, data: bytes) -> None:
        """Keep what was said last, for watchers; a simulated broker may lack that stream."""
        live = self._broker.streams.get(self._live.name)
        if live is not None:
            live.store(subject, data, f"t{next(self._broker.nonces)}", info={})

    async def get_record(self, subject: str) -> Record | None:
        kept = (await self._stream(subject)).last(subject)
        if kept is None:
            return None
        self.stats.bytes_down += len(kept.data)
        return Record(subject, kept.data, kept.sequence)

    async def get_records(self, subject_filter: str) -> list[Record]:
        stream = await self._stream(subject_filter)
        found = [kept for subject in stream.subjects(subject_filter) if (kept := stream.last(subject)) is not None]
        self.stats.bytes_down += sum(len(kept.data) for kept in found)
        return [Record(kept.subject, kept.data, kept.sequence) for kept in found]

    async def publish(self, subject: str, data: bytes, *, msg_id: str, info: Info | None = None) -> None:
        check_size(subject, data)
        stream = await self._stream(subject)
        stream.store(subject, bytes(data), msg_id, info=info_header(info))
        self.stats.bytes_up += len(data)

    async def consume(self, subject_filter: str, *, durable: str, takeover: bool = False) -> MemoryConsumer:
        stream = await self._stream(subject_filter)
        if takeover:
            stream.remove_places(subject_filter)
        place = stream.place(token(durable, "durable name"), subject_filter)
        consumer = MemoryConsumer(stream, place)
        self._consumers.append(consumer)
        return consumer

    async def replay(self, subject_filter: str, *, after: int = 0, limit: int = 1000) -> list[StoredEvent]:
        found = (await self._stream(subject_filter)).select(subject_filter, after)[:limit]
        self.stats.bytes_down += sum(len(kept.data) for kept in found)
        return [StoredEvent(kept.sequence, kept.subject, kept.data, kept.stored_s) for kept in found]

    async def tell(self, subject: str, data: bytes) -> None:
        check_size(subject, data)
        await self._give_way()
        self.stats.bytes_up += len(data)
        self._tell_feeds(CoreMessage(subject, bytes(data)))

    def _tell_feeds(self, core_message: CoreMessage) -> None:
        self._broker.core_message(core_message)
        if any(matches(kept, core_message.subject) for kept in self._live.subjects):
            self._keep_last(core_message.subject, core_message.data)

    async def reach(self, timeout_s: float) -> bool:  # noqa: ARG002  (memory answers at once)
        await asyncio.sleep(0)
        return True

    async def listen(
        self, subject_filter: str, *, len_max: int = 1024, late_s_max: float = 0.0
    ) -> BufferedSubscription:
        del late_s_max
        await self._give_way()
        feed = self._new_feed(len_max)
        self._broker.feeds[feed] = subject_filter
        self._feeds.append(feed)
        return feed

    def _new_feed(self, len_max: int) -> BufferedSubscription:
        """Return a feed that is not listening yet; a bus at the end of a link has its own kind."""
        return BufferedSubscription(len_max, self.stats, self.hush)

    async def hush(self, feed: BufferedSubscription) -> None:
        """Stop filling a subscription."""
        self._broker.feeds.pop(feed, None)

    async def ask(self, subject: str, data: bytes, *, timeout_s: float, answer_at: str = "") -> bytes | None:
        check_size(subject, data)
        await self._give_way()
        if not self._broker.hears(subject):
            return None
        inbox = answer_at or f"_INBOX.{next(self._broker.nonces)}"
        feed = self._new_feed(1)
        self._broker.feeds[feed] = inbox
        try:
            self._broker.core_message(CoreMessage(subject, bytes(data), inbox))
            self.stats.bytes_up += len(data)
            answer = await feed.next(timeout_s)
        finally:
            await feed.close()
        return None if answer is None else answer.data

    async def close(self) -> None:
        for consumer in self._consumers:
            await consumer.close()
        for feed in self._feeds:
            self._broker.feeds.pop(feed, None)
            feed.end()
        self._closed = True
