"""Contributions that come as one sum are folded together, parked together, or read again without the one that is bad."""

from __future__ import annotations

import pytest

from atoll.base.errors import ProtocolMisuse
from atoll.protocol.events import (
    Command,
    Commit,
    Committed,
    ContributionArrived,
    ContributionReady,
    Fetch,
    Fold,
    LearnerBeat,
    PushKey,
    Refuse,
    TimerFired,
)
from atoll.protocol.settings import ProtocolSettings
from atoll.protocol.shard import Shard
from support.shards import told

NAMES = ("a", "b", "c")


class SumDesk:
    """A shard of one fragment with three learners."""

    def __init__(self, **changes: object) -> None:
        settings = {"fragments": 1, "shards": 1, "interval_steps": 8, "quorum": 1} | changes
        self.shard = Shard(ProtocolSettings(**settings).check(), 0, {0: 0})  # type: ignore[arg-type]
        for name in NAMES:
            self.shard.handle(LearnerBeat(at_s=0.0, learner=name, incarnation=1, training=True, step_s=1.0, tokens=100))
        told(self.shard, TimerFired(at_s=8.0, name="due/0"))

    def beat(self, name: str, at_s: float) -> None:
        told(
            self.shard,
            LearnerBeat(at_s=at_s, learner=name, incarnation=1, training=True, step_s=1.0, tokens=100, steps=int(at_s)),
        )

    def arrive(self, *names: str, base: int = 0, push: int = 1, at_s: float = 8.5) -> list[Command]:
        return [
            action
            for name in names
            for action in told(
                self.shard,
                ContributionArrived(
                    at_s=at_s,
                    key=PushKey(name, 1, 0, push),
                    base_version=base,
                    tokens=10,
                    steps=8,
                    trained_tokens=100,
                ),
            )
        ]

    def ready(self, *names: str, push: int = 1, at_s: float = 9.0, norms: float | None = None) -> list[Command]:
        first, *others = (PushKey(name, 1, 0, push) for name in names)
        norm = 1.0 if norms is None else norms
        rest = tuple((key, 1.0) for key in others)
        return self.shard.handle(ContributionReady(at_s=at_s, key=first, norm=norm, others=rest))


def of(kind: type[Fetch | Fold | Refuse], actions: list[Command]) -> list[str]:
    """Return the learners of commands of a kind."""
    return [action.key.learner for action in actions if isinstance(action, kind)]


def test_a_sum_is_folded_whole_before_its_round_moves_on() -> None:
    """Without grace the first of them alone would commit the round, and leave the others to the next one."""
    desk = SumDesk(grace_gamma=0.0, grace_cap_steps=0.0)
    assert of(Fetch, desk.arrive(*NAMES)) == list(NAMES)
    actions = desk.ready(*NAMES)
    assert of(Fold, actions) == list(NAMES)
    [commit] = [action for action in actions if isinstance(action, Commit)]
    assert [share.key.learner for share in commit.shares] == list(NAMES)


def test_a_sum_that_comes_too_late_is_parked_whole_and_folded_late() -> None:
    desk = SumDesk(grace_gamma=0.0, grace_cap_steps=0.0)
    desk.arrive(*NAMES)
    desk.ready("a")
    assert desk.ready("b", "c", at_s=9.1) == []
    actions = desk.shard.handle(Committed(at_s=10.0, fragment=0, version=1))
    folds = [action for action in actions if isinstance(action, Fold)]
    assert [(fold.key.learner, fold.age) for fold in folds] == [("b", 1), ("c", 1)]


def test_one_that_is_too_long_is_read_apart_and_the_others_once_more() -> None:
    """A sum cannot be clipped in part: the long one is clipped alone, and the others enter with the next sum."""
    desk = SumDesk(quorum=3)
    for push in range(1, 5):
        desk.arrive(*NAMES, push=push, base=push - 1, at_s=10.0 * push)
        desk.ready(*NAMES, push=push, at_s=10.0 * push)
        desk.shard.handle(Committed(at_s=10.0 * push, fragment=0, version=push))
        for name in NAMES:
            desk.beat(name, 10.0 * push + 8.0)
        told(desk.shard, TimerFired(at_s=10.0 * push + 8.0, name="due/0"))
    ledger = desk.shard.slots[0].fragment_ledger
    desk.arrive(*NAMES, push=5, base=4, at_s=50.0)
    before = ledger.lengths
    actions = desk.ready("b", "a", "c", push=5, at_s=50.0, norms=1e6)

    assert of(Refuse, actions) == []
    assert [(action.key.learner, action.apart) for action in actions if isinstance(action, Fetch)] == [
        ("b", True),
        ("a", False),
        ("c", False),
    ]
    assert of(Fold, actions) == []
    assert ledger.lengths == before
    [fold] = [action for action in desk.ready("b", push=5, at_s=50.1, norms=1e6) if isinstance(action, Fold)]
    assert fold.scale * 1e6 == pytest.approx(10.0)
    assert of(Fold, desk.ready("a", "c", push=5, at_s=50.2)) == ["a", "c"]


def test_a_sum_of_what_nobody_asked_for_is_a_mistake() -> None:
    """No contribution enters without its manifest."""
    desk = SumDesk()
    desk.arrive("a")
    with pytest.raises(ProtocolMisuse, match="nobody asked for"):
        desk.ready("a", "b")
