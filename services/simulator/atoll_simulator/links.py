"""The bus of one simulated process: the in-memory bus at the other end of a link of its own.

A link has two legs. A message takes `bytes / bandwidth` to leave, one after the other, and `latency_s` to arrive, so a large
blob holds up the heartbeat behind it. A request takes both legs: its payload up, its answer down. While a link is cut nothing
travels: a request on its way is sent again when the link is back, and fails like the real adapter's after `TOTAL_S`, and the
requested action may have happened; a core message is lost. A process that dies leaves its link without a message. Not
modelled: retransmission and congestion inside a leg, and a broker that needs time of its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncGenerator, Callable, Coroutine
from dataclasses import dataclass
from typing import Any, Final, TypeVar

from atoll.base.errors import BrokerUnavailable
from atoll.bus.interface import CoreMessage, Record, StoredEvent
from atoll.bus.memory import MemoryBroker, MemoryBus, MemoryConsumer, MemoryDelivery
from atoll.bus.options import DEFAULTS
from atoll.bus.streams import check_size
from atoll.bus.subscriptions import BufferedSubscription
from atoll.wire.blobs import BlobRef, Download, Portion, Upload
from atoll.wire.limits import Buffer, Info
from atoll.wire.traffic import BusStats

T = TypeVar("T")

TOTAL_S: Final = DEFAULTS.total_s
MESSAGE_BYTES: Final = 128
"""Bytes of subject, headers and acknowledgement of a message, beside its payload (our estimate)."""


@dataclass(frozen=True, slots=True)
class LinkShape:
    """The limits of a link: seconds each way, bytes/s up and down (0: no bound), share of core messages lost."""

    latency_s: float = 0.0
    up_bytes_s: float = 0.0
    down_bytes_s: float = 0.0
    loss: float = 0.0


class Leg:
    """One direction of a link: first in, first out."""

    def __init__(self, bytes_s: float, latency_s: float, count: Callable[[int], None]) -> None:
        """Begin with nothing on the way; `count` receives the size of each message."""
        self._bytes_s = bytes_s
        self._latency_s = latency_s
        self.free_s = 0.0
        self._count = count

    def arrival_s(self, now_s: float, size_bytes: int) -> float:
        """Put a message on the leg and return when it arrives."""
        leaves_s = max(now_s, self.free_s)
        if self._bytes_s > 0:
            leaves_s += (size_bytes + MESSAGE_BYTES) / self._bytes_s
        self.free_s = leaves_s
        self._count(size_bytes + MESSAGE_BYTES)
        return leaves_s + self._latency_s


class SimulatedLink:
    """A process's link to the broker: two legs; whole, cut, or gone after the process died."""

    def __init__(self, shape: LinkShape, dice: random.Random) -> None:
        """Begin whole; `dice` decides which core messages are lost. Belongs to the running loop."""
        self.stats = BusStats()
        self.up = Leg(shape.up_bytes_s, shape.latency_s, self._count_up)
        self.down = Leg(shape.down_bytes_s, shape.latency_s, self._count_down)
        self._loss = shape.loss
        self._dice = dice
        self._loop = asyncio.get_running_loop()
        self._whole = asyncio.Event()
        self._whole.set()
        self._reasons: dict[str, None] = {}
        self._behind: set[asyncio.Task[None]] = set()
        self.cuts = 0
        self.gone = False

    @property
    def whole(self) -> bool:
        """Return whether messages travel."""
        return self._whole.is_set() and not self.gone

    def _count_up(self, size_bytes: int) -> None:
        self.stats.wire_bytes_up += size_bytes

    def _count_down(self, size_bytes: int) -> None:
        self.stats.wire_bytes_down += size_bytes

    def cut(self, reason: str) -> None:
        """Block everything, and lose what is on its way, until every reason is healed."""
        self._reasons[reason] = None
        self._whole.clear()
        self.cuts += 1
        self.up.free_s = self.down.free_s = 0.0

    def heal(self, reason: str) -> None:
        """Take a reason away."""
        self._reasons.pop(reason, None)
        if not self._reasons:
            self._whole.set()

    async def carry(self, leg: Leg, size_bytes: int, within_s: float | None = TOTAL_S) -> None:
        """Return when a message of `size_bytes` has arrived, sent again after every cut.

        Raises:
            BrokerUnavailable: the link stayed cut for `within_s` (None: for ever), or its process is dead.
        """
        deadline_s = None if within_s is None else self._loop.time() + within_s
        while True:
            await self._travelling(deadline_s)
            cuts = self.cuts
            await asyncio.sleep(leg.arrival_s(self._loop.time(), size_bytes) - self._loop.time())
            if cuts == self.cuts and not self.gone:
                return

    async def _travelling(self, deadline_s: float | None) -> None:
        if self.gone:
            raise BrokerUnavailable("this process is dead")
        if self._whole.is_set():
            return
        try:
            async with asyncio.timeout_at(deadline_s):
                await self._whole.wait()
        except TimeoutError:
            raise BrokerUnavailable("the broker does not answer", got="a link that is cut") from None

    def behind(self, work: Coroutine[Any, Any, None]) -> None:
        """Do something that its caller does not wait for."""
        task = self._loop.create_task(work)
        self._behind.add(task)
        task.add_done_callback(self._behind.discard)

    def core_message(self, leg: Leg, size_bytes: int, arrive: object, *arguments: object) -> None:
        """Call `arrive(*arguments)` when a core message has arrived, or never."""
        if not self.whole or (self._loss and self._dice.random() < self._loss):
            return
        due_s = leg.arrival_s(self._loop.time(), size_bytes)
        self._loop.call_at(due_s, self._arrived, self.cuts, arrive, arguments)

    def _arrived(self, cuts: int, arrive: object, arguments: tuple[object, ...]) -> None:
        if cuts == self.cuts and not self.gone and callable(arrive):
            arrive(*arguments)


