"""What a shard writes down for whoever reads the run later, and the patience with which it does everything.

A broker that is away or full makes a shard wait and try again, never skip: what it does is ordered, and the next thing
rests on the last. Only errors that waiting cannot mend get through.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from atoll.base.clock import Clock
from atoll.base.errors import BrokerUnavailable, StorageFull
from atoll.base.logs import get
from atoll.bus.interface import Bus
from atoll.wire.messages import encode, event
from atoll.wire.subjects import Subjects

log = get(__name__)

T = TypeVar("T")

RETRY_S_MAX = 5.0


async def patiently(attempt: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """Return what `attempt` returns; while the broker is away or full, wait and try again."""
    pause_s = 0.1
    while True:
        try:
            return await attempt()
        except (BrokerUnavailable, StorageFull) as error:
            log.warning("broker.waiting", reason=str(error), pause_s=pause_s)
            await asyncio.sleep(pause_s)
            pause_s = min(2.0 * pause_s, RETRY_S_MAX)


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
        """Append an event; the id is new for each, so that a repeated attempt is stored once."""
        self._written += 1
        line = encode(event(kind, self._who, self._clock.wall(), **fields))
        msg_id = f"{kind}-{self._who}-{self.epoch}-{self._written}"
        subject = self._subjects.event(kind, self._who)
        await patiently(lambda: self._bus.publish(subject, line, msg_id=msg_id, info={"kind": kind}))
