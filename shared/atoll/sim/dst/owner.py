"""One candidacy for one shard as the service runs it: wait for the lease, take over, serve, be deposed or finish.

The order of effects is `atoll_synchronizer.service`'s: one lane per fragment executes folds, commits, books and
acknowledgements strictly in the order the production `Shard` gave them; a refused compare-and-set ends the candidacy.
It decides nothing, and every fact is followed by every invariant of the machine.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from atoll.protocol import invariants
from atoll.protocol.events import (
    Acknowledge,
    Action,
    ArmTimer,
    Commit,
    CommitRefused,
    Committed,
    ContributionArrived,
    ContributionReady,
    ContributionSpoiled,
    Dismiss,
    DrainOrdered,
    Event,
    Fetch,
    Finish,
    Fold,
    Isolate,
    Keep,
    LearnerBeat,
    LearnerLeft,
    PublishCall,
    PushKey,
    QueueDrained,
    StandDown,
    TimerFired,
)
from atoll.protocol.ledger import Ledger
from atoll.protocol.shard import Shard
from atoll.sim.dst.broker import Gone
from atoll.sim.dst.lease import LeaseKeeper
from atoll.sim.dst.line import Conflict, Line, Unavailable, patiently
from atoll.sim.dst.process import Mailbox, Process, Scope, Work
from atoll.sim.dst.reader import Delivery, Reader
from atoll.sim.dst.store import Store
from atoll.sim.dst.traffic import Contribution, Farewell

if TYPE_CHECKING:
    from atoll.sim.dst.world import World

HOLD_S = 3.0
DECODE_S = 0.002
IDLE_S = 0.05
HANDED_OVER = "handed over"
NORM = {"": 1.0, "outlier": 1e3}


@dataclass(frozen=True, slots=True)
class Ended:
    """How a candidacy ended; `deposed`: another owns the shard now."""

    reason: str
    deposed: bool = False


class Owner:
    """One candidacy for one shard: standby, owner, finished or deposed."""

    def __init__(self, world: World, process: Process, shard: int, line: Line) -> None:
        """Prepare; `serve` does the work."""
        self.world = world
        self.process = process
        self.shard = shard
        self.line = line
        self.candidacy = world.number("candidacy")
        self.lease = LeaseKeeper(line, shard, f"{process.name}~{self.candidacy}", world.settings)
        self.store = Store(line, world.settings.fragments_of(shard), world.dice)
        self.scope = Scope()
        self.ended = Mailbox(process)
        self.ledger = Ledger()
        self.machine: Shard | None = None
        self.draining = False
        self.finished = False
        self.reader: Reader | None = None
        self._heir = ""
        self._deliveries: dict[PushKey, Delivery] = {}
        self._farewells: dict[tuple[str, int], Delivery] = {}
        self._lanes: dict[int, Mailbox] = {}
        self._waiting = 0
        self._folds: dict[int, set[PushKey]] = {}
        self._ready: set[PushKey] = set()
        self._timers: dict[str, int] = {}

    # --- one candidacy ------------------------------------------------------------------------------------------------

    def serve(self) -> Work:
        """Wait until the shard is ours, serve it, and return how that ended."""
        former: Ledger | None = yield from self.lease.win()
        if not self.lease.epoch:
            return Ended("nothing to own")
        self.world.note(self.process.name, "owns", f"shard {self.shard}", f"epoch {self.lease.epoch}")
        self.world.tally["tenures"] += 1
        self.ledger = former or Ledger()
        self.process.spawn(self._keep_lease(), self.scope)
        self.process.spawn(self._guarded(self._take_over(former)), self.scope)
        ended: Ended = yield from self.ended.get()
        self.scope.stop()
        if not ended.deposed and self.machine is not None:
            ledger = self.store.ledger(self.machine.ledger)
            yield from patiently(lambda: self.lease.release(ledger, closed=self.finished, to=self._heir))
        if self.reader is not None:
            self.reader.close()
        self.line.broker.hush(self._on_beat)
        self.world.note(self.process.name, "ends", ended.reason)
        return ended

    def _take_over(self, former: Ledger | None) -> Work:
        """Fence and load the fragments, begin to read the queue, and go on where the former owner was."""
        epoch = self.lease.epoch
        yield from patiently(self.store.open, epoch)
        versions = {p: holding.head.version for p, holding in self.store.holdings.items()}
        self.machine = Shard(
            self.world.settings, self.shard, versions, fragment_ledger=self.store.fragment_ledger, ledger=former
        )
        self.watch = invariants.ShardWatch()
        self.ledger = self.machine.ledger
        for fragment in versions:
            self._lanes[fragment] = Mailbox(self.process)
            self.process.spawn(self._guarded(self._work(fragment)), self.scope)
        self.line.broker.listen("beat", self.process, self._on_beat)
        reader = Reader(self.line, self.shard, epoch)
        yield from patiently(reader.open)
        self.reader = reader
        self.process.spawn(self._guarded(self._read_queue(reader)), self.scope)
        self.process.spawn(self._keep_holding(reader), self.scope)
        if self.draining:
            self.order_drain()

    def _guarded(self, work: Work) -> Work:
        """Do `work`; a compare-and-set that somebody else has won ends the candidacy."""
        try:
            yield from work
        except Conflict as error:
            self._depose(f"refused: {error}")

    def _keep_lease(self) -> Work:
        yield from self.lease.hold(lambda: self.ledger)
        self._depose("somebody else holds the lease")

    def _depose(self, reason: str) -> None:
        self.world.tally["owners deposed"] += 1
        self.ended.put(Ended(reason, deposed=True))

    def order_drain(self) -> None:
        """Finish when the last learner has left and the queue is empty; a standby leaves when the shard has an owner."""
        self.draining = self.lease.leaving = True
        if self.machine is not None and self.reader is not None:
            self._on_fact(DrainOrdered(at_s=self.process.clock.now_s, cause_id="drain"))

    def leave(self) -> None:
        """Stop serving now; what is queued stays queued for the next owner."""
        self.ended.put(Ended("left"))

    def hand_over(self, to: str, within_s: float) -> Work:
        """Make durable what is decided, decide nothing more, and release the shard to the process `to`."""
        if self.reader is None or self._heir or not self.scope.live:
            return
        self._heir = to
        until_s = self.process.clock.now_s + within_s
        while self._waiting and self.process.clock.now_s < until_s:
            yield IDLE_S
        self.ended.put(Ended(HANDED_OVER))

    # --- facts --------------------------------------------------------------------------------------------------------

    def _on_beat(self, beat: tuple[LearnerBeat, str]) -> None:
        if self.scope.live and self.machine is not None and beat[1] != "left":
            self._on_fact(_at(beat[0], self.process.clock.now_s))

    def _read_queue(self, reader: Reader) -> Work:
        while True:
            try:
                delivery: Delivery | None = yield from reader.next()
                if delivery is None:
                    proven = yield from reader.is_drained()
                    self._on_fact(QueueDrained(at_s=self.process.clock.now_s, proven=proven))
                    continue
            except Unavailable:
                yield from reader.pause()
                continue
            self._on_delivery(delivery)

    def _on_delivery(self, delivery: Delivery) -> None:
        now_s = self.process.clock.now_s
        body = delivery.body
        if isinstance(body, Farewell):
            self._farewells[body.learner, body.incarnation] = delivery
            self._on_fact(_at(body.beat, now_s))
            self._on_fact(LearnerLeft(at_s=now_s, learner=body.learner, incarnation=body.incarnation))
            return
        self._deliveries[body.key] = delivery
        self._on_fact(
            ContributionArrived(
                at_s=now_s,
                key=body.key,
                base_version=body.base_version,
                tokens=body.tokens,
                steps=body.steps,
                trained_tokens=body.trained_tokens,
                final=body.final,
            )
        )

    def _on_fact(self, fact: Event) -> None:
        machine = self.machine
        if machine is None or not self.scope.live or not self.process.alive or self._heir:
            return
        actions = machine.handle(fact)
        self.world.note(self.process.name, fact, actions)
        self.watch.see(actions)
        invariants.check_shard(machine)
        for action in actions:
            self._do(action)

    # --- commands -----------------------------------------------------------------------------------------------------

    def _do(self, action: Action) -> None:
        if isinstance(action, ArmTimer):
            self._arm(action)
        elif isinstance(action, PublishCall):
            self.world.tally["quorum waits"] += action.attempt > 1
            self.line.tell("call", action)
        elif isinstance(action, Fetch):
            self.process.spawn(self._fetch(action), self.scope)
        elif isinstance(action, Fold | Acknowledge):
            self._enqueue(action.key.fragment, action)
        elif isinstance(action, Commit | Keep | Dismiss):
            self._enqueue(action.fragment, action)
        elif isinstance(action, Isolate):
            self.world.tally["quarantines"] += 1
        elif isinstance(action, Finish):
            self.process.spawn(self._finish(action.reason), self.scope)
        elif isinstance(action, StandDown):
            self.ended.put(Ended(action.reason, deposed=True))

    def _enqueue(self, fragment: int, action: Action) -> None:
        self._waiting += 1
        self._lanes[fragment].put(action)

    def _arm(self, action: ArmTimer) -> None:
        armed = self._timers[action.name] = self._timers.get(action.name, 0) + 1
        wait_s = (action.due_s - self.process.clock.now_s) / self.process.clock.rate
        self.process.engine.after(wait_s, self.process.tell, self._on_timer, action.name, armed)

    def _on_timer(self, name: str, armed: int) -> None:
        if self._timers.get(name) == armed:
            self._on_fact(TimerFired(at_s=self.process.clock.now_s, name=name))

    def _fetch(self, action: Fetch) -> Work:
        body: Contribution = self._deliveries[action.key].body
        reason = ""
        try:
            yield from patiently(self.line.ask, self.line.broker.get_blob, body.stem)
            yield DECODE_S
            self._ready.add(action.key)
        except Gone:
            reason = "chunks_gone"
        now_s = self.process.clock.now_s
        reason = reason or ("" if body.flaw == "outlier" else body.flaw)
        if reason:
            self._on_fact(ContributionSpoiled(at_s=now_s, key=action.key, reason=reason, cause_id=action.cause_id))
        else:
            self._on_fact(ContributionReady(at_s=now_s, key=action.key, norm=NORM[body.flaw], cause_id=action.cause_id))

    def _work(self, fragment: int) -> Work:
        """Execute one fragment's commands in order, until a write of ours is refused."""
        lane = self._lanes[fragment]
        while True:
            action: Action = yield from lane.get()
            try:
                yield from self._execute(action)
            except Conflict as error:
                self.world.tally["deposed writes refused"] += 1
                self._on_fact(CommitRefused(at_s=self.process.clock.now_s, fragment=fragment, reason=str(error)))
                raise
            self._waiting -= 1

    def _execute(self, action: Action) -> Work:
        if isinstance(action, Fold):
            self._ready.discard(action.key)
            self._folds.setdefault(action.key.fragment, set()).add(action.key)
        elif isinstance(action, Acknowledge):
            yield from self._acknowledge(action)
        elif isinstance(action, Dismiss):
            farewell = self._farewells.pop((action.learner, action.incarnation), None)
            if farewell is not None:
                yield from patiently(farewell.ack, action)
        elif isinstance(action, Keep):
            yield from patiently(self.store.keep, action.fragment, action.fragment_ledger)
        elif isinstance(action, Commit):
            yield from self._commit(action)

    def _commit(self, command: Commit) -> Work:
        folded = frozenset(self._folds.pop(command.fragment, ()))
        yield from patiently(self.store.commit, command, folded)
        now_s, version = self.process.clock.now_s, command.base_version + 1
        self._on_fact(Committed(at_s=now_s, fragment=command.fragment, version=version, cause_id=command.cause_id))

    def _acknowledge(self, action: Acknowledge) -> Work:
        """Settle one contribution for good: tell its learner if refused, empty its place in line, forget its chunks."""
        delivery = self._deliveries.pop(action.key, None)
        if delivery is None:
            return
        self._ready.discard(action.key)
        if action.fate == "refused":
            self.line.tell(f"verdict/{action.key.learner}", action)
        yield from patiently(delivery.ack, action)
        yield from patiently(self.line.ask, self.line.broker.purge, delivery.body.stem)

    # --- the rest -----------------------------------------------------------------------------------------------------

    def _finish(self, reason: str) -> Work:
        """End once every lane is empty."""
        while self._waiting:
            yield IDLE_S
        self.finished = True
        self.ended.put(Ended(reason))

    def _keep_holding(self, reader: Reader) -> Work:
        """Tell the queue now and then that what is in our hands is still being worked on."""
        while True:
            yield HOLD_S
            for delivery in self._deliveries.values():
                reader.hold(delivery.sequence)


def _at(beat: LearnerBeat, at_s: float) -> LearnerBeat:
    """Return what a learner reported, as heard now by our own clock."""
    return LearnerBeat(
        at_s=at_s,
        learner=beat.learner,
        incarnation=beat.incarnation,
        training=beat.training,
        step_s=beat.step_s,
        tokens=beat.tokens,
        pushed=beat.pushed,
        superseded=beat.superseded,
        refused_local=beat.refused_local,
        run_tokens=beat.run_tokens,
    )
