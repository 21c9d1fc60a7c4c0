"""Removal of chunks from the broker's streams: what commits leave behind, and what is beyond a learner's share.

Removing a chunk costs a broker about as much as serving it, a commit leaves as many bytes behind as it stores, and at that
moment every learner begins to read the new version. So the `GarbageCollector` removes the leftovers of a commit `LYING_S`
later, or with the next commit of the fragment; a commit that finds no room removes all of them at once. Removing never makes
anything fail: the collector tries again later, and the leftovers of a killed process are swept by the next owner (`store`), or
age out.

The owner of shard 0 also keeps each learner and region of the run to its share of the streams (`ShareKeeper`), for all shards.
It narrows the streams to the shards and fragments that the run has, so the broker refuses what belongs to none (`Bus.fit`).
Then it removes what is beyond a share (`atoll.run.stream_room`), the oldest first, which costs its sender its own chunks
alone. An honest learner may leave some chunks of pushes that it gave up. More than `TOLD_SHARES` of a share fills the stream:
log and event log then name whose subjects those are, and nobody as the one who stored it, since chunks are not signed.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from typing import Final, NamedTuple

from atoll.base.errors import AccessDenied, BrokerUnavailable, BusError, RunReplaced, StorageFull
from atoll.base.logs import get
from atoll.base.retry import patiently
from atoll.bus.interface import Bus
from atoll.run.stream_room import ChunkShares, Excess, places_of
from atoll.wire.events import FilledEvent
from atoll_synchronizer.shard_context import EventLog, ShardContext

LYING_S: Final = 3.0
PURGES_AT_ONCE: Final = 4

log = get(__name__)
LOOK_S: Final = 1.0
FILLED_S: Final = 0.2
"""The pause while somebody fills a stream."""
BUSY_MAX: Final = 0.05
"""A look at a large stream takes the broker long; it may be at it for so much of the time."""
TOLD_SHARES: Final = 2
TELL_S: Final = 10.0
_FAILURES: Final = (BusError, BrokerUnavailable, StorageFull)


class Leftover(NamedTuple):
    """Everything of a fragment that matches a filter, to be removed at `due_s` of the loop's clock."""

    due_s: float
    fragment: int
    subject_filter: str


class GarbageCollector:
    """The leftovers of one tenure on the broker."""

    def __init__(self, bus: Bus) -> None:
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
        await self.remove(*now, *(self._take_failed() if fragment is None else ()))

    def _take_failed(self) -> list[str]:
        due = list(self._due)
        self._due.clear()
        return due

    async def keep_sweeping(self) -> None:
        """Remove each leftover when it is due."""
        clock = asyncio.get_running_loop().time
        while True:
            due = self._take_failed()
            while self._lying and self._lying[0].due_s <= clock():
                due.append(self._lying.popleft().subject_filter)
            await self.remove(*due)
            await asyncio.sleep(self._lying[0].due_s - clock() if self._lying else LYING_S)


class ShareKeeper:
    """The streams of one run, kept by one tenure."""

    def __init__(self, context: ShardContext, event_log: EventLog) -> None:
        self._bus, self._clock = context.bus, context.clock
        self._places, self._shares = places_of(context.run), ChunkShares(context.run)
        self._event_log = event_log
        self._removed: Counter[str] = Counter()
        self._told_s: dict[str, float] = {}

    async def keep(self) -> None:
        """Fit the streams, then look for ever."""
        try:
            changed = await patiently(lambda: self._bus.fit(self._places), "the bounds of the streams")
        except (AccessDenied, BusError) as error:
            log.warning("streams.not_fitted", reason=str(error), todo="start the broker with this release of atoll")
        else:
            log.info("streams.fitted", changed=changed)
        while True:
            began_s, filled = self._clock.monotonic(), False
            try:
                filled = await self.look()
            except RunReplaced:
                return
            except _FAILURES as error:
                log.debug("shares.unknown", reason=str(error))
            took_s = self._clock.monotonic() - began_s
            await asyncio.sleep(max(FILLED_S if filled else LOOK_S, took_s / BUSY_MAX - took_s))

    async def look(self) -> bool:
        """Remove what is beyond the shares; return whether that was anything."""
        shares = self._shares
        stored = await self._bus.count_stored(shares.subject_filter, more_than=shares.least)
        excesses = shares.excesses(stored)
        for excess in excesses:
            await self._bus.purge(excess.subject_filter, keep=excess.keep)
            self._removed[excess.subjects_of] += excess.messages if _fills(excess) else 0
        await self._tell()
        return bool(excesses)

    async def _tell(self) -> None:
        now_s = self._clock.monotonic()
        due = [one for one in +self._removed if now_s - self._told_s.get(one, -TELL_S) >= TELL_S]
        for name in due:
            messages, self._told_s[name] = self._removed.pop(name), now_s
            log.warning(
                "stream.filled",
                subjects_of=name,
                removed=messages,
                why="more than one share of chunks, which nobody signs: from it, or from the broker of a region",
                todo=f"atoll keys revoke FOLDER {name}, if it goes on; a region's broker, if it goes on even then",
            )
            await self._event_log.record(FilledEvent(subjects_of=name, removed=messages))


def _fills(excess: Excess) -> bool:
    return excess.messages >= (TOLD_SHARES - 1) * excess.keep
