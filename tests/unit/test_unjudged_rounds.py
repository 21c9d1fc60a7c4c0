"""A round that judges contributions by each other needs three learners: with fewer it waits, and is refused at the end."""

from __future__ import annotations

from collections import Counter

import pytest

from atoll.protocol import events
from support.shards import ShardDesk

SILENT_S = 60.0


class JudgingDesk(ShardDesk):
    """A shard of one fragment that merges what three learners or more have pushed."""

    def __init__(self, **changes: object) -> None:
        super().__init__(**{"quorum": 3, "robust": "gate"} | changes)

    def push(self, name: str, at_s: float) -> list[events.Command]:
        key = events.PushKey(name, 1, 0, 1)
        return self.arrive(key, at_s, tokens=10, trained_tokens=10) + self.ready(key, at_s)


def refused(actions: list[events.Command]) -> Counter[str]:
    return Counter(action.reason for action in actions if isinstance(action, events.Refuse))


@pytest.mark.parametrize("ending", ["apart", "together"])
@pytest.mark.parametrize("pushing", [1, 2])
def test_what_nobody_can_judge_is_refused_when_the_run_is_over(pushing: int, ending: str) -> None:
    """A liar that leaves last has not the last word; its refusal is in the ledger, and the shard finishes."""
    desk = JudgingDesk(ending=ending)
    names = ("liar", "other")[:pushing]
    for name in names:
        desk.beat(name, 0.0)
    for name in names:
        desk.push(name, 1.0)
    desk.tell(*(events.LearnerLeft(at_s=SILENT_S, learner=name, incarnation=1) for name in names))
    assert not [action for action in desk.done if isinstance(action, events.Commit | events.Unfold)]

    ended = desk.tell(events.DrainOrdered(at_s=SILENT_S), events.QueueDrained(at_s=SILENT_S + 1.0, proven=True))

    assert [action.fragment for action in ended if isinstance(action, events.Unfold)] == [0]
    assert refused(ended) == {"unjudged": pushing}
    assert not [action for action in desk.done if isinstance(action, events.Commit)]
    assert isinstance(ended[-1], events.Finish)
    accounts = desk.shard.ledger.accounts
    assert sum(account.refused["unjudged"] for account in accounts.values()) == 10 * pushing


def test_while_the_run_goes_on_such_a_round_waits_for_learners() -> None:
    """Heartbeats may be lost for a while: nothing honest is thrown away then, and nothing is merged unjudged."""
    desk = JudgingDesk()
    for name in "ab":
        desk.beat(name, 0.0)
    for name in "ab":
        desk.push(name, 1.0)
    assert not [
        action
        for action in desk.tell(events.QueueDrained(at_s=SILENT_S, proven=True))
        if isinstance(action, events.Commit)
    ]

    for name in "abc":
        desk.beat(name, SILENT_S + 1.0)
    told = desk.push("c", SILENT_S + 2.0)
    told += desk.tell(*(events.LearnerLeft(at_s=SILENT_S + 3.0, learner=name, incarnation=1) for name in "abc"))

    (commit,) = [action for action in told if isinstance(action, events.Commit)]
    assert {share.key.learner for share in commit.shares} == {"a", "b", "c"}
    assert refused(desk.done) == {}


def test_without_a_judging_merge_the_last_push_is_merged_as_before() -> None:
    desk = JudgingDesk(robust="none")
    desk.beat("a")
    desk.push("a", 1.0)

    told = desk.tell(events.LearnerLeft(at_s=SILENT_S, learner="a", incarnation=1))

    assert [action.end for action in told if isinstance(action, events.Commit)] == ["nobody left"]
    assert [type(action) for action in desk.done if isinstance(action, events.Fold | events.Unfold)] == [events.Fold]
