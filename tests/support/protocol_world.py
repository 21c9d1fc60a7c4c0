"""A small deterministic world around the real machines, for tests and golden logbooks: no bus, no clock, no tensor.

One shard, some islands, and everything that is on its way between them as a list that the test orders, delays,
duplicates or drops. Facts that a driver would produce are produced here in the simplest way. Every fact is followed by
every invariant. `heal` delivers what is left, drains everybody and checks that the books of both sides agree.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from atoll.base.errors import AtollError
from atoll.protocol import invariants
from atoll.protocol.events import (
    Acknowledge,
    Action,
    Adopted,
    ArmTimer,
    CallHeard,
    Commit,
    Committed,
    ContributionArrived,
    ContributionReady,
    ContributionSpoiled,
    Dismiss,
    DrainOrdered,
    Event,
    Fetch,
    FetchFragment,
    Finish,
    FragmentFetched,
    HeadHeard,
    Keep,
    LearnerBeat,
    LearnerLeft,
    Leave,
    PublishCall,
    Push,
    PushKey,
    PushRefused,
    PushSettled,
    QueueDrained,
    Share,
    StepDone,
    TimerFired,
)
from atoll.protocol.fragment_ledger import FragmentLedger
from atoll.protocol.island import Island
from atoll.protocol.ledger import Ledger, Settlement, settle
from atoll.protocol.recorder import logbook_line
from atoll.protocol.settings import ProtocolSettings
from atoll.protocol.shard import Shard

ROUNDS_MAX = 60


def one_commit(base_version: int) -> Commit:
    """Return the command to commit one contribution, the next of learner `a`, to fragment 0 on `base_version`."""
    key = PushKey("a", 1, 0, base_version + 1)
    share = Share(key=key, base_version=base_version, tokens=8, steps=4, weight=16.0, age=0)
    fragment_ledger = FragmentLedger()
    fragment_ledger.merge(share)
    return Commit(
        fragment=0,
        base_version=base_version,
        shares=(share,),
        called_s=0.0,
        quorum_s=0.0,
        grace_s=0.0,
        end="all answered",
        live=1,
        fragment_ledger=fragment_ledger.frozen(Ledger()),
    )


@dataclass
class LearnerIncarnation:
    """One incarnation of a learner: its machine and the frames that wait for its next step boundary."""

    name: str
    incarnation: int
    island: Island
    ready: dict[int, int] = field(default_factory=dict)
    left: bool = False


@dataclass
class ProtocolWorld:
    """One shard and its islands; `queue` is the durable work queue, `calls` and `heads` are core messages on their way."""

    settings: ProtocolSettings
    step_s: float = 1.0
    now_s: float = 0.0

    def __post_init__(self) -> None:
        """Start with nobody there."""
        self.heads = dict.fromkeys(range(self.settings.fragments), 0)
        self.shard = Shard(self.settings, 0, dict(self.heads))
        self.watch = invariants.ShardWatch()
        self.durable = invariants.Durable(self.heads)
        self.lives: dict[str, LearnerIncarnation] = {}
        self.incarnations: dict[str, int] = {}
        self.queue: list[ContributionArrived | LearnerLeft] = []
        self.delivered: dict[PushKey, ContributionArrived] = {}
        self.last_beats: dict[tuple[str, int], LearnerBeat] = {}
        self.reading: list[PushKey] = []
        self.core_messages: list[Callable[[], None]] = []
        self.lanes: dict[int, list[Action]] = {fragment: [] for fragment in self.heads}
        self.timers: dict[str, float] = {}
        self.finished = ""
        self.log: list[str] = []

    # --- what a test may do -----------------------------------------------------------------------------------------

    def join(self, name: str) -> None:
        """A learner arrives, or returns in its next incarnation, and adopts the heads."""
        number = self.incarnations.get(name, 0) + 1
        self.incarnations[name] = number
        self.lives[name] = LearnerIncarnation(name, number, Island(self.settings, dict(self.heads)))

    def die(self, name: str) -> None:
        """A learner is killed: what it had queued stays queued."""
        del self.lives[name]

    def step(self, name: str, tokens: int = 10) -> None:
        """A learner takes a step and adopts what waits for it."""
        life = self.lives[name]
        self._tell(life, StepDone(at_s=self.now_s, tokens=tokens))
        for fragment, version in sorted(life.ready.items()):
            self._tell(life, Adopted(at_s=self.now_s, fragment=fragment, version=version))
        life.ready.clear()

    def beat(self, name: str) -> None:
        """A learner's heartbeat reaches the shard."""
        life = self.lives[name]
        self._tell_shard(self._beat(life, training=not life.island.draining))

    def tick(self, for_s: float) -> None:
        """Time passes; timers that come due fire in order."""
        until_s = self.now_s + for_s
        while self.timers:
            name, due_s = min(self.timers.items(), key=lambda item: (item[1], item[0]))
            if due_s > until_s:
                break
            del self.timers[name]
            self.now_s = max(self.now_s, due_s)
            self._tell_shard(TimerFired(at_s=self.now_s, name=name))
        self.now_s = until_s

    def deliver(self, index: int = 0, *, again: bool = False) -> None:
        """The queue hands one message over; `again` delivers an old one once more (its acknowledgement was lost)."""
        if again and self.delivered:
            keys = sorted(self.delivered)
            once_more = self.delivered[keys[index % len(keys)]]
            self._tell_shard(once_more)
            return
        if self.queue:
            message = self.queue.pop(index % len(self.queue))
            if isinstance(message, ContributionArrived):
                self.delivered[message.key] = message
            if isinstance(message, LearnerLeft):
                self._tell_shard(self.last_beats[message.learner, message.incarnation])
            self._tell_shard(message)

    def read(self, index: int = 0, spoil: str = "") -> None:
        """The shard's workbench is done with one contribution, well or, with `spoil`, badly."""
        if not self.reading:
            return
        key = self.reading.pop(index % len(self.reading))
        if spoil:
            self._tell_shard(ContributionSpoiled(at_s=self.now_s, key=key, reason=spoil))
        else:
            self._tell_shard(ContributionReady(at_s=self.now_s, key=key))

    def core_message(self, index: int = 0, *, lose: bool = False) -> None:
        """One at-most-once message arrives, or is lost."""
        if self.core_messages:
            heard = self.core_messages.pop(index % len(self.core_messages))
            if not lose:
                heard()

    @property
    def commits(self) -> list[Commit]:
        """Return the commits that are decided and not durable yet."""
        return [action for lane in self.lanes.values() for action in lane if isinstance(action, Commit)]

    def work(self, index: int = 0) -> None:
        """The driver does the next thing in one of its lanes: a commit, books kept, an acknowledgement."""
        busy = [lane for lane in self.lanes.values() if lane]
        if busy:
            self._execute(busy[index % len(busy)].pop(0))

    def commit(self, index: int = 0) -> None:
        """One commit becomes durable and its head visible, after what stands before it in its lane."""
        decided = self.commits
        if decided:
            wanted = decided[index % len(decided)]
            while wanted in self.commits:
                self._execute(self.lanes[wanted.fragment].pop(0))

    def drain(self, name: str) -> None:
        """A learner is asked to leave."""
        self._tell(self.lives[name], DrainOrdered(at_s=self.now_s))

    def heal(self) -> Settlement:
        """Deliver everything, drain everybody, and return the settlement; the shard must have finished."""
        self._deliver_all()
        for name in sorted(self.lives):
            self.drain(name)
        self._tell_shard(DrainOrdered(at_s=self.now_s))
        for _ in range(ROUNDS_MAX):
            self._deliver_all()
            self.tick(self.settings.silence_s + 10.0 * self.step_s)
            self._tell_shard(QueueDrained(at_s=self.now_s))
            if self.finished and not (self.queue or self.reading or any(self.lanes.values())):
                return settle(self.shard.ledger, self.settings.fragments)
        raise AtollError("the world never came to rest", got=self.log[-20:])

    # --- the inside ---------------------------------------------------------------------------------------------------

    def _deliver_all(self) -> None:
        while self.queue or self.reading or any(self.lanes.values()) or self.core_messages:
            self.core_message()
            self.deliver()
            self.read()
            self.work()

    def _tell_shard(self, fact: Event) -> None:
        actions = self.shard.handle(fact)
        self._note("shard", fact, actions)
        self.watch.see(actions)
        invariants.check_shard(self.shard)
        for action in actions:
            self._do(action)

    def _tell(self, life: LearnerIncarnation, fact: Event) -> None:
        actions = life.island.handle(fact)
        self._note(f"{life.name}/{life.incarnation}", fact, actions)
        invariants.check_island(life.island)
        for action in actions:
            self._do_for(life, action)

    def _do(self, action: Action) -> None:
        if isinstance(action, ArmTimer):
            self.timers[action.name] = action.due_s
        elif isinstance(action, Fetch):
            self.reading.append(action.key)
        elif isinstance(action, Commit | Keep | Dismiss):
            self.lanes[action.fragment].append(action)
        elif isinstance(action, PublishCall):
            for life in list(self.lives.values()):
                self._whisper_call(life, action)
        elif isinstance(action, Acknowledge):
            self.lanes[action.key.fragment].append(action)
        elif isinstance(action, Finish):
            self.finished = action.reason

    def _execute(self, action: Action) -> None:
        """Do what a lane holds; the same order as the driver's: durable first, then told."""
        if isinstance(action, Commit):
            self.durable.see_commit(action)
            version = action.base_version + 1
            self.heads[action.fragment] = version
            for life in list(self.lives.values()):
                self._whisper_head(life, action.fragment, version)
            self._tell_shard(Committed(at_s=self.now_s, fragment=action.fragment, version=version))
        elif isinstance(action, Keep):
            self.durable.see_books(action.fragment, action.fragment_ledger)
        elif isinstance(action, Acknowledge):
            self.durable.see_acknowledged(action)
            sender = self.lives.get(action.key.learner)
            if action.fate == "refused" and sender is not None and sender.incarnation == action.key.incarnation:
                self._whisper_refusal(sender, action)

    def _do_for(self, life: LearnerIncarnation, action: Action) -> None:
        if isinstance(action, Push):
            self.queue.append(
                ContributionArrived(
                    at_s=self.now_s,
                    key=PushKey(life.name, life.incarnation, action.fragment, action.push),
                    base_version=action.base_version,
                    tokens=action.tokens,
                    steps=action.steps,
                    trained_tokens=action.trained_tokens,
                    final=action.final,
                )
            )
            self._tell(life, PushSettled(at_s=self.now_s, fragment=action.fragment, push=action.push))
        elif isinstance(action, FetchFragment):
            version = self.heads[action.fragment]
            life.ready[action.fragment] = version
            self._tell(life, FragmentFetched(at_s=self.now_s, fragment=action.fragment, version=version))
        elif isinstance(action, Leave):
            life.left = True
            self.last_beats[life.name, life.incarnation] = self._beat(life, training=False)
            self.queue.append(LearnerLeft(at_s=self.now_s, learner=life.name, incarnation=life.incarnation))
            self.lives.pop(life.name, None)

    def _beat(self, life: LearnerIncarnation, *, training: bool) -> LearnerBeat:
        return LearnerBeat(
            at_s=self.now_s,
            learner=life.name,
            incarnation=life.incarnation,
            training=training,
            step_s=self.step_s,
            tokens=life.island.tokens,
            pushed=life.island.pushed,
            superseded=life.island.superseded,
            refused_local=life.island.refused_local,
        )

    def _whisper_call(self, life: LearnerIncarnation, call: PublishCall) -> None:
        def heard() -> None:
            if self.lives.get(life.name) is life:
                fact = CallHeard(at_s=self.now_s, fragment=call.fragment, version=call.version, attempt=call.attempt)
                self._tell(life, fact)

        self.core_messages.append(heard)

    def _whisper_head(self, life: LearnerIncarnation, fragment: int, version: int) -> None:
        def heard() -> None:
            if self.lives.get(life.name) is life:
                self._tell(life, HeadHeard(at_s=self.now_s, fragment=fragment, version=version))

        self.core_messages.append(heard)

    def _whisper_refusal(self, life: LearnerIncarnation, refusal: Acknowledge) -> None:
        def heard() -> None:
            if self.lives.get(life.name) is life:
                fact = PushRefused(
                    at_s=self.now_s, fragment=refusal.key.fragment, push=refusal.key.push, reason=refusal.reason
                )
                self._tell(life, fact)

        self.core_messages.append(heard)

    def _note(self, who: str, fact: Event, actions: list[Action]) -> None:
        """Keep one readable line per fact, for logbooks and for the last lines of a failure."""
        self.log.append(logbook_line(who, fact, actions, self.now_s))
