"""How far the run is, by what its learners have heard: believed only as far as the leases say so.

A learner's heartbeat tells how far the whole run is, as the learner heard it from any shard. It matters to a
shard whose own fragments are behind: what others have merged is in the ledgers of other shards only, and without
them this shard would not know that the run has reached its target. But whoever says a larger number would end the run for all.
So the number is a reason to read the other shards' leases, and what *they* say is believed. Looks in vain become rarer.
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
LOOK_S_MAX: Final = 10.0


class Hearsay:
    """What the leases of a run have shown of its tokens: `tokens`."""

    def __init__(self, bus: Bus, run: RunRecord) -> None:
        """Know nothing yet."""
        self._bus = bus
        self._run = run
        self.tokens = 0
        self._wanted = asyncio.Event()

    def heard(self, run_tokens: int, known: int) -> None:
        """Have the leases read if somebody says that the run is at its target, and by what is `known` it is not."""
        if max(self.tokens, known) < self._run.protocol.tokens_target <= run_tokens:
            self._wanted.set()

    async def keep_looking(self) -> None:
        """Once somebody says that the run is over, read the leases until they say so, too: who left says it only once."""
        pause_s = LOOK_S
        await self._wanted.wait()
        while self.tokens < self._run.protocol.tokens_target:
            # A heartbeat may be ahead of the lease that says the same: most of such differences are gone by then.
            await asyncio.sleep(pause_s)
            try:
                self.tokens = max(self.tokens, (await recorded_progress(self._bus, self._run)).tokens)
            except (BusError, BrokerUnavailable, StorageFull) as error:
                log.warning("leases.unreadable", reason=str(error))
            pause_s = min(LOOK_S_MAX, 2.0 * pause_s)
