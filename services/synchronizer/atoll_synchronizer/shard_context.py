"""Surroundings of one candidacy, which every part of a shard's driver receives, and the event log of the run.

The event log is for readers of the run: one event per round, refusal, quarantine and closed ledger. While the broker is
away or full, the event log waits and tries again; it never skips an event (`atoll.base.retry`). One whose writer was cancelled
is written by `finish`, under the id that it had.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any

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
        self._begun = 0
        self._unwritten: dict[str, Callable[[], Coroutine[Any, Any, None]]] = {}
        self.epoch = 0

    async def record(self, kind: str, **fields: object) -> None:
        """Append an event; each event has a new id, so that a repeated attempt is stored once."""
        self._begun += 1
        line = encode(event(kind, self._who, self._clock.wall(), **fields))
        msg_id = f"{kind}-{self._who}-{self.epoch}-{self._begun}"
        subject, info = self._subjects.event(kind, self._who), event_info(kind, fields)
        self._unwritten[msg_id] = partial(self._bus.publish, subject, line, msg_id=msg_id, info=info)
        await self._write(msg_id)

    async def finish(self) -> None:
        """Write what is not written yet, once nobody else writes."""
        for msg_id in list(self._unwritten):
            await self._write(msg_id)

    async def _write(self, msg_id: str) -> None:
        if (write := self._unwritten.get(msg_id)) is not None:
            await patiently(write, "an event")
            self._unwritten.pop(msg_id, None)
