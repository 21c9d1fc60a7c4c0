"""Between processes and the broker: every message has a delay of its own and may be lost, doubled or held up.

A process has a bus as the JetStream adapter is one. A request is sent again under the same id until it is answered or the
patience of the adapter ends; a write whose answer was lost is found by reading back. What a request asks for happens at
the broker, whatever has become of its process meanwhile.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections import Counter, deque
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from atoll.base.errors import AtollError, BlobGone, BrokerUnavailable, RecordConflict
from atoll.base.retry import all_of
from atoll.bus.interface import CoreMessage, QueueTurns, Record, StoredCounts, StoredEvent
from atoll.bus.memory import MemoryBus, QueuePlace, StoredMessage
from atoll.bus.streams import Places, check_size, info_header, stream_of
from atoll.bus.subscriptions import BufferedSubscription
from atoll.protocol.invariants import InvariantBroken
from atoll.wire.blobs import BlobRef, Download, Portion, Upload
from atoll.wire.limits import Buffer, Info
from atoll.wire.subjects import Subjects, token
from schedules.broker import NoAnswer, NoLeader, ScheduleBroker, WatchedStream
from schedules.processes import Process, ProcessLoop

T = TypeVar("T")

TRY_S = 1.5
TOTAL_S = 6.0
SLOW_S = 3.0
WINDOW = 3
REPEATED = 0.5
PROPOSED = 0.3
"""So many of the requests that find no leader had reached a follower of the former one."""
UP, DOWN = "up", "down"


@dataclass(slots=True)
class LinkFaults:
    """What happens to messages at this moment; shares of all messages, seconds."""

    delay_s: float = 0.004
    slow: float = 0.0
    lost_messages: float = 0.0
    lost_requests: float = 0.0
    lost_answers: float = 0.0
    duplicates: float = 0.0


class Network:
    """All links. `on_violation` hears of what the witness at the broker cannot bear."""

    def __init__(
        self, loop: ProcessLoop, dice: random.Random, tally: Counter[str], on_violation: Callable[[BaseException], None]
    ) -> None:
        self.loop = loop
        self.dice = dice
        self.tally = tally
        self.link_faults = LinkFaults()
        self.cut: dict[str, dict[Process, int]] = {UP: {}, DOWN: {}}
        self._on_violation = on_violation

    def passes(self, process: Process, way: str) -> bool:
        """Return whether a link is whole in one direction."""
        return not self.cut[way].get(process)

    def send(self, process: Process, way: str, lost: float, call: Callable[..., object], *arguments: object) -> None:
        """Call `call(*arguments)` at the other end, later, twice or never."""
        faults, dice = self.link_faults, self.dice
        if not self.passes(process, way):
            return
        if lost and dice.random() < lost:
            self.tally[f"lost {way}"] += 1
            return
        self._carry(process, way, call, arguments)
        if faults.duplicates and dice.random() < faults.duplicates:
            self.tally["messages doubled"] += 1
            self._carry(process, way, call, arguments)

    def elect(self, stream: WatchedStream, broker: ScheduleBroker) -> None:
        """Have a stream find a leader; what then happens late is as good as any other message."""
        try:
            broker.elect(stream, lambda: self.dice.random() < REPEATED)
        except InvariantBroken as error:
            self._on_violation(error)

    def _carry(self, process: Process, way: str, call: Callable[..., object], arguments: tuple[object, ...]) -> None:
        faults, dice = self.link_faults, self.dice
        delay_s = dice.random() * 2.0 * faults.delay_s
        if faults.slow and dice.random() < faults.slow:
            delay_s += dice.random() * SLOW_S
        self.loop.after(delay_s, self._arrive, process, way, call, arguments)

    def _arrive(self, process: Process, way: str, call: Callable[..., object], arguments: tuple[object, ...]) -> None:
        if self.passes(process, way):
            try:
                call(*arguments)
            except InvariantBroken as error:
                self._on_violation(error)


class ScheduleFeed(BufferedSubscription):
    """A subscription of a process."""

    def __init__(self, bus: ScheduleBus, len_max: int) -> None:
        super().__init__(len_max, bus.stats, bus.hush)
        self._bus = bus

    def push(self, core_message: CoreMessage) -> None:
        """Send a message on its way to the process."""
        network = self._bus.network
        network.send(self._bus.process, DOWN, network.link_faults.lost_messages, super().push, core_message)


class ScheduleDelivery:
    """A queued message in a reader's hands."""

    def __init__(self, consumer: ScheduleConsumer, kept: StoredMessage, *, redelivered: bool) -> None:
        self.subject, self.data, self.sequence, self.redelivered = kept.subject, kept.data, kept.sequence, redelivered
        self._consumer = consumer

    async def ack(self) -> None:
        """Remove the message from the queue; a reader that was removed is not answered."""
        consumer = self._consumer

        def effect() -> None:
            if consumer.place.gone:
                consumer.bus.broker.tally["acks of removed readers"] += 1
                raise NoAnswer
            consumer.stream.settle(self.sequence)

        await consumer.bus.request(effect)
        consumer.unsettled.pop(self.sequence, None)

    async def drop(self) -> None:
        """Ask for the message to be removed; nobody answers."""
        consumer = self._consumer
        consumer.unsettled.pop(self.sequence, None)
        consumer.bus.say(consumer.settle, self.sequence)

    async def hold(self) -> None:
        consumer = self._consumer
        consumer.bus.say(consumer.bus.broker.hold, consumer.stream, consumer.place, self.sequence)

    async def release(self) -> None:
        consumer = self._consumer
        consumer.unsettled.pop(self.sequence, None)
        consumer.bus.say(consumer.bus.broker.give_back, consumer.stream, consumer.place, self.sequence)


