"""The rules of a round, one sentence each: shard, island, grace, ledger, settings."""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec
import pytest

from atoll.base.parsing import parsed
from atoll.protocol import events, invariants, island, pacing, shard
from atoll.protocol import round as rounds
from atoll.protocol.ledger import FragmentLedger
from atoll.protocol.settings import ProtocolSettings
from support.shards import ShardDesk

STEP_S = 1.0
C = TypeVar("C")


def settings(**changes: object) -> ProtocolSettings:
    base: dict[str, object] = {"fragments": 1, "interval_steps": 8, "shards": 1, "silence_s": 5.0}
    return msgspec.convert(base | changes, ProtocolSettings).check()


def key(learner: str, push: int = 1, incarnation: int = 1, fragment: int = 0) -> events.PushKey:
    return events.PushKey(learner, incarnation, fragment, push)


class RulesDesk(ShardDesk):
    """A shard whose calls and contributions come when a test says so."""

    def call(self, at_s: float) -> list[events.Command]:
        """Let the due timer of fragment 0 fire, as if it had been armed for now."""
        self.shard.slots[0].due_s = at_s
        return self.fire("due", at_s)

    def offer(self, who: events.PushKey, at_s: float, base: int = 0, **more: Any) -> list[events.Command]:  # noqa: ANN401
        arrived = self.arrive(who, at_s, base, **more)
        return arrived + (self.ready(who, at_s) if any(isinstance(each, events.Fetch) for each in arrived) else [])


def the(kind: type[C], actions: list[events.Command]) -> list[C]:
    return [action for action in actions if isinstance(action, kind)]


def test_grace_is_gamma_of_the_slack_within_zero_and_the_cap() -> None:
    """Eq. 3: gamma (tau xi_step - xi_quorum - xi_sync), clamped."""
    s = settings(grace_gamma=0.5, grace_cap_steps=1.0, overlap_steps=2)

    assert pacing.grace_window(s, 1.0, 0.6, 0.4).granted_s == pytest.approx(0.5)
    assert pacing.grace_window(s, 1.0, None, None).granted_s == 1.0
    assert pacing.grace_window(s, 1.0, 1.5, 1.0).granted_s == 0.0


def test_first_calls_are_staggered_over_one_interval() -> None:
    """Fragment p of P is due (p + 1)/P of an interval after the first report."""
    desk = RulesDesk(fragments=4)

    timers = [a for a in desk.beat("a", at_s=10.0) if isinstance(a, events.ArmTimer)]

    assert [timer.due_s for timer in timers] == [12.0, 14.0, 16.0, 18.0]


def test_a_last_contribution_on_the_version_that_is_being_committed_waits_for_it() -> None:
    """Its head is visible before the shard hears that its commit is through; what is two versions ahead is of no run."""
    desk = RulesDesk(tokens_target=10, grace_gamma=0.0, grace_cap_steps=0.0)
    for name in ("a", "b"):
        desk.beat(name)
    desk.call(1.0)
    [_commit] = the(events.Commit, desk.offer(key("a"), 2.0))

    early = desk.offer(key("a", push=2), 2.1, base=1, final=True)
    absurd = desk.offer(key("b", push=2), 2.1, base=2, final=True)
    actions = desk.tell(events.Committed(at_s=2.2, fragment=0, version=1))

    assert [type(action) for action in early] == [events.Fetch]
    assert [action.reason for action in the(events.Refuse, absurd)] == ["future_base"]
    (fold,) = the(events.Fold, actions)
    assert (fold.key, fold.age) == (key("a", push=2), 0)


