"""How far the run is, by what its learners have heard: believed only as far as the leases say so.

A learner's heartbeat tells how many tokens the whole run has trained, as the learner heard it from any shard. It matters to a
shard whose former owner died: learners that were heard by nobody since are in the ledgers of other shards only, and without
them this shard would not know that the run has reached its target. But whoever says a larger number would end the run for all.
So the number is a reason to read the other shards' leases, and what *they* say is believed. Looks in vain come ever rarer.
"""

from __future__ import annotations

import asyncio
from typing import Final

from atoll.base.errors import BrokerUnavailable, BusError, StorageFull
from atoll.base.logs import get
from atoll.bus.interface import Bus
from atoll.run.record import recorded_progress
from atoll.wire.messages import RunRecord

log = get(__name__)

LOOK_S: Final = 2.0
LOOK_S_MAX: Final = 60.0


class Hearsay:
    """What the leases of a run have shown of its tokens: `tokens`."""

    def __init__(self, bus: Bus, run: RunRecord) -> None:
        """Know nothing yet."""
        self._bus = bus
        self._run = run
        self.tokens = 0
        self._wanted = asyncio.Event()

    def heard(self, run_tokens: int, known: int) -> None:
        """Have the leases read if somebody says more than is `known`."""
        if run_tokens > max(self.tokens, known):
            self._wanted.set()

    async def keep_looking(self) -> None:
        """Read the leases whenever somebody says more than is known."""
        pause_s = LOOK_S
        while True:
            await self._wanted.wait()
            # A heartbeat may be ahead of the others that say the same: most of such differences are gone by then.
            await asyncio.sleep(pause_s)
            self._wanted.clear()
            before = self.tokens
            try:
                self.tokens = max(before, (await recorded_progress(self._bus, self._run)).tokens)
            except (BusError, BrokerUnavailable, StorageFull) as error:
                log.warning("leases.unreadable", reason=str(error))
            pause_s = LOOK_S if self.tokens > before else min(LOOK_S_MAX, 2.0 * pause_s)
