"""A bus whose messages are signed by who writes them and checked by who reads them, whatever broker lies between.

A locked door keeps strangers away from a broker. It does not keep the broker's own operator, or whoever copies its store, from
writing what he likes. So each process of a locked run signs its records, queued messages and core messages for the subject that
they are for, and believes only what somebody signed who may write on that subject (`atoll.keys.signatures`).

A message travels as its JSON and, behind a line break, its signature: people and old tools still read the first line. Chunks
are not signed one by one: a signed message names them by a BLAKE3 (`atoll.wire.blobs`), so nobody can exchange them. The event
log and the taps are for people; nothing in Atoll acts on them, and they carry no signature.

Answers go to an inbox that only the broker knows beforehand, so they are signed as answers of the run and not for a subject.

A message that nobody vouches for is not an error of the bus: readers meet wrong messages anyway, and know what each means for
them. The bus hands up in its place why it is not believed, and `decode` refuses that like any other unreadable message.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final, Protocol

from atoll.base.errors import PeerMisbehaved
from atoll.wire.blobs import Upload
from atoll.wire.signature_line import unproven
from atoll.wire.subjects import Subjects

if TYPE_CHECKING:
    from atoll.bus.interface import Bus, Consumer, CoreMessage, Delivery, Record, StoredEvent, Subscription
    from atoll.wire.blobs import BlobRef, Download, Portion
    from atoll.wire.limits import Buffer, Info
    from atoll.wire.traffic import BusStats

INBOX: Final = "_INBOX."


class Signatures(Protocol):
    """One identity's signatures, and its belief in those of others."""

    def signed(self, subject: str, message: bytes) -> bytes:
        """Return a message with our signature for `subject`."""

    def opened(self, subject: str, data: bytes) -> bytes:
        """Return the message in `data`; raise `PeerMisbehaved` if nobody signed it who may write on `subject`."""


def is_signed(subject: str) -> bool:
    """Return whether messages on `subject` carry a signature: all of a run, but its event log and its taps."""
    levels = subject.split(".", 3)
    return len(levels) > 2 and levels[0] == "atoll" and levels[2] not in ("ev", "tap")


