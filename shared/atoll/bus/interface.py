"""The interface between Atoll and its broker: four kinds of traffic, and no other.

* **blobs**: large immutable bytes, stored in pieces under a stem (`atoll.wire.blobs`), invisible until a small message names
  them. So a writer that dies half way leaves garbage that ages out, never half a tensor.
* **records**: the last value of a subject, written by compare-and-set. If an acknowledgement is lost, the adapter reads back:
  `put_record` answers with the revision or with `RecordConflict`, never with "maybe".
* **durable messages**: acknowledged and deduplicated by `msg_id`; consumed once from a work queue (`consume`) or read in order
  from the event log (`replay`).
* **core messages** (`tell`, `listen`, `ask`): at most once, for calls, heartbeats and commands. Losing one is harmless.

Every wait is bounded by a time-out. Every call may raise `BusError` kinds, `BrokerUnavailable` or `StorageFull`, and nothing
else. `info` is a small mapping that taps show in place of the payload. Methods are coroutines of the caller's event loop. One
contract suite (`tests/support/bus_contract.py`) runs against every implementation.
"""
# ruff: noqa: D102  (each method of `ForwardingBus` is the one of `Bus`)

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final, Protocol, runtime_checkable

from atoll.bus.streams import Places
from atoll.wire.blobs import BlobRef, Download, Portion, Upload
from atoll.wire.limits import Buffer, Info
from atoll.wire.subjects import Subjects
from atoll.wire.traffic import BusStats

STORED_AT: Final = "Nats-Time-Stamp"
"""The header with the broker's time of storage."""
NODES: Final = "atoll.nodes"
"""Where the operator asks what a broker's nodes are; no run has it, whose subjects have a third part."""
PAGE_EVENTS: Final = 1000
"""The number of entries of the event log that its readers take at a time."""


@dataclass(frozen=True, slots=True)
class Record:
    """The last value of a subject; the next `put_record` must expect `revision`."""

    subject: str
    data: bytes
    revision: int


@dataclass(frozen=True, slots=True)
class StoredCounts:
    """Numbers of messages that a stream keeps of each subject, and the bytes of the whole stream, of at most `bytes_max`."""

    by_subject: Mapping[str, int]
    size_bytes: int
    bytes_max: int


@dataclass(frozen=True, slots=True)
class CoreMessage:
    """One core message; `reply` is a subject to `tell` an answer to, or None."""

    subject: str
    data: bytes
    reply: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class StoredEvent:
    """One stored message of the event log, with its sequence number, and when it was stored by the broker's clock, if known."""

    sequence: int
    subject: str
    data: bytes
    stored_s: float | None = None


class Delivery(Protocol):
    """One queued message that this consumer holds until it is settled."""

    subject: str
    data: bytes
    redelivered: bool

    async def ack(self) -> None:
        """Remove the message from the queue, confirmed by the broker."""

    async def drop(self) -> None:
        """Remove the message from the queue without waiting for the broker's word; one that stays comes again."""

    async def hold(self) -> None:
        """Report that work on it goes on, so that it is not delivered again yet."""

    async def release(self) -> None:
        """Return it for another delivery."""


@dataclass(slots=True)
class QueueTurns:
    """Turns of a queue: how often all that it held at one moment has been settled since; then the next moment begins."""

    count: int = 0
    _mark: int | None = None

    def see(self, newest: int, settled_to: int) -> None:
        """Take an answer of the broker: the number of its newest message, and up to which number all are settled."""
        passed = self._mark is not None and self._mark <= settled_to
        if passed or newest <= settled_to:
            self.count += 1
        if passed or self._mark is None:
            self._mark = newest


