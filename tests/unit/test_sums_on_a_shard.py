"""Contributions that come as one sum are folded together, parked together, or read again without the one that is bad."""

from __future__ import annotations

import pytest

from atoll.base.errors import ProtocolMisuse
from atoll.protocol import events
from support.shards import ShardDesk

NAMES = ("a", "b", "c")


class SumDesk(ShardDesk):
    """A shard of one fragment with three learners, which has called them."""

    def __init__(self, **changes: object) -> None:
        super().__init__(**{"quorum": 1} | changes)
        for name in NAMES:
            self.beat(name)
        self.fire("due", 8.0)

    def pushed(self, *names: str, base: int = 0, push: int = 1, at_s: float = 8.5) -> list[events.Command]:
        keys = [events.PushKey(name, 1, 0, push) for name in names]
        return [action for key in keys for action in self.arrive(key, at_s, base, tokens=10, trained_tokens=100)]

    def read(self, *names: str, push: int = 1, at_s: float = 9.0, norms: float = 1.0) -> list[events.Command]:
        first, *others = (events.PushKey(name, 1, 0, push) for name in names)
        return self.ready(first, at_s, norm=norms, others=tuple((key, 1.0) for key in others))


def of(kind: type[events.Fetch | events.Fold | events.Refuse], actions: list[events.Command]) -> list[str]:
    return [action.key.learner for action in actions if isinstance(action, kind)]


def test_a_sum_is_folded_whole_before_its_round_moves_on() -> None:
    """Without grace the first of them alone would commit the round, and leave the others to the next one."""
    desk = SumDesk(grace_gamma=0.0, grace_cap_steps=0.0)
    assert of(events.Fetch, desk.pushed(*NAMES)) == list(NAMES)
    actions = desk.read(*NAMES)
    assert of(events.Fold, actions) == list(NAMES)
    [commit] = [action for action in actions if isinstance(action, events.Commit)]
    assert [share.key.learner for share in commit.shares] == list(NAMES)


def test_a_sum_that_comes_too_late_is_parked_whole_and_folded_late() -> None:
    desk = SumDesk(grace_gamma=0.0, grace_cap_steps=0.0)
    desk.pushed(*NAMES)
    desk.read("a")
    assert desk.read("b", "c", at_s=9.1) == []
    actions = desk.tell(events.Committed(at_s=10.0, fragment=0, version=1))
    folds = [action for action in actions if isinstance(action, events.Fold)]
    assert [(fold.key.learner, fold.age) for fold in folds] == [("b", 1), ("c", 1)]


def test_one_that_is_too_long_is_read_apart_and_the_others_once_more() -> None:
    """A sum cannot be clipped in part: the long one is clipped alone, and the others enter with the next sum."""
    desk = SumDesk(quorum=3)
    for push in range(1, 5):
        desk.pushed(*NAMES, push=push, base=push - 1, at_s=10.0 * push)
        desk.read(*NAMES, push=push, at_s=10.0 * push)
        desk.tell(events.Committed(at_s=10.0 * push, fragment=0, version=push))
        for name in NAMES:
            desk.beat(name, 10.0 * push + 8.0, steps=10 * push + 8)
        desk.fire("due", 10.0 * push + 8.0)
    ledger = desk.shard.slots[0].fragment_ledger
    desk.pushed(*NAMES, push=5, base=4, at_s=50.0)
    before = ledger.lengths
    actions = desk.read("b", "a", "c", push=5, at_s=50.0, norms=1e6)

    assert of(events.Refuse, actions) == []
    assert [(action.key.learner, action.apart) for action in actions if isinstance(action, events.Fetch)] == [
        ("b", True),
        ("a", False),
        ("c", False),
    ]
    assert of(events.Fold, actions) == []
    assert ledger.lengths == before
    [fold] = [action for action in desk.read("b", push=5, at_s=50.1, norms=1e6) if isinstance(action, events.Fold)]
    assert fold.scale * 1e6 == pytest.approx(10.0)
    assert of(events.Fold, desk.read("a", "c", push=5, at_s=50.2)) == ["a", "c"]


def test_a_sum_of_what_nobody_asked_for_is_a_mistake() -> None:
    desk = SumDesk()
    desk.pushed("a")
    with pytest.raises(ProtocolMisuse, match="nobody asked for"):
        desk.read("a", "b")
