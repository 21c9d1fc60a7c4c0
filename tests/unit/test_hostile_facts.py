"""What a shard and a learner make of facts that somebody made up: bounded sums, bounded work, one look at the record."""

from __future__ import annotations

import itertools
import math

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.base.quantities import RUN_TOKENS_MAX, TOKENS_MAX
from atoll.protocol import claims, events, island
from atoll.protocol.pacing import LOOK_S, OVERDUE_S, PATIENCE_S_MAX, look_is_due
from atoll.protocol.quarantine import Measure
from atoll.protocol.settings import ProtocolSettings
from atoll.protocol.shard import LAST_VERSIONS, Shard
from atoll.wire.messages import Call, decode, encode
from support.shards import answered, beat_of

SETTINGS = msgspec.convert({"fragments": 1, "shards": 1, "interval_steps": 8, "silence_s": 5.0}, ProtocolSettings)


def agreed(**changes: object) -> ProtocolSettings:
    return msgspec.structs.replace(SETTINGS, **changes).check()


def arrived(learner: str, push: int, at_s: float, **changes: int) -> events.ContributionArrived:
    fields = {"base_version": 0, "tokens": 80, "steps": 8, "trained_tokens": 100} | changes
    return events.ContributionArrived(at_s=at_s, key=events.PushKey(learner, 1, 0, push), **fields)  # type: ignore[arg-type]


def test_two_absurd_heartbeats_stop_no_calls() -> None:
    """The sum of what learners claim stays within what a call may say; once it left that bound, commits stopped for ever."""
    desk = Shard(agreed(), 0, {0: 0})
    for number in range(64):
        desk.handle(beat_of(f"fat{number}", 0.0, tokens=TOKENS_MAX))
    desk.handle(events.QueueDrained(at_s=0.0, proven=False, run_tokens=RUN_TOKENS_MAX))
    desk.slots[0].due_s = 9.0
    answered(desk, 9.0)
    (call,) = [
        action
        for action in desk.handle(events.TimerFired(at_s=9.0, name="due/0"))
        if isinstance(action, events.PublishCall)
    ]

    said = Call(fragment=0, version=0, attempt=1, run_tokens=call.run_tokens)
    assert decode(Call, encode(said)).run_tokens == RUN_TOKENS_MAX


def test_no_report_brings_a_run_nearer_to_its_target() -> None:
    """A first heartbeat of 2^39 steps, or one manifest of 2^47 trained tokens, once ended the run for all."""
    desk = Shard(agreed(tokens_target=1000), 0, {0: 0})
    desk.handle(beat_of("liar", 0.0, tokens=1 << 47, steps=1 << 39))
    desk.handle(arrived("liar", 1, 0.1, trained_tokens=1 << 47))

    assert not desk.ledger.reached(1000)
    assert desk.expected_tokens() == 0
    fold, commit = merged(desk, "liar", 1)
    assert (fold.weight, commit.shares[0].credit, desk.ledger.run_tokens) == (800.0, 80, 80)
    assert desk.expected_tokens() <= 3 * 80


def merged(desk: Shard, learner: str, push: int) -> tuple[events.Fold, events.Commit]:
    """Have a contribution that was offered merged alone, because everybody leaves; return what was decided."""
    desk.handle(beat_of(learner, 1.0, tokens=0))  # a shard that has heard nobody train listens first
    told = desk.handle(events.ContributionReady(at_s=1.0, key=events.PushKey(learner, 1, 0, push)))
    told += desk.handle(events.LearnerLeft(at_s=1.0, learner=learner, incarnation=1))
    (fold,) = [action for action in told if isinstance(action, events.Fold)]
    (commit,) = [action for action in told if isinstance(action, events.Commit)]
    return fold, commit