class Consumer(Protocol):
    """A durable place in a work queue; it survives its process."""

    @property
    def turns(self) -> int:
        """Return how often all that was queued at one moment was settled since, as `drained` has found (`QueueTurns`)."""

    async def next(self, timeout_s: float) -> Delivery | None:
        """Return the next message, or None if none came within `timeout_s`."""

    async def arrived(self, most: int) -> Sequence[Delivery]:
        """Return up to `most` further messages that are here already; do not wait for any."""

    async def drained(self) -> bool | None:
        """Return whether the broker reports nothing queued and nothing unsettled; None without an answer.

        While messages keep coming it is enough that all is settled that was queued at the last question. Raises
        `RecordConflict` if this reader took the queue over and another reader has removed it since.
        """

    async def close(self) -> None:
        """Stop reading; unsettled messages will be delivered again."""


class Subscription(Protocol):
    """A bounded live feed: beyond its bound the *oldest* core message is dropped and counted."""

    def __aiter__(self) -> AsyncIterator[CoreMessage]:
        """Iterate until `close`."""

    async def next(self, timeout_s: float) -> CoreMessage | None:
        """Return the next core message, or None if none came within `timeout_s`."""

    async def close(self) -> None:
        """Stop listening; iteration ends."""


class Signatures(Protocol):
    """One identity's signatures, and its belief in those of others."""

    def sign(self, subject: str, message: bytes, founding: str = "") -> bytes:
        """Return a message with our signature for `subject` in a founding of the run."""

    def verify(self, subject: str, data: bytes, founding: str = "", *, live: bool = False) -> bytes:
        """Return the message in `data`; raise `PeerMisbehaved` if nobody signed it who may write on `subject`.

        A `live` message was said just now; a stored one may be older than the end of its signer's key.
        """


@runtime_checkable
class Bus(Protocol):
    """The calls that a service may make. See the module docstring for the four kinds of traffic."""

    stats: BusStats
    signatures: Signatures | None
    """Those that this bus sets and checks; None for the bus of an open run."""

    async def provision(self, stream_bytes_max: int, bulk: Sequence[str] = ()) -> None:
        """Create those of the run's streams that do not exist; each that holds tensors may have so many bytes.

        `bulk` are the addresses of further brokers that keep fragments of the run (`RunRecord.bulk`). For a founder or
        rebuilder alone. Raises `StorageFull` (no room for such bounds) or `SettingsError` (a stream of that name is not ours).
        """

    async def put_blob(self, stem: str, payload: Buffer | Upload) -> BlobRef:
        """Store `payload` under `stem` and return its reference once every piece is acknowledged.

        Idempotent: storing the same bytes under the same stem again changes nothing. Where the first writer wins
        (contributions), other bytes change nothing either, and only a reader's check of the digest tells. A failed `Upload`
        continues where it was when the caller passes it again. Raises `StorageFull` if the stream still has no room after
        retries, and any error from making a piece.
        """

    async def get_blob(self, ref: BlobRef, size_bytes_max: int) -> bytes:
        """Return the whole blob; raise `BlobGone`, `BlobCorrupt`, or `PeerMisbehaved` if it is larger than allowed."""

    def pieces(self, download: Download) -> AsyncGenerator[Portion]:
        """Yield every missing piece once, in the order of arrival, together with the others that came with it.

        The bus verifies the whole blob after the last piece; before that, the reader has only its own checks.
        Raises `BlobGone` or `BlobCorrupt`. A failed download continues where it was when the caller passes it again.
        """

    async def fit(self, places: Places) -> int:
        """Narrow the run's streams to its `places`, and give those of a former release today's rules; return how many changed.

        For the owner of a shard. Raises `AccessDenied` behind the door of a former release.
        """

    async def count_stored(self, subject_filter: str, *, more_than: int) -> StoredCounts:
        """Return what a stream keeps below `subject_filter`; no subject is named unless it keeps over `more_than` messages."""

    async def purge(self, subject_filter: str, *, keep: int = 0) -> int:
        """Delete every stored message that matches, but for the newest `keep` of them, and return how many were deleted."""

    async def put_record(
        self,
        subject: str,
        data: bytes,
        *,
        expected: int | None,
        info: Info | None = None,
        reconnects: int | None = None,
    ) -> int:
        """Write the record if its revision is still `expected` (0: it must not exist; None: any revision).

        Returns the new revision. Raises `RecordConflict` if another writer was first. After a time-out the bus reads
        back: if the stored value is ours, it returns that revision.

        `reconnects` is what `Bus.reconnects` said when all that the record names was stored. On a later connection the bus
        raises `BrokerUnavailable` instead: a broker that lost power may have lost acknowledged data.
        """

    def reconnects(self, subject: str) -> int:
        """Return how often a connection was lost and made again to the broker that keeps `subject`."""

    async def get_record(self, subject: str) -> Record | None:
        """Return the record as its leader has it (never stale), or None."""

    async def get_records(self, subject_filter: str) -> list[Record]:
        """Return all records that match, in one paged read; a mirror may serve them slightly stale."""

    async def publish(self, subject: str, data: bytes, *, msg_id: str, info: Info | None = None) -> None:
        """Store `data` once, also if it is retried under `msg_id`; return when acknowledged, or raise `QueueFull`."""

    async def consume(self, subject_filter: str, *, durable: str, takeover: bool = False) -> Consumer:
        """Resume (or create) the durable consumer of a work queue.

        With `takeover` every other durable reader of this filter loses its place, and the messages that it holds are delivered
        again at once. Raises `RecordConflict` if another reader takes the queue over at the same moment.
        """

    async def replay(self, subject_filter: str, *, after: int = 0, limit: int = 1000) -> list[StoredEvent]:
        """Return stored messages that match, in order, with sequence numbers above `after`; at most `limit`."""

    async def tell(self, subject: str, data: bytes) -> None:
        """Send at most once; raise nothing if there is no listener."""

    async def reach(self, timeout_s: float) -> bool:
        """Return whether the broker answers within `timeout_s`: what was sent before has reached it then."""

    async def listen(self, subject_filter: str, *, len_max: int = 1024, late_s_max: float = 0.0) -> Subscription:
        """Hear core messages (and the taps) from now on, up to `late_s_max` late: then many of them cost one awakening."""

    async def ask(self, subject: str, data: bytes, *, timeout_s: float, answer_at: str = "") -> bytes | None:
        """Send and return the first answer, or None if none came within `timeout_s`, or nobody listens.

        The answer comes to an inbox that only the broker knows, or on `answer_at`, a subject that nobody else uses.
        """

    async def close(self) -> None:
        """Disconnect from the broker; pending acknowledged work is already safe."""