class SignedBus:
    """Another bus whose messages carry signatures; see the module."""

    def __init__(self, inner: Bus, run: str, signatures: Signatures) -> None:
        """Sign and check what goes through `inner`, which this bus closes with itself."""
        self.signatures = signatures
        self.stats: BusStats = inner.stats
        self._inner = inner
        self._answer = Subjects(run).answer

    # --- what is written --------------------------------------------------------------------------------------------

    async def put_record(
        self,
        subject: str,
        data: bytes,
        *,
        expected: int | None,
        info: Info | None = None,
        reconnects: int | None = None,
    ) -> int:
        """Sign, then as `Bus.put_record`. A signature is the same each time, so a retry finds its own record."""
        signed = self._signed(subject, data)
        return await self._inner.put_record(subject, signed, expected=expected, info=info, reconnects=reconnects)

    async def publish(self, subject: str, data: bytes, *, msg_id: str, info: Info | None = None) -> None:
        """Sign, then as `Bus.publish`."""
        await self._inner.publish(subject, self._signed(subject, data), msg_id=msg_id, info=info)

    async def tell(self, subject: str, data: bytes) -> None:
        """Sign, then as `Bus.tell`; what goes to an inbox is an answer."""
        await self._inner.tell(subject, self._signed(subject, data))

    async def ask(self, subject: str, data: bytes, *, timeout_s: float) -> bytes | None:
        """Sign the question, then as `Bus.ask`, and check the answer."""
        answer = await self._inner.ask(subject, self._signed(subject, data), timeout_s=timeout_s)
        return None if answer is None else self._opened(self._answer, answer)

    async def put_blob(self, stem: str, payload: Buffer | Upload) -> BlobRef:
        """Store as `Bus.put_blob`; the reference's digest cannot be met by other bytes."""
        upload = Upload.of(payload)
        upload.collision_free = True
        return await self._inner.put_blob(stem, upload)

    # --- what is read -----------------------------------------------------------------------------------------------

    async def get_record(self, subject: str) -> Record | None:
        """Read as `Bus.get_record`, and check."""
        record = await self._inner.get_record(subject)
        return None if record is None else self._record(record)

    async def get_records(self, subject_filter: str) -> list[Record]:
        """Read as `Bus.get_records`, and check each."""
        return [self._record(record) for record in await self._inner.get_records(subject_filter)]

    async def replay(self, subject_filter: str, *, after: int = 0, limit: int = 1000) -> list[StoredEvent]:
        """Read as `Bus.replay`, and check what is signed; the event log is not."""
        found = await self._inner.replay(subject_filter, after=after, limit=limit)
        return [
            replace(entry, data=self._opened(entry.subject, entry.data)) if is_signed(entry.subject) else entry
            for entry in found
        ]

    async def consume(self, subject_filter: str, *, durable: str, takeover: bool = False) -> Consumer:
        """Consume as `Bus.consume`, and check each message."""
        consumer = await self._inner.consume(subject_filter, durable=durable, takeover=takeover)
        return _SignedConsumer(consumer, self)

    async def listen(self, subject_filter: str, *, len_max: int = 1024, late_s_max: float = 0.0) -> Subscription:
        """Listen as `Bus.listen`, and check each message."""
        heard = await self._inner.listen(subject_filter, len_max=len_max, late_s_max=late_s_max)
        return _SignedSubscription(heard, self)

    async def get_blob(self, ref: BlobRef, size_bytes_max: int) -> bytes:
        """Read as `Bus.get_blob`."""
        return await self._inner.get_blob(ref, size_bytes_max)

    def pieces(self, download: Download) -> AsyncGenerator[Portion]:
        """Read as `Bus.pieces`."""
        return self._inner.pieces(download)

    # --- the rest ---------------------------------------------------------------------------------------------------

    async def provision(self, stream_bytes_max: int, bulk: Sequence[str] = ()) -> None:
        """Do as `Bus.provision`."""
        await self._inner.provision(stream_bytes_max, bulk)

    def reconnects(self, subject: str) -> int:
        """Do as `Bus.reconnects`."""
        return self._inner.reconnects(subject)

    async def purge(self, subject_filter: str) -> int:
        """Do as `Bus.purge`."""
        return await self._inner.purge(subject_filter)

    async def reach(self, timeout_s: float) -> bool:
        """Do as `Bus.reach`."""
        return await self._inner.reach(timeout_s)

    async def close(self) -> None:
        """Close the bus below."""
        await self._inner.close()

    def core_message(self, heard: CoreMessage) -> CoreMessage:
        """Return a core message with its signature checked and taken off."""
        if not is_signed(heard.subject):
            return heard
        return replace(heard, data=self._opened(heard.subject, heard.data))

    def delivery(self, held: Delivery) -> _SignedDelivery:
        """Return a delivery with its signature checked and taken off."""
        return _SignedDelivery(held, held.subject, self._opened(held.subject, held.data), held.redelivered)

    def _record(self, record: Record) -> Record:
        return replace(record, data=self._opened(record.subject, record.data))

    def _signed(self, subject: str, data: bytes) -> bytes:
        if subject.startswith(INBOX):
            subject = self._answer
        return self.signatures.signed(subject, data) if is_signed(subject) else data

    def _opened(self, subject: str, data: bytes) -> bytes:
        try:
            return self.signatures.opened(subject, data)
        except PeerMisbehaved as error:
            return unproven(f"{error.what}: {error.got}" if error.got else error.what)


def signatures_of(bus: Bus) -> Signatures | None:
    """Return whose signatures a bus sets, None for the bus of an open run."""
    found: Signatures | None = getattr(bus, "signatures", None)
    return found


@dataclass(slots=True)
class _SignedDelivery:
    """A delivery whose signature is off."""

    held: Delivery
    subject: str
    data: bytes
    redelivered: bool

    async def ack(self) -> None:
        await self.held.ack()

    async def hold(self) -> None:
        await self.held.hold()

    async def release(self) -> None:
        await self.held.release()


@dataclass(frozen=True, slots=True)
class _SignedConsumer:
    """A consumer whose deliveries' signatures are off."""

    consumer: Consumer
    bus: SignedBus

    async def next(self, timeout_s: float) -> Delivery | None:
        found = await self.consumer.next(timeout_s)
        return None if found is None else self.bus.delivery(found)

    async def arrived(self, most: int) -> Sequence[Delivery]:
        return [self.bus.delivery(one) for one in await self.consumer.arrived(most)]

    async def discard(self, deliveries: Sequence[Delivery]) -> None:
        await self.consumer.discard([one.held if isinstance(one, _SignedDelivery) else one for one in deliveries])

    async def drained(self) -> bool:
        return await self.consumer.drained()

    async def close(self) -> None:
        await self.consumer.close()


@dataclass(frozen=True, slots=True)
class _SignedSubscription:
    """A subscription whose messages' signatures are off."""

    heard: Subscription
    bus: SignedBus

    async def __aiter__(self) -> AsyncIterator[CoreMessage]:
        async for core_message in self.heard:
            yield self.bus.core_message(core_message)

    async def next(self, timeout_s: float) -> CoreMessage | None:
        found = await self.heard.next(timeout_s)
        return None if found is None else self.bus.core_message(found)

    async def close(self) -> None:
        await self.heard.close()
