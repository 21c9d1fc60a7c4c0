"""What every part of a shard's driver receives: the bus, the run, the number of the shard, and the clock."""

from __future__ import annotations

from dataclasses import dataclass

from atoll.base.clock import Clock
from atoll.bus.interface import Bus
from atoll.wire.messages import RunRecord
from atoll.wire.subjects import Subjects


@dataclass(frozen=True, slots=True)
class ShardContext:
    """The surroundings of one candidacy."""

    bus: Bus
    run: RunRecord
    shard: int
    clock: Clock

    @property
    def subjects(self) -> Subjects:
        """Return the names of the run's subjects."""
        return Subjects(self.run.run)

    @property
    def name(self) -> str:
        """Return the shard's name in logs and events."""
        return f"shard-{self.shard}"
