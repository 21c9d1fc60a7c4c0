"""What a shard has in its hands while one round becomes the next, and when the next call is due."""

from __future__ import annotations

import pytest

from atoll.protocol.events import ArmTimer, Commit, Committed, ContributionSpoiled, Fold, PushKey
from support.shards import ShardDesk


def arrives(
    desk: ShardDesk, learner: str, at_s: float, base: int = 0, *, push: int = 1, final: bool = False
) -> PushKey:
    key = PushKey(learner, 1, 0, push)
    desk.arrive(key, at_s, base, trained_tokens=100 * push, final=final)
    return key


def test_what_is_being_read_during_a_commit_is_being_read_for_the_next_round() -> None:
    """What was parked is not: it is folded at once."""
    desk = ShardDesk()
    for learner in ("a", "b", "c"):
        desk.beat(learner, step_s=0.5)
    desk.fire("due", 4.0)
    first, slow, parked = (arrives(desk, learner, 4.1) for learner in ("a", "b", "c"))
    desk.ready(first, 4.2)
    (commit,) = (action for action in desk.fire("grace", 4.9) if isinstance(action, Commit))
    desk.ready(parked, 5.0)

    actions = desk.tell(Committed(at_s=5.1, fragment=0, version=1))

    assert commit.end == "grace over"
    assert [action.key for action in actions if isinstance(action, Fold)] == [parked]
    now = desk.shard.slots[0].round
    assert now.loading == {slow}
    assert not now.idle


def test_a_last_contribution_is_folded_as_soon_as_nothing_will_make_the_version_it_is_on() -> None:
    desk = ShardDesk(ending="together", tokens_target=1_000_000)
    desk.beat("a", step_s=0.5)
    reading = arrives(desk, "a", 1.0)
    last = arrives(desk, "a", 1.1, base=1, push=2, final=True)
    assert desk.ready(last, 1.2) == []
    assert desk.shard.slots[0].parked == [last]

    actions = desk.tell(ContributionSpoiled(at_s=1.3, key=reading, reason="blob_gone"))

    assert [action.key for action in actions if isinstance(action, Fold)] == [last]
    assert desk.shard.slots[0].parked == []


@pytest.mark.parametrize("step_s", [0.5, 2.0])
def test_the_next_round_is_due_an_interval_after_the_beat_of_the_last(step_s: float) -> None:
    desk, interval_s = ShardDesk(), 8 * step_s
    desk.beat("a", step_s=step_s)
    assert desk.shard.slots[0].due_s == interval_s
    desk.fire("due", interval_s + 1.0)
    desk.ready(arrives(desk, "a", interval_s + 1.2), interval_s + 1.3)
    actions = desk.tell(Committed(at_s=interval_s + 2.0, fragment=0, version=1))

    due = [action.due_s for action in actions if isinstance(action, ArmTimer) and action.name == "due/0"]
    assert due[-1] == 2.0 * interval_s
    assert (desk.shard.slots[0].called_s, desk.shard.slots[0].due_s) == (interval_s, 2.0 * interval_s)


def test_a_run_that_ends_together_does_not_wait_for_who_is_in_quarantine() -> None:
    desk = ShardDesk(ending="together", tokens_target=150, offences_max=1, protect="isolate", silence_s=60.0)
    for at_s in (0.0, 50.0, 100.0):
        desk.beat("a", at_s, training=False, step_s=0.5)
        desk.beat("mad", at_s, training=False, step_s=0.5)
    spoiled = arrives(desk, "mad", 100.0)
    desk.tell(ContributionSpoiled(at_s=100.1, key=spoiled, reason="not_finite"))
    assert desk.shard.isolated("mad", 1)

    first = desk.ready(arrives(desk, "a", 100.2), 100.3)
    desk.tell(Committed(at_s=100.4, fragment=0, version=1))
    second = desk.ready(arrives(desk, "a", 100.5, base=1, push=2, final=True), 100.6)

    for actions in (first, second):
        assert [action.end for action in actions if isinstance(action, Commit)] == ["all answered"]
