"""The shards' side of a simulated fleet: production `Shard` machines, and their commands, carried out at once or later.

It is a driver of the machine like the service, with sums in place of bytes: fetching and committing take the time of a
fragment over the hub's own link. One lane per fragment keeps the order of the commands: commands after a commit wait
until it is durable. Nothing fails here (dying owners and forgetful brokers: `tests/schedules`). The hub decides
nothing.
"""

from __future__ import annotations

from collections import Counter, deque
from typing import TYPE_CHECKING

import msgspec

from atoll.base.errors import ProtocolMisuse
from atoll.protocol import invariants
from atoll.protocol.events import (
    Acknowledge,
    ArmTimer,
    Command,
    Commit,
    Committed,
    ContributionArrived,
    ContributionReady,
    Dismiss,
    DrainOrdered,
    Fact,
    Fetch,
    Finish,
    Fold,
    Isolate,
    Keep,
    Kept,
    LearnerBeat,
    LearnerLeft,
    PublishCall,
    PushKey,
    QueueDrained,
    Refuse,
    TimerFired,
    Unfold,
)
from atoll.protocol.shard import Shard

if TYPE_CHECKING:
    from atoll_simulator.fleet.rounds import Rounds

IDLE_S = 1.0


class Hub:
    """One shard with its queue; `versions` are visible, `merged_s` says when a commit first had each learner."""

    def __init__(self, world: Rounds, shard: int, *, watched: bool) -> None:
        """Found the fragments at version 0; `watched` checks every invariant after every fact."""
        self.world = world
        self.versions = dict.fromkeys(world.settings.fragments_of(shard), 0)
        self.machine = Shard(world.settings, shard, dict(self.versions))
        self.tally: Counter[str] = Counter()
        self.contributors: Counter[int] = Counter()
        self.merged_s: dict[str, float] = {}
        self.finished = False
        self._unsettled: set[PushKey | tuple[str, int]] = set()
        self._timers: Counter[str] = Counter()
        self._lanes: dict[int, deque[Command]] = {fragment: deque() for fragment in self.versions}
        self._committing: set[int] = set()
        self._watch = invariants.ShardWatch() if watched else None
        self._durable = invariants.Durable(self.versions) if watched else None

    # --- facts ----------------------------------------------------------------------------------------------------------

    def hear_beat(self, beat: LearnerBeat) -> None:
        """Hear a report."""
        self._on_fact(msgspec.structs.replace(beat, at_s=self.world.engine.now_s))

    def receive(self, arrived: ContributionArrived) -> None:
        """Find a contribution in the queue."""
        self._unsettled.add(arrived.key)
        self._on_fact(msgspec.structs.replace(arrived, at_s=self.world.engine.now_s))

    def receive_farewell(self, beat: LearnerBeat) -> None:
        """Find a farewell in the queue: a last report, then the goodbye."""
        self._unsettled.add((beat.learner, beat.incarnation))
        self.hear_beat(beat)
        now_s = self.world.engine.now_s
        self._on_fact(LearnerLeft(at_s=now_s, learner=beat.learner, incarnation=beat.incarnation))

    def drain(self) -> None:
        """Finish when all learners have left and nothing is queued."""
        self._on_fact(DrainOrdered(at_s=self.world.engine.now_s, cause_id="drain"))
        self._look_at_queue()

    def _look_at_queue(self) -> None:
        if not self.finished:
            self._on_fact(QueueDrained(at_s=self.world.engine.now_s, proven=not self._unsettled))
            self.world.engine.after(IDLE_S, self._look_at_queue)

    def _on_fact(self, fact: Fact) -> None:
        actions = self.machine.handle(fact)
        if self._watch is not None:
            self._watch.see(actions)
            invariants.check_shard(self.machine)
        for action in actions:
            self._do(action)

    # --- commands -------------------------------------------------------------------------------------------------------

    def _do(self, action: Command) -> None:
        engine = self.world.engine
        if isinstance(action, ArmTimer):
            self._timers[action.name] += 1
            engine.after(action.due_s - engine.now_s, self._on_timer, action, self._timers[action.name])
        elif isinstance(action, PublishCall):
            self.tally["calls again" if action.attempt > 1 else "rounds"] += 1
            self.world.announce_call(action)
        elif isinstance(action, Fetch):
            engine.after(self.world.fetch_s(), self._on_fetched, action.key)
        elif isinstance(action, Fold | Acknowledge):
            self._in_lane(action.key.fragment, action)
        elif isinstance(action, Commit | Keep | Dismiss | Unfold):
            if isinstance(action, Commit) and self.world.on_commit is not None:
                self.world.on_commit(action)
            self._in_lane(action.fragment, action)
        elif isinstance(action, Refuse):
            self.world.tell_refused(action)
        elif isinstance(action, Finish):
            self.finished = True
        elif not isinstance(action, Isolate):
            raise ProtocolMisuse("a shard that nothing happens to has no reason for this", got=action)

    def _on_timer(self, armed: ArmTimer, number: int) -> None:
        if self._timers[armed.name] == number:
            # Adding a wait to the time of day may round to just before the intended moment.
            self._on_fact(TimerFired(at_s=max(armed.due_s, self.world.engine.now_s), name=armed.name))

    def _on_fetched(self, key: PushKey) -> None:
        self._on_fact(ContributionReady(at_s=self.world.engine.now_s, key=key))

    def _in_lane(self, fragment: int, action: Command) -> None:
        if fragment in self._committing:
            self._lanes[fragment].append(action)
        else:
            self._execute(fragment, action)

    def _execute(self, fragment: int, action: Command) -> None:
        if isinstance(action, Commit):
            self._committing.add(fragment)
            self.world.engine.after(self.world.commit_s(), self._commit, action)
        elif isinstance(action, Acknowledge):
            self._unsettled.discard(action.key)
            self.tally[action.reason or action.fate] += 1
            if self._durable is not None:
                self._durable.see_acknowledged(action)
        elif isinstance(action, Dismiss):
            self._unsettled.discard((action.learner, action.incarnation))
            if self._durable is not None:
                self._durable.see_dismissed(action)
        elif isinstance(action, Keep):
            if self._durable is not None:
                self._durable.see_ledger(fragment, action.fragment_ledger)
            self._on_fact(Kept(at_s=self.world.engine.now_s, fragment=fragment))

    def _commit(self, commit: Commit) -> None:
        """Make a commit visible, announce it, and continue with the waiting commands of its lane."""
        fragment = commit.fragment
        if self._durable is not None:
            self._durable.see_commit(commit)
        version = self.versions[fragment] = commit.base_version + 1
        self.tally["commits"] += 1
        names = {share.key.learner for share in commit.shares}
        self.contributors[len(names)] += 1
        for name in sorted(names - self.merged_s.keys()):
            self.merged_s[name] = self.world.engine.now_s
        self.world.announce_head(fragment, version)
        self._committing.discard(fragment)
        lane = self._lanes[fragment]
        waiting, self._lanes[fragment] = lane, deque()
        for action in waiting:
            self._in_lane(fragment, action)
        self._on_fact(
            Committed(at_s=self.world.engine.now_s, fragment=fragment, version=version, cause_id=commit.cause_id)
        )