def test_no_token_of_a_fragment_is_pushed_twice() -> None:
    """The same tokens in every push would be merged as often; a life pushes no more of a fragment than it has trained."""
    desk = RulesDesk()
    desk.beat("a")
    desk.beat("b")
    desk.call(0.0)

    def again(who: events.PushKey, trained: int) -> list[str]:
        arrived = events.ContributionArrived(
            at_s=0.1, key=who, base_version=0, tokens=80, steps=8, trained_tokens=trained
        )
        return [action.reason for action in desk.tell(arrived) if isinstance(action, events.Refuse)]

    assert again(key("a", 1), 100) == []
    assert again(key("a", 2), 100) == ["implausible"]
    assert again(key("a", 3), 160) == []
    assert again(key("a", 4), 239) == ["implausible"]
    assert again(key("b", 1), 100) == []
    assert again(key("a", 1, incarnation=2), 100) == []
    for who in (key("a", 1), key("a", 3), key("b", 1)):
        desk.tell(events.ContributionReady(at_s=0.2, key=who))
    assert the(events.Commit, desk.tell(events.TimerFired(at_s=9.0, name="grace/0")))
    assert again(key("a", 5), 239) == ["implausible"]
    desk.tell(events.Committed(at_s=9.1, fragment=0, version=1))
    assert again(key("a", 6), 239) == ["implausible"]
    assert again(key("a", 7), 240) == []


def test_late_contributions_are_no_quorum() -> None:
    """A round that began with them waits for one on its own base before its grace window opens."""
    desk = RulesDesk()
    for name in ("fast", "slow"):
        desk.beat(name)
    desk.call(0.0)
    desk.offer(key("fast"), 0.1)
    desk.tell(events.TimerFired(at_s=5.0, name="grace/0"))
    desk.tell(events.Committed(at_s=5.1, fragment=0, version=1))
    desk.offer(key("slow"), 5.2)

    called = desk.call(8.0)
    answered = desk.offer(key("fast", 2), 8.3, base=1)

    assert not the(events.Commit, called)
    assert not [timer for timer in the(events.ArmTimer, called) if timer.name == "grace/0"]
    assert [timer for timer in the(events.ArmTimer, answered) if timer.name == "grace/0"]


def test_a_silent_learner_does_not_hold_a_round() -> None:
    desk = RulesDesk()
    desk.beat("dead", at_s=0.0)
    desk.beat("a", at_s=20.0)
    desk.call(21.0)

    (commit,) = the(events.Commit, desk.offer(key("a"), 21.1))

    assert commit.end == "all answered"
    assert commit.live == 1


def test_farewells_that_waited_for_a_commit_are_folded_together() -> None:
    desk = RulesDesk(grace_gamma=0.0)
    for name in "abc":
        desk.beat(name)
    desk.call(1.0)
    desk.offer(key("a"), 1.0)
    for name in "bc":
        desk.offer(key(name), 1.2, final=True)
    for name in "abc":
        desk.tell(events.LearnerLeft(at_s=1.3, learner=name, incarnation=1))

    actions = desk.tell(events.Committed(at_s=1.5, fragment=0, version=1))

    commits = [action for action in actions if isinstance(action, events.Commit)]
    assert len(the(events.Fold, actions)) == 2
    assert [share.key.learner for commit in commits for share in commit.shares] == ["b", "c"]


def test_a_deposed_shard_stands_down_and_says_nothing_more() -> None:
    desk = RulesDesk()

    (stand_down,) = desk.tell(events.CommitRefused(at_s=1.0, fragment=0, reason="someone wrote"))

    assert isinstance(stand_down, events.StandDown)
    assert desk.beat("a", at_s=2.0) == []


def test_a_run_finishes_when_the_last_learner_left_and_the_queue_is_empty() -> None:
    desk = RulesDesk(tokens_target=80)
    desk.beat("a", at_s=1.0)
    assert not the(events.Finish, desk.tell(events.QueueDrained(at_s=1.1)))
    desk.beat("a", at_s=1.2, training=False)
    assert not the(events.Finish, desk.tell(events.QueueDrained(at_s=1.3)))
    (_commit,) = the(events.Commit, desk.offer(key("a"), 1.4, final=True))
    desk.tell(events.LearnerLeft(at_s=1.5, learner="a", incarnation=1))
    assert not the(events.Finish, desk.tell(events.QueueDrained(at_s=1.6)))
    desk.tell(events.Committed(at_s=1.7, fragment=0, version=1))

    assert not the(events.Finish, desk.tell(events.QueueDrained(at_s=60.0, proven=False)))
    assert the(events.Finish, desk.tell(events.QueueDrained(at_s=60.0))) == [
        events.Finish(reason="token target reached")
    ]