class ScheduleConsumer:
    """A place in a work queue."""

    def __init__(self, bus: ScheduleBus, stream: WatchedStream, place: QueuePlace, *, takeover: bool) -> None:
        self.bus = bus
        self.stream = stream
        self.place = place
        self._takeover = takeover
        self.unsettled: dict[int, ScheduleDelivery] = {}
        self._newest_then = 0
        self._turns = QueueTurns()
        self._arrived: deque[tuple[StoredMessage, bool]] = deque()
        self._news = asyncio.Event()
        self._closed = False

    @property
    def turns(self) -> int:
        """Return how often all that was queued at one moment was settled since."""
        return self._turns.count

    async def next(self, timeout_s: float) -> ScheduleDelivery | None:
        """Return the next message, or None when none came within `timeout_s`."""
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + timeout_s
        asked = False
        while not self._closed:
            if self._arrived:
                kept, before = self._arrived.popleft()
                delivery = self.unsettled[kept.sequence] = ScheduleDelivery(self, kept, redelivered=before)
                return delivery
            left_s = deadline_s - loop.time()
            if left_s <= 0:
                return None
            self._news.clear()
            if not asked:
                asked = True
                self.bus.say(self._pull, self.bus.broker.loop.now_s + timeout_s)
            try:
                await asyncio.wait_for(self._news.wait(), left_s)
            except TimeoutError:
                continue
        return None

    def _pull(self, until_s: float) -> None:
        self.bus.broker.pull(self.stream, self.place, until_s, self._deliver)

    def _deliver(self, kept: StoredMessage, before: bool) -> None:  # noqa: FBT001  (as the store says it)
        network = self.bus.network
        network.send(self.bus.process, DOWN, network.link_faults.lost_requests, self._arrive, kept, before)

    def _arrive(self, kept: StoredMessage, before: bool) -> None:  # noqa: FBT001
        self._arrived.append((kept, before))
        self._news.set()

    async def arrived(self, most: int) -> list[ScheduleDelivery]:
        found: list[ScheduleDelivery] = []
        while self._arrived and len(found) < most:
            kept, before = self._arrived.popleft()
            found.append(ScheduleDelivery(self, kept, redelivered=before))
            self.unsettled[kept.sequence] = found[-1]
        return found

    def settle(self, sequence: int) -> None:
        """Remove a message at the broker, as a reader that was not removed itself."""
        if not self.place.gone:
            self.stream.settle(sequence)

    async def drained(self) -> bool | None:
        """Return whether nothing is queued and nothing unsettled; raise `RecordConflict` for a removed reader."""

        def effect() -> bool:
            if self.place.gone and self._takeover:
                self.bus.broker.tally["readers that found themselves removed"] += 1
                raise RecordConflict("somebody else reads this queue", got=self.place.subject_filter)
            oldest = next((kept.sequence for kept in self.stream.select(self.place.subject_filter)), None)
            before, self._newest_then = self._newest_then, self.stream.newest
            if not self.place.gone:
                self._turns.see(self.stream.newest, self.stream.newest if oldest is None else oldest - 1)
            return not self.place.gone and (oldest is None or 0 < before < oldest)

        try:
            return await self.bus.request(effect)
        except BrokerUnavailable:
            return None

    async def close(self) -> None:
        """Stop reading and give back what is not settled."""
        if self._closed:
            return
        self._closed = True
        self._news.set()
        for kept, _ in self._arrived:
            self.bus.say(self.bus.broker.give_back, self.stream, self.place, kept.sequence)
        for delivery in list(self.unsettled.values()):
            await delivery.release()