class LinkedFeed(BufferedSubscription):
    """A subscription at the far end of a link."""

    def __init__(self, link: SimulatedLink, bus: LinkedBus, len_max: int) -> None:
        super().__init__(len_max, bus.stats, bus.hush)
        self._link = link

    def push(self, core_message: CoreMessage) -> None:
        """Send a core message down the link."""
        self._link.core_message(self._link.down, len(core_message.data), super().push, core_message)


class LinkedDelivery:
    """A queued message delivered to a process at the far end of a link."""

    def __init__(self, inner: MemoryDelivery, link: SimulatedLink) -> None:
        self.subject, self.data, self.redelivered = inner.subject, inner.data, inner.redelivered
        self._inner = inner
        self._link = link

    async def ack(self) -> None:
        """Remove the message from the queue."""
        await self._link.carry(self._link.up, 0)
        await self._inner.ack()
        await self._link.carry(self._link.down, 0)

    async def drop(self) -> None:
        """Have the message removed when the word has arrived; while the link is cut, it waits."""
        await asyncio.sleep(0)
        self._link.behind(self._removed())

    async def _removed(self) -> None:
        with contextlib.suppress(BrokerUnavailable):  # its process is dead: the next one gets the message
            await self._link.carry(self._link.up, 0, None)
            await self._inner.drop()

    async def hold(self) -> None:
        """Tell the queue that work on it goes on."""
        await self._link.carry(self._link.up, 0)

    async def release(self) -> None:
        """Give it back for another delivery."""
        await self._link.carry(self._link.up, 0)
        await self._inner.release()


class LinkedConsumer:
    """A work queue's reader behind a link."""

    def __init__(self, inner: MemoryConsumer, link: SimulatedLink) -> None:
        self._inner = inner
        self._link = link

    @property
    def turns(self) -> int:
        """Return how often all that was queued at one moment was settled since."""
        return self._inner.turns

    async def next(self, timeout_s: float) -> LinkedDelivery | None:
        """Return the next message, or None when none came within `timeout_s`; nothing is taken while the link is cut."""
        if not self._link.whole:
            await asyncio.sleep(timeout_s)
            return None
        delivery = await self._inner.next(timeout_s)
        if delivery is None:
            return None
        await self._link.carry(self._link.down, len(delivery.data), None)
        return LinkedDelivery(delivery, self._link)

    async def arrived(self, most: int) -> list[LinkedDelivery]:  # noqa: ARG002  (the link carries one at a time)
        """Return nothing: each message travels alone."""
        return []

    async def drained(self) -> bool:
        """Return whether nothing is queued and nothing unsettled."""
        await self._link.carry(self._link.up, 0)
        drained = await self._inner.drained()
        await self._link.carry(self._link.down, 0)
        return drained

    async def close(self) -> None:
        """Stop reading; a dead process cannot give anything back."""
        if not self._link.gone:
            await self._inner.close()


