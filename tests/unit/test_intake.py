"""What a shard's intake takes from the queue and from the air: members' messages, in bounded memory, and no junk."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import msgspec
import pytest

from atoll.base.clock import SystemClock
from atoll.bus.interface import Bus, CoreMessage
from atoll.bus.memory import MemoryBroker, MemoryBus
from atoll.bus.signed import SignedBus
from atoll.client.membership import claim, release
from atoll.protocol.claims import AT_ONCE_S, CLOCKS_APART_S
from atoll.protocol.events import ContributionArrived, Fact, LearnerBeat, LearnerLeft, QueueDrained
from atoll.protocol.ledger import FormerLives, Ledger
from atoll.run.member_roll import Strangers
from atoll.wire.events import event_of
from atoll.wire.messages import Lease, RunRecord, encode
from atoll_synchronizer import intake as fact_intake
from atoll_synchronizer.acknowledgements import PendingAcknowledgements
from atoll_synchronizer.garbage_collector import GarbageCollector
from atoll_synchronizer.intake import FactIntake, MessageFailed
from atoll_synchronizer.shard_context import EventLog, ShardContext
from support.attacks import beat, distinct_manifests, junk_manifests, manifest, wildcard_manifest
from support.founded_run import run_record
from support.shard_owners import FixedOwner
from support.signing_office import SigningOffice

DEADLINE_S = 60.0
ROOM_BYTES = 1 << 30


@dataclass
class IntakeScene:
    """The intake of shard 0 of a run in memory, and the facts that came of what was sent."""

    run: RunRecord
    bus: Bus
    told: list[Fact] = field(default_factory=list)
    breaks: bool = False
    tasks: list[asyncio.Task[None]] = field(default_factory=list)

    def tell(self, fact: Fact) -> None:
        if self.breaks and isinstance(fact, ContributionArrived):
            raise ZeroDivisionError("a mistake of ours")
        self.told.append(fact)

    async def begin(self, aside: frozenset[str] = frozenset()) -> FactIntake:
        context = ShardContext(self.bus, self.run, 0, SystemClock())
        self.owner = FixedOwner(self.tell)
        event_log = EventLog(self.bus, context.subjects, context.name, context.clock)
        pending = PendingAcknowledgements(self.bus, context.subjects, event_log, GarbageCollector(self.bus), self.owner)
        self.intake = FactIntake(context, pending, event_log, self.owner, aside)
        await self.intake.open(1)
        works = self.intake.read_queue(), self.intake.keep_roll()
        self.tasks = [*(asyncio.create_task(work) for work in works), *self.tasks]
        return self.intake

    async def end(self) -> None:
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)
        await self.intake.close()

    async def send(self, subject: str, data: bytes) -> None:
        await self.bus.publish(subject, data, msg_id=f"m{len(data)}-{subject}-{id(data)}")

    async def queued(self) -> int:
        stored = await self.bus.count_stored(f"{self.run.subjects.prefix}.up.m.>", more_than=0)
        return sum(stored.by_subject.values())

    def arrived(self) -> list[str]:
        return [fact.key.learner for fact in self.told if isinstance(fact, ContributionArrived)]


@pytest.fixture
async def scene(run: str) -> AsyncIterator[IntakeScene]:
    bus = MemoryBus(run, MemoryBroker())
    found = IntakeScene(run_record(run), bus)
    await claim(bus, found.run.subjects, "a", SystemClock())
    yield found
    await found.end()


async def until(holds: object) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while not await holds():  # type: ignore[operator]  # noqa: ASYNC110  (nothing sets an event)
            await asyncio.sleep(0.01)


async def test_junk_of_strangers_is_dropped_and_a_members_manifest_behind_it_is_taken(scene: IntakeScene) -> None:
    """It leaves the queue without a fact and without an event of its own, and is told as a sum."""
    strangers, junk = distinct_manifests(scene.run), junk_manifests(scene.run)
    for _ in range(300):
        await scene.send(*next(strangers)[:2])
        message = next(junk)
        if scene.run.subjects.contributions_of(0)[:-1] in message.subject:
            await scene.send(*message[:2])
    for message in wildcard_manifest(scene.run):
        await scene.send(*message[:2])
    await scene.send(*manifest(scene.run, "a")[:2])
    intake = await scene.begin()

    async def emptied() -> bool:
        return await scene.queued() == 1

    await until(emptied)
    assert scene.arrived() == ["a"]
    assert intake.junk.messages > 300
    await intake.junk.tell()
    events = await scene.bus.replay(scene.run.subjects.event("junk", "*"))
    assert len(events) == 1


async def test_what_nobody_signed_is_told_as_nobodys(run: str, tmp_path: Path) -> None:
    """The broker of a region writes on the subjects of its learners, and they were named as those who had sent it."""
    broker, record, office = MemoryBroker(), run_record(run), SigningOffice(tmp_path, run)
    subjects, region = record.subjects, MemoryBus(run, broker)
    shard, learner = (
        SignedBus(MemoryBus(run, broker), run, signatures)
        for signatures in (office.signatures("shard", "synchronizer"), office.signatures("a"))
    )
    await shard.provision(ROOM_BYTES)
    await shard.put_record(subjects.run_record, encode(record), expected=0)
    await claim(learner, subjects, "a", SystemClock())
    scene = IntakeScene(record, shard)
    intake = await scene.begin()
    malformed = manifest(record, "a", layout="0" * 16)
    await learner.publish(malformed.subject, malformed.data, msg_id="signed")
    await region.publish(malformed.subject, b"junk", msg_id="unsigned")
    intake._on_beat(
        CoreMessage(subjects.beat("a"), await shard.strip_signature(subjects.beat("*"), subjects.beat("a"), b"{}"))
    )

    async def counted() -> bool:
        return intake.junk.messages == 3

    await until(counted)
    await intake.junk.tell()
    [entry] = await region.replay(subjects.event("junk", "*"))
    told = {name: msgspec.json.decode(raw) for name, raw in event_of(entry.subject, entry.data).fields.items()}
    assert told["reasons"] == {"malformed": 1, "unsigned": 2}
    assert (told["senders"], told["unsigned_on_subjects_of"]) == ({"a": 1}, {"a": 2})
    await scene.end()


async def test_what_a_newcomer_sends_waits_until_its_record_is_read(scene: IntakeScene) -> None:
    """It wrote its record before it pushed; the shard reads the records after it has met the stranger."""
    await scene.begin()
    await claim(scene.bus, scene.run.subjects, "b", SystemClock())
    await scene.send(*manifest(scene.run, "b")[:2])

    async def there() -> bool:
        return scene.arrived() == ["b"]

    await until(there)


async def test_a_heartbeat_counts_if_its_learner_is_a_member_and_sends_it_itself(scene: IntakeScene) -> None:
    """A stranger's waits, one for each id; another's name, an absurd claim and a farewell by air are dropped."""
    intake = await scene.begin()
    s = scene.run.subjects
    taken = [
        intake._on_beat(CoreMessage(subject, data))
        for subject, data in (
            (s.beat("a"), beat(scene.run, "a")),
            (s.beat("x"), beat(scene.run, "x")),
            (s.beat("a"), beat(scene.run, "a", incarnation=7)),
            (s.beat("a"), beat(scene.run, "x")),
            (s.beat("a"), beat(scene.run, "a", tokens=1, pushed=1 << 50)),
            (s.beat("a"), beat(scene.run, "a", step=1 << 30)),
            (s.beat("a"), b"[" * 5000),
        )
    ]

    assert taken == [True, False, False, False, False, False, False]
    assert [fact.learner for fact in scene.told if isinstance(fact, LearnerBeat)] == ["a"]
    assert len(intake._waiting_beats) == 2
    assert intake.junk.messages == 4


async def arrived(scene: IntakeScene, count: int) -> bool:
    return len(scene.arrived()) == count


async def test_a_push_that_its_learner_cannot_have_trained_is_absurd(scene: IntakeScene) -> None:
    """It says more steps, or a larger total, than its learner had time for since it was heard."""
    intake = await scene.begin()
    assert intake._on_beat(CoreMessage(scene.run.subjects.beat("a"), beat(scene.run, "a")))
    for number, claims in enumerate(({"steps": 1 << 30, "tokens": 1 << 47, "trained_tokens": 1 << 47}, {}), 1):
        await scene.send(*manifest(scene.run, "a", **claims)[:2])
        await until(partial(arrived, scene, number))
        intake._pending.contributions.clear()  # as when it is settled
    facts = [fact for fact in scene.told if isinstance(fact, ContributionArrived)]
    assert [(fact.tokens, fact.absurd) for fact in facts] == [(1 << 47, True), (1000, False)]


NOW_S = 100_000.0


def founded_before(scene: IntakeScene, age_s: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the run be so old, by wall clocks that do not jump."""
    monkeypatch.setattr(SystemClock, "wall", staticmethod(lambda: NOW_S))
    scene.run = msgspec.structs.replace(scene.run, founded_at_s=NOW_S - age_s)


