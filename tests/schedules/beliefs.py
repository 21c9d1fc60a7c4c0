"""What shards believe of time and of learners, beside what the world knows.

A shard has its own clock and what the broker delivers. Time in which it could not hear its broker must enter none of its
averages, make no learner silent for it, and so never let it commit below its quorum. An honest fleet's pace is its own.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

from atoll.protocol.claims import HELD_SHARE
from atoll.protocol.events import ArmTimer, Commit, Committed, Fact, Finish, LearnerBeat, PublishCall, ShardCommand
from atoll.protocol.pacing import CUT_OFF_S, MovingAverage
from atoll.protocol.shard import Shard
from atoll_simulator.loop import _group
from schedules.processes import Process

if TYPE_CHECKING:
    from schedules.learners import Learner
    from schedules.world import World

HEARD_S = 2.0
"""A learner that has been there, reachable, for so long is known to every shard that listens."""
SLACK_S = 0.1
UNHEARD = (
    *("freezes", "messages lost", "messages late", "messages slow", "cut both ways", "cut up", "cut down"),
    *("learner cut off", "clock ahead", "ids taken over", "stores lost", "hostile messages", "hostile learner"),
)
"""After these a learner that is there may be silent for a shard that hears its broker, or a step takes as long as it likes."""
PACE = 3.0
"""An honest step takes 0.8 to 1.2 times its mean, and somewhat longer where threads are slow."""


class Beliefs:
    """Watches the shards of one world."""

    def __init__(self, world: World) -> None:
        self.world = world
        self._began_s: dict[tuple[int, str, int], float] = {}
        self._samples: list[tuple[MovingAverage, float]] = []

    @contextlib.contextmanager
    def sampled(self) -> Iterator[None]:
        add, note = MovingAverage.add, self._sample

        def noted(self: MovingAverage, sample: float) -> float:
            note(self, sample)
            return add(self, sample)

        MovingAverage.add = noted  # type: ignore[method-assign]
        try:
            yield
        finally:
            MovingAverage.add = add  # type: ignore[method-assign]

    def _sample(self, average: MovingAverage, sample: float) -> None:
        self._samples.append((average, sample))

    def see(self, shard: Shard, event: Fact, actions: list[ShardCommand]) -> None:
        armed = [each.name for each in actions if isinstance(each, ArmTimer) and each.name.startswith("grace/")]
        now_s, graced = self.world.loop.now_s, [int(name.partition("/")[2]) for name in armed]
        samples, self._samples = self._samples, []
        for average, sample in samples:
            if average is shard.quorum:
                self._check_sample("quorum", sample, [self._began_s.get((id(shard), "call", p), now_s) for p in graced])
            elif average is shard.sync and isinstance(event, Committed):
                self._check_sample("commit", sample, [self._began_s[id(shard), "commit", event.fragment]])
        for action in actions:  # what one fact ends and begins at once has been looked at
            if isinstance(action, PublishCall) and action.attempt == 1:
                self._began_s[id(shard), "call", action.fragment] = now_s
            elif isinstance(action, Commit):
                self._began_s[id(shard), "commit", action.fragment] = now_s
                self._check_quorum(shard, action)
            elif isinstance(action, Finish) and action.reason != "drained":
                self.world.check_end("a shard")
        if isinstance(event, LearnerBeat):
            self._check_pace(shard.step_s())

    def _check_sample(self, what: str, sample: float, began_s: list[float]) -> None:
        process = _group.get()
        assert process is None or isinstance(process, Process)
        if any(self.world.tally[kind] for kind in ("clock ahead", "stores lost")):
            return
        rate = 1.0 if process is None else process.rate
        most_s = rate * max(self._reachable_s(process, each) for each in began_s) + SLACK_S
        self.world.tally[f"{what} times checked"] += 1
        self.world.check(sample <= most_s, f"no absence enters the time of a {what}", (sample, most_s))

    def _reachable_s(self, process: Process | None, since_s: float) -> float:
        """Return how long the broker was there for a process since a moment, but for absences too short to be told."""
        now_s, broker = self.world.loop.now_s, self.world.broker
        own = [] if process is None else self.world.cut_off_s.get(process, [])
        gone, end_s = 0.0, since_s
        for first_s, last_s in sorted([*broker.away_s, *own]):
            if last_s - first_s > CUT_OFF_S:
                gone += max(0.0, min(last_s, now_s) - max(first_s, end_s))
                end_s = max(end_s, min(last_s, now_s))
        return now_s - since_s - gone

    def _check_quorum(self, shard: Shard, commit: Commit) -> None:
        """Below its quorum a shard commits when everybody else has left, or is truly gone."""
        world, merged = self.world, {share.key.learner for share in commit.shares}
        over = shard.draining or world.draining or shard.ledger.reached(shard.settings.tokens_target)
        if len(merged) >= shard.settings.quorum or over:
            return
        world.tally["commits below a quorum"] += 1
        if any(world.tally[kind] for kind in UNHEARD):
            return
        there = [learner.process.name for learner in world.learning if self._is_there(learner)]
        world.check(not there, "no shard is alone beside a learner that is there", (sorted(merged), there))

    def _is_there(self, learner: Learner) -> bool:
        session = learner.session
        if session is None or not learner.joined or learner.stop.is_set() or session.driver.failure is not None:
            return False
        return self._reachable_s(None, learner.joined_s) > HEARD_S and not session.driver.machine.draining

    def _check_pace(self, step_s: float | None) -> None:
        world = self.world
        if step_s is None or any(world.tally[kind] for kind in UNHEARD):
            return
        steps = [world.step_s_of(name) for name in world.names]
        steps.append(
            max(*steps, 1.0 / (HELD_SHARE * world.settings.steps_per_s_max))
        )  # a fast loop is held, in the end
        fair = min(steps) / PACE <= step_s <= max(steps) * PACE
        world.tally["paces checked"] += 1
        world.check(fair, "no absence enters the pace of a fleet", (step_s, steps))
