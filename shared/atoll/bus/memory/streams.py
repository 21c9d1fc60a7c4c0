"""The streams of a run in plain memory, with the broker's rules: bounds, dedup, compare-and-set, work queues.

Deterministic: sequences count up, queues deliver in order, time is a `Clock` that may be simulated. It does not survive
its process, replicate, or redeliver after silence (an unsettled message returns when its consumer releases it or
closes).
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from atoll.base.clock import Clock
from atoll.base.errors import BrokerUnavailable, ProtocolMisuse, QueueFull, RecordConflict, StorageFull
from atoll.bus.interface import CoreMessage, StoredCounts
from atoll.bus.streams import StreamPlan
from atoll.wire.subjects import matches

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
    """One stream after its `StreamPlan`; `tell` receives its tap."""

    def __init__(self, plan: StreamPlan, prefix: str, clock: Clock, tell: Callable[[CoreMessage], None]) -> None:
        """Begin empty."""
        self.plan = plan
        self.kept: dict[int, StoredMessage] = {}
        self.places: dict[str, QueuePlace] = {}
        self.size_bytes = 0
        self._prefix = prefix
        self._clock = clock
        self._tell = tell
        self._sequence = SEQUENCE_FIRST
        self._by_subject: dict[str, list[int]] = {}
        self._ids: dict[str, tuple[int, float]] = {}

    def store(
        self, subject: str, data: bytes, msg_id: str, *, expected: int | None = None, info: Mapping[str, str]
    ) -> int:
        """Store and return the sequence; a known `msg_id` returns the sequence it got before. `info` is a header."""
        self._forget_old()
        current = self.revision(subject)
        if expected is not None and expected != current:
            raise RecordConflict(
                "someone else wrote the record first",
                got=f"revision {current} of {subject}",
                allowed=f"revision {expected}",
                todo="read it again and decide anew",
            )
        if msg_id in self._ids:
            return self._ids[msg_id][0]
        kept = StoredMessage(self._sequence + 1, subject, data, msg_id, self._clock.monotonic(), self._clock.wall())
        self._make_room(kept)
        self._sequence = kept.sequence
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
        """Apply the bounds, or refuse."""
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
            raise QueueFull(
                "the queue holds its bound for this subject",
                got=kept.subject,
                allowed=f"{plan.per_subject} per subject",
            )
        if plan.discard == "new" and self.size_bytes + kept.size_bytes > plan.bytes_max:
            raise StorageFull(
                "the stream has no room",
                got=f"{kept.subject}: {self.size_bytes} of {plan.bytes_max} bytes",
                todo="raise stream_bytes_max, free the disk, or let consumers catch up",
            )
        if crowded:
            self.remove(of_subject[0])
        while self.kept and self.size_bytes + kept.size_bytes > plan.bytes_max:
            self.remove(next(iter(self.kept)))

    def _tap(self, kept: StoredMessage, info: Mapping[str, str]) -> None:
        """Show a stored message."""
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
        """Drop messages and ids that have outlived their window."""
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
        gone = self.purged(subject_filter, keep)
        for kept in gone:
            self.remove(kept.sequence)
        return len(gone)

    def place(self, durable: str, subject_filter: str) -> QueuePlace:
        """Return the durable place, new or as it was left."""
        return self.places.setdefault(durable, QueuePlace(subject_filter))

    def remove_places(self, subject_filter: str) -> None:
        """Remove the queue places of all readers of exactly this filter."""
        for durable, place in list(self.places.items()):
            if place.subject_filter == subject_filter:
                place.gone = True
                del self.places[durable]

    @property
    def newest(self) -> int:
        """Return the largest sequence number that was given out."""
        return self._sequence

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