@dataclass(frozen=True, slots=True)
class StoredRun:
    """One run as a broker keeps it: streams, messages, bytes on disk, the sum of the bounds.

    `written_s` is when the newest message was stored, in seconds since the epoch, None if there is none.
    """

    run: str
    streams: int
    messages: int
    size_bytes: int
    bounds_bytes: int
    written_s: float | None

    def beside(self, other: StoredRun) -> StoredRun:
        """Return this run with what another broker keeps of it."""
        written = [at_s for at_s in (self.written_s, other.written_s) if at_s is not None]
        return replace(
            self,
            streams=self.streams + other.streams,
            messages=self.messages + other.messages,
            size_bytes=self.size_bytes + other.size_bytes,
            bounds_bytes=self.bounds_bytes + other.bounds_bytes,
            written_s=max(written, default=None),
        )


@dataclass(frozen=True, slots=True)
class StreamState:
    """One stream; `kind` is the end of its name (`UPM` is the queue of contributions).

    `size_bytes` and `bytes_max` are of one copy; `copies_current` are those that have everything, of `copies`.
    """

    kind: str
    messages: int
    size_bytes: int
    bytes_max: int
    copies: int
    copies_current: int


@dataclass(frozen=True, slots=True)
class NodeStatus:
    """One answer: the name and version of a nats-server, what its operator has it say, and which nodes it is connected to."""

    name: str
    version: str
    tags: tuple[str, ...]
    peers: tuple[str, ...]
    connections: int
    up_s: float


