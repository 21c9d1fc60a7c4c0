"""Chunks that nobody needs any more, removed from the broker when nobody waits for it.

Removing a chunk costs a broker about as much as serving it, and a commit leaves as much behind as it stores: the frames
before the last, the former outer state, the contributions that were merged. At that moment every learner begins to read what
is new. So what a commit leaves is removed `LYING_S` later, or with the next commit of its fragment where that comes first: a
fragment has one generation of it on the broker at most. A commit that finds no room removes all of it at once.

Removing never makes anything fail: what cannot be removed now waits for the next time. What a process has left lying when
it is killed, its heir sweeps (`store`) or it ages out (contributions).
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Final, NamedTuple

from atoll.base.errors import BrokerUnavailable, BusError, StorageFull
from atoll.base.logs import get
from atoll.bus.interface import Bus

LYING_S: Final = 3.0
PURGES_AT_ONCE: Final = 4

log = get(__name__)


class Leftover(NamedTuple):
    """What matches a filter, of a fragment, to be removed at `due_s` of the loop's clock."""

    due_s: float
    fragment: int
    subject_filter: str


class GarbageCollector:
    """What one tenure has left on the broker."""

    def __init__(self, bus: Bus) -> None:
        """Begin with a clean floor."""
        self._bus = bus
        self._lying: deque[Leftover] = deque()
        self._due: deque[str] = deque()

    def leave(self, fragment: int, *subject_filters: str) -> None:
        """Have what matches removed later."""
        due_s = asyncio.get_running_loop().time() + LYING_S
        self._lying.extend(Leftover(due_s, fragment, each) for each in subject_filters)

    async def remove(self, *subject_filters: str) -> None:
        """Remove what matches now; what cannot be removed waits for a sweep."""
        waiting = deque(subject_filters)

        async def take() -> None:
            while waiting:
                this = waiting.popleft()
                try:
                    await self._bus.purge(this)
                except BaseException as error:
                    self._due.extend((this, *waiting))
                    waiting.clear()
                    if not isinstance(error, BusError | BrokerUnavailable | StorageFull):
                        raise
                    log.warning("litter.kept", filters=len(self._due), reason=str(error))

        await asyncio.gather(*(take() for _ in range(min(PURGES_AT_ONCE, len(waiting)))))

    async def sweep(self, fragment: int | None = None) -> None:
        """Remove at once what lies there: of one fragment, or everything, also what could not be removed before."""
        now: list[str] = []
        others: deque[Leftover] = deque()
        for left in self._lying:
            if fragment in (None, left.fragment):
                now.append(left.subject_filter)
            else:
                others.append(left)
        self._lying = others
        await self.remove(*now, *(self._taken() if fragment is None else ()))

    def _taken(self) -> list[str]:
        """Return what could not be removed before, and forget it."""
        due = list(self._due)
        self._due.clear()
        return due

    async def keep_sweeping(self) -> None:
        """Remove everything when it is due."""
        clock = asyncio.get_running_loop().time
        while True:
            due = self._taken()
            while self._lying and self._lying[0].due_s <= clock():
                due.append(self._lying.popleft().subject_filter)
            await self.remove(*due)
            await asyncio.sleep(self._lying[0].due_s - clock() if self._lying else LYING_S)
