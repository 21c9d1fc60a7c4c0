"""A small deterministic world around the real machines, for tests and golden logbooks: no bus, no clock, no tensor.

One shard, some islands, and everything that is on its way between them as a list that the test orders, delays,
duplicates or drops. Facts that a driver would produce are produced here in the simplest way. Every fact is followed by
every invariant and by every reference model. `heal` delivers what is left, drains everybody and checks that the ledgers of
both sides agree with each other and with the models.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from atoll.base.errors import AtollError
from atoll.base.parsing import parsed
from atoll.protocol import events, invariants
from atoll.protocol.island import Island
from atoll.protocol.ledger import FragmentLedger, Ledger, Settlement, settle
from atoll.protocol.recorder import logbook_line
from atoll.protocol.settings import ProtocolSettings
from atoll.protocol.shard import Shard
from support.reference_machines import FateModel, IslandModel, RoundModel

ROUNDS_MAX = 60
ANSWERS_S = 2.0
"""How often the broker answers for the queue."""


def one_commit(base_version: int) -> events.Commit:
    """Return the command to commit the next contribution of learner `a` to fragment 0; its ledger holds all before it."""
    fragment_ledger = FragmentLedger()
    for base in range(base_version + 1):
        key = events.PushKey("a", 1, 0, base + 1)
        share = events.Share(key=key, base_version=base, tokens=8, steps=4, weight=16.0, age=0, credit=8)
        fragment_ledger.merge(share)
    return events.Commit(
        fragment=0,
        base_version=base_version,
        shares=(share,),
        called_s=0.0,
        quorum_s=0.0,
        grace_s=0.0,
        end="all answered",
        live=1,
        fragment_ledger=fragment_ledger.freeze(Ledger()),
    )


@dataclass
class LearnerIncarnation:
    """One incarnation of a learner: its machine, and a model of it."""

    name: str
    incarnation: int
    island: Island
    model: IslandModel
    left: bool = False


@dataclass
class ProtocolWorld:
    """One shard and its islands; `queue` is the durable work queue, `calls` and `heads` are core messages on their way.

    Pushes are durable and frames are read at once, unless `holding`: then they wait in `sending` and `fetching`. While it is
    `cut_off` the shard hears nothing of the broker but what a test hands over.
    """

    settings: ProtocolSettings
    step_s: float = 1.0
    now_s: float = 0.0
    holding: bool = False
    cut_off: bool = False
    paces: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.heads = dict.fromkeys(range(self.settings.fragments), 0)
        self.shard = Shard(self.settings, 0, dict(self.heads))
        self.watch = invariants.ShardWatch()
        self.rounds = RoundModel(self.settings, self.heads)
        self.fates = FateModel(self.settings, self.heads)
        self.sending: list[tuple[LearnerIncarnation, events.ContributionArrived]] = []
        self.fetching: list[tuple[LearnerIncarnation, events.FetchFragment]] = []
        self.gone: dict[str, Counter[str]] = {}
        self.farewells: list[events.LearnerLeft] = []
        self.durable = invariants.Durable(self.heads)
        self.lives: dict[str, LearnerIncarnation] = {}
        self.incarnations: dict[str, int] = {}
        self.queue: list[events.ContributionArrived | events.LearnerLeft] = []
        self.delivered: dict[events.PushKey, events.ContributionArrived] = {}
        self.acknowledged: set[events.PushKey] = set()
        self.last_beats: dict[tuple[str, int], events.LearnerBeat] = {}
        self.reading: list[events.PushKey] = []
        self.core_messages: list[Callable[[], None]] = []
        self.lanes: dict[int, list[events.Command]] = {fragment: [] for fragment in self.heads}
        self.timers: dict[str, float] = {}
        self.finished = ""
        self.log: list[str] = []
        self.folded = 0
        self._answered_s = 0.0
        self._turns = 0
        self._marked = self._outstanding()

    # --- what a test may do -----------------------------------------------------------------------------------------

    def join(self, name: str) -> None:
        """A learner arrives, or returns in its next incarnation, and adopts the heads."""
        number = self.incarnations.get(name, 0) + 1
        self.incarnations[name] = number
        self.lives[name] = LearnerIncarnation(
            name, number, Island(self.settings, dict(self.heads)), IslandModel(self.settings, self.heads)
        )

    def die(self, name: str) -> None:
        """A learner is killed: what it had queued stays queued."""
        dead = self.lives.pop(name)
        self.sending = [(life, arrived) for life, arrived in self.sending if life is not dead]
        self.fetching = [(life, wanted) for life, wanted in self.fetching if life is not dead]

    def take_over(self) -> None:
        """The shard's owner dies; its heir begins with what is durable, and what nobody acknowledged comes once more."""
        fragment_ledger = {
            fragment: parsed(kept.freeze(_reports(kept)), FragmentLedger)
            for fragment, kept in self.durable.fragment_ledger.items()
        }
        lost = {
            key
            for lane in self.lanes.values()
            for one in lane
            if isinstance(one, events.Acknowledge)
            for key in [one.key]
        }
        known = {
            key: fate for key, fate in self.fates.fates.items() if self.durable.fragment_ledger[key.fragment].knows(key)
        }
        self.shard = Shard(self.settings, 0, dict(self.heads), fragment_ledgers=fragment_ledger)
        self.watch = invariants.ShardWatch()
        self.rounds = RoundModel(self.settings, self.heads)
        self.rounds.inherit(self.shard.ledger, known, {p: kept.tokens_counted for p, kept in fragment_ledger.items()})
        self.fates = FateModel(self.settings, self.heads, known, self.shard.ledger)
        open_keys = [key for key in self.delivered if key not in known or key in lost]
        self.queue += [self.delivered[key] for key in open_keys if self.delivered[key] not in self.queue]
        self.queue += [one for one in self.farewells if one not in self.queue]
        self.lanes = {fragment: [] for fragment in self.heads}
        self.reading.clear()
        self.timers.clear()
        self.finished = ""

    def step(self, name: str, tokens: int = 10) -> None:
        """A learner takes a step and adopts what waits for it."""
        self._tell(self.lives[name], events.StepDone(at_s=self.now_s, tokens=tokens))

    def beat(self, name: str) -> None:
        life = self.lives[name]
        self._tell_shard(self._beat(life, training=not life.island.draining))

    def tick(self, for_s: float) -> None:
        """Time passes; timers that come due fire in order, and the broker answers now and then."""
        until_s = self.now_s + for_s
        while True:
            name, due_s = min(self.timers.items(), key=lambda item: (item[1], item[0]), default=("", math.inf))
            at_s = max(self.now_s, min(due_s, self._answered_s + ANSWERS_S))
            if at_s > until_s:
                break
            self.now_s = at_s
            if due_s <= at_s:
                del self.timers[name]
                self._tell_shard(events.TimerFired(at_s=at_s, name=name))
            else:
                self._answered_s = at_s
                if not self.cut_off:
                    self._tell_shard(events.QueueDrained(at_s=at_s, proven=False, turns=self._turn()))
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
            if isinstance(message, events.ContributionArrived):
                self.delivered[message.key] = message
            if isinstance(message, events.LearnerLeft):
                self.farewells.append(message)
                self._tell_shard(self.last_beats[message.learner, message.incarnation])
            self._tell_shard(message)

    def read(self, index: int = 0, spoil: str = "") -> None:
        """The shard's aggregator is done with one contribution, well or, with `spoil`, badly."""
        if not self.reading:
            return
        key = self.reading.pop(index % len(self.reading))
        if spoil:
            self._tell_shard(events.ContributionSpoiled(at_s=self.now_s, key=key, reason=spoil))
        else:
            self._tell_shard(events.ContributionReady(at_s=self.now_s, key=key))

    def core_message(self, index: int = 0, *, lose: bool = False) -> None:
        """One at-most-once message arrives, or is lost."""
        if self.core_messages:
            heard = self.core_messages.pop(index % len(self.core_messages))
            if not lose:
                heard()

    def send(self, index: int = 0, reason: str = "") -> None:
        """A push that was held becomes durable, or its learner gives it up for `reason`."""
        if self.sending:
            life, arrived = self.sending.pop(index % len(self.sending))
            if not reason:
                self.queue.append(arrived)
            push = arrived.key.push
            self._tell(
                life, events.PushSettled(at_s=self.now_s, fragment=arrived.key.fragment, push=push, reason=reason)
            )

    def fetch(self, index: int = 0, *, fail: bool = False) -> None:
        """A frame that was held is read, or cannot be."""
        if self.fetching:
            life, wanted = self.fetching.pop(index % len(self.fetching))
            fragment, version = wanted.fragment, self.heads[wanted.fragment]
            if version <= life.island.intervals[fragment].newest and not wanted.again:
                self._tell(life, events.NothingNewer(at_s=self.now_s, fragment=fragment))
                return
            if fail:
                self._tell(life, events.FetchFailed(at_s=self.now_s, fragment=fragment, version=version, reason="away"))
                return
            self._tell(life, events.FragmentFetched(at_s=self.now_s, fragment=fragment, version=version))

    @property
    def commits(self) -> list[events.Commit]:
        """Return the commits that are decided and not durable yet."""
        return [action for lane in self.lanes.values() for action in lane if isinstance(action, events.Commit)]

    def work(self, index: int = 0) -> None:
        """The driver does the next thing in one of its lanes: a commit, ledgers kept, an acknowledgement."""
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
        self._tell(self.lives[name], events.DrainOrdered(at_s=self.now_s))

    def heal(self) -> Settlement:
        """Deliver everything, drain everybody, and return the settlement; the shard must have finished."""
        self._deliver_all()
        self.cut_off = False
        for name in sorted(self.lives):
            self.drain(name)
        self._tell_shard(events.DrainOrdered(at_s=self.now_s))
        for _ in range(ROUNDS_MAX):
            self._deliver_all()
            self.tick(self.settings.silence_s + 10.0 * self.step_s)
            self._tell_shard(events.QueueDrained(at_s=self.now_s, turns=self._turn()))
            if self.finished and not (self.queue or self.reading or any(self.lanes.values())):
                self._check_fates()
                return settle(self.shard.ledger, self.settings.fragments)
        raise AtollError("the world never came to rest", got=self.log[-20:])

    # --- the inside ---------------------------------------------------------------------------------------------------

    def _check_fates(self) -> None:
        """Compare what the ledger says of each learner that left with what the models say of its pushes and their fates."""
        for name, told in self.gone.items():
            if self.shard.ledger.former.covers(name):
                continue
            account = self.shard.ledger.accounts[name]
            invariants.require(account.left, "who has left is known to have left", name)
            got = Counter(pushed=account.pushed, superseded=account.superseded, local=account.refused_local)
            invariants.require(got == told, "the ledgers have what the learner has", (name, got, told))
            settled = sum(
                tokens for key, (_, tokens) in self.fates.fates.items() if f"{key.learner}/{key.incarnation}" == name
            )
            invariants.require(settled == told["pushed"], "what was pushed has a fate", (name, settled, told))

    def _outstanding(self) -> set[object]:
        """Return what the queue holds: what was not delivered yet, and what was, and is not settled."""
        queued = {each.key if isinstance(each, events.ContributionArrived) else each for each in self.queue}
        return {*queued, *self.farewells, *(key for key in self.delivered if key not in self.acknowledged)}

    def _turn(self) -> int:
        """Return how often all that the queue held at one moment was settled since."""
        outstanding = self._outstanding()
        if not self._marked & outstanding:
            self._turns, self._marked = self._turns + 1, outstanding
        return self._turns

    def _deliver_all(self) -> None:
        self.holding = False
        while (
            self.queue
            or self.reading
            or any(self.lanes.values())
            or self.core_messages
            or self.sending
            or self.fetching
        ):
            self.send()
            self.fetch()
            self.core_message()
            self.deliver()
            self.read()
            self.work()

    def _tell_shard(self, fact: events.Fact) -> None:
        actions = self.shard.handle(fact)
        self._note("shard", fact, actions)
        self.watch.see(actions)
        self.rounds.see(fact, actions)
        self.fates.see(fact, actions)
        invariants.check_shard(self.shard)
        self.fates.check(self.shard.ledger)
        self.folded = max(self.folded, self.shard.ledger.former.lives)
        for action in actions:
            self._do(action)

    def _tell(self, life: LearnerIncarnation, fact: events.Fact) -> None:
        actions = life.island.handle(fact)
        self._note(f"{life.name}/{life.incarnation}", fact, actions)
        invariants.check_island(life.island)
        life.model.see(fact, actions)
        life.model.check(life.island)
        for action in actions:
            self._do_for(life, action)

    def _do(self, action: events.Command) -> None:
        if isinstance(action, events.ArmTimer):
            self.timers[action.name] = action.due_s
        elif isinstance(action, events.Fetch):
            self.reading.append(action.key)
        elif isinstance(action, events.Commit | events.Keep | events.Dismiss):
            self.lanes[action.fragment].append(action)
        elif isinstance(action, events.PublishCall):
            for life in list(self.lives.values()):
                self._tell_call(life, action)
        elif isinstance(action, events.Acknowledge):
            self.lanes[action.key.fragment].append(action)
        elif isinstance(action, events.Refuse):
            invariants.require(action.reason != "implausible", "who pushes what it has trained is believed", action)
            sender = self.lives.get(action.key.learner)
            if sender is not None and sender.incarnation == action.key.incarnation:
                self._tell_refusal(sender, action)
        elif isinstance(action, events.Finish):
            self.finished = action.reason

    def _execute(self, action: events.Command) -> None:
        """Do what a lane holds; the same order as the driver's: durable first, then told."""
        if isinstance(action, events.Commit):
            self.durable.see_commit(action)
            version = action.base_version + 1
            self.heads[action.fragment] = version
            for life in list(self.lives.values()):
                self._tell_head(life, action.fragment, version)
            self._tell_shard(events.Committed(at_s=self.now_s, fragment=action.fragment, version=version))
        elif isinstance(action, events.Keep):
            self.durable.see_ledger(action.fragment, action.fragment_ledger)
            self._tell_shard(events.Kept(at_s=self.now_s, fragment=action.fragment))
        elif isinstance(action, events.Dismiss):
            self.durable.see_dismissed(action)
            dismissed = action.learner, action.incarnation
            self.farewells = [one for one in self.farewells if (one.learner, one.incarnation) != dismissed]
        elif isinstance(action, events.Acknowledge):
            self.durable.see_acknowledged(action)
            self.acknowledged.add(action.key)

    def _do_for(self, life: LearnerIncarnation, action: events.Command) -> None:
        if isinstance(action, events.Push):
            arrived = events.ContributionArrived(
                at_s=self.now_s,
                key=events.PushKey(life.name, life.incarnation, action.fragment, action.push),
                base_version=action.base_version,
                tokens=action.tokens,
                steps=action.steps,
                trained_tokens=action.trained_tokens,
                final=action.final,
            )
            self.sending.append((life, arrived))
            if action.keep:
                self._tell(life, events.SnapshotKept(at_s=self.now_s, fragment=action.fragment, push=action.push))
            if not self.holding:
                self.send(-1)
        elif isinstance(action, events.Adopt):
            fragment, version, overwritten = action.fragment, action.version, action.overwrite
            self._tell(
                life, events.Adopted(at_s=self.now_s, fragment=fragment, version=version, overwritten=overwritten)
            )
        elif isinstance(action, events.FetchFragment):
            self.fetching.append((life, action))
            if not self.holding:
                self.fetch(-1)
        elif isinstance(action, events.Leave):
            life.left = True
            self.gone[f"{life.name}/{life.incarnation}"] = life.model.totals()
            self.last_beats[life.name, life.incarnation] = self._beat(life, training=False)
            self.queue.append(events.LearnerLeft(at_s=self.now_s, learner=life.name, incarnation=life.incarnation))
            self.lives.pop(life.name, None)

    def _beat(self, life: LearnerIncarnation, *, training: bool) -> events.LearnerBeat:
        return events.LearnerBeat(
            at_s=self.now_s,
            learner=life.name,
            incarnation=life.incarnation,
            training=training,
            step_s=self.step_s * self.paces.get(life.name, 1.0),
            steps=life.island.steps,
            tokens=life.island.tokens,
            pushed=life.island.pushed,
            superseded=life.island.superseded,
            refused_local=life.island.refused_local,
        )

    def _tell_call(self, life: LearnerIncarnation, call: events.PublishCall) -> None:
        def heard() -> None:
            if self.lives.get(life.name) is life:
                fact = events.CallHeard(
                    at_s=self.now_s, fragment=call.fragment, version=call.version, attempt=call.attempt
                )
                self._tell(life, fact)

        self.core_messages.append(heard)

    def _tell_head(self, life: LearnerIncarnation, fragment: int, version: int) -> None:
        def heard() -> None:
            if self.lives.get(life.name) is life:
                self._tell(life, events.HeadHeard(at_s=self.now_s, fragment=fragment, version=version))

        self.core_messages.append(heard)

    def _tell_refusal(self, life: LearnerIncarnation, refusal: events.Refuse) -> None:
        def heard() -> None:
            if self.lives.get(life.name) is life:
                fact = events.PushRefused(
                    at_s=self.now_s, fragment=refusal.key.fragment, push=refusal.key.push, reason=refusal.reason
                )
                self._tell(life, fact)

        self.core_messages.append(heard)

    def _note(self, who: str, fact: events.Fact, actions: Sequence[events.Command]) -> None:
        """Keep one readable line per fact, for logbooks and for the last lines of a failure."""
        if isinstance(fact, events.QueueDrained) and not fact.proven and not actions:
            return
        self.log.append(logbook_line(who, fact, actions, self.now_s))


def _reports(fragment_ledger: FragmentLedger) -> Ledger:
    told = Ledger(run_tokens=fragment_ledger.run_tokens)
    for name, report in fragment_ledger.reports.items():
        learner, _, incarnation = name.rpartition("/")
        sums = report.trained, report.pushed, report.superseded, report.refused_local
        told.take_report(learner, int(incarnation), *sums)
        told.accounts[name].left = report.left
    return told
