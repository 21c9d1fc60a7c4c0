"""What every part of a shard's driver receives: its surroundings, and the event log of the run.

The event log is for readers of the run: one event per round, refusal, quarantine and closed ledger. While the broker is
away or full, the event log waits and tries again; it never skips an event (`atoll.base.retry`).
"""

from __future__ import annotations

from atoll.base.clock import Clock
from atoll.base.retry import patiently
from atoll.bus.interface import Bus
from atoll.wire.event_log import event_info
from atoll.wire.messages import RunRecord, encode, event
from atoll.wire.subjects import Subjects


class ShardContext:
    """The surroundings of one candidacy; `name` is the shard's in logs and events."""

    def __init__(self, bus: Bus, run: RunRecord, shard: int, clock: Clock) -> None:
        """Keep them."""
        self.bus = bus
        self.run = run
        self.shard = shard
        self.clock = clock
        self.subjects = run.subjects
        self.name = f"shard-{shard}"


class EventLog:
    """Appends events of one shard's owner, `who`, in its tenure `epoch`."""

    def __init__(self, bus: Bus, subjects: Subjects, who: str, clock: Clock) -> None:
        """Write nothing yet."""
        self._bus = bus
        self._subjects = subjects
        self._who = who
        self._clock = clock
        self._written = 0
        self.epoch = 0

    async def record(self, kind: str, **fields: object) -> None:
        """Append an event; each event has a new id, so that a repeated attempt is stored once."""
        self._written += 1
        line = encode(event(kind, self._who, self._clock.wall(), **fields))
        msg_id = f"{kind}-{self._who}-{self.epoch}-{self._written}"
        subject = self._subjects.event(kind, self._who)
        await patiently(
            lambda: self._bus.publish(subject, line, msg_id=msg_id, info=event_info(kind, fields)), "an event"
        )
