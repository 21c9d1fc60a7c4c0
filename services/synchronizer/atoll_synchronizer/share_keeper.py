"""Keeps each learner and region of a run to its share of the streams: the owner of shard 0 does, for all shards.

When it begins, it narrows the streams to the shards and fragments that the run has, so the broker refuses what belongs to
none, and gives those of a former release today's bounds (`Bus.fit`). Then it looks again and again what is stored on the
subjects of each, and removes what is beyond its share (`atoll.run.stream_room`), the oldest first. That costs it its own chunks
and nobody else's.

An honest learner may leave some chunks of pushes that it gave up, since behind a locked door it cannot delete. They are
removed without a word. More than `TOLD_SHARES` of a share fills the stream. The log and the event log then name whose subjects
those are, and nobody as the one who stored it: chunks are not signed, and the broker of a region stores for its learners.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Final

from atoll.base.errors import AccessDenied, BrokerUnavailable, BusError, RunReplaced, StorageFull
from atoll.base.logs import get
from atoll.base.retry import patiently
from atoll.run.stream_room import ChunkShares, Excess, places_of
from atoll_synchronizer.shard_context import EventLog, ShardContext

LOOK_S: Final = 1.0
FILLED_S: Final = 0.2
"""The pause while somebody fills a stream."""
BUSY_MAX: Final = 0.05
"""A look at a large stream takes the broker long; it may be at it for so much of the time."""
TOLD_SHARES: Final = 2
TELL_S: Final = 10.0
_FAILURES: Final = (BusError, BrokerUnavailable, StorageFull)

log = get(__name__)


class ShareKeeper:
    """The streams of one run, kept by one tenure."""

    def __init__(self, context: ShardContext, event_log: EventLog) -> None:
        """Look at nothing yet."""
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
        """Tell on whose subjects the stream is filled, of each at intervals."""
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
            await self._event_log.record("filled", subjects_of=name, removed=messages)


def _fills(excess: Excess) -> bool:
    """Return whether this is more than an honest sender leaves behind."""
    return excess.messages >= (TOLD_SHARES - 1) * excess.keep
