"""The broker of a schedule: the in-memory broker, with a witness of every durable change, and the ways in which it fails.

It can be away, be full, have a stream without a leader, come back without the chunks that it acknowledged last and that
nothing names yet, or lose its whole store. The witness sees a change before it is made. A work queue delivers again what nobody
settles or holds.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable
from typing import Any, Protocol

from atoll.base.errors import AtollError, StorageFull
from atoll.bus.interface import CoreMessage
from atoll.bus.memory import SEQUENCE_FIRST, MemoryBroker, MemoryStream, QueuePlace, StoredMessage
from atoll.bus.streams import stream_of, stream_plan
from atoll.bus.subscriptions import BufferedSubscription
from atoll.wire.subjects import Subjects
from schedules.processes import ProcessLoop

ACK_WAIT_S = 6.0
GIB = 1 << 30


class NoAnswer(Exception):
    """The broker says nothing to this request."""


class NoLeader(NoAnswer):
    """The stream of this request has no leader: its nodes elect one."""

    def __init__(self, stream: WatchedStream) -> None:
        super().__init__(stream.plan.name)
        self.stream = stream


class Witness(Protocol):
    """Sees every durable change before it is made, and raises when it must not be."""

    def stored(self, kept: StoredMessage) -> None:
        """A message is about to be stored."""

    def purged(self, kept: StoredMessage) -> None:
        """A message is about to be removed because somebody asked for it."""

    def settled(self, kept: StoredMessage) -> None:
        """A queued message is about to be removed because its reader acknowledged it."""


class TrueClock:
    """The clock of the broker: the true time."""

    def __init__(self, loop: ProcessLoop) -> None:
        self._loop = loop

    def monotonic(self) -> float:
        return self._loop.now_s

    def wall(self) -> float:
        return self._loop.now_s


class WatchedStream(MemoryStream):
    """A stream that shows every change to a witness, and that may be full."""

    broker: ScheduleBroker
    proposed: list[Callable[[], object]] | None = None
    """While the stream has no leader: what the former one had told a follower of, and which the next one will commit."""

    def store(self, subject: str, *known: Any, **more: Any) -> int:  # noqa: ANN401  (as `MemoryStream.store`)
        self._led()
        return super().store(subject, *known, **more)

    def last(self, subject: str) -> StoredMessage | None:
        """Return the newest message, with a leader."""
        self._led()
        return super().last(subject)

    def select(self, subject_filter: str, after: int = 0) -> list[StoredMessage]:
        self._led()
        return super().select(subject_filter, after)

    def _led(self) -> None:
        """Raise `NoLeader` if a process asks and there is none; the witness and the storm may look."""
        if self.proposed is not None and self.broker.asked:
            raise NoLeader(self)

    def _make_room(self, kept: StoredMessage) -> None:
        if self.broker.full:
            self.broker.tally["refused for want of room"] += 1
            raise StorageFull("the stream has no room", got=kept.subject)
        super()._make_room(kept)
        self.broker.witness.stored(kept)

    def purge(self, subject_filter: str, keep: int = 0) -> int:
        self._led()
        for kept in self.purged(subject_filter, keep):
            self.broker.witness.purged(kept)
        return super().purge(subject_filter, keep)

    def settle(self, sequence: int) -> None:
        """Show what is acknowledged, then remove it."""
        self._led()
        kept = self.kept.get(sequence)
        if kept is not None:
            self.broker.witness.settled(kept)
            self.remove(sequence)

    def lose_since(self, since_s: float, is_named: Callable[[str], bool]) -> int:
        """Lose what was stored after a moment and is not named by anything, and the ids of all that was stored after it."""
        lost = [kept for kept in self.kept.values() if kept.at_s >= since_s and not is_named(kept.subject)]
        for kept in lost:
            self.remove(kept.sequence)
        return len(lost)


class ScheduleBroker(MemoryBroker):
    """What all buses of a schedule share."""

    def __init__(self, loop: ProcessLoop, witness: Witness, tally: Counter[str], stream_bytes_max: int = GIB) -> None:
        super().__init__(stream_bytes_max=stream_bytes_max, clock=TrueClock(loop))
        self.loop = loop
        self.witness = witness
        self.tally = tally
        self.up = True
        self.life = 0
        """Counts its deaths and its returns: what is sent while it is away reaches no later life of it, either."""
        self.away_s: list[tuple[float, float]] = []
        """From when to when it was away, each time, seconds."""
        self._went_s = 0.0
        self.full = False
        self.asked = False
        """Whether what happens now was asked for by a process."""
        self.on_restart: list[Callable[[], None]] = []
        self._held: dict[tuple[int, int], int] = {}

    def provision(self, run: str) -> None:
        """Create the streams of `run` that do not exist yet."""
        prefix = Subjects(run).prefix
        for plan in stream_plan(run, self.stream_bytes_max):
            if plan.name not in self.streams:
                stream = WatchedStream(plan, prefix, TrueClock(self.loop), self.core_message)
                stream.broker = self
                self.streams[plan.name] = stream

    def stream(self, plans: Any, subject: str) -> WatchedStream:  # noqa: ANN401  (stream plans)
        """Return the stream that keeps a subject."""
        stream = self.streams[stream_of(plans, subject).name]
        assert isinstance(stream, WatchedStream)
        return stream

    def core_message(self, core_message: CoreMessage) -> None:
        """Hand a message to whoever listens, while there is a broker."""
        if self.up:
            super().core_message(core_message)

    def forget_feeds(self, feeds: list[BufferedSubscription]) -> None:
        """Hear that a process is gone: its connection was reset."""
        for feed in feeds:
            self.feeds.pop(feed, None)

    # --- the work queues ----------------------------------------------------------------------------------------------

    def pull(
        self, stream: WatchedStream, place: QueuePlace, until_s: float, deliver: Callable[[StoredMessage, bool], None]
    ) -> None:
        """Deliver the next message of a place, when there is one before `until_s`."""
        if place.gone or not self.up or stream.proposed is not None:
            return
        taken = stream.take(place)
        if taken is not None:
            if taken[1]:
                self.tally["deliveries repeated"] += 1
            self.hold(stream, place, taken[0].sequence)
            deliver(*taken)
            return
        if self.loop.now_s >= until_s:
            return
        news = self.loop.create_future()

        def on_news(_: object) -> None:
            if not news.cancelled():
                self.pull(stream, place, until_s, deliver)

        news.add_done_callback(on_news)
        place.waiting.append(news)
        self.loop.at(until_s, news.cancel)

    def hold(self, stream: WatchedStream, place: QueuePlace, sequence: int) -> None:
        """Give a reader more time for a message, which is delivered again after that."""
        if stream.proposed is not None:
            return
        key = (id(place), sequence)
        turn = self._held[key] = self._held.get(key, 0) + 1
        self.loop.after(ACK_WAIT_S, self._silent, stream, place, sequence, turn)

    def _silent(self, stream: WatchedStream, place: QueuePlace, sequence: int, turn: int) -> None:
        if self._held.get((id(place), sequence)) == turn and sequence in place.out and not place.gone:
            self.tally["redeliveries by silence"] += 1
            self.give_back(stream, place, sequence)

    def give_back(self, stream: WatchedStream, place: QueuePlace, sequence: int) -> None:
        kept = stream.kept.get(sequence)
        place.out.discard(sequence)
        if kept is not None:
            stream.wake(kept.subject)

    # --- misfortune ---------------------------------------------------------------------------------------------------

    def crash(self) -> None:
        """Be away; who waits for a message waits in vain."""
        self._went_s = self.loop.now_s if self.up else self._went_s
        self.up = False
        self.life += 1
        for stream in self.streams.values():
            _forget_waiting(stream)

    def lose_leader(self, stream: WatchedStream) -> None:
        """Leave a stream without a leader: it answers nothing, and who waits for one of its messages waits in vain."""
        stream.proposed = []
        _forget_waiting(stream)

    def elect(self, stream: WatchedStream, repeats: Callable[[], bool]) -> None:
        """Give a stream a leader again: it commits what was proposed, and delivers again what it knows of nobody to have."""
        proposed, stream.proposed = stream.proposed or [], None
        for effect in proposed:
            self.tally["proposals committed late"] += 1
            with contextlib.suppress(AtollError, NoAnswer):
                effect()
        for place in stream.places.values():
            for sequence in sorted(place.out):
                if not place.gone and repeats():
                    self.give_back(stream, place, sequence)

    def restart(self) -> None:
        """Be back, with all that was acknowledged."""
        if self.up:
            return
        self.up = True
        self.away_s.append((self._went_s, self.loop.now_s))
        self.life += 1
        for each in self.on_restart:
            each()

    def lose_chunks(self, since_s: float, is_named: Callable[[str], bool]) -> int:
        """Lose the chunks acknowledged since a moment that nothing names, as a power cut may."""
        lost = 0
        for stream in self.streams.values():
            if isinstance(stream, WatchedStream) and stream.plan.name.rpartition("_")[2] in ("UPC", "GL", "ST", "PS"):
                lost += stream.lose_since(since_s, is_named)
        return lost

    def copy(self) -> dict[str, tuple[Any, ...]]:
        """Return what is stored, as a copy of its disk would have it."""
        return {
            name: (dict(each.kept), {key: [*found] for key, found in each._by_subject.items()}, each.newest)
            for name, each in self.streams.items()
        }

    def go_back(self, copy: dict[str, tuple[Any, ...]]) -> None:
        """Have what a copy holds and nothing that came after it."""
        for name, stream in self.streams.items():
            stream.kept, stream._by_subject, stream.newest = copy[name]
            stream.size_bytes = sum(kept.size_bytes for kept in stream.kept.values())
            stream._ids.clear()
            for place in stream.places.values():
                place.out.clear()

    def lose_all(self, run: str) -> None:
        for stream in self.streams.values():
            for place in stream.places.values():
                place.gone = True
        ends = {name: stream.newest for name, stream in self.streams.items()}
        self.streams.clear()
        self.provision(run)
        for name, stream in self.streams.items():
            # As `provision` has it, which numbers by the time: a new stream begins far above all numbers of the lost one.
            stream.newest = ends[name] + SEQUENCE_FIRST


def _forget_waiting(stream: MemoryStream) -> None:
    """Have everybody wait in vain who waits for a message of a stream."""
    for place in stream.places.values():
        for news in place.waiting:
            news.cancel()
        place.waiting.clear()