def test_a_step_counts_and_weighs_no_more_than_sixteen_of_the_others() -> None:
    """In a loop of one's own no batch is declared: of two others the larger steps decide; of one nobody knows who lies."""
    assert (
        claims.step_tokens_max([10.0, 20.0], 0.0, 0) == claims.step_tokens_max([10.0, 20.0, 1e12], 1e12, 0) == 16 * 20.0
    )
    assert (
        claims.step_tokens_max([10.0, 20.0, 30.0, 40.0], 10.0, 0)
        == claims.step_tokens_max([20.0, 30.0, 40.0], 0.0, 0)
        == 16 * 30.0
    )
    assert claims.step_tokens_max([10.0, 20.0, 30.0, 40.0], 40.0, 0) == 16 * 20.0
    assert claims.step_tokens_max([10.0, 20.0], 10.0, 0) == claims.step_tokens_max([10.0], 0.0, 0) == math.inf
    assert claims.step_tokens_max([10.0], 0.0, 7) == 7
    desk = Shard(agreed(), 0, {0: 0})
    desk.step_sizes = [10.0, 20.0]
    desk.handle(arrived("liar", 1, 0.1, tokens=1 << 40, steps=8, trained_tokens=1 << 40))

    fold, commit = merged(desk, "liar", 1)

    assert commit.shares[0].credit == 8 * 320
    assert fold.weight == 8 * 320**2


def test_who_trains_on_after_the_end_is_refused_in_the_end() -> None:
    """A liar that behaved until the target pushed on alone for ever, version by version, and the run never closed."""
    desk = Shard(agreed(tokens_target=80), 0, {0: 0})
    desk.handle(arrived("a", 1, 0.1))
    merged(desk, "a", 1)
    desk.handle(events.Committed(at_s=1.0, fragment=0, version=1))
    desk.slots[0].round.version = LAST_VERSIONS + 2

    heard = desk.handle(arrived("late", 1, 2.0, base_version=1 + LAST_VERSIONS, trained_tokens=200))
    (refused,) = [
        action
        for action in desk.handle(arrived("late", 2, 2.0, base_version=2 + LAST_VERSIONS, trained_tokens=200))
        if isinstance(action, events.Refuse)
    ]

    assert desk.ledger.reached(80)
    assert not any(isinstance(action, events.Refuse) for action in heard)
    assert refused.reason == "after_end"


@pytest.mark.parametrize("target", [0, 80])
def test_those_that_left_at_the_target_still_judge_who_stays(target: int) -> None:
    """Alone, its own last length is its limit; before the target nobody is judged by lives that have ended."""
    desk = Shard(agreed(tokens_target=target), 0, {0: 0})
    slot = desk.slots[0]
    for learner in ("a", "b", "c"):
        desk.ledger.account(learner, 1).left = True
        slot.fragment_ledger.lengths[learner] = Measure(1.0, 8, 1, 0)
    desk.ledger.count(80)
    desk.handle(arrived("liar", 1, 1.0))
    ready = events.ContributionReady(at_s=1.0, key=events.PushKey("liar", 1, 0, 1), norm=900.0, base_norm=1000.0)
    (fold,) = [action for action in desk.handle(ready) if isinstance(action, events.Fold)]

    assert fold.scale == pytest.approx(100.0 / 900.0 if target else 1.0)


@pytest.mark.parametrize("others", [0, 1])
def test_one_contribution_counts_sixteen_intervals_beside_one_that_has_none(others: int) -> None:
    """Who was away for long is merged whole, and counts whole where nobody else is there whom it could cost anything."""
    desk = Shard(agreed(), 0, {0: 0})
    for number in range(others):
        desk.handle(beat_of(f"other{number}", 0.0, training=False))
        desk.handle(events.LearnerLeft(at_s=0.0, learner=f"other{number}", incarnation=1))
    desk.handle(arrived("a", 1, 0.1, tokens=10_000, steps=1000, trained_tokens=10_000))

    fold, commit = merged(desk, "a", 1)

    assert fold.weight == 10_000**2 / 1000
    assert (commit.shares[0].tokens, commit.shares[0].credit) == (
        10_000,
        10 * claims.INTERVALS_MAX * 8 if others else 10_000,
    )


