"""The seam between Atoll and its broker: what a service may ask of a bus, and what it may be told.

Four kinds of traffic, and no other:

* **blobs**: large immutable bytes, stored in pieces under a stem (`atoll.wire.blobs`). Nothing sees them until a small
  message names them (claim check), so a writer that dies half way leaves garbage that ages out, never half a tensor.
* **records**: the last value of a subject, written by compare-and-set. Heads, leases, membership and data leases are
  records. A lost acknowledgement is settled inside the adapter by reading back: `put_record` answers with the revision
  or with `RecordConflict`, never with "maybe".
* **durable messages**: acknowledged and deduplicated by `msg_id`; consumed once from a work queue (`consume`) or read
  in order from the tape (`replay`).
* **at-most-once messages** (`tell`, `listen`, `ask`): at most once, for calls, heartbeats and commands. Losing one is harmless.

Rules for implementers. Every wait is bounded by a time-out. Every call may raise `BusError` kinds, `BrokerUnavailable`
or `StorageFull`, and nothing else. `info` is a small mapping that taps show in place of the payload. Methods are
coroutines of the caller's event loop; the JetStream adapter does its network work in a thread of its own.
The same contract suite runs against every implementation.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

from atoll.wire.blobs import BlobRef, Download, Portion, Upload
from atoll.wire.limits import Buffer, Info
from atoll.wire.traffic import BusStats


@dataclass(frozen=True, slots=True)
class Record:
    """The last value of a subject; `revision` is what the next `put_record` must expect."""

    subject: str
    data: bytes
    revision: int


@dataclass(frozen=True, slots=True)
class CoreMessage:
    """One at-most-once message; `reply` is a subject to `tell` an answer to, or None."""

    subject: str
    data: bytes
    reply: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class StoredEvent:
    """One stored message of the tape, with its sequence number."""

    sequence: int
    subject: str
    data: bytes


class Delivery(Protocol):
    """One queued message in this consumer's hands until it is settled."""

    subject: str
    data: bytes
    redelivered: bool

    async def ack(self) -> None:
        """Remove the message from the queue, confirmed by the broker."""

    async def hold(self) -> None:
        """Say that work on it goes on, so that it is not delivered again yet."""

    async def release(self) -> None:
        """Give it back for another delivery."""


class Consumer(Protocol):
    """A durable place in a work queue; survives its process."""

    async def next(self, timeout_s: float) -> Delivery | None:
        """Return the next message, or None when none came within `timeout_s`."""

    async def drained(self) -> bool:
        """Return whether the broker says that nothing is queued and nothing unsettled; False when it says nothing.

        Raises `RecordConflict` when this reader took the queue over and somebody else has removed it since.
        """

    async def close(self) -> None:
        """Stop reading; unsettled messages will be delivered again."""


class Subscription(Protocol):
    """A bounded live feed: beyond its bound the *oldest* at-most-once message is dropped and counted."""

    def __aiter__(self) -> AsyncIterator[CoreMessage]:
        """Iterate until `close`."""

    async def next(self, timeout_s: float) -> CoreMessage | None:
        """Return the next at-most-once message, or None when none came within `timeout_s`."""

    async def close(self) -> None:
        """Stop listening; iteration ends."""


@runtime_checkable
class Bus(Protocol):
    """What a service may ask of a bus. See the module docstring for the four kinds of traffic."""

    stats: BusStats

    async def put_blob(self, stem: str, payload: Buffer | Upload) -> BlobRef:
        """Store `payload` under `stem` and return where it lies once every piece is acknowledged.

        Bytes are handed down: a buffer is cut into pieces as it lies in memory, an `Upload` yields the pieces that are missing.

        Idempotent: storing the same bytes under the same stem again changes nothing. An `Upload` that failed goes on where
        it was when it is given again. Raises `StorageFull` when the stream refuses for want of room after retries, and
        whatever making a piece raises.
        """

    async def get_blob(self, ref: BlobRef, size_bytes_max: int) -> bytes:
        """Return the whole blob; raise `BlobGone`, `BlobCorrupt`, or `PeerMisbehaved` when larger than allowed."""

    def pieces(self, download: Download) -> AsyncGenerator[Portion]:
        """Yield every piece that is missing, in the order of arrival, each once, as many at a time as came together.

        The blob as a whole is verified after the last one: what came before is only as good as the reader's own checks.
        Raises `BlobGone` or `BlobCorrupt`. A download that failed goes on where it was when it is given again.
        """

    async def purge(self, subject_filter: str) -> int:
        """Delete every stored message that matches and return how many there were."""

    async def put_record(
        self,
        subject: str,
        data: bytes,
        *,
        expected: int | None,
        info: Info | None = None,
        reconnects: int | None = None,
    ) -> int:
        """Write the record if its revision is still `expected` (0: it must not exist; None: whatever it is).

        Returns the new revision. Raises `RecordConflict` if somebody else wrote first. A time-out is settled by reading
        back: if the stored value is ours, its revision is returned.

        `reconnects` is what `stats` said when everything that the record names was stored. On a later connection the record
        is not sent, and `BrokerUnavailable` is raised: a broker that lost power may have lost what it acknowledged before.
        """

    async def get_record(self, subject: str) -> Record | None:
        """Return the record as its leader has it (never stale), or None."""

    async def get_records(self, subject_filter: str) -> list[Record]:
        """Return all records that match, in one paged read; may be stale by a moment when served by a mirror."""

    async def publish(self, subject: str, data: bytes, *, msg_id: str, info: Info | None = None) -> None:
        """Store `data` once, however often it is retried under `msg_id`; return when acknowledged.

        Raises `QueueFull` when the work queue holds its bound for this subject already.
        """

    async def consume(self, subject_filter: str, *, durable: str, takeover: bool = False) -> Consumer:
        """Resume (or create) the durable consumer of a work queue.

        With `takeover` every other durable reader of this filter loses its place: what it holds is delivered again at
        once, although it may still be there (frozen or cut off, it cannot give anything back), and it gets nothing more.
        Raises `RecordConflict` when another takes the queue over at the same moment.
        """

    async def replay(self, subject_filter: str, *, after: int = 0, limit: int = 1000) -> list[StoredEvent]:
        """Return stored messages that match, in order, with sequence numbers above `after`; at most `limit`."""

    async def tell(self, subject: str, data: bytes) -> None:
        """Send at most once; raise nothing when nobody listens."""

    async def listen(self, subject_filter: str, *, len_max: int = 1024) -> Subscription:
        """Hear at-most-once messages (and the taps) from now on."""

    async def ask(self, subject: str, data: bytes, *, timeout_s: float) -> bytes | None:
        """Send and return the first answer, or None when none came within `timeout_s`."""

    async def close(self) -> None:
        """Let go of the broker; pending acknowledged work is already safe."""