class LinkedBus(MemoryBus):
    """One process's bus: all its requests travel over `link`."""

    def __init__(self, run: str, broker: MemoryBroker, link: SimulatedLink) -> None:
        super().__init__(run, broker)
        self.link = link
        self.stats = link.stats

    def sever(self) -> None:
        """End without a message, as a killed process does."""
        self.link.gone = True
        for feed in self._feeds:
            self._broker.feeds.pop(feed, None)

    def _new_feed(self, len_max: int) -> BufferedSubscription:
        return LinkedFeed(self.link, self, len_max)

    async def _up(self, size_bytes: int) -> None:
        await self.link.carry(self.link.up, size_bytes)

    async def _down(self, size_bytes: int) -> None:
        await self.link.carry(self.link.down, size_bytes)

    async def put_blob(self, stem: str, payload: Buffer | Upload) -> BlobRef:
        """Store a blob; see `Bus`."""
        upload = Upload.of(payload)
        await self._up(sum(len(upload.make(number)) for number in upload.missing()))
        ref = await super().put_blob(stem, upload)
        await self._down(0)
        return ref

    async def pieces(self, download: Download) -> AsyncGenerator[Portion]:
        """Yield a blob's pieces, all together at the moment when the last one has arrived; see `Bus`."""
        await self._up(0)
        arrived = [piece async for portion in super().pieces(download.copy()) for piece in portion]
        await self._down(sum(len(piece) for _, piece in arrived))
        for number, piece in arrived:
            download.take(number, piece)
        if arrived:
            yield arrived
        download.verify()

    async def purge(self, subject_filter: str, *, keep: int = 0) -> int:
        """Delete what matches; see `Bus`."""
        await self._up(0)
        count = await super().purge(subject_filter, keep=keep)
        await self._down(0)
        return count

    async def put_record(
        self,
        subject: str,
        data: bytes,
        *,
        expected: int | None,
        info: Info | None = None,
        reconnects: int | None = None,
    ) -> int:
        """Write by compare-and-set; see `Bus`."""
        await self._up(len(data))
        revision = await super().put_record(subject, data, expected=expected, info=info, reconnects=reconnects)
        await self._down(0)
        return revision

    async def get_record(self, subject: str) -> Record | None:
        """Return a record; see `Bus`."""
        await self._up(0)
        record = await super().get_record(subject)
        await self._down(0 if record is None else len(record.data))
        return record

    async def get_records(self, subject_filter: str) -> list[Record]:
        """Return all records that match; see `Bus`."""
        await self._up(0)
        records = await super().get_records(subject_filter)
        await self._down(sum(len(record.data) for record in records))
        return records

    async def publish(self, subject: str, data: bytes, *, msg_id: str, info: Info | None = None) -> None:
        """Store once; see `Bus`."""
        await self._up(len(data))
        await super().publish(subject, data, msg_id=msg_id, info=info)
        await self._down(0)

    async def consume(self, subject_filter: str, *, durable: str, takeover: bool = False) -> LinkedConsumer:  # type: ignore[override]
        """Read a work queue; see `Bus`."""
        await self._up(0)
        consumer = await super().consume(subject_filter, durable=durable, takeover=takeover)
        await self._down(0)
        return LinkedConsumer(consumer, self.link)

    async def replay(self, subject_filter: str, *, after: int = 0, limit: int = 1000) -> list[StoredEvent]:
        """Return stored messages in order; see `Bus`."""
        await self._up(0)
        entries = await super().replay(subject_filter, after=after, limit=limit)
        await self._down(sum(len(entry.data) for entry in entries))
        return entries

    async def tell(self, subject: str, data: bytes) -> None:
        """Send at most once; see `Bus`."""
        check_size(subject, data)
        await self._give_way()
        self.stats.bytes_up += len(data)
        self.link.core_message(self.link.up, len(data), self._tell_feeds, CoreMessage(subject, bytes(data)))

    async def reach(self, timeout_s: float) -> bool:
        """Return whether the link carries a message there and back in time."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._up(0)
                await self._down(0)
        except TimeoutError:
            return False
        return True

    async def listen(
        self, subject_filter: str, *, len_max: int = 1024, late_s_max: float = 0.0
    ) -> BufferedSubscription:
        """Receive core messages; see `Bus`."""
        await self._up(0)
        feed = await super().listen(subject_filter, len_max=len_max, late_s_max=late_s_max)
        await self._down(0)
        return feed

    async def ask(self, subject: str, data: bytes, *, timeout_s: float, answer_at: str = "") -> bytes | None:
        """Send and return the first answer, or None; see `Bus`."""
        check_size(subject, data)
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + timeout_s
        try:
            async with asyncio.timeout_at(deadline_s):
                await self._up(len(data))
        except TimeoutError:
            return None
        return await super().ask(subject, data, timeout_s=deadline_s - loop.time(), answer_at=answer_at)

    async def close(self) -> None:
        """Give back all unsettled deliveries and end the subscriptions, unless the process is dead."""
        if not self.link.gone:
            await super().close()