def test_a_contribution_counts_and_weighs_sixteen_of_the_others_at_most() -> None:
    """Sixteen intervals of sixteen batches each ended a run of an hour in 37 s; two fast honest ones count whole."""
    assert claims.tokens_bound([500, 1000, 9000], 9000, 8, 100.0, 20.0) == claims.TokensBound(16_000.0, 16_000.0)
    assert claims.tokens_bound([1, 1000, 9000], 9000, 8, 100.0, 20.0).counted == 16_000.0
    assert claims.tokens_bound([1, 1], 0, 8, 100.0, 20.0) == claims.TokensBound(160.0, 160.0)
    assert claims.tokens_bound([1000, 9000], 9000, 8, 5.0, math.inf) == claims.TokensBound(16_000.0)
    assert claims.tokens_bound([1, 9000], 9000, 8, 5.0, math.inf) == claims.TokensBound(640.0)
    assert claims.tokens_bound([], 0, 8, 5.0, 2.0) == claims.TokensBound(256.0)


def test_who_says_that_its_steps_take_for_ever_is_not_waited_for_for_ever() -> None:
    """Ten of its steps are 10^13 seconds by its own word; patience has a bound of its own."""
    desk = Shard(agreed(), 0, {0: 0})
    for second in range(60):
        desk.handle(beat_of("ghost", second - 59.0, step_s=1e12))

    for second in range(int(PATIENCE_S_MAX)):
        desk.handle(events.QueueDrained(at_s=second + 1.0))

    assert desk.live() == desk.present() == {"ghost"}
    desk.handle(events.QueueDrained(at_s=PATIENCE_S_MAX + 0.1))
    assert desk.live() == desk.present() == set()


def test_a_learner_that_beats_on_and_does_nothing_does_not_keep_a_run_from_finishing() -> None:
    """Once the run is over, a contribution or a farewell counts, and a heartbeat does not."""
    desk = Shard(agreed(tokens_target=100), 0, {0: 0})
    finished_s = None
    for second in range(2 * int(OVERDUE_S)):
        desk.handle(beat_of("ghost", float(second)))
        told = desk.handle(events.QueueDrained(at_s=float(second), run_tokens=100))
        if any(isinstance(action, events.Finish) for action in told):
            finished_s = second
            break

    assert finished_s is not None
    assert OVERDUE_S < finished_s <= OVERDUE_S + 3.0


def test_a_thousand_refusals_are_kept_in_two_writings() -> None:
    """The first begins at once, the second takes all that came meanwhile: cost does not grow with their number."""
    desk, refused = Shard(agreed(), 0, {0: 5}), 1000
    told = [action for push in range(1, refused + 1) for action in desk.handle(arrived("a", push, 0.0))]
    assert sum(isinstance(action, events.Refuse) for action in told) == refused
    assert [type(action) for action in told if not isinstance(action, events.Refuse)] == [events.Keep]

    first = desk.handle(events.Kept(at_s=1.0, fragment=0))
    second = desk.handle(events.Kept(at_s=2.0, fragment=0))

    assert [type(action) for action in first] == [events.Acknowledge, events.Keep]
    assert [type(action) for action in second] == [events.Acknowledge] * (refused - 1)


def test_what_is_refused_and_comes_again_before_that_is_durable_is_not_acknowledged_yet() -> None:
    """If the shard died then, nothing would know of the refusal any more."""
    desk = Shard(agreed(), 0, {0: 5})
    for push in (1, 2):
        desk.handle(arrived("a", push, 0.0))

    assert [desk.handle(arrived("a", push, 0.5)) for push in (1, 2)] == [[], []]


def test_a_claim_of_more_tokens_in_a_step_than_the_run_allows_is_refused_unread() -> None:
    """One such push would be the whole round: its weight is the square of its tokens."""
    desk = Shard(agreed(step_tokens_max=10), 0, {0: 0})

    absurd = desk.handle(arrived("a", 1, 0.0, tokens=1 << 40, steps=1))
    honest = desk.handle(arrived("a", 2, 0.0, tokens=80, steps=8))

    assert [action.reason for action in absurd if isinstance(action, events.Refuse)] == ["implausible"]
    assert [type(action).__name__ for action in honest] == ["Fetch"]


