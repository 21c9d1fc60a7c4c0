"""Each machine alone beside its reference model, on facts drawn at random: no world around it keeps them reasonable.

Drivers deliver what a broker, a link or another process makes of time. So a learner hears calls for versions that it left
behind and heads that it cannot read, pushes settle in any order or are given up, and a shard is offered contributions that are
empty, too old, of the future or not its own. A failure names its seed; the same seed is the same story.
"""

from __future__ import annotations

import itertools
import math
import random
from typing import TypeVar

import msgspec
import pytest

from atoll.base.errors import ProtocolMisuse
from atoll.protocol import events, invariants
from atoll.protocol.island import Island
from atoll.protocol.ledger import Ledger
from atoll.protocol.ownership import Balance, LeaseSeen, LeaseStanding, LeaseUnseen, LeaseWritten, Tenure
from atoll.protocol.recorder import freeze, thaw
from atoll.protocol.settings import ProtocolSettings
from atoll.protocol.shard import Shard
from support.reference_machines import FateModel, IslandModel, RoundModel

SEEDS = [range(first, first + 10) for first in range(0, 60, 10)]
FACTS = 120
THAWED_EVERY = 17
NAMES = ("a", "b", "c")


M = TypeVar("M", Island, Shard, Tenure)


def thawed(machine: M) -> M:
    """Return the machine that a dump of this one makes, from its state alone; the two are in the same state."""
    frozen = freeze(machine)
    other = thaw(frozen)
    assert type(other) is type(machine)
    first, second = (unordered(msgspec.json.decode(state)) for state in (frozen, freeze(other)))
    assert first == second
    return other


def unordered(value: object) -> object:
    """Return a value whose lists are in one order: sets are written in any."""
    if isinstance(value, dict):
        return {name: unordered(inside) for name, inside in value.items()}
    return sorted((unordered(inside) for inside in value), key=repr) if isinstance(value, list) else value


def agreed(**asked: object) -> ProtocolSettings:
    base: dict[str, object] = {"fragments": 2, "shards": 1, "interval_steps": 4, "silence_s": 6.0}
    return msgspec.convert(base | asked, ProtocolSettings).check()


