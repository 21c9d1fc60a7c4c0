"""Lives that are over: folded into one account, exactly once, and what a commit costs then."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import nullcontext
from statistics import fmean
from types import FrameType
from typing import Self

import msgspec
import pytest

from atoll.base.parsing import parsed
from atoll.protocol.events import (
    Acknowledge,
    ArmTimer,
    Command,
    Commit,
    Committed,
    ContributionArrived,
    ContributionReady,
    Dismiss,
    Fact,
    Fetch,
    Fold,
    Keep,
    Kept,
    LearnerBeat,
    LearnerLeft,
    PublishCall,
    PushKey,
    QueueDrained,
    TimerFired,
)
from atoll.protocol.former_lives import KEPT_LIVES
from atoll.protocol.fragment_ledger import FragmentLedger, close_together
from atoll.protocol.ledger import Ledger, settle
from atoll.protocol.settings import ProtocolSettings
from atoll.protocol.shard import Shard

FRAGMENTS = 2
SAMPLES = 9
TRAINED, PUSHED = 12, 10
"""Tokens of one life, and those of them that it pushes, per fragment; it overwrites the others."""


class WorkCounter:
    """Counts calls, of Python's functions and of others."""

    def __init__(self) -> None:
        """Have counted none."""
        self.calls = 0

    def __enter__(self) -> Self:
        """Begin to count."""
        sys.setprofile(self._on_event)
        return self

    def __exit__(self, *_: object) -> None:
        """Stop."""
        sys.setprofile(None)

    def _on_event(self, _: FrameType, event: str, __: object) -> None:
        self.calls += event in ("call", "c_call")


class LivesDesk:
    """The shards of a run and lives that come and go: in every interval each pushes once to each fragment, and ends.

    A life leaves with a farewell, or dies: then its learner's last word was before its push.
    """

    def __init__(self, shards: int = 1) -> None:
        """Found a run whose learner `steady` stays."""
        plan: dict[str, object] = {"fragments": FRAGMENTS, "shards": shards, "interval_steps": 8, "quorum": 1}
        self.settings = msgspec.convert(plan, ProtocolSettings).check()
        self.shards = [Shard(self.settings, number, dict.fromkeys(range(FRAGMENTS), 0)) for number in range(shards)]
        self.durable: dict[int, bytes] = {}
        self.now_s = 0.0
        self.turn = 0
        self.lives: dict[str, int] = {"steady": 1}
        self.incarnations: Counter[str] = Counter()
        self.tokens: Counter[str] = Counter()
        """What became of each token-fragment, by the test's own count."""
        self.trained = 0
        self.acknowledged: list[Acknowledge] = []
        self.dismissed = 0
        self.keeping: list[tuple[Shard, Keep]] = []
        self._steady = 0

    def keep(self) -> None:
        """Let ledgers that are to be written alone become durable."""
        while self.keeping:
            shard, action = self.keeping.pop(0)
            self.durable[action.fragment] = action.fragment_ledger
            self.tell(shard, Kept(at_s=self.now_s, fragment=action.fragment))

    def tell(self, shard: Shard, fact: Fact) -> None:
        """Hand a fact over and do what the shard commands; a commit is durable at once."""
        for action in shard.handle(fact):
            self._do(shard, action)

    def _do(self, shard: Shard, action: Command) -> None:
        if isinstance(action, Fetch):
            self.tell(shard, ContributionReady(at_s=self.now_s, key=action.key))
        elif isinstance(action, Commit):
            self.durable[action.fragment] = action.fragment_ledger
            self.tell(shard, Committed(at_s=self.now_s, fragment=action.fragment, version=action.base_version + 1))
        elif isinstance(action, Keep):
            self.keeping.append((shard, action))
        elif isinstance(action, Acknowledge):
            self.acknowledged.append(action)
        elif isinstance(action, Dismiss):
            self.dismissed += 1
        else:
            assert isinstance(action, ArmTimer | Fold | PublishCall), action

    def beat(self, name: str, incarnation: int, trained: int, *, spent: bool = False) -> None:
        """Let a learner report to all shards; `spent`: all of it is pushed or superseded."""
        own = FRAGMENTS * PUSHED if spent else 0
        for shard in self.shards:
            self.tell(
                shard,
                LearnerBeat(
                    at_s=self.now_s,
                    learner=name,
                    incarnation=incarnation,
                    training=True,
                    step_s=1.0,
                    tokens=trained,
                    pushed=own,
                    superseded=FRAGMENTS * trained - own if spent else 0,
                    steps=8,
                ),
            )

    def push(self, name: str, incarnation: int, fragment: int, push: int = 1, trained: int = TRAINED) -> None:
        """Let a contribution of somebody arrive, on the present version."""
        shard = self.shards[self.settings.shard_of(fragment)]
        arrived = ContributionArrived(
            at_s=self.now_s,
            key=PushKey(name, incarnation, fragment, push),
            base_version=shard.slots[fragment].round.version,
            tokens=PUSHED,
            steps=8,
            trained_tokens=trained,
        )
        self.tell(shard, arrived)

    def interval(self, *names: str, dying: bool = False) -> None:
        """Let a life of each of these learners begin, push and end; each fragment gets a version."""
        self.now_s += 8.0
        self._steady += 1
        self.beat("steady", 1, self._steady * PUSHED)
        lives = [(name, self.incarnations[name] + 1) for name in names]
        for name, incarnation in lives:
            self.incarnations[name] = incarnation
            self.beat(name, incarnation, TRAINED)
        for fragment in range(FRAGMENTS):
            shard = self.shards[self.settings.shard_of(fragment)]
            shard.slots[fragment].due_s = self.now_s
            self.tell(shard, TimerFired(at_s=self.now_s, name=f"due/{fragment}"))
            for name, incarnation in lives:
                self.push(name, incarnation, fragment)
            self.push("steady", 1, fragment, push=self._steady, trained=self._steady * PUSHED)
            self.tell(shard, TimerFired(at_s=self.now_s + 4.0, name=f"grace/{fragment}"))
        for name, incarnation in () if dying else lives:
            self.beat(name, incarnation, TRAINED, spent=True)
            for shard in self.shards:
                self.tell(shard, LearnerLeft(at_s=self.now_s, learner=name, incarnation=incarnation))
        self.keep()
        self._count(len(lives), dying=dying)
        self.turn += 1
        for shard in self.shards:
            self.tell(shard, QueueDrained(at_s=self.now_s, proven=False, turns=self.turn))

    def _count(self, ended: int, *, dying: bool) -> None:
        self.trained += ended * TRAINED + PUSHED
        self.tokens["merged"] += FRAGMENTS * PUSHED * (ended + 1)
        self.tokens["lost" if dying else "superseded"] += FRAGMENTS * (TRAINED - PUSHED) * ended

    def ledgers(self) -> dict[int, FragmentLedger]:
        """Return what is durable, as an heir reads it."""
        return {fragment: parsed(frozen, FragmentLedger) for fragment, frozen in self.durable.items()}

    def read(self) -> Ledger:
        """Return the ledger of the run by its heads."""
        ledgers, whole = self.ledgers(), Ledger()
        close_together(ledgers, FRAGMENTS)
        for each in ledgers.values():
            each.enter_into(whole)
        return whole

    def check_exact(self) -> None:
        """Every token has one fate, by the heads and by what the shards would close with."""
        closing = Ledger()
        for shard in self.shards:
            closing.absorb(shard.ledger)
        for whole in (self.read(), closing):
            settled = settle(whole, FRAGMENTS)
            assert settled.exact, settled.errors
            assert settled.trained == FRAGMENTS * self.trained
            assert +Counter(settled.fates) == +self.tokens
            assert whole.run_tokens == self.trained


