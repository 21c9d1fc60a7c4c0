"""Candidates for a shard: one record, any number of them, each with a clock of its own."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from atoll.protocol.events import Command, RenewLease, StandDown, TakeLease
from atoll.protocol.ownership import LeaseSeen, LeaseStanding, LeaseUnseen, LeaseWritten, Tenure

LEASE_S = 3.0


@dataclass
class LeaseRecord:
    """The lease as the broker has it: changed by compare-and-set only."""

    revision: int = 0
    epoch: int = 0
    owner: int = -1
    released: bool = False
    epochs: list[int] = field(default_factory=list)


@dataclass(eq=False)
class Candidate:
    """A machine and the clock it goes by, which may be ahead of others."""

    name: int
    record: LeaseRecord
    ahead_s: float = 0.0
    frozen: bool = False

    def __post_init__(self) -> None:
        self.machine = Tenure(LEASE_S)

    def look(self, now_s: float, *, lose_answer: bool = False) -> list[Command]:
        """Read the record and do what the machine says; perhaps the answer to a write is lost."""
        record, at_s = self.record, now_s + self.ahead_s
        seen = LeaseSeen(
            at_s=at_s,
            revision=record.revision,
            epoch=record.epoch,
            released=record.released,
            ours=record.owner == self.name,
        )
        actions = self.machine.handle(seen)
        for action in actions:
            if isinstance(action, TakeLease | RenewLease) and action.revision == record.revision:
                record.revision += 1
                record.owner, record.epoch, record.released = self.name, self.machine.epoch, False
                if isinstance(action, TakeLease):
                    record.epochs.append(action.epoch)
                if not lose_answer:
                    self.machine.handle(LeaseWritten(at_s=at_s, revision=record.revision))
        return actions


def test_a_free_lease_is_taken_at_once() -> None:
    record = LeaseRecord()
    first = Candidate(1, record)
    first.look(0.0)
    assert first.machine.standing is LeaseStanding.OWNING
    record.released = True

    second = Candidate(2, record)
    assert second.look(0.1) == [TakeLease(revision=1, epoch=2)]


def test_a_lease_that_moves_is_left_alone_and_one_that_stands_still_is_taken() -> None:
    record = LeaseRecord()
    owner, standby = Candidate(1, record), Candidate(2, record, ahead_s=1e6)
    for tenth in range(100):
        owner.look(tenth / 10)
        standby.look(tenth / 10)
    assert standby.machine.standing is LeaseStanding.WAITING
    taken_s = next(10.0 + tenth / 10 for tenth in range(100) if standby.look(10.0 + tenth / 10))

    assert 9.0 + LEASE_S <= taken_s <= 10.0 + LEASE_S + 0.1
    assert owner.look(taken_s) == [StandDown(reason="epoch 2 holds the lease, we held 1")]
    assert owner.look(taken_s + 10.0) == []


def test_who_slept_looks_again_before_it_takes() -> None:
    """A candidate that was suspended has an old memory; the owner has renewed since."""
    record = LeaseRecord()
    owner, sleeper = Candidate(1, record), Candidate(2, record)
    owner.look(0.0)
    sleeper.look(0.0)
    owner.look(100.0)

    assert sleeper.look(100.0) == []


def test_no_owner_that_lives_loses_its_shard_to_an_absence_of_the_broker() -> None:
    """Absences of 1 to 20 s, at any moment, however the two come back, as long as the owner needs less than a lease for it."""
    for seed in range(300):
        dice = random.Random(seed)
        record = LeaseRecord()
        owner, standby = Candidate(1, record), Candidate(2, record, ahead_s=dice.uniform(-1e3, 1e3))
        owner.look(0.0)
        away_s = dice.uniform(10.0, 13.0)
        back_s = away_s + dice.uniform(1.0, 20.0)
        frozen = dice.random() < 0.3
        """A broker that is frozen answers late what was asked of it, if that is soon enough."""
        back = {owner: back_s + dice.uniform(0.0, 0.8 * LEASE_S), standby: back_s + dice.uniform(0.0, 0.2)}
        due = {owner: 0.0, standby: dice.uniform(0.0, 0.5)}
        while min(due.values()) < back_s + 10.0:
            one = min(due, key=lambda each: due[each])
            now_s = due[one]
            if away_s < now_s < back[one]:
                late_s = min(back[one], now_s + one.machine.patience_s) - now_s
                now_s += late_s
                if now_s < back[one] or not frozen:
                    one.machine.handle(LeaseUnseen(at_s=now_s + one.ahead_s))
                else:
                    one.look(now_s)
            else:
                one.look(now_s)
            due[one] = now_s + one.machine.poll_s + dice.uniform(0.0, 0.05)

        assert record.epochs == [1], seed


def test_a_dead_owner_is_followed_within_a_lease_of_the_end_of_an_absence() -> None:
    """What was seen before it does not count, and neither does it hold up anything after it."""
    record = LeaseRecord()
    Candidate(1, record).look(0.0)
    heir = Candidate(2, record)
    for tenth in range(20):
        heir.look(tenth / 10)
    heir.machine.handle(LeaseUnseen(at_s=12.0))
    taken_s = next(12.0 + tenth / 10 for tenth in range(100) if heir.look(12.0 + tenth / 10))

    assert 12.0 + LEASE_S <= taken_s <= 12.0 + LEASE_S + 0.2


def test_one_look_is_never_enough() -> None:
    """A candidate that slept for an hour has seen the lease at both ends of it, and not whether it stood still in between."""
    record = LeaseRecord()
    Candidate(1, record).look(0.0)
    heir = Candidate(2, record)
    heir.look(0.0)

    assert [bool(heir.look(3600.0 * number)) for number in range(1, 5)] == [False, False, False, True]


def test_a_lease_that_was_there_and_is_lost_is_taken_once_that_stands_still() -> None:
    record = LeaseRecord()
    Candidate(1, record).look(0.0)
    heir, newcomer = Candidate(2, record), Candidate(3, LeaseRecord())
    heir.look(0.0)
    record.revision = 0

    assert heir.look(0.5) == []
    assert newcomer.look(0.5) == [TakeLease(revision=0, epoch=1)]
    assert any(heir.look(0.5 + tenth / 10) for tenth in range(40))


def test_a_taking_whose_answer_was_lost_counts() -> None:
    candidate = Candidate(1, LeaseRecord())
    candidate.look(0.0, lose_answer=True)
    before = candidate.machine.standing
    candidate.look(0.5)

    assert (before, candidate.machine.standing) == (LeaseStanding.TAKING, LeaseStanding.OWNING)
    assert candidate.machine.epoch == 1


def test_epochs_never_repeat_whatever_freezes() -> None:
    """Random freezes and lost answers over many candidates: every tenure has an epoch of its own, one more than before."""
    tenures = 0
    for seed in range(200):
        dice = random.Random(seed)
        record = LeaseRecord()
        people = [Candidate(i, record, ahead_s=dice.uniform(-1e3, 1e3)) for i in range(3)]
        for tenth in range(400):
            for one in people:
                one.frozen = one.frozen if dice.random() > 0.02 else not one.frozen
                if not one.frozen:
                    one.look(tenth / 5, lose_answer=dice.random() < 0.1)
                if one.machine.standing is LeaseStanding.DEPOSED:
                    one.machine = Tenure(LEASE_S)
                    one.name += 10

        assert record.epochs == list(range(1, len(record.epochs) + 1)), seed
        tenures += len(record.epochs)
    assert tenures > 400
