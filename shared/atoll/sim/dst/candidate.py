"""A process that wants one shard: candidacy after candidacy until the run is over or it is told to leave."""

from __future__ import annotations

from typing import TYPE_CHECKING

from atoll.sim.dst.line import Line
from atoll.sim.dst.owner import HANDED_OVER, Ended, Owner
from atoll.sim.dst.process import Process, Work

if TYPE_CHECKING:
    from atoll.sim.dst.world import World


class Candidate:
    """One candidate of shard `shard`."""

    def __init__(self, world: World, process: Process, shard: int, line: Line) -> None:
        """Prepare; `live` does the work."""
        self.world = world
        self.process = process
        self.shard = shard
        self.line = line
        self.owner = Owner(world, process, shard, line)
        self.draining = False

    def live(self) -> Work:
        """Serve until a candidacy ends in any other way than by being deposed or giving the shard away."""
        while True:
            ended: Ended = yield from self.owner.serve()
            if self.draining or not (ended.deposed or ended.reason == HANDED_OVER):
                break
            self.owner = Owner(self.world, self.process, self.shard, self.line)
        self.world.note(self.process.name, "leaves")
        self.process.crash()

    def drain(self) -> None:
        """Leave when there is nothing left to do."""
        self.draining = True
        self.owner.order_drain()

    def give(self, to: str) -> None:
        """Give the shard to another process, if it is ours, and be a candidate again."""
        self.process.spawn(self.owner.hand_over(to, self.world.settings.lease_s), self.owner.scope)

    def retire(self, grace_s: float) -> None:
        """Leave within `grace_s`, whatever is still to be done."""
        self.drain()
        self.process.spawn(self._leave(grace_s))

    def _leave(self, grace_s: float) -> Work:
        yield grace_s
        self.owner.leave()
