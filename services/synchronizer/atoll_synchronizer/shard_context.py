"""Surroundings of one candidacy, which every part of a shard's driver receives: context, the owner, the event log of the run.

The event log is for readers of the run: one event per round, refusal, quarantine and closed ledger. While the broker is
away or full, the event log waits and tries again; it never skips an event (`atoll.base.retry`). One whose writer was cancelled
is written by `finish`, under the id that it had.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any, Protocol

from atoll.base.clock import Clock
from atoll.base.retry import patiently
from atoll.bus.interface import Bus
from atoll.protocol.events import Fact
from atoll.protocol.ledger import Ledger
from atoll.wire.events import EventFields, event_info, log_entry
from atoll.wire.messages import Contribution, Head, RunRecord, encode
from atoll.wire.subjects import Subjects


class ShardContext:
    """The surroundings of one candidacy; `name` is the shard's in logs and events."""

    def __init__(self, bus: Bus, run: RunRecord, shard: int, clock: Clock) -> None:
        self.bus = bus
        self.run = run
        self.shard = shard
        self.clock = clock
        self.subjects = run.subjects
        self.name = f"shard-{shard}"


class ShardOwner(Protocol):
    """The owner of a shard as the parts of its driver see it: they tell it facts, and ask how its machine and store stand."""

    def tell(self, fact: Fact) -> None:
        """Tell the machine a fact, and have done what it commands."""

    def spawn(self, *works: Coroutine[Any, Any, None]) -> None:
        """Begin work that ends with the tenure."""

    def note_settled(self, manifest: Contribution) -> None:
        """Take note that a contribution is settled for good."""

    def ledger_now(self) -> Ledger:
        """Return the machine's ledger."""

    def step_s(self) -> float:
        """Return the median step time of the live learners, 0 without one."""

    def live_in(self, region: str) -> set[str]:
        """Return the live learners of a region."""

    def region_of(self, learner: str) -> str:
        """Return the region whose synchronizer folds what a member sends, empty for none."""

    def head_of(self, fragment: int) -> Head:
        """Return the head of a fragment as the store holds it."""

    def norm_of(self, fragment: int) -> float:
        """Return the L2 norm of a fragment's values."""


class EventLog:
    """Appends events of one shard's owner, `who`, in its tenure `epoch`."""

    def __init__(self, bus: Bus, subjects: Subjects, who: str, clock: Clock) -> None:
        self._bus = bus
        self._subjects = subjects
        self._who = who
        self._clock = clock
        self._begun = 0
        self._unwritten: dict[str, Callable[[], Coroutine[Any, Any, None]]] = {}
        self.epoch = 0

    async def record(self, fields: EventFields) -> None:
        """Append an event; each event has a new id, so that a repeated attempt is stored once."""
        self._begun += 1
        line = encode(log_entry(fields, self._who, self._clock.wall()))
        msg_id = f"{fields.kind}-{self._who}-{self.epoch}-{self._begun}"
        subject, info = self._subjects.event(fields.kind, self._who), event_info(fields)
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
