"""Reads the heads of a run at intervals, as records: their taps may be lost or wrong, records are not.

A head names its contributors, so it grows with the learners of a run, and every learner reads heads. If each reading took all
of them, a run of M learners and P fragments would move M * M * P names every few seconds, which nobody needs (128
learners, 96 fragments: 30 MB/s at the broker). So a reading takes all heads if they name few, at the beginning, and when
something may have been missed: after a lost connection, or after a core message that was dropped. Otherwise it takes the next
`IN_TURN` fragments in turn. A tap that the broker lost without a sign is found some readings later, or by the next
call of its fragment, which names the version.
"""

from __future__ import annotations

from itertools import cycle, islice
from typing import Final

import msgspec

from atoll.base.errors import PeerMisbehaved
from atoll.base.logs import get
from atoll.base.retry import all_of
from atoll.bus.interface import Bus
from atoll.run.heads import read_head, read_heads
from atoll.wire.messages import Head, RunRecord

log = get(__name__)

NAMES_MAX: Final = 1024
"""Heads are all read together, each time, if they are so many with the contributors that they name: about 100 kB."""
IN_TURN: Final = 4


class HeadTap(msgspec.Struct, frozen=True):
    """What a learner needs of a head's tap."""

    fragment: int
    version: int


class HeadReading:
    """The readings of one learner."""

    def __init__(self, bus: Bus, run: RunRecord) -> None:
        """Have read nothing yet."""
        self._bus = bus
        self._run = run
        self._turns = cycle(range(len(run.layout.fragments)))
        self._missed: tuple[int, int] | None = None
        self._names = 0
        """How many heads there were when all were read, and contributors in them."""

    async def read(self) -> list[Head]:
        """Return the heads of this reading, without those that do not fit the run; raises what the bus raises."""
        missed = self._bus.stats.reconnects, self._bus.stats.core_messages_dropped
        if self._names <= NAMES_MAX or missed != self._missed:
            heads = list((await read_heads(self._bus, self._run)).values())
            self._names = sum(1 + len(head.included) for head in heads)
            self._missed = missed
            return heads
        turn = list(islice(self._turns, IN_TURN))
        found = await all_of(self._fitting(fragment) for fragment in turn)
        return [head for head in found if head is not None]

    async def _fitting(self, fragment: int) -> Head | None:
        try:
            return await read_head(self._bus, self._run, fragment)
        except PeerMisbehaved as error:
            log.warning("head.refused", fragment=fragment, reason=str(error))
            return None
