"""Candidates for a shard: one record, any number of them, each with a clock of its own."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from atoll.protocol.events import Command, RenewLease, StandDown, TakeLease
from atoll.protocol.tenure import LeaseSeen, LeaseStanding, LeaseWritten, Tenure

LEASE_S = 3.0


@dataclass
class LeaseRecord:
    """The lease as the broker has it: changed by compare-and-set only."""

    revision: int = 0
    epoch: int = 0
    owner: int = -1
    released: bool = False
    epochs: list[int] = field(default_factory=list)


@dataclass
class Candidate:
    """A machine and the clock it goes by, which may be ahead of others."""

    name: int
    record: LeaseRecord
    ahead_s: float = 0.0
    frozen: bool = False

    def __post_init__(self) -> None:
        """Begin to wait."""
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
    """Nobody owned the shard yet, or its owner gave it back."""
    record = LeaseRecord()
    first = Candidate(1, record)
    first.look(0.0)
    assert first.machine.standing is LeaseStanding.OWNING
    record.released = True

    second = Candidate(2, record)
    assert second.look(0.1) == [TakeLease(revision=1, epoch=2)]


def test_a_lease_that_moves_is_left_alone_and_one_that_stands_still_is_taken() -> None:
    """However far apart the clocks are: what counts is how long the revision stood still."""
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


def test_a_taking_whose_answer_was_lost_counts() -> None:
    """The record says that it is ours."""
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