class ScheduleBus(MemoryBus):
    """The bus of one process."""

    def __init__(self, run: str, broker: ScheduleBroker, network: Network, process: Process) -> None:
        super().__init__(run, broker)
        self.broker = broker
        self.network = network
        self.process = process
        self._loop = network.loop
        self._open: list[ScheduleConsumer] = []
        self._tail = len(Subjects(run).prefix) + 1
        self._names: dict[str, str] = {}
        broker.on_restart.append(self._on_restart)

    def _on_restart(self) -> None:
        self.stats.reconnects += 1

    def reconnect(self) -> None:
        """Have been cut off for so long that the connection was opened anew."""
        self.stats.reconnects += 1

    def sever(self) -> None:
        """Be gone without a word, as a killed process is."""
        if self._on_restart in self.broker.on_restart:
            self.broker.on_restart.remove(self._on_restart)
        self.broker.forget_feeds(self._feeds)

    # --- requests -----------------------------------------------------------------------------------------------------

    async def request(self, effect: Callable[[], T], reconnects: int | None = None) -> T:
        """Have `effect` happen at the broker, at least once, and return what it answers; at most once it answers.

        Raises:
            BrokerUnavailable: no answer came, it may have happened; or the bus has reconnected more often than `reconnects`.
        """
        if self._closed:
            raise BrokerUnavailable("the bus is closed", todo="open a new one")
        loop, network = asyncio.get_running_loop(), self.network
        deadline_s = loop.time() + TOTAL_S
        while True:
            if reconnects is not None and reconnects != self.stats.reconnects:
                network.tally["records of a former connection"] += 1
                raise BrokerUnavailable("the connection was lost before the record was written")
            answer: asyncio.Future[Any] = loop.create_future()
            life = self.broker.life
            network.send(self.process, UP, network.link_faults.lost_requests, self._serve, life, effect, answer)
            timer = loop.call_later(TRY_S, _silence, answer)
            try:
                found = await answer
            finally:
                timer.cancel()
            if found is not _NOTHING:
                result, error = found
                if error is not None:
                    raise error
                return result  # type: ignore[no-any-return]
            self.stats.retries += 1
            network.tally["requests sent again"] += 1
            if loop.time() >= deadline_s:
                network.tally["requests given up"] += 1
                raise BrokerUnavailable("the broker does not answer")

    def _serve(self, life: int, effect: Callable[[], Any], answer: asyncio.Future[Any]) -> None:
        """Do what a request asks for, at the broker, and answer; what was sent to a former life of it is lost."""
        if not self.broker.up or life != self.broker.life:
            return
        result, error = None, None
        self.broker.asked = True
        try:
            result = effect()
        except NoLeader as without:
            if without.stream.proposed is not None and self.network.dice.random() < PROPOSED:
                without.stream.proposed.append(effect)
            return
        except NoAnswer:
            return
        except InvariantBroken:
            raise
        except AtollError as refused:
            error = refused
        finally:
            self.broker.asked = False
        network = self.network
        if network.link_faults.lost_answers and network.dice.random() < network.link_faults.lost_answers:
            network.tally["answers lost"] += 1
            return
        network.send(self.process, DOWN, network.link_faults.lost_requests, _answer, answer, result, error)

    def say(self, effect: Callable[..., object], *arguments: object) -> None:
        """Have `effect` happen at the broker at most once, or twice; nobody answers."""
        if not self._closed:
            lost, life = self.network.link_faults.lost_messages, self.broker.life
            self.network.send(self.process, UP, lost, self._if_up, life, effect, arguments)

    def _if_up(self, life: int, effect: Callable[..., object], arguments: tuple[object, ...]) -> None:
        if self.broker.up and life == self.broker.life:
            self.broker.asked = True
            try:
                effect(*arguments)
            except NoAnswer:
                return
            finally:
                self.broker.asked = False

    def _on(self, subject: str) -> WatchedStream:
        kind = subject[self._tail : self._tail + 4]
        if kind not in self._names:
            self._names[kind] = stream_of(self._plans, subject).name
        stream = self.broker.streams[self._names[kind]]
        assert isinstance(stream, WatchedStream)
        return stream

    # --- blobs --------------------------------------------------------------------------------------------------------

    async def put_blob(self, stem: str, payload: Buffer | Upload) -> BlobRef:
        """Store what is missing of a blob, several pieces at a time."""
        upload = Upload.of(payload)
        missing, turn = len(upload.missing()), asyncio.Lock()
        if upload.stored and missing:
            self.network.tally["uploads resumed"] += 1
        if missing + len(upload.stored) > 1:
            self.network.tally["blobs of several pieces"] += 1
        async with contextlib.aclosing(upload.pieces()) as pieces:

            async def writer() -> None:
                while True:
                    async with turn:
                        made = await anext(pieces, None)
                    if made is None:
                        return
                    number, piece = made[0], bytes(made[1])
                    subject = f"{stem}.{number}"
                    store = self._on(subject).store_piece
                    await self.request(partial(store, subject, piece, f"c{next(self._broker.nonces)}"))
                    self.stats.bytes_up += len(piece)
                    self.stats.blob_bytes_up += len(piece)
                    upload.stored.add(number)

            await all_of([writer() for _ in range(min(WINDOW, missing))])
        return upload.ref(stem)

    async def pieces(self, download: Download) -> AsyncGenerator[Portion]:
        """Yield what is missing of a blob, in whatever order it arrives."""

        async def read(page: list[int]) -> Portion:
            def effect() -> Portion:
                found: Portion = []
                for number in page:
                    subject = f"{download.ref.stem}.{number}"
                    kept = self._on(subject).last(subject)
                    if kept is None:
                        raise BlobGone("chunks of a blob are missing", got=subject)
                    found.append((number, kept.data))
                return found

            return await self.request(effect)

        reading: set[asyncio.Future[Portion]] = {asyncio.ensure_future(read(page)) for page in download.pages()}
        try:
            while reading:
                done, reading = await asyncio.wait(reading, return_when=asyncio.FIRST_COMPLETED)
                for portion in sorted((each.result() for each in done), key=lambda part: part[0][0]):
                    for number, piece in portion:
                        self.stats.bytes_down += len(piece)
                        download.take(number, piece)
                    yield portion
        finally:
            for each in reading:
                each.cancel()
            await asyncio.gather(*reading, return_exceptions=True)
        download.verify()

    async def fit(self, places: Places) -> int:
        return await self.request(lambda: self._broker.fit(self._run, places))

    async def count_stored(self, subject_filter: str, *, more_than: int) -> StoredCounts:
        return await self.request(lambda: self._on(subject_filter).count_stored(subject_filter, more_than))

    async def purge(self, subject_filter: str, *, keep: int = 0) -> int:
        return await self.request(lambda: self._on(subject_filter).purge(subject_filter, keep))

    # --- records ------------------------------------------------------------------------------------------------------

    async def put_record(
        self,
        subject: str,
        data: bytes,
        *,
        expected: int | None,
        info: Info | None = None,
        reconnects: int | None = None,
    ) -> int:
        """Write by compare-and-set; an earlier attempt of ours is found by its id."""
        check_size(subject, data)
        note, nonce = info_header(info), f"r{next(self.broker.nonces)}"

        def effect() -> int:
            stream = self._on(subject)
            try:
                return stream.store(subject, bytes(data), nonce, expected=expected, info=note)
            except RecordConflict:
                there = stream.last(subject)
                if there is not None and there.msg_id == nonce:
                    self.network.tally["lost writes found"] += 1
                    return there.sequence
                self.network.tally["compare-and-sets refused"] += 1
                raise

        revision = await self.request(effect, reconnects)
        self.stats.bytes_up += len(data)
        return revision

    async def get_record(self, subject: str) -> Record | None:
        def effect() -> Record | None:
            kept = self._on(subject).last(subject)
            return None if kept is None else Record(subject, kept.data, kept.sequence)

        return await self.request(effect)

    async def get_records(self, subject_filter: str) -> list[Record]:
        def effect() -> list[Record]:
            stream = self._on(subject_filter)
            found = [kept for subject in stream.subjects(subject_filter) if (kept := stream.last(subject)) is not None]
            return [Record(kept.subject, kept.data, kept.sequence) for kept in found]

        return await self.request(effect)

    # --- queues and the event log ------------------------------------------------------------------------------------------

    async def publish(self, subject: str, data: bytes, *, msg_id: str, info: Info | None = None) -> None:
        check_size(subject, data)
        note = info_header(info)
        await self.request(lambda: self._on(subject).store(subject, bytes(data), msg_id, info=note))
        self.stats.bytes_up += len(data)

    async def consume(self, subject_filter: str, *, durable: str, takeover: bool = False) -> ScheduleConsumer:  # type: ignore[override]
        name, removed = token(durable, "durable name"), False

        def effect() -> tuple[WatchedStream, QueuePlace]:
            nonlocal removed
            stream = self._on(subject_filter)
            if takeover and not removed:
                removed = True
                stream.remove_places(subject_filter)
            return stream, stream.place(name, subject_filter)

        stream, place = await self.request(effect)
        consumer = ScheduleConsumer(self, stream, place, takeover=takeover)
        self._open.append(consumer)
        return consumer

    async def replay(self, subject_filter: str, *, after: int = 0, limit: int = 1000) -> list[StoredEvent]:
        def effect() -> list[StoredEvent]:
            found = self._on(subject_filter).select(subject_filter, after)[:limit]
            return [StoredEvent(kept.sequence, kept.subject, kept.data) for kept in found]

        return await self.request(effect)

    # --- messages that may be lost ------------------------------------------------------------------------------------

    async def tell(self, subject: str, data: bytes) -> None:
        check_size(subject, data)
        await self._give_way()
        self.stats.bytes_up += len(data)
        self.say(self.broker.core_message, CoreMessage(subject, bytes(data)))

    async def reach(self, timeout_s: float) -> bool:
        """Return whether the broker answers in time."""
        try:
            async with asyncio.timeout(timeout_s):
                await self.request(lambda: None)
        except (TimeoutError, BrokerUnavailable):
            return False
        return True

    async def listen(
        self, subject_filter: str, *, len_max: int = 1024, late_s_max: float = 0.0
    ) -> BufferedSubscription:
        """Hear messages from now on; the network alone makes them late."""
        del late_s_max
        feed = ScheduleFeed(self, len_max)
        self._feeds.append(feed)

        def effect() -> None:
            if not self.process.dead:
                self.broker.feeds[feed] = subject_filter

        await self.request(effect)
        return feed

    async def ask(self, subject: str, data: bytes, *, timeout_s: float, answer_at: str = "") -> bytes | None:
        """Send and return the first answer, or None."""
        check_size(subject, data)
        await self._give_way()
        inbox, feed = answer_at or f"_INBOX.{next(self.broker.nonces)}", ScheduleFeed(self, 1)
        self._feeds.append(feed)
        self.broker.feeds[feed] = inbox
        try:
            self.say(self.broker.core_message, CoreMessage(subject, bytes(data), inbox))
            answer = await feed.next(timeout_s)
        finally:
            self.broker.feeds.pop(feed, None)
            self._feeds.remove(feed)
        return None if answer is None else answer.data

    async def hush(self, feed: BufferedSubscription) -> None:
        self.broker.feeds.pop(feed, None)

    async def close(self) -> None:
        """Give back what is not settled and end the feeds."""
        for consumer in self._open:
            await consumer.close()
        for feed in self._feeds:
            self.broker.feeds.pop(feed, None)
            feed.end()
        self._closed = True
        if self._on_restart in self.broker.on_restart:
            self.broker.on_restart.remove(self._on_restart)


_NOTHING = object()


def _silence(answer: asyncio.Future[Any]) -> None:
    if not answer.done():
        answer.set_result(_NOTHING)


def _answer(answer: asyncio.Future[Any], result: object, error: AtollError | None) -> None:
    if not answer.done():
        answer.set_result((result, error))
