"""Lives that are over: folded into one account, exactly once, and what a commit costs then."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from statistics import fmean
from types import FrameType
from typing import Self

import msgspec
import pytest

from atoll.base.parsing import parsed
from atoll.protocol import events
from atoll.protocol.invariants import check_shard
from atoll.protocol.ledger import (
    KEPT_LIVES,
    LIVES_MAX,
    UNTIL_MAX,
    FormerLives,
    FragmentLedger,
    Ledger,
    add_part,
    close_together,
    parts,
    settle,
)
from atoll.protocol.settings import ProtocolSettings
from atoll.protocol.shard import Shard
from support.shards import beat_of

FRAGMENTS = 2
SAMPLES = 9
TRAINED, PUSHED = 12, 10
"""Tokens of one life, and those of them that it pushes, per fragment; it overwrites the others."""


class WorkCounter:
    """Counts calls, of Python's functions and of others."""

    def __init__(self) -> None:
        self.calls = 0

    def __enter__(self) -> Self:
        sys.setprofile(self._on_event)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)

    def _on_event(self, _: FrameType, event: str, __: object) -> None:
        self.calls += event in ("call", "c_call")


class LivesDesk:
    """The shards of a run and lives that come and go: in every interval each pushes once to each fragment, and ends.

    A life leaves with a farewell, or dies: then its learner's last word was before its push.
    """

    def __init__(self, shards: int = 1) -> None:
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
        self.acknowledged: list[events.Acknowledge] = []
        self.dismissed = 0
        self.keeping: list[tuple[Shard, events.Keep]] = []
        self._steady = 0

    def keep(self) -> None:
        while self.keeping:
            shard, action = self.keeping.pop(0)
            self.durable[action.fragment] = action.fragment_ledger
            self.tell(shard, events.Kept(at_s=self.now_s, fragment=action.fragment))

    def tell(self, shard: Shard, fact: events.Fact) -> None:
        """Hand a fact over and do what the shard commands; a commit is durable at once."""
        for action in shard.handle(fact):
            self._do(shard, action)

    def _do(self, shard: Shard, action: events.Command) -> None:
        if isinstance(action, events.Fetch):
            self.tell(shard, events.ContributionReady(at_s=self.now_s, key=action.key))
        elif isinstance(action, events.Commit):
            self.durable[action.fragment] = action.fragment_ledger
            self.tell(
                shard, events.Committed(at_s=self.now_s, fragment=action.fragment, version=action.base_version + 1)
            )
        elif isinstance(action, events.Keep):
            self.keeping.append((shard, action))
        elif isinstance(action, events.Acknowledge):
            self.acknowledged.append(action)
        elif isinstance(action, events.Dismiss):
            self.dismissed += 1
        else:
            assert isinstance(action, events.ArmTimer | events.Fold | events.PublishCall), action

    def beat(self, name: str, incarnation: int, trained: int, *, spent: bool = False) -> None:
        """Let a learner report to all shards; `spent`: all of it is pushed or superseded."""
        own = FRAGMENTS * PUSHED if spent else 0
        for shard in self.shards:
            gone = FRAGMENTS * trained - own if spent else 0
            told = {"incarnation": incarnation, "tokens": trained, "pushed": own, "superseded": gone, "steps": 8}
            self.tell(shard, beat_of(name, self.now_s, **told))

    def push(self, name: str, incarnation: int, fragment: int, push: int = 1, trained: int = TRAINED) -> None:
        shard = self.shards[self.settings.shard_of(fragment)]
        arrived = events.ContributionArrived(
            at_s=self.now_s,
            key=events.PushKey(name, incarnation, fragment, push),
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
            self.round(fragment, lives)
        for name, incarnation in () if dying else lives:
            self.beat(name, incarnation, TRAINED, spent=True)
            for shard in self.shards:
                self.tell(shard, events.LearnerLeft(at_s=self.now_s, learner=name, incarnation=incarnation))
        self.keep()
        self._count(len(lives), dying=dying)
        self.answer()

    def round(self, fragment: int, lives: Iterable[tuple[str, int]] = ()) -> None:
        """Let a fragment be called and have its next version, of what `steady` and these lives push."""
        shard = self.shards[self.settings.shard_of(fragment)]
        shard.slots[fragment].due_s = self.now_s
        self.tell(shard, events.TimerFired(at_s=self.now_s, name=f"due/{fragment}"))
        for name, incarnation in lives:
            self.push(name, incarnation, fragment)
        self.push("steady", 1, fragment, push=self._steady, trained=self._steady * PUSHED)
        self.tell(shard, events.TimerFired(at_s=self.now_s + 4.0, name=f"grace/{fragment}"))

    def answer(self) -> None:
        """Let the broker say that all is settled that the queue held when it was asked the last time."""
        self.turn += 1
        for shard in self.shards:
            self.tell(shard, events.QueueDrained(at_s=self.now_s, proven=False, turns=self.turn))

    def _count(self, ended: int, *, dying: bool) -> None:
        self.trained += ended * TRAINED + PUSHED
        self.tokens["merged"] += FRAGMENTS * PUSHED * (ended + 1)
        self.tokens["lost" if dying else "superseded"] += FRAGMENTS * (TRAINED - PUSHED) * ended

    def ledgers(self) -> dict[int, FragmentLedger]:
        return {fragment: parsed(frozen, FragmentLedger) for fragment, frozen in self.durable.items()}

    def read(self) -> Ledger:
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
            assert whole.former.tokens + sum(each.trained for each in whole.accounts.values()) == self.trained


def one_life(number: int) -> Iterator[str]:
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


def many_former_lives(shards: int = 1) -> LivesDesk:
    """Return a run in which sixty learners had a life each and left, thirty had one and came again, and nothing is queued."""
    desk, names = LivesDesk(shards), one_life(0)
    desk.interval(*(next(names) for _ in range(60)))
    dying = [f"again-{number}" for number in range(30)]
    desk.interval(*dying, dying=True)
    desk.interval(*dying)
    for _ in range(6):
        desk.interval()
    return desk


@pytest.mark.parametrize("shards", [1, 2])
def test_what_comes_late_of_a_former_life_has_a_fate(shards: int) -> None:
    """A duplicate is acknowledged, a farewell let go of, a heartbeat ignored; no sum moves, and no account is opened."""
    desk = many_former_lives(shards)
    before = [msgspec.json.encode(shard.ledger) for shard in desk.shards]
    assert desk.shards[0].ledger.former.covers("once-000007/1")
    desk.acknowledged.clear()
    dismissed = desk.dismissed

    for fragment in range(FRAGMENTS):
        desk.push("once-000007", 1, fragment)
        desk.push("again-3", 1, fragment, push=2)
    desk.beat("once-000007", 1, 10 * TRAINED)
    for shard in desk.shards:
        desk.tell(shard, events.LearnerLeft(at_s=desk.now_s, learner="once-000007", incarnation=1))

    assert [each.fate for each in desk.acknowledged] == ["known"] * 2 * FRAGMENTS
    assert desk.dismissed == dismissed + shards
    assert [msgspec.json.encode(shard.ledger) for shard in desk.shards] == before
    assert all("once-000007" not in shard.learners for shard in desk.shards)
    desk.check_exact()


def test_a_learner_that_comes_again_has_an_account_as_ever() -> None:
    desk = many_former_lives()
    desk.interval("once-000007")

    assert desk.shards[0].ledger.accounts["once-000007/2"].merged == FRAGMENTS * PUSHED
    desk.check_exact()


@pytest.mark.parametrize("shards", [1, 2])
def test_an_heir_finds_each_fragment_as_it_was_written_and_no_token_twice(
    shards: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One ledger may name lives as former that have accounts in another, which was written before."""
    monkeypatch.setattr("atoll.protocol.ledger.KEPT_LIVES", 0)
    desk, names = LivesDesk(shards), one_life(0)
    desk.interval(*(next(names) for _ in range(20)))
    written, apart = [dict(desk.durable)], 0
    for _ in range(6):
        desk.interval()
        written.append(dict(desk.durable))
        for mixed in ({0: written[-2][0], 1: written[-1][1]}, {0: written[-1][0], 1: written[-2][1]}):
            ledgers = {fragment: parsed(frozen, FragmentLedger) for fragment, frozen in mixed.items()}
            apart += ledgers[0].former.lives != ledgers[1].former.lives
            heirs = [
                Shard(desk.settings, number, dict.fromkeys(range(FRAGMENTS), 9), fragment_ledgers=ledgers)
                for number in range(shards)
            ]
            whole = Ledger()
            for heir in heirs:
                check_shard(heir)
                whole.absorb(heir.ledger)
            settled = settle(whole, FRAGMENTS)
            assert settled.exact, settled.errors
            assert settled.trained == FRAGMENTS * desk.trained
            assert settled.fates["superseded"] == desk.tokens["superseded"]
    assert written[-1] != written[0]
    assert apart > 0


def test_nothing_is_folded_before_the_queue_has_settled_what_it_held() -> None:
    desk = many_former_lives()
    folded = desk.shards[0].ledger.former.lives
    desk.turn -= 100  # the queue answers, and has come no further
    for _ in range(3):
        desk.interval(*(f"again-{number}" for number in range(20)))
    assert desk.shards[0].ledger.former.lives == folded

    desk.turn += 100
    for _ in range(5):
        desk.interval()
    assert desk.shards[0].ledger.former.lives > folded


def test_nothing_is_folded_before_all_ledgers_of_the_shard_have_its_account() -> None:
    """An heir would find its last report in one of them alone."""
    desk, names = LivesDesk(), one_life(0)
    desk.interval(*(next(names) for _ in range(60)))
    shard = desk.shards[0]
    for _ in range(6):
        desk.answer()
        desk.round(0)
        desk._steady += 1
        desk.beat("steady", 1, desk._steady * PUSHED)
    assert shard.ended.batch
    assert not shard.ledger.former.lives

    desk.round(1)
    assert shard.ledger.former.lives == 60 - KEPT_LIVES


def test_what_comes_of_a_folded_life_is_settled_once_the_fold_is_durable() -> None:
    """Its process was frozen and goes on. An heir of the shard that finds the account open must find the push, too."""
    desk, names = LivesDesk(), one_life(0)
    desk.interval(*(next(names) for _ in range(60)))
    while not desk.shards[0].ended.batch:
        desk.answer()
    for fragment in range(FRAGMENTS):
        desk._steady += 1
        desk.beat("steady", 1, desk._steady * PUSHED)
        desk.round(fragment)
    assert desk.shards[0].ledger.former.covers("once-000000/1")
    assert not any(ledger.former.covers("once-000000/1") for ledger in desk.ledgers().values())
    desk.acknowledged.clear()
    dismissed = desk.dismissed

    desk.push("once-000000", 1, 1, push=2)
    desk.tell(desk.shards[0], events.LearnerLeft(at_s=desk.now_s, learner="once-000000", incarnation=1))
    assert (desk.acknowledged, desk.dismissed) == ([], dismissed)
    desk.keep()

    assert [each.fate for each in desk.acknowledged] == ["known"]
    assert desk.dismissed == dismissed + 1
    assert all(ledger.former.covers("once-000000/1") for ledger in desk.ledgers().values())


def test_nothing_is_folded_of_which_a_push_is_in_hand() -> None:
    """Its learner was replaced and goes on: what came before its life is folded is merged, and the fold waits for it."""
    desk = LivesDesk()
    dying = [f"again-{number}" for number in range(40)]
    desk.interval(*dying, dying=True)
    desk.interval(*dying)
    desk.interval()
    shard = desk.shards[0]
    while not shard.ended.batch:
        desk.answer()
    held = shard.ended.batch[0]
    learner, _, incarnation = held.rpartition("/")

    desk._steady += 1
    desk.beat("steady", 1, desk._steady * PUSHED)
    desk.round(0)
    desk.push(learner, int(incarnation), 0, push=2, trained=2 * TRAINED)
    desk.round(1)

    assert shard.ledger.former.lives > 0
    assert held in shard.ledger.accounts
    for _ in range(6):
        desk.interval()
    assert shard.ledger.former.covers(held)
    settled = settle(desk.read(), FRAGMENTS)
    assert settled.exact, settled.errors


def test_whose_account_did_not_add_up_is_named_after_it_is_folded() -> None:
    desk = LivesDesk()
    desk.interval()
    shard = desk.shards[0]
    desk.beat("liar", 1, TRAINED, spent=True)
    desk.tell(shard, events.LearnerLeft(at_s=desk.now_s, learner="liar", incarnation=1))
    desk.keep()
    desk.interval(*(f"once-{number}" for number in range(60)))
    for _ in range(6):
        desk.interval()

    assert shard.ledger.former.covers("liar/1")
    settled = settle(desk.read(), FRAGMENTS)
    assert not settled.exact
    assert [error.partition(":")[0] for error in settled.errors] == ["liar/1"]
    assert sum(settled.fates.values()) == settled.trained


@pytest.mark.parametrize("order", [1, -1])
def test_a_learner_that_claims_lives_has_a_bounded_number_of_accounts(order: int) -> None:
    """A member may say that it had any number of lives; nobody else pays for that, and no token counts twice."""
    desk = LivesDesk()
    desk.interval()
    before = len(desk.durable[0])
    for incarnation in range(1, 20_000)[::order]:
        desk.beat("liar", incarnation, TRAINED)
    desk.interval()

    assert len([name for name in desk.shards[0].ledger.accounts if name.startswith("liar/")]) <= LIVES_MAX
    assert len(desk.durable[0]) < before + 200 * LIVES_MAX
    assert settle(desk.read(), FRAGMENTS).exact


def test_the_learners_that_are_named_are_the_last_ones() -> None:
    former = FormerLives()
    for number in range(UNTIL_MAX + 5):
        former.remember(f"l{number}/1")
    former.remember("l7/3")

    assert len(former.until) == UNTIL_MAX
    assert former.forgotten == 5
    assert not former.covers("l4/1")
    assert former.covers("l7/2")
    ledger = Ledger(former=former)
    ledger.account("l3", 1)
    assert ledger.has_folded("l4/1")
    assert not ledger.has_folded("l3/1")
    assert not Ledger().has_folded("l4/1")


def test_a_ledger_with_former_lives_in_pages_is_the_same_ledger() -> None:
    """Only the first page has them; more would count them again."""
    ledger = many_former_lives().shards[0].ledger
    together: Ledger | None = None
    for number, part in enumerate(parts(ledger, 7)):
        together = add_part(together, msgspec.json.decode(msgspec.json.encode(part), type=Ledger), number)

    assert together == ledger


@pytest.mark.parametrize(
    ("shards", "lives"), [(1, 4_800), (2, 4_800), pytest.param(1, 100_000, marks=pytest.mark.second_tier)]
)
def test_what_a_commit_costs_does_not_grow_with_the_lives_that_ever_were(shards: int, lives: int) -> None:
    """Many thousands of honest lives: the ledgers of a commit are as large, and take as many calls, as after the first few."""
    desk, names = LivesDesk(shards), one_life(0)
    early = live_on(desk, names, 1_600)
    late = live_on(desk, names, lives)
    for _ in range(4):
        desk.interval()

    assert late == pytest.approx(early, rel=0.1)
    assert all(len(shard.ledger.accounts) <= KEPT_LIVES + 1 for shard in desk.shards)
    assert all(len(shard.learners) <= KEPT_LIVES + 1 for shard in desk.shards)
    desk.check_exact()