class IslandAtRandom:
    """A learner's machine, and what is on its way from and to it."""

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        adoption, ending = (
            self.chance.choice(["overwrite", "blend", "carry"]),
            self.chance.choice(["apart", "together"]),
        )
        self.settings = agreed(adoption=adoption, ending=ending)
        self.versions = {fragment: self.chance.randrange(4) for fragment in range(2)}
        self.island = Island(self.settings, self.versions)
        self.model = IslandModel(self.settings, self.versions)
        self.pushes: list[tuple[int, int]] = []
        self.sent: list[tuple[int, int]] = []
        self.asked: list[events.FetchFragment] = []
        self.adopting: dict[int, events.Adopt] = {}
        self.unread: list[events.Push] = []
        self.now_s = 0.0

    def tell(self, fact: events.Fact) -> list[events.Command]:
        actions = self.island.handle(fact)
        self.model.see(fact, actions)
        self.model.check(self.island)
        invariants.check_island(self.island)
        self.pushes += [(a.fragment, a.push) for a in actions if isinstance(a, events.Push)]
        self.asked += [a for a in actions if isinstance(a, events.FetchFragment)]
        self.adopting |= {a.fragment: a for a in actions if isinstance(a, events.Adopt)}
        self.unread += [a for a in actions if isinstance(a, events.Push) and a.keep]
        return actions

    def act(self) -> None:
        chance, fragment = self.chance, self.chance.randrange(2)
        self.now_s += chance.choice([0.0, 0.05, 0.3, 1.0])
        anchor, kind = self.island.intervals[fragment].anchor, self.chance.randrange(20)
        if chance.random() < 0.3:
            self.obey(fragment)
        elif kind < 5 and not self.island.draining:
            self.tell(events.StepDone(at_s=self.now_s, tokens=chance.choice([1, 7, 10])))
        elif kind < 9:
            version = max(0, anchor + chance.choice([-1, 0, 0, 0, 1, 3]))
            self.tell(events.CallHeard(at_s=self.now_s, fragment=fragment, version=version, attempt=1, cause_id="c"))
        elif kind < 11:
            version = max(0, anchor + chance.choice([-1, 0, 1, 2, 1 << 40]))
            proven = version < 1 << 40 and chance.random() < 0.5
            self.tell(events.HeadHeard(at_s=self.now_s, fragment=fragment, version=version, proven=proven))
        elif kind < 15 and self.pushes:
            settled = self.pushes.pop(chance.randrange(len(self.pushes)))
            reason = chance.choice(["", "", "", "gave_up", "not_finite"])
            self.sent += [] if reason else [settled]
            self.tell(events.PushSettled(at_s=self.now_s, fragment=settled[0], push=settled[1], reason=reason))
        elif kind < 16 and self.sent:
            refused = chance.choice(self.sent)
            self.tell(events.PushRefused(at_s=self.now_s, fragment=refused[0], push=refused[1], reason="stale"))
        elif kind < 18 and self.asked:
            self.fetched(self.asked.pop(chance.randrange(len(self.asked))))
        elif kind == 18:
            self.adopting.pop(fragment, None)
            ready = self.island.intervals[fragment].ready
            ready = anchor if ready is None else max(anchor, ready)
            self.tell(
                events.Adopted(
                    at_s=self.now_s, fragment=fragment, version=chance.choice([anchor, ready, ready, ready + 1])
                )
            )
        elif chance.random() < 0.1:
            self.tell(events.DrainOrdered(at_s=self.now_s))

    def obey(self, fragment: int) -> None:
        """Keep a snapshot that is to be kept, or adopt what is to be adopted."""
        if self.unread:
            push = self.unread.pop(self.chance.randrange(len(self.unread)))
            self.tell(events.SnapshotKept(at_s=self.now_s, fragment=push.fragment, push=push.push))
        elif fragment in self.adopting:
            version, overwritten = self.adopting[fragment].version, self.adopting.pop(fragment).overwrite
            self.tell(events.Adopted(at_s=self.now_s, fragment=fragment, version=version, overwritten=overwritten))

    def fetched(self, asked: events.FetchFragment) -> None:
        """Let a frame come, of the version that was asked for or a later one, or not at all."""
        if self.chance.random() < 0.3:
            self.tell(
                events.FetchFailed(at_s=self.now_s, fragment=asked.fragment, version=asked.version, reason="away")
            )
            return
        here = self.island.intervals[asked.fragment].newest
        version = max(here, asked.version - self.chance.choice([0, 0, 3])) + self.chance.randrange(2)
        if version == here and not asked.again:
            self.tell(events.NothingNewer(at_s=self.now_s, fragment=asked.fragment))
        else:
            self.tell(events.FragmentFetched(at_s=self.now_s, fragment=asked.fragment, version=version))

    def end(self) -> None:
        self.tell(events.DrainOrdered(at_s=self.now_s))
        while self.pushes:
            fragment, push = self.pushes.pop(0)
            self.tell(events.PushSettled(at_s=self.now_s, fragment=fragment, push=push))
        assert self.island.left
        assert self.tell(events.CallHeard(at_s=self.now_s, fragment=0, version=99, attempt=1)) == []


@pytest.mark.parametrize("seeds", SEEDS, ids=str)
def test_a_learner_answers_as_its_model_whatever_it_hears(seeds: range) -> None:
    for seed in seeds:
        scene = IslandAtRandom(seed)
        for fact in range(FACTS):
            scene.act()
            if fact % THAWED_EVERY == 0:
                scene.island = thawed(scene.island)
        lags = [own.known - own.anchor for own in scene.island.intervals.values()]
        assert scene.island.lag_versions == max(lags)
        scene.end()


def test_a_learner_refuses_facts_that_cannot_be() -> None:
    island = Island(agreed(), {0: 3, 1: 3})
    island.handle(events.StepDone(at_s=0.0, tokens=1))
    with pytest.raises(ProtocolMisuse, match="went back"):
        island.handle(events.Adopted(at_s=0.0, fragment=0, version=2))
    with pytest.raises(ProtocolMisuse, match="does not know"):
        island.handle(events.QueueDrained(at_s=0.0))
    island.handle(events.DrainOrdered(at_s=0.0))
    with pytest.raises(ProtocolMisuse, match="takes no step"):
        island.handle(events.StepDone(at_s=0.0, tokens=1))


