"""Removes chunks that no reader needs any more, at a moment when no reader waits for the broker.

Removing a chunk costs a broker about as much as serving it, and a commit leaves as many bytes behind as it stores: the
frames before the last, the former outer state, the merged contributions. At that moment every learner begins to read
the new version. So the collector removes the leftovers of a commit `LYING_S` later, or with the next commit of the
fragment if that comes first: the broker holds at most one generation of leftovers per fragment. A commit that finds no
room removes all of them at once.

Removing never makes anything fail: the collector tries again later. If a process is killed, the next owner sweeps its
leftovers (`store`), or they age out (contributions).
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
    """Everything of a fragment that matches a filter, to be removed at `due_s` of the loop's clock."""

    due_s: float
    fragment: int
    subject_filter: str


class GarbageCollector:
    """The leftovers of one tenure on the broker."""

    def __init__(self, bus: Bus) -> None:
        """Begin without leftovers."""
        self._bus = bus
        self._lying: deque[Leftover] = deque()
        self._due: deque[str] = deque()

    def leave(self, fragment: int, *subject_filters: str) -> None:
        """Remove later what matches the filter."""
        due_s = asyncio.get_running_loop().time() + LYING_S
        self._lying.extend(Leftover(due_s, fragment, each) for each in subject_filters)

    async def remove(self, *subject_filters: str) -> None:
        """Remove what matches now; if that fails, keep it for a sweep."""
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
                    log.warning("garbage.kept", filters=len(self._due), reason=str(error))

        await asyncio.gather(*(take() for _ in range(min(PURGES_AT_ONCE, len(waiting)))))

    async def sweep(self, fragment: int | None = None, *more: str) -> None:
        """Remove the leftovers of one fragment, or all, now, and what `more` filters match.

        All includes those whose removal failed before.
        """
        now = list(more)
        others: deque[Leftover] = deque()
        for left in self._lying:
            if fragment in (None, left.fragment):
                now.append(left.subject_filter)
            else:
                others.append(left)
        self._lying = others
        await self.remove(*now, *(self._taken() if fragment is None else ()))

    def _taken(self) -> list[str]:
        """Return the leftovers whose removal failed, and forget them."""
        due = list(self._due)
        self._due.clear()
        return due

    async def keep_sweeping(self) -> None:
        """Remove each leftover when it is due."""
        clock = asyncio.get_running_loop().time
        while True:
            due = self._taken()
            while self._lying and self._lying[0].due_s <= clock():
                due.append(self._lying.popleft().subject_filter)
            await self.remove(*due)
            await asyncio.sleep(self._lying[0].due_s - clock() if self._lying else LYING_S)