def test_an_heir_that_never_hears_anybody_merges_what_is_queued_and_finishes() -> None:
    """The last learner died behind its final push, and so did the owner: who comes next knows no learner."""
    desk = RulesDesk(tokens_target=80, silence_s=5.0)
    desk.tell(events.QueueDrained(at_s=0.0, proven=False))
    assert not the(events.Commit, desk.offer(key("a"), 1.0, final=True))

    (_commit,) = the(events.Commit, desk.tell(events.QueueDrained(at_s=6.0, proven=False)))
    desk.tell(events.Committed(at_s=6.1, fragment=0, version=1))

    assert the(events.Finish, desk.tell(events.QueueDrained(at_s=7.0)))


def test_who_contributes_is_heard() -> None:
    """After a cut the queue speaks before the heartbeats do: a quorum is still a quorum."""
    desk = RulesDesk(quorum=3, silence_s=5.0)
    for learner in "abc":
        desk.beat(learner, at_s=0.0)

    assert not the(events.Commit, desk.offer(key("a"), 60.0))
    assert desk.shard.live() == {"a"}


def test_a_run_is_over_also_when_only_another_shard_merged_the_last_tokens() -> None:
    desk = RulesDesk(tokens_target=1000, silence_s=1.0)
    desk.beat("a")
    desk.tell(events.QueueDrained(at_s=50.0))
    assert not desk.shard.finished

    desk.tell(events.LearnerBeat(at_s=50.0, learner="a", incarnation=1, training=False, step_s=STEP_S, tokens=100))
    desk.tell(events.QueueDrained(at_s=50.0, run_tokens=1000))
    (kept,) = the(events.Keep, desk.tell(events.LearnerLeft(at_s=50.0, learner="a", incarnation=1)))
    heir = shard.Shard(
        settings(tokens_target=1000), 0, {0: 0}, fragment_ledgers={0: parsed(kept.fragment_ledger, FragmentLedger)}
    )

    assert the(events.Finish, desk.tell(events.QueueDrained(at_s=51.0)))
    assert heir.ledger.run_tokens == 1000


def test_pacing_follows_steps_that_become_shorter() -> None:
    """A first report that includes compiling does not put the first round off by H of its kind."""
    desk = RulesDesk()
    desk.tell(events.LearnerBeat(at_s=0.0, learner="a", incarnation=1, training=True, step_s=60.0, tokens=1))
    actions = desk.tell(events.LearnerBeat(at_s=1.0, learner="a", incarnation=1, training=True, step_s=0.5, tokens=1))

    (timer,) = (a for a in actions if isinstance(a, events.ArmTimer))
    assert timer.due_s < 0.75 * 8 * 60.0


class Beach:
    """An island with its ledger checked after every fact."""

    def __init__(self, **changes: object) -> None:
        self.island = island.Island(settings(**changes), {0: 0})

    def tell(self, fact: object) -> list[events.Command]:
        actions = self.island.handle(fact)  # type: ignore[arg-type]
        invariants.check_island(self.island)
        return actions

    def steps(self, count: int) -> None:
        for _ in range(count):
            self.tell(events.StepDone(at_s=0.0, tokens=10))

    def called(self, version: int = 0, attempt: int = 1) -> list[events.Command]:
        return self.tell(events.CallHeard(at_s=0.0, fragment=0, version=version, attempt=attempt))

    def ready(self, version: int) -> list[events.Adopt]:
        """Fetch a version, take a step, and return what is to be adopted then."""
        self.tell(events.FragmentFetched(at_s=0.0, fragment=0, version=version))
        return self.boundary()

    def boundary(self) -> list[events.Adopt]:
        return [
            command for command in self.tell(events.StepDone(at_s=0.0, tokens=10)) if isinstance(command, events.Adopt)
        ]


