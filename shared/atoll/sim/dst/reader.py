"""The reader of a shard's queue as the JetStream adapter has it: remove who reads, create our own, pull one by one."""

from __future__ import annotations

from typing import Any

from atoll.sim.dst.broker import Message, NoReader, ReaderConflict
from atoll.sim.dst.line import Conflict, Line, Unavailable
from atoll.sim.dst.process import Mailbox, Work

POLL_S = 1.0
PULL_GRACE_S = 0.25


def queue_name(shard: int) -> str:
    """Return the name of a shard's work queue."""
    return f"queue/{shard}"


class Delivery:
    """One queued message in this reader's hands."""

    __slots__ = ("_reader", "body", "sequence")

    def __init__(self, reader: Reader, message: Message) -> None:
        """Hold it."""
        self._reader = reader
        self.sequence = message.sequence
        self.body: Any = message.body

    def ack(self, fate: object) -> Work:
        """Remove the message from the queue, confirmed by the broker."""
        return self._reader.settle(self, fate)


class Reader:
    """The durable place of one tenure in a shard's queue."""

    def __init__(self, line: Line, shard: int, epoch: int) -> None:
        """Read nothing yet; `open` takes the queue over."""
        self._line = line
        self._queue = queue_name(shard)
        self._name = f"shard-{shard}-{epoch}"
        self._inbox = Mailbox(line.process)
        self._held: set[int] = set()

    def open(self) -> Work:
        """Remove every other reader and create ours."""
        broker = self._line.broker
        for reader in (yield from self._line.ask(broker.readers, self._queue)):
            yield from self._line.ask(broker.remove_reader, self._queue, reader)
        try:
            yield from self._line.ask(broker.create_reader, self._queue, self._name)
        except ReaderConflict as conflict:
            raise Conflict("another reader was faster") from conflict

    def next(self) -> Work:
        """Return the next delivery, or None when none came for a while, as it is for a reader that was removed."""
        line = self._line
        if not self._inbox.items:
            line.network.up(
                line.process, line.broker.pull, self._queue, self._name, line.process, POLL_S, self._inbox.put
            )
        item = yield from self._inbox.get(POLL_S + PULL_GRACE_S)
        if isinstance(item, NoReader):
            yield POLL_S
            return None
        if item is None:
            return None
        self._held.add(item.sequence)
        return Delivery(self, item)

    def is_drained(self) -> Work:
        """Return whether the broker says that nothing is queued and nothing unsettled; raise `Conflict` when we are out."""
        try:
            return (yield from self._line.ask(self._line.broker.is_drained, self._queue, self._name))
        except NoReader as gone:
            raise Conflict("our reader was removed") from gone

    def settle(self, delivery: Delivery, fate: object) -> Work:
        """Acknowledge and wait for the broker's word."""
        try:
            yield from self._line.ask(self._line.broker.ack, self._queue, self._name, delivery.sequence, fate)
        except NoReader as gone:
            raise Unavailable from gone
        self._held.discard(delivery.sequence)

    def hold(self, sequence: int) -> None:
        """Put redelivery off."""
        self._line.network.up(self._line.process, self._line.broker.hold, self._queue, self._name, sequence)

    def pause(self) -> Work:
        """Wait after the queue could not be read."""
        yield POLL_S

    def close(self) -> None:
        """Give back what is not settled."""
        line = self._line
        for sequence in sorted(self._held):
            line.network.up(line.process, line.broker.give_back, self._queue, self._name, sequence)