def one_life(number: int) -> Iterator[str]:
    """Yield names that nobody had before."""
    while True:
        yield f"once-{number:06d}"
        number += 1


FEW = [f"again-{number}" for number in range(8)]


def live_on(desk: LivesDesk, names: Iterator[str], lives: int) -> tuple[float, float]:
    """Let so many lives come and go, of learners that are restarted and of ones that come once.

    Return the bytes of the ledgers that the last commits of an interval have written, and the calls that all that is done in an
    interval takes: means over the last of them, because lives are folded now and then.
    """
    measured: list[tuple[int, int]] = []
    for number in range(lives // 32):
        with WorkCounter() if lives - 32 * number <= 32 * SAMPLES else nullcontext(WorkCounter()) as work:
            desk.interval(*FEW, dying=number % 3 == 0)
            desk.interval(*(next(names) for _ in range(24)))
        measured.append((sum(len(frozen) for frozen in desk.durable.values()), work.calls))
    sizes, calls = zip(*measured[-SAMPLES:], strict=True)
    return fmean(sizes), fmean(calls)


@pytest.mark.parametrize(("shards", "lives"), [(1, 100_000), (2, 12_000)])
def test_what_a_commit_costs_does_not_grow_with_the_lives_that_ever_were(shards: int, lives: int) -> None:
    """A hundred thousand honest lives: the ledgers of a commit are as large, and take as many calls, as after the first few."""
    desk, names = LivesDesk(shards), one_life(0)
    early = live_on(desk, names, 1_600)
    late = live_on(desk, names, lives)
    for _ in range(4):
        desk.interval()

    assert late == pytest.approx(early, rel=0.1)
    assert all(len(shard.ledger.accounts) <= KEPT_LIVES + 1 for shard in desk.shards)
    assert all(len(shard.learners) <= KEPT_LIVES + 1 for shard in desk.shards)
    desk.check_exact()