class ShardAtRandom:
    """A shard's machine, and contributions from learners of unequal speed, most of them reasonable."""

    def __init__(self, seed: int) -> None:
        self.chance = chance = random.Random(seed)
        self.settings = agreed(
            fragments=4,
            shards=2,
            quorum=chance.choice([1, 1, 2, 3]),
            age_max=chance.choice([0, 1, 2, 3]),
            age_law=chance.choice(["power", "gate"]),
            grace_gamma=chance.choice([0.0, 0.5, 0.9]),
            grace_cap_steps=chance.choice([0.5, 1.0, 2.0]),
            average_decay=chance.choice([0.2, 0.5, 1.0]),
            offences_max=chance.choice([0, 1, 3]),
            protect=chance.choice(["clip", "isolate"]),
            outlier_ratio=chance.choice([0.0, 2.0, 10.0]),
            ending=chance.choice(["apart", "together"]),
        )
        self.versions = {fragment: chance.randrange(3) for fragment in self.settings.fragments_of(1)}
        self.shard = Shard(self.settings, 1, self.versions)
        self.watch = invariants.ShardWatch()
        self.rounds, self.fates = RoundModel(self.settings, self.versions), FateModel(self.settings, self.versions)
        self.steps_s = {name: chance.choice([0.3, 1.0, 1.1, 4.0]) for name in NAMES}
        self.lives = dict.fromkeys(NAMES, 1)
        self.now_s, self.pushes = 100.0, itertools.count(1)
        self.timers: dict[str, float] = {}
        self.reading: list[events.PushKey] = []
        self.writes: dict[int, list[events.Commit | events.Keep]] = {fragment: [] for fragment in self.versions}
        self.arrived: list[events.ContributionArrived] = []

    def tell(self, fact: events.Fact) -> list[events.ShardCommand]:
        actions = self.shard.handle(fact)
        self.watch.see(actions)
        self.rounds.see(fact, actions)
        self.fates.see(fact, actions)
        self.fates.check(self.shard.ledger)
        invariants.check_shard(self.shard)
        for action in actions:
            if isinstance(action, events.ArmTimer):
                self.timers[action.name] = action.due_s
            elif isinstance(action, events.Fetch):
                self.reading.append(action.key)
            elif isinstance(action, events.Commit | events.Keep):
                self.writes[action.fragment].append(action)
        return actions

    def act(self) -> None:
        chance, kind = self.chance, self.chance.randrange(20)
        name = chance.choice(NAMES)
        if kind < 4:
            self.beat(name)
        elif kind < 8:
            self.offer(name)
        elif kind < 12 and self.reading:
            key = self.reading.pop(chance.randrange(len(self.reading)))
            if chance.random() < 0.15:
                reason = chance.choice(["not_finite", "corrupt", "blob_gone"])
                self.tell(events.ContributionSpoiled(at_s=self.now_s, key=key, reason=reason))
            else:
                norm, base_norm = chance.choice([0.0, 0.1, 1.0, 1.0, 1.5, 30.0]), chance.choice([0.0, 0.0, 10.0])
                self.tell(events.ContributionReady(at_s=self.now_s, key=key, norm=norm, base_norm=base_norm))
        elif kind < 14 and any(self.writes.values()):
            self.now_s += chance.choice([0.0, 0.2, 1.0])
            self.write()
        elif kind < 15 and self.arrived:
            self.tell(chance.choice(self.arrived))
        elif kind < 16 and chance.random() < 0.3:
            self.lives[name] += 1
        elif kind < 17 and chance.random() < 0.3:
            self.tell(events.LearnerLeft(at_s=self.now_s, learner=name, incarnation=self.lives[name]))
        else:
            self.wait(chance.choice([0.05, 0.3, 1.0, 8.0]))

    def write(self) -> None:
        lane = self.chance.choice([lane for lane in self.writes.values() if lane])
        done = lane.pop(0)
        if isinstance(done, events.Commit):
            self.tell(events.Committed(at_s=self.now_s, fragment=done.fragment, version=done.base_version + 1))
        else:
            self.tell(events.Kept(at_s=self.now_s, fragment=done.fragment))

    def beat(self, name: str) -> None:
        chance, life = self.chance, self.lives[name]
        told = events.LearnerBeat(
            at_s=self.now_s,
            learner=name,
            incarnation=max(1, life - (chance.random() < 0.1)),
            training=chance.random() < 0.9,
            step_s=self.steps_s[name] * chance.choice([0.0, 0.9, 1.0, 1.5]),
            tokens=chance.randrange(500),
        )
        self.tell(told)
        if chance.random() < 0.1:
            self.tell(events.QueueDrained(at_s=self.now_s, proven=False, run_tokens=chance.randrange(900)))

    def offer(self, name: str) -> None:
        chance = self.chance
        fragment = chance.choice([*self.versions, *self.versions, *self.versions, 0])
        known = self.shard.slots[fragment].round.version if fragment in self.versions else 0
        arrived = events.ContributionArrived(
            at_s=self.now_s,
            key=events.PushKey(name, self.lives[name], fragment, next(self.pushes)),
            base_version=max(0, known - chance.choice([-1, 0, 0, 0, 0, 1, 2, 4])),
            tokens=chance.choice([0, 1, 10, 40]),
            steps=chance.choice([0, 1, 4, 8]),
            trained_tokens=chance.randrange(500),
            final=chance.random() < 0.1,
        )
        self.arrived += [arrived] if fragment in self.versions else []
        self.tell(arrived)

    def wait(self, for_s: float) -> None:
        """Let time pass; timers fire when they are due, and the broker answers, or is away for all that time."""
        until_s, cut_off = self.now_s + for_s, self.chance.random() < 0.2
        answers_s = self.now_s + 1.0
        while min(answers_s, *self.timers.values(), math.inf) <= until_s:
            name = min(self.timers, key=lambda one: (self.timers[one], one), default="")
            if not name or answers_s < self.timers[name]:
                self.now_s, answers_s = max(self.now_s, answers_s), answers_s + 1.0
                if not cut_off:
                    self.tell(events.QueueDrained(at_s=self.now_s, proven=False))
            else:
                self.now_s = max(self.now_s, self.timers.pop(name))
                self.tell(events.TimerFired(at_s=self.now_s, name=name))
        self.now_s = until_s

    def end(self) -> None:
        """Let everything be read and committed and everybody leave: the shard has nothing in its hands, and finishes."""
        self.tell(events.DrainOrdered(at_s=self.now_s))
        for name in NAMES:
            self.tell(events.LearnerLeft(at_s=self.now_s, learner=name, incarnation=self.lives[name]))
        for _ in range(30):
            while self.reading:
                self.tell(events.ContributionReady(at_s=self.now_s, key=self.reading.pop(0)))
            self.wait(8.0)
            while any(self.writes.values()):
                self.write()
        held = [key for slot in self.shard.slots.values() for key in (*slot.offers, *slot.parked)]
        assert held == []
        assert self.tell(events.QueueDrained(at_s=self.now_s, proven=False)) == []
        assert self.tell(events.QueueDrained(at_s=self.now_s)) == [events.Finish(reason="drained")]
        assert self.tell(events.QueueDrained(at_s=self.now_s)) == []
        assert set(self.fates.fates) == {one.key for one in self.arrived}