def test_a_version_is_adopted_at_the_next_boundary_and_once() -> None:
    """Until it is in the parameters no call is answered: a push would count steps that the adoption overwrites."""
    beach = Beach()
    beach.steps(2)

    assert [(adopt.version, adopt.since) for adopt in beach.ready(1)] == [(1, 0)]
    assert beach.boundary() == []
    assert beach.called(0) == beach.called(1) == []

    beach.tell(events.FragmentFetched(at_s=0.0, fragment=0, version=2))
    beach.tell(events.Adopted(at_s=0.0, fragment=0, version=1))
    assert [adopt.version for adopt in beach.boundary()] == [2]


@pytest.mark.parametrize("changes", [{"adoption": "carry"}, {"ending": "together"}], ids=str)
def test_a_version_waits_until_the_snapshot_is_kept_that_training_goes_on_from(changes: dict[str, object]) -> None:
    """Progress since a push is known only from the values that were pushed; a push that was given up is no such beginning."""
    beach = Beach(**changes)
    beach.steps(1)
    (push,) = the(events.Push, beach.called())
    assert push.keep

    assert beach.ready(1) == []
    beach.tell(events.SnapshotKept(at_s=0.0, fragment=0, push=1))
    assert [adopt.since for adopt in beach.boundary()] == [1]

    beach.tell(events.Adopted(at_s=0.0, fragment=0, version=1))
    beach.steps(1)
    beach.called(1)
    beach.tell(events.PushSettled(at_s=0.0, fragment=0, push=1))
    beach.tell(events.PushSettled(at_s=0.0, fragment=0, push=2, reason="gave_up"))
    assert [adopt.since for adopt in beach.ready(2)] == [0]


@pytest.mark.parametrize("adoption", ["carry", "overwrite"])
@pytest.mark.parametrize(
    ("missed", "alone", "kept"),
    [(2, 40, True), (3, 40, False), (3, 8, True), (3, 9, False), (300, 1, True)],
    ids=["nearly there", "cut off", "an interval", "more than that", "slow"],
)
def test_who_was_cut_off_keeps_nothing_of_what_it_trained_alone(
    adoption: str, missed: int, alone: int, *, kept: bool
) -> None:
    """Versions missed beyond `age_max`, and more trained than an interval: both, and it is neither carried nor pushed late."""
    beach = Beach(adoption=adoption, interval_steps=8, age_max=2)
    beach.steps(3)
    beach.called()
    beach.tell(events.PushSettled(at_s=0.0, fragment=0, push=1))
    beach.tell(events.SnapshotKept(at_s=0.0, fragment=0, push=1))
    beach.steps(alone - 1)
    version = 1 + missed
    (adopt,) = beach.ready(version)
    assert adopt.overwrite is not kept

    beach.tell(events.Adopted(at_s=0.0, fragment=0, version=version, overwritten=adopt.overwrite))

    carried = kept and adoption == "carry"
    assert (beach.island.pushed, beach.island.superseded) == (30, 0 if carried else 10 * alone)
    beach.steps(1)
    (push,) = the(events.Push, beach.called(version=version))
    assert (push.steps, push.base_version) == (1 + (alone if carried else 0), version)


def test_what_would_be_refused_is_not_pushed_at_an_overwrite() -> None:
    """It was never pushed, and its base is older than a late contribution's may be."""
    beach = Beach(interval_steps=8, age_max=2)
    beach.steps(8)
    (adopt,) = beach.ready(4)
    assert adopt.overwrite

    pushed = the(events.Push, beach.tell(events.Adopted(at_s=0.0, fragment=0, version=4, overwritten=True)))

    assert pushed == []
    assert beach.island.superseded == 90


@pytest.mark.parametrize(("version", "pushed"), [(2, [0]), (3, [])])
def test_what_is_too_late_to_be_merged_is_not_pushed(version: int, pushed: list[int]) -> None:
    """A newcomer's first step is compiled, and rounds pass meanwhile: all of its first pushes were refused as stale."""
    beach = Beach(interval_steps=8, age_max=2)
    beach.steps(1)
    actions = beach.called(version=version)
    late = [push.base_version for push in the(events.Push, actions) if isinstance(push, events.Push)]
    rescued = the(events.Push, beach.tell(events.Adopted(at_s=0.0, fragment=0, version=version)))

    assert (late, rescued) == (pushed, [])
    assert beach.island.superseded == (0 if pushed else 10)
    assert the(events.FetchFragment, actions)