async def test_the_first_claim_of_a_life_is_bounded_by_its_member_record(
    scene: IntakeScene, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of one that came later by the reading without it, of one that was there by the founding."""
    founded_before(scene, 1_000.0, monkeypatch)
    intake = await scene.begin()
    await claim(scene.bus, scene.run.subjects, "b", SystemClock())
    await intake._roll.read()
    s, rate = scene.run.subjects, scene.run.protocol.steps_per_s_max
    early, late = int(rate * 1_000.0), int(rate * 2.0 * (CLOCKS_APART_S + 1_000.0))
    taken = [
        intake._on_beat(CoreMessage(s.beat(name), beat(scene.run, name, step=steps)))
        for name, steps in (("a", late), ("a", early), ("b", early), ("b", 10))
    ]

    assert taken == [False, True, False, True]
    assert intake.junk.messages == 2


async def test_a_first_push_is_bounded_like_a_first_heartbeat(
    scene: IntakeScene, monkeypatch: pytest.MonkeyPatch
) -> None:
    founded_before(scene, 1_000.0, monkeypatch)
    await scene.begin()
    await scene.send(*manifest(scene.run, "a", steps=1 << 30, tokens=1 << 47, trained_tokens=1 << 47)[:2])
    await until(partial(arrived, scene, 1))

    assert [fact.absurd for fact in scene.told if isinstance(fact, ContributionArrived)] == [True]


@pytest.mark.parametrize(("ahead_s", "steps"), [(1_800.0, 10_000_000), (86_400.0, 1 << 30)])
async def test_where_the_founder_s_clock_is_ahead_nobody_is_silenced(
    scene: IntakeScene, monkeypatch: pytest.MonkeyPatch, ahead_s: float, steps: int
) -> None:
    """Within an hour it bounds the less; beyond it nobody knows how old a life is."""
    founded_before(scene, -ahead_s, monkeypatch)
    intake = await scene.begin()

    assert intake._on_beat(CoreMessage(scene.run.subjects.beat("a"), beat(scene.run, "a", step=steps)))


async def test_a_farewell_ends_its_life_whatever_it_says(scene: IntakeScene) -> None:
    """It was dropped as junk, with the last account of a life, for a pace that was beyond belief."""
    batch = msgspec.structs.replace(scene.run.protocol, step_tokens_max=100)
    scene.run = msgspec.structs.replace(scene.run, protocol=batch)
    intake = await scene.begin()
    assert intake._on_beat(CoreMessage(scene.run.subjects.beat("a"), beat(scene.run, "a")))
    lie = {"step": 1 << 39, "tokens": 1 << 46, "pushed": 1000, "superseded": 1 << 46, "state": "left"}
    await scene.send(scene.run.subjects.farewell(0, "a"), beat(scene.run, "a", **lie))

    async def left() -> bool:
        return any(isinstance(fact, LearnerLeft) for fact in scene.told)

    await until(left)
    [_, said] = [fact for fact in scene.told if isinstance(fact, LearnerBeat)]
    most = batch.steps_per_s_max * (AT_ONCE_S + DEADLINE_S)
    assert 10 < said.steps < most
    assert said.tokens == 100 * said.steps
    assert (said.pushed, said.superseded) == (1000, batch.fragments * said.tokens - 1000)
    assert intake.junk.messages == 0


async def test_of_two_manifests_of_one_contribution_the_first_says_what_is_merged(scene: IntakeScene) -> None:
    """The machine decides by the first; with the second's frame its ledger would tell of another contribution."""
    intake = await scene.begin()
    for tokens in (1000, 1 << 20):
        await scene.send(*manifest(scene.run, "a", tokens=tokens)[:2])

    await until(partial(arrived, scene, 2))
    ((_, waiting),) = intake._pending.contributions.items()
    assert waiting.manifest.tokens == 1000
    assert [fact.tokens for fact in scene.told if isinstance(fact, ContributionArrived)] == [1000, 1000]


async def drained_since(scene: IntakeScene, count: int) -> bool:
    """Return whether so many facts were told in all, of which the newest says how far the run is."""
    return len(scene.told) > count and isinstance(scene.told[-1], QueueDrained)


async def test_how_far_the_run_is_is_believed_as_far_as_leases_say(
    scene: IntakeScene, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A member that says that the run is over once ended it for all; what it says has the leases read."""
    monkeypatch.setattr(fact_intake, "CLAIM_LOOK_S", 0.01)
    monkeypatch.setattr(fact_intake, "CLAIM_LOOK_S_MAX", 0.01)
    target = msgspec.structs.replace(scene.run.protocol, tokens_target=70_000)
    scene.run = msgspec.structs.replace(scene.run, protocol=target)
    intake = await scene.begin()
    scene.tasks.append(asyncio.create_task(intake.claimed_progress.keep_verifying()))
    subject, told = scene.run.subjects.beat("a"), beat(scene.run, "a", run_tokens=1 << 50)

    async def said(tokens: int) -> bool:
        intake._on_beat(CoreMessage(subject, told))
        asked = [fact.run_tokens for fact in scene.told if isinstance(fact, QueueDrained)]
        return bool(asked) and asked[-1] == tokens

    await until(lambda: said(0))
    ledger = Ledger(run_tokens=70_000)
    fields = {"shard": 1, "epoch": 1, "nonce": "n", "host": "h", "pid": 1, "ledger": ledger}
    foreign = Lease(**fields | {"run_nonce": "another"})  # type: ignore[arg-type]
    await scene.bus.put_record(scene.run.subjects.lease(1), encode(foreign), expected=0)
    seen = len(scene.told)
    await until(lambda: drained_since(scene, seen + 2))
    assert await said(0)
    ours = Lease(**fields | {"run_nonce": scene.run.nonce})  # type: ignore[arg-type]
    await scene.bus.put_record(scene.run.subjects.lease(1), encode(ours), expected=None)
    await until(lambda: said(70_000))


async def test_a_message_that_breaks_the_machine_is_named_and_can_be_set_aside(scene: IntakeScene) -> None:
    scene.breaks = True
    sent = manifest(scene.run, "a")
    await scene.send(*sent[:2])
    intake = await scene.begin()
    with pytest.raises(MessageFailed, match="a mistake of ours") as failed:
        await asyncio.wait_for(scene.tasks[0], DEADLINE_S)
    assert await scene.queued() == 1
    await intake.close()

    again = await scene.begin(frozenset({failed.value.digest}))

    async def emptied() -> bool:
        return await scene.queued() == 0

    await until(emptied)
    assert again.junk.messages == 1


async def test_a_farewell_counts_on_its_learners_own_subject(scene: IntakeScene) -> None:
    await scene.send(scene.run.subjects.farewell(0, "a"), beat(scene.run, "b", state="left"))
    await scene.begin()

    async def emptied() -> bool:
        return await scene.queued() == 0

    await until(emptied)
    await scene.send(scene.run.subjects.farewell(0, "a"), beat(scene.run, "a", state="left"))

    async def left() -> bool:
        return any(isinstance(fact, LearnerLeft) for fact in scene.told)

    await until(left)


async def test_strangers_wait_in_bounded_memory() -> None:
    """One message for each key; beyond the bound there is no room until the members were read."""
    strangers = Strangers[int](most=2)
    assert [strangers.put(key, 1) for key in ("a", "b", "a", "c")] == [True, True, True, False]
    assert not strangers.room.is_set()
    assert strangers.before(asyncio.get_running_loop().time()) == [1, 1]
    assert strangers.room.is_set()


async def test_what_may_be_of_a_forgotten_former_life_is_judged_by_the_newest_record(scene: IntakeScene) -> None:
    """The ledgers name only the last former lives: one that its record calls over has had its fates, a present one has not."""
    await claim(scene.bus, scene.run.subjects, "b", SystemClock())
    intake = await scene.begin()
    scene.owner.ledger = Ledger(former=FormerLives(lives=9, forgotten=1))
    gone = await claim(scene.bus, scene.run.subjects, "c", SystemClock())
    await release(scene.bus, scene.run.subjects, gone)
    s = scene.run.subjects
    assert not intake._on_beat(CoreMessage(s.beat("c"), beat(scene.run, "c")))
    await scene.send(*manifest(scene.run, "c")[:2])
    await scene.send(s.farewell(0, "c"), beat(scene.run, "c", state="left"))
    await scene.send(*manifest(scene.run, "b")[:2])

    await until(partial(arrived, scene, 1))
    await until(partial(drained_since, scene, len(scene.told)))
    assert scene.arrived() == ["b"]
    assert [fact for fact in scene.told if isinstance(fact, LearnerBeat | LearnerLeft)] == []
    assert await scene.queued() == 1
    assert intake.junk.messages == 3