@pytest.mark.parametrize("seeds", SEEDS, ids=str)
def test_a_shard_decides_as_its_models_whatever_it_is_offered(seeds: range) -> None:
    """Weights, ages, staleness weights, fates, averages, grace windows and the reasons that rounds end for."""
    for seed in seeds:
        scene = ShardAtRandom(seed)
        for fact in range(FACTS):
            scene.act()
            if fact % THAWED_EVERY == 0:
                scene.shard = thawed(scene.shard)
        assert scene.fates.fates
        scene.end()


def test_an_heir_waits_until_it_can_have_heard_everybody_and_knows_what_its_predecessor_was_told() -> None:
    told = Ledger(run_tokens=400)
    told.take_report("a", 1, 500, 0, 0, 0)
    shard = Shard(agreed(tokens_target=400), 0, {0: 0, 1: 0}, ledger=told)
    assert shard.ledger.run_tokens == 400
    first = [shard.handle(events.QueueDrained(at_s=at_s)) for at_s in (1000.0, 1002.0, 1004.0, 1005.9)]
    assert first == [[]] * 4
    assert shard.handle(events.QueueDrained(at_s=1006.1)) == [events.Finish(reason="token target reached")]


def test_a_shard_refuses_facts_that_cannot_be() -> None:
    shard = Shard(agreed(), 0, {0: 0, 1: 0})
    with pytest.raises(ProtocolMisuse, match="does not know"):
        shard.handle(events.StepDone(at_s=0.0, tokens=1))
    with pytest.raises(ProtocolMisuse, match="nobody asked for"):
        shard.handle(events.ContributionReady(at_s=0.0, key=events.PushKey("a", 1, 0, 1)))
    with pytest.raises(ProtocolMisuse, match="durable"):
        shard.handle(events.Committed(at_s=0.0, fragment=0, version=1))


