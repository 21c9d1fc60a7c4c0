"""The broker as its users know it: records by compare-and-set, blobs, work queues with one reader each, at-most-once messages.

Everything here is durable but what is on its way: a crash loses at-most-once messages, pulls that wait and nothing
else. While the disk is full, whatever would store something is refused and changes nothing. Each change is shown to a
`Witness`, which knows what may never happen.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any, NamedTuple, Protocol

from atoll.sim.dst.network import Network, Refused
from atoll.sim.dst.process import Process

QUEUED_MAX = 2
ACK_WAIT_S = 8.0


class Full(Refused):
    """There is no room, for now: in the stream, or in the queue for this subject."""


class WrongRevision(Refused):
    """Somebody else wrote the record first."""


class Gone(Refused):
    """The chunks are not there."""


class NoReader(Refused):
    """This reader was removed from the queue."""


class ReaderConflict(Refused):
    """The queue has another reader already."""


class Record(NamedTuple):
    """The last value of a name; `nonce` tells whose write it was."""

    revision: int
    value: Any
    nonce: str


NOTHING = Record(0, None, "")


class Message(NamedTuple):
    """A queued message; at most `QUEUED_MAX` of one `subject` are kept."""

    sequence: int
    subject: str
    body: Any


@dataclass(slots=True)
class Queue:
    """A work queue: what is stored, what its one reader holds, and the pulls that wait."""

    messages: dict[int, Message] = field(default_factory=dict)
    subjects: Counter[str] = field(default_factory=Counter)
    reader: str = ""
    out: dict[int, int] = field(default_factory=dict)
    pulls: list[tuple[float, Process, Callable[[object], None]]] = field(default_factory=list)


class Witness(Protocol):
    """Who is shown every durable change."""

    def see_record(self, name: str, before: Record, after: Record, blobs: Mapping[str, Any]) -> None:
        """A record has changed."""

    def see_purged(self, stem: str) -> None:
        """A blob was deleted."""

    def see_queued(self, body: object) -> None:
        """A message was stored."""

    def see_settled(self, body: object, fate: object) -> None:
        """A message was acknowledged and is gone; `fate` is the command that led to it."""


class Broker:
    """One broker; its methods are what a request does when it arrives."""

    def __init__(self, network: Network, witness: Witness, tally: Counter[str]) -> None:
        """Hold nothing."""
        self.records: dict[str, Record] = {}
        self.blobs: dict[str, Any] = {}
        self.queues: dict[str, Queue] = {}
        self.full = False
        self.listeners: dict[str, list[tuple[Process, Callable[[Any], None]]]] = {}
        self._network = network
        self._engine = network.engine
        self._witness = witness
        self._tally = tally
        self._sequence = 0
        self._deliveries = 0
        self._stored: set[str] = set()

    # --- records and blobs ------------------------------------------------------------------------------------------

    def get(self, name: str) -> Record:
        """Return a record, `NOTHING` when there is none."""
        return self.records.get(name, NOTHING)

    def get_all(self, names: tuple[str, ...]) -> list[Record]:
        """Return the records of these names that exist, in this order."""
        return [self.records[name] for name in names if name in self.records]

    def put(self, name: str, value: object, expected: int, nonce: str) -> int:
        """Write a record if its revision is `expected`; return the new revision. Taps hear of it under its kind."""
        before = self.records.get(name, NOTHING)
        if before.revision != expected:
            self._tally["writes refused"] += 1
            raise WrongRevision
        self._make_room()
        self._sequence += 1
        after = Record(self._sequence, value, nonce)
        self._witness.see_record(name, before, after, self.blobs)
        self.records[name] = after
        self.tell(name.partition("/")[0], value)
        return after.revision

    def put_blob(self, stem: str, payload: object) -> None:
        """Store a blob; storing it again changes nothing."""
        self._make_room()
        self.blobs.setdefault(stem, payload)

    def get_blob(self, stem: str) -> object:
        """Return a blob."""
        if stem not in self.blobs:
            self._tally["blobs gone"] += 1
            raise Gone
        return self.blobs[stem]

    def purge(self, stem: str) -> None:
        """Delete a blob, or every blob that a pattern matches; a full disk refuses that too."""
        self._make_room()
        doomed = [stem] if stem in self.blobs else []
        if "*" in stem:
            doomed = [each for each in self.blobs if fnmatchcase(each, stem)]
            self._tally["blobs swept"] += len(doomed)
        for each in doomed:
            del self.blobs[each]
            self._witness.see_purged(each)

    # --- work queues -------------------------------------------------------------------------------------------------

    def publish(self, queue: str, subject: str, body: object, message_id: str) -> None:
        """Store a message, once per id."""
        if message_id in self._stored:
            self._tally["publishes repeated"] += 1
            return
        self._make_room()
        place = self.queues[queue]
        if place.subjects[subject] >= QUEUED_MAX:
            self._tally["queue full"] += 1
            raise Full
        self._stored.add(message_id)
        self._sequence += 1
        place.messages[self._sequence] = Message(self._sequence, subject, body)
        place.subjects[subject] += 1
        self._witness.see_queued(body)
        self._serve(place)

    def readers(self, queue: str) -> list[str]:
        """Return the readers of a queue: one or none."""
        reader = self.queues[queue].reader
        return [reader] if reader else []

    def remove_reader(self, queue: str, reader: str) -> None:
        """Remove a reader if it is still there: what it holds can be delivered again."""
        place = self.queues[queue]
        if place.reader != reader:
            return
        self._tally["readers removed"] += 1
        place.reader = ""
        place.out.clear()
        pulls, place.pulls = place.pulls, []
        for _, process, deliver in pulls:
            self._network.down(process, deliver, NoReader())

    def create_reader(self, queue: str, reader: str) -> None:
        """Begin to read; refused while another reads."""
        self._make_room()
        place = self.queues[queue]
        if place.reader not in ("", reader):
            self._tally["reader conflicts"] += 1
            raise ReaderConflict
        place.reader = reader

    def pull(
        self, queue: str, reader: str, process: Process, expires_s: float, deliver: Callable[[object], None]
    ) -> None:
        """Deliver the next message as soon as there is one, unless that takes too long."""
        place = self.queues[queue]
        if place.reader != reader:
            self._network.down(process, deliver, NoReader())
            return
        place.pulls.append((self._engine.now_s + expires_s, process, deliver))
        self._serve(place)

    def is_drained(self, queue: str, reader: str) -> bool:
        """Return whether nothing is queued and nothing is out."""
        place = self.queues[queue]
        if place.reader != reader:
            raise NoReader
        return not place.messages

    def ack(self, queue: str, reader: str, sequence: int, fate: object) -> None:
        """Remove a message for good; only the queue's reader can."""
        place = self.queues[queue]
        if place.reader != reader:
            self._tally["acks of removed readers"] += 1
            raise NoReader
        place.out.pop(sequence, None)
        message = place.messages.pop(sequence, None)
        if message is not None:
            place.subjects[message.subject] -= 1
            self._witness.see_settled(message.body, fate)

    def hold(self, queue: str, reader: str, sequence: int) -> None:
        """Put redelivery off."""
        place = self.queues[queue]
        if place.reader == reader and sequence in place.out:
            self._lend(place, sequence)

    def give_back(self, queue: str, reader: str, sequence: int) -> None:
        """Make a message available again."""
        place = self.queues[queue]
        if place.reader == reader and place.out.pop(sequence, None) is not None:
            self._serve(place)

    def _serve(self, place: Queue) -> None:
        """Answer pulls that wait, oldest first, with messages that are not out."""
        while place.pulls:
            sequence = next((each for each in place.messages if each not in place.out), None)
            if sequence is None:
                return
            expires_s, process, deliver = place.pulls.pop(0)
            if expires_s < self._engine.now_s:
                continue
            self._lend(place, sequence)
            self._network.down(process, deliver, place.messages[sequence])

    def _lend(self, place: Queue, sequence: int) -> None:
        """Note that a message is in its reader's hands, for so long."""
        self._deliveries += 1
        place.out[sequence] = self._deliveries
        self._engine.after(ACK_WAIT_S, self._expire, place, sequence, self._deliveries)

    def _expire(self, place: Queue, sequence: int, lent: int) -> None:
        if place.out.get(sequence) == lent:
            self._tally["redeliveries by silence"] += 1
            del place.out[sequence]
            if self._network.broker_up:
                self._serve(place)

    # --- at-most-once messages
    # ----------------------------------------------------------------------------------------------------

    def listen(self, subject: str, process: Process, hear: Callable[[Any], None]) -> None:
        """Let a process hear a subject from now on, for as long as it lives."""
        self.listeners.setdefault(subject, []).append((process, hear))

    def tell(self, subject: str, body: object) -> None:
        """Pass an at-most-once message on to all who listen."""
        heard = self.listeners.get(subject)
        if heard is None:
            return
        for process, hear in heard:
            if process.alive:
                self._network.down(process, hear, body)

    def hush(self, hear: Callable[[Any], None]) -> None:
        """Let somebody hear no more."""
        for subject, heard in self.listeners.items():
            self.listeners[subject] = [each for each in heard if each[1] != hear]

    # --- the machine below --------------------------------------------------------------------------------------------

    def crash(self) -> None:
        """Die; what is stored stays."""
        self._network.broker_up = False
        for place in self.queues.values():
            place.pulls.clear()

    def restart(self) -> None:
        """Be there again."""
        self._network.broker_up = True

    def _make_room(self) -> None:
        if self.full:
            self._tally["disk full"] += 1
            raise Full