def test_invariants_notice_a_contribution_merged_twice() -> None:
    watch = invariants.ShardWatch()
    desk = RulesDesk()
    desk.beat("a")
    desk.call(1.0)
    actions = desk.offer(key("a"), 1.1)
    watch.see(actions)
    (commit,) = the(events.Commit, actions)

    with pytest.raises(invariants.InvariantBroken):
        watch.see([msgspec.structs.replace(commit, base_version=1)])


def test_what_an_overwrite_would_throw_away_unpushed_is_pushed_first() -> None:
    """A learner whose steps outlast a round's interval is still heard, late, on its old anchor."""
    beach = Beach()
    beach.tell(events.HeadHeard(at_s=0.0, fragment=0, version=1))
    beach.steps(1)

    (push,) = the(events.Push, beach.tell(events.Adopted(at_s=0.0, fragment=0, version=1)))

    assert (push.base_version, push.tokens) == (0, 10)
    assert beach.island.superseded == 0
    beach.steps(1)
    assert len(the(events.Push, beach.called(version=1))) == 1


def test_a_due_timer_that_fires_a_tick_early_is_armed_again() -> None:
    """Timers go by a clock with ticks: one that is dropped for being early would be the fragment's last."""
    desk = RulesDesk()
    desk.beat("a")
    desk.shard.slots[0].due_s = 8.0

    early = desk.tell(events.TimerFired(at_s=8.0 - 1e-9, name="due/0"))

    assert early == [events.ArmTimer(name="due/0", due_s=8.0)]
    assert the(events.PublishCall, desk.tell(events.TimerFired(at_s=8.0, name="due/0")))


def test_a_learner_that_is_called_again_and_again_begins_anew() -> None:
    """Its push was refused and the notice was lost; without this rule the fragment would wait for it for ever."""
    learner = island.Island(settings(), {0: 4})
    learner.handle(events.StepDone(at_s=0.0, tokens=10))
    (_push,) = learner.handle(events.CallHeard(at_s=0.1, fragment=0, version=4, attempt=1))
    again = [events.CallHeard(at_s=2.0 + i, fragment=0, version=4, attempt=2 + i) for i in range(island.UNHEARD_CALLS)]
    assert [learner.handle(call) for call in again] == [[]] * island.UNHEARD_CALLS
    learner.handle(events.PushSettled(at_s=6.0, fragment=0, push=1))

    answers = [learner.handle(call) for call in again]

    assert answers == [[]] * (island.UNHEARD_CALLS - 1) + [[events.FetchFragment(fragment=0, version=4, again=True)]]
    learner.handle(events.StepDone(at_s=7.0, tokens=10))
    learner.handle(events.FragmentFetched(at_s=7.1, fragment=0, version=4))
    assert learner.handle(events.Adopted(at_s=7.2, fragment=0, version=4)) == []
    learner.handle(events.StepDone(at_s=8.0, tokens=10))
    (second,) = learner.handle(events.CallHeard(at_s=8.1, fragment=0, version=4, attempt=9))
    assert (second.push, second.tokens, learner.superseded) == (2, 10, 10)  # type: ignore[attr-defined]
    invariants.check_island(learner)


def test_late_contributions_count_after_calls_in_vain() -> None:
    """They fill their learners' places in the bounded queue until a commit: if they never counted, none might follow."""
    desk = RulesDesk(quorum=2, grace_gamma=0.0)
    desk.shard.slots[0].round = rounds.FragmentRound(0, 3, desk.shard.settings)
    desk.beat("a")
    desk.beat("b")
    for learner in ("a", "b"):
        desk.offer(key(learner), 0.5, base=2)

    decided = [the(events.Commit, desk.call(1.0 + 0.1 * attempt)) for attempt in range(rounds.VAIN_CALLS + 1)]

    assert [len(commits) for commits in decided] == [0] * rounds.VAIN_CALLS + [1]