def test_a_heartbeat_that_changes_nothing_looks_at_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a thousand learners each of a thousand heartbeats a second would look at a thousand learners."""
    desk, looks = Shard(agreed(), 0, {0: 0}), list[float]()
    for number in range(100):
        desk.handle(beat_of(f"learner-{number}", 1.0))
    live = desk.live

    def looked(*, isolated: bool = False) -> set[str]:
        looks.append(desk.connected.now_s)
        return live(isolated=isolated)

    monkeypatch.setattr(desk, "live", looked)
    for number in range(100):
        desk.handle(beat_of(f"learner-{number}", 1.0 + LOOK_S / 200.0 * number))

    before = len(looks)
    desk.handle(beat_of("learner-0", 1.0 + LOOK_S / 2.0, step_s=9.0))

    assert before <= 2
    assert len(looks) > before


def test_a_shard_is_not_told_more_than_time_allows() -> None:
    judge = claims.ClaimJudge(agreed(step_tokens_max=10, steps_per_s_max=5.0))
    assert judge.fault("a", 1, claims.Claim(100, 1000, 1000), 0.0) == ""
    assert "100 steps" in judge.fault("a", 1, claims.Claim(100, 1001, 0), 0.0)
    assert "token-fragments" in judge.fault("a", 1, claims.Claim(100, 1000, 1001), 0.0)
    most = 101 + int(5.0 * (claims.AT_ONCE_S + 1.0))
    assert judge.fault("a", 1, claims.Claim(most, 0, 0), 1.0) == ""
    assert "possible" in judge.fault("a", 1, claims.Claim(most + 1, 0, 0), 1.0)
    assert judge.fault("a", 2, claims.Claim(1 << 30, 0, 0), 1.0) == ""


def test_a_contribution_weighs_no_more_than_time_allows() -> None:
    """Its weight is tokens^2 / steps; at a given batch it grew with the steps that it claimed, without a bound."""
    judge = claims.ClaimJudge(agreed(step_tokens_max=10, steps_per_s_max=5.0))
    assert judge.push_fault("a", 1, claims.PushClaim(1 << 30, 10, 10), 0.0) == ""
    judge.fault("a", 1, claims.Claim(100, 1000, 0), 0.0)
    most = 101 + int(5.0 * (claims.AT_ONCE_S + 1.0))
    assert judge.push_fault("a", 1, claims.PushClaim(most, 10 * most, 10 * most), 1.0) == ""
    assert "possible" in judge.push_fault("a", 1, claims.PushClaim(most + 1, 10, 10), 1.0)
    assert "trained" in judge.push_fault("a", 1, claims.PushClaim(10, 100, 99), 1.0)
    assert "in 406 steps" in judge.push_fault("a", 1, claims.PushClaim(10, 100, 10 * most + 1), 1.0)
    assert "possible" not in judge.push_fault("a", 1, claims.PushClaim(most + 5, 10, 10), 2.0)


def test_the_first_claim_of_a_life_is_bounded_by_the_time_that_it_can_have_lasted() -> None:
    """A first heartbeat of 2^39 steps was believed by whoever had not heard its learner; and it is the base of no later one."""
    judge = claims.ClaimJudge(agreed(step_tokens_max=10, steps_per_s_max=5.0))
    most = 1 + int(5.0 * (claims.AT_ONCE_S + 40.0))
    assert "possible" in judge.fault("a", 1, claims.Claim(1 << 39, 0, 0), 0.0, 40.0)
    assert "possible" in judge.push_fault("a", 1, claims.PushClaim(most + 1, 10, 10), 0.0, 40.0)
    assert "possible" in judge.fault("a", 1, claims.Claim(most + 1, 0, 0), 0.0, 40.0)
    assert judge.fault("a", 1, claims.Claim(most, 0, 0), 0.0, 40.0) == ""
    assert judge.fault("a", 2, claims.Claim(most, 0, 0), 0.0, 40.0) == ""


def test_a_farewell_counts_as_far_as_it_can_be() -> None:
    """What was pushed stays, since shards know that themselves; what is said beyond the pace goes first from what was not."""
    judge = claims.ClaimJudge(agreed(fragments=2, step_tokens_max=10, steps_per_s_max=5.0))
    judge.fault("a", 1, claims.Claim(100, 1000, 500), 0.0)
    honest = claims.Claim(101, 1010, 1000, 1000, 20)
    assert judge.last_claim("a", 1, honest, 1.0) == honest

    most = 101 + int(5.0 * (claims.AT_ONCE_S + 1.0))
    lying = judge.last_claim("a", 1, claims.Claim(1 << 39, 1 << 47, 7000, 1 << 47, 30), 1.0)
    assert lying == claims.Claim(most, 10 * most, 7000, 2 * 10 * most - 7030, 30)
    assert judge.last_claim("a", 1, claims.Claim(2, 20, 1 << 40, 5, 5), 1.0) == claims.Claim(2, 20, 40, 0, 0)
    assert judge.fault("a", 1, claims.Claim(102, 1020, 0), 1.0) == ""


@given(
    allowed=st.floats(0.01, 1e4),
    loop_s=st.lists(st.sampled_from((0.0, 1e-4, 0.3, 20.0, 500.0)), min_size=1, max_size=200),
    delays_s=st.lists(st.floats(0.0, 29.0), min_size=1, max_size=20),
    slow=st.floats(0.992, 1.008),
)
def test_whatever_a_held_loop_reports_is_believed(
    allowed: float, loop_s: list[float], delays_s: list[float], slow: float
) -> None:
    """By an owner that hears it first at any moment, however long messages take on their way, by a clock of its own."""
    settings = agreed(steps_per_s_max=allowed, step_tokens_max=10)
    allowance, now_s, reports = claims.StepAllowance(settings), 0.0, list[tuple[float, int]]()
    for steps, pause_s in enumerate(loop_s, 1):
        now_s += pause_s
        now_s += allowance.wait_s(now_s)
        allowance.take(now_s)
        reports.append((now_s, steps))
    for first in range(0, len(reports), 7):
        judge = claims.ClaimJudge(settings)
        for (at_s, steps), delay_s in zip(reports[first:], itertools.cycle(delays_s), strict=False):
            heard_s = slow * at_s + delay_s
            claim, push = claims.Claim(steps, 10 * steps, 10 * steps), claims.PushClaim(steps, 10 * steps, 10 * steps)
            assert judge.fault("a", 1, claim, heard_s, heard_s) == ""
            assert judge.push_fault("a", 1, push, heard_s, heard_s) == ""


def test_what_time_does_not_allow_is_an_offence_and_moves_no_total() -> None:
    desk = Shard(agreed(offences_max=2, protect="isolate"), 0, {0: 0})
    absurd = [msgspec.structs.replace(arrived("a", push, 0.0), absurd=True) for push in (1, 2)]
    told = [action for fact in absurd for action in desk.handle(fact)]

    assert [action.reason for action in told if isinstance(action, events.Refuse)] == ["implausible"] * 2
    assert any(isinstance(action, events.Isolate) for action in told)
    assert desk.ledger.run_tokens == 0


# --- the learner --------------------------------------------------------------------------------------------------------------


def test_a_false_version_costs_ever_fewer_looks() -> None:
    """Every look finds nothing newer; once, a learner asked again without a pause, for ever."""
    learner, looks = island.Island(agreed(), {0: 3}), 0
    for tick in range(1000):
        at_s = tick / 100.0
        told = learner.handle(events.CallHeard(at_s=at_s, fragment=0, version=1 << 40, attempt=1))
        if any(isinstance(action, events.FetchFragment) for action in told):
            looks += 1
            learner.handle(events.NothingNewer(at_s=at_s, fragment=0))

    assert 10 <= looks <= 20
    assert learner.lag_versions == 0
    proven = learner.handle(events.HeadHeard(at_s=10.0, fragment=0, version=4, proven=True))
    assert [type(action) for action in proven] == [events.FetchFragment]


def test_nothing_newer_throws_nothing_away() -> None:
    """A false head once had a learner adopt its own version again, and overwrite what it had trained since."""
    learner = island.Island(agreed(), {0: 3})
    learner.handle(events.StepDone(at_s=0.0, tokens=10))
    learner.handle(events.HeadHeard(at_s=0.1, fragment=0, version=9))
    learner.handle(events.NothingNewer(at_s=0.2, fragment=0))

    assert learner.intervals[0].ready is None
    assert (learner.open, learner.superseded) == (10, 0)


@pytest.mark.parametrize("what", ["calls", "verdicts"])
def test_false_calls_and_verdicts_make_a_learner_begin_anew_ever_more_rarely(what: str) -> None:
    """Honest ones make it begin anew once or twice; somebody who repeats them for ten minutes, a handful of times."""
    learner, anew = island.Island(agreed(), {0: 3}), 0
    for tick in range(6000):
        at_s = tick / 10.0
        learner.handle(events.StepDone(at_s=at_s, tokens=1))
        sent = learner.intervals[0].sent
        told = learner.handle(events.CallHeard(at_s=at_s, fragment=0, version=3, attempt=1))
        if what == "verdicts" and sent is not None:
            told = [*told, *learner.handle(events.PushRefused(at_s=at_s, fragment=0, push=sent.push, reason="stale"))]
        for action in told:
            if isinstance(action, events.Push):
                learner.handle(events.PushSettled(at_s=at_s, fragment=0, push=action.push))
            elif isinstance(action, events.FetchFragment):
                anew += 1
                learner.intervals[0].fetching = False
                learner.handle(events.Adopted(at_s=at_s, fragment=0, version=3))

    assert 3 <= anew <= 25


def test_a_call_is_believed_as_far_as_a_fleet_can_have_come() -> None:
    """Beyond that the leases are read: the fleet came 3 tokens for each of ours, so 6 are believed."""
    progress = claims.RunProgress(target=1_000_000)
    progress.prove(5_000, own=100)
    assert not progress.hear(5_000 + int(10 * claims.FLEET_MAX), own=110)
    assert progress.tokens == 5_000 + 10 * claims.FLEET_MAX
    for own in range(200, 2_000, 100):
        progress.prove(5_000 + 3 * (own - 100), own)

    assert progress.hear(RUN_TOKENS_MAX, own=1_910)
    assert progress.tokens == 5_000 + 3 * 1_800 + 6 * 10
    assert not progress.is_over
    progress.prove(1_000_000, own=1_920)
    assert progress.is_over


def test_a_call_that_is_believed_ends_no_run() -> None:
    progress = claims.RunProgress(target=5_000)
    progress.prove(4_000, own=100)

    assert progress.hear(5_000, own=200)
    assert progress.tokens == 5_000
    assert not progress.is_over


def test_the_more_learners_the_more_rarely_all_of_them_are_looked_at() -> None:
    """So that a look costs the same share of a core; a crowd is still looked at well before it would count as silent."""
    assert look_is_due(0.0, None, 1)
    assert not look_is_due(10.2, 10.0, 3)
    assert look_is_due(10.25, 10.0, 3)
    assert not look_is_due(10.9, 10.0, 1000)
    assert look_is_due(11.0, 10.0, 1000)


def test_a_learner_that_beats_on_does_not_keep_the_last_contributions_of_others_from_the_model() -> None:
    """Below the quorum only a fleet that is gone has them merged, and one that never pushes again is as good as gone."""
    desk = Shard(agreed(tokens_target=100, quorum=2), 0, {0: 0})
    desk.handle(beat_of("a", 0.0))
    desk.handle(beat_of("ghost", 0.0))
    desk.handle(arrived("a", 1, 0.5))
    folded = desk.handle(events.ContributionReady(at_s=0.6, key=events.PushKey("a", 1, 0, 1), norm=1.0))
    assert any(isinstance(action, events.Fold) for action in folded)
    desk.handle(events.LearnerLeft(at_s=1.0, learner="a", incarnation=1))
    told: list[events.ShardCommand] = []
    for second in range(2, 2 * int(OVERDUE_S)):
        told = desk.handle(beat_of("ghost", float(second))) + desk.handle(
            events.QueueDrained(at_s=float(second), run_tokens=100)
        )
        if any(isinstance(action, events.Commit) for action in told):
            break

    assert any(isinstance(action, events.Commit) for action in told)
    assert OVERDUE_S < second <= OVERDUE_S + 60.0