class CandidateModel:
    """One candidate for a lease, from what it has seen and when."""

    def __init__(self, lease_s: float) -> None:
        self.lease_s, self.seen, self.looks_s = lease_s, -1, list[float]()
        self.epoch, self.standing, self.renewed_s, self.never = 0, "waiting", 0.0, True

    def sees(self, fact: LeaseSeen) -> list[events.Command]:
        if self.standing == "deposed":
            return []
        if self.standing == "owning":
            if not fact.ours:
                self.standing = "deposed"
                return [events.StandDown(reason=f"epoch {fact.epoch} holds the lease, we held {self.epoch}")]
            due = fact.at_s - self.renewed_s >= self.lease_s / 3.0
            return [events.RenewLease(revision=fact.revision)] if due else []
        if self.standing == "taking" and fact.ours:
            self.written(fact.at_s)
            return []
        self.never = self.never and not fact.revision
        if fact.revision != self.seen:
            self.seen, self.looks_s = fact.revision, []
        self.looks_s.append(fact.at_s)
        still_s = sum(min(later - at_s, self.lease_s / 4.0) for at_s, later in itertools.pairwise(self.looks_s))
        if not fact.released and not self.never and still_s < self.lease_s:
            self.standing = "waiting"
            return []
        self.standing, self.epoch = "taking", fact.epoch + 1
        return [events.TakeLease(revision=fact.revision, epoch=self.epoch)]

    def misses(self) -> None:
        """A look failed: what was seen before it counts no more."""
        self.looks_s = []

    def written(self, at_s: float) -> None:
        self.standing, self.renewed_s = "owning", at_s


@pytest.mark.parametrize("seeds", SEEDS, ids=str)
def test_a_candidate_takes_and_renews_a_lease_as_its_model(seeds: range) -> None:
    """Whatever the record does between two looks; `at_s` is any clock's, from any zero."""
    for seed in seeds:
        chance = random.Random(seed)
        tenure, model = Tenure(3.0), CandidateModel(3.0)
        now_s, revision, epoch = chance.uniform(-50.0, 50.0), chance.randrange(3), 1
        for _ in range(80):
            now_s += chance.choice([0.1, 0.5, 1.0, 1.0, 3.0])
            if chance.random() < 0.05:
                assert tenure.handle(LeaseUnseen(at_s=now_s)) == []
                model.misses()
                continue
            ours = tenure.standing in (LeaseStanding.OWNING, LeaseStanding.TAKING) and chance.random() < 0.9
            if chance.random() < (0.05 if ours else 0.15):
                revision, epoch = revision + 1, epoch + chance.randrange(2)
            fact = LeaseSeen(
                at_s=now_s,
                revision=0 if chance.random() < 0.05 else revision,
                epoch=epoch,
                released=chance.random() < 0.03,
                ours=ours and chance.random() < 0.6,
            )
            actions = tenure.handle(fact)
            assert actions == model.sees(fact)
            if actions and not isinstance(actions[0], events.StandDown) and chance.random() < 0.7:
                revision += 1
                assert tenure.handle(LeaseWritten(at_s=now_s, revision=revision)) == []
                model.written(now_s)
            assert tenure.standing.value == model.standing
            assert tenure.epoch == model.epoch
            if tenure.standing is LeaseStanding.OWNING:
                assert tenure.revision >= 0
            assert tenure.poll_s == 0.5
            tenure = thawed(tenure) if chance.random() < 0.1 else tenure


def test_a_candidate_refuses_what_it_did_not_ask_for() -> None:
    tenure = Tenure(3.0)
    with pytest.raises(ProtocolMisuse, match="nobody asked for"):
        tenure.handle(LeaseWritten(at_s=0.0, revision=1))
    with pytest.raises(ProtocolMisuse, match="does not know"):
        tenure.handle(events.QueueDrained(at_s=0.0))


def test_a_host_that_never_gave_a_shard_away_may_do_so_also_after_it_was_frozen() -> None:
    """And what cannot be frozen is not."""
    other = thaw(freeze(Balance("h", 3.0)))
    assert isinstance(other, Balance)
    assert other.settled_s == -math.inf
    with pytest.raises(ProtocolMisuse, match="can be frozen"):
        freeze(object())  # type: ignore[arg-type]