class ManagingBus(Bus, Protocol):
    """A bus at one broker that also answers for that broker: what it keeps of its runs, and how its nodes do."""

    @property
    def subjects(self) -> Subjects:
        """Return the subjects of this bus's run."""

    def beside(self, run: str) -> ManagingBus:
        """Return a bus for another run of the same broker on this connection; it lives as long as this one."""

    async def stored_runs(self) -> list[StoredRun]:
        """Return what the broker keeps of each of its runs, by name."""

    async def stream_states(self) -> list[StreamState]:
        """Return how full this run's streams are, of those that there are and that we may ask of."""

    async def nodes(self, wait_s: float) -> list[NodeStatus]:
        """Return what each node of a locked broker says of itself, by name, within `wait_s`; `SettingsError` if none tells."""

    async def switch_taps(self, *, bodies: bool) -> int:
        """Give the taps of this run bodies at this broker, or take them away; return how many streams that changed."""

    async def remove_run(self) -> int:
        """Delete all that the broker keeps of this bus's run; return how many streams that were."""


class ForwardingBus:
    """A layer over another bus, which it closes with itself: a subclass states only what it changes."""

    def __init__(self, inner: Bus) -> None:
        self.stats: BusStats = inner.stats
        self.signatures: Signatures | None = inner.signatures
        self._inner = inner

    async def provision(self, stream_bytes_max: int, bulk: Sequence[str] = ()) -> None:
        await self._inner.provision(stream_bytes_max, bulk)

    async def put_blob(self, stem: str, payload: Buffer | Upload) -> BlobRef:
        return await self._inner.put_blob(stem, payload)

    async def get_blob(self, ref: BlobRef, size_bytes_max: int) -> bytes:
        return await self._inner.get_blob(ref, size_bytes_max)

    def pieces(self, download: Download) -> AsyncGenerator[Portion]:
        return self._inner.pieces(download)

    async def fit(self, places: Places) -> int:
        return await self._inner.fit(places)

    async def count_stored(self, subject_filter: str, *, more_than: int) -> StoredCounts:
        return await self._inner.count_stored(subject_filter, more_than=more_than)

    async def purge(self, subject_filter: str, *, keep: int = 0) -> int:
        return await self._inner.purge(subject_filter, keep=keep)

    async def put_record(
        self,
        subject: str,
        data: bytes,
        *,
        expected: int | None,
        info: Info | None = None,
        reconnects: int | None = None,
    ) -> int:
        return await self._inner.put_record(subject, data, expected=expected, info=info, reconnects=reconnects)

    def reconnects(self, subject: str) -> int:
        return self._inner.reconnects(subject)

    async def get_record(self, subject: str) -> Record | None:
        return await self._inner.get_record(subject)

    async def get_records(self, subject_filter: str) -> list[Record]:
        return await self._inner.get_records(subject_filter)

    async def publish(self, subject: str, data: bytes, *, msg_id: str, info: Info | None = None) -> None:
        await self._inner.publish(subject, data, msg_id=msg_id, info=info)

    async def consume(self, subject_filter: str, *, durable: str, takeover: bool = False) -> Consumer:
        return await self._inner.consume(subject_filter, durable=durable, takeover=takeover)

    async def replay(self, subject_filter: str, *, after: int = 0, limit: int = 1000) -> list[StoredEvent]:
        return await self._inner.replay(subject_filter, after=after, limit=limit)

    async def tell(self, subject: str, data: bytes) -> None:
        await self._inner.tell(subject, data)

    async def reach(self, timeout_s: float) -> bool:
        return await self._inner.reach(timeout_s)

    async def listen(self, subject_filter: str, *, len_max: int = 1024, late_s_max: float = 0.0) -> Subscription:
        return await self._inner.listen(subject_filter, len_max=len_max, late_s_max=late_s_max)

    async def ask(self, subject: str, data: bytes, *, timeout_s: float, answer_at: str = "") -> bytes | None:
        return await self._inner.ask(subject, data, timeout_s=timeout_s, answer_at=answer_at)

    async def close(self) -> None:
        await self._inner.close()
