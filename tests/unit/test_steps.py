"""Step times and heartbeats: one odd step spoils nothing, and a shard paces by what is true now, however rare beats are."""

from __future__ import annotations

import itertools

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.protocol import pacing
from atoll.protocol.events import ArmTimer, LearnerBeat
from atoll.protocol.settings import ProtocolSettings
from atoll.protocol.shard import Shard


def times(*steps_s: float) -> pacing.StepTimes:
    found = pacing.StepTimes()
    for step_s in steps_s:
        found.add(step_s)
    return found


def test_the_first_step_is_no_sample_and_an_odd_second_one_is_gone_with_the_third() -> None:
    """Steps of 0.1 s after one that compiled and one that waited for it."""
    assert times(0.0).mean_s == 0.0
    assert times(0.0, 2.4).mean_s == 2.4
    assert times(0.0, 2.4, 0.1).mean_s == pytest.approx(0.1)


def test_steps_of_unequal_length_count_in_the_mean_unless_they_are_odd() -> None:
    """A median of 0.1 s would call too often: a quarter of these steps takes twice as long. A stall of 5 s is none."""
    uneven = [0.1, 0.1, 0.1, 0.2] * 4

    assert times(*uneven).mean_s == pytest.approx(0.125)
    assert times(*uneven, 5.0).mean_s == pytest.approx(0.125, rel=0.05)


def test_a_machine_that_became_slower_is_believed_after_half_of_the_recent_steps() -> None:
    slowed = times(*[0.1] * pacing.RECENT_STEPS, *[1.0] * (pacing.RECENT_STEPS // 2))
    sure = times(*[0.1] * pacing.RECENT_STEPS, *[1.0] * (pacing.RECENT_STEPS // 2 + 1))

    assert slowed.mean_s == pytest.approx(0.1)
    assert sure.mean_s == pytest.approx((9 * 1.0 + 7 * 0.1) / 16)


@given(st.lists(st.floats(1e-4, 1e3), min_size=1, max_size=40))
def test_the_mean_is_that_of_recent_steps_within_three_times_their_median(steps_s: list[float]) -> None:
    found, recent = times(*steps_s).mean_s, sorted(steps_s[-pacing.RECENT_STEPS :])

    assert recent[0] * (1 - 1e-9) <= found <= pacing.ODD_TIMES * recent[(len(recent) - 1) // 2] * (1 + 1e-9)


def test_what_is_new_is_told_again_after_pauses_that_double() -> None:
    """Of a silence of 60 s the usual pause is 12 s; a lost heartbeat costs no more than the news is old."""
    beats = pacing.Heartbeats(60.0)
    joined = [beats.pause_after(0.0) for _ in range(7)]
    stepping = [beats.pause_after(0.1) for _ in range(7)]

    assert joined == stepping == [0.5, 1.0, 2.0, 4.0, 8.0, 12.0, 12.0]


def test_news_is_what_is_off_by_more_than_a_fifth_from_what_was_told() -> None:
    beats = pacing.Heartbeats(60.0)
    assert not beats.is_news(0.0)
    assert beats.is_news(0.1)

    beats.pause_after(0.1)

    assert [beats.is_news(each) for each in (0.1, 0.119, 0.081, 0.13, 0.07)] == [False, False, False, True, True]


@given(st.floats(0.2, 3600.0), st.lists(st.floats(0.0, 1e3), min_size=1, max_size=30))
def test_no_heartbeat_comes_too_soon_or_too_late(silence_s: float, steps_s: list[float]) -> None:
    beats = pacing.Heartbeats(silence_s)
    usual_s = silence_s / pacing.BEATS_PER_SILENCE
    pauses_s = [beats.pause_after(step_s) for step_s in steps_s]

    assert all(min(pacing.PAUSE_S_MIN, usual_s) <= pause_s <= usual_s for pause_s in pauses_s)
    assert all(b <= 2.0 * a or b == beats.shortest_s for a, b in itertools.pairwise(pauses_s))


def resting() -> Shard:
    """Return a shard of one fragment that is called every eight steps, in a run of rare heartbeats."""
    chosen = {"fragments": 1, "interval_steps": 8, "shards": 1, "silence_s": 60.0}
    return Shard(msgspec.convert(chosen, ProtocolSettings).check(), 0, {0: 0})


def due_s(shard: Shard, step_s: float, at_s: float) -> list[float]:
    """Return when a shard that is told of the only learner's step time would call, where that moves anything."""
    beat = LearnerBeat(at_s=at_s, learner="a", incarnation=1, training=True, step_s=step_s, tokens=100)
    return [action.due_s for action in shard.handle(beat) if isinstance(action, ArmTimer)]


def test_one_heartbeat_corrects_a_shard_wholly() -> None:
    """First told a step of 2.4 s and then of 0.1 s, it calls after H steps of 0.1 s; an average would believe 1.25 s."""
    shard = resting()

    assert due_s(shard, 2.4, at_s=0.0) == pytest.approx([8 * 2.4])
    assert due_s(shard, 0.1, at_s=0.3) == pytest.approx([0.3 + 8 * 0.1])
    assert shard.step_s() == 0.1


def test_what_a_learner_keeps_for_itself_would_move_no_call() -> None:
    """Steps a fifth shorter move a call by a quarter of the interval that they make: both bounds are the same."""
    shard, beats = resting(), pacing.Heartbeats(60.0)
    due_s(shard, 1.0, at_s=0.0)
    beats.pause_after(1.0)
    kept_s = 1.0 - 0.99 * pacing.NEWS_SHARE

    told_s = 1.0 - 1.01 * pacing.NEWS_SHARE

    assert not beats.is_news(kept_s)
    assert due_s(shard, kept_s, at_s=0.0) == []
    assert beats.is_news(told_s)
    assert due_s(shard, told_s, at_s=0.0) == pytest.approx([8 * told_s])


def test_the_median_of_an_odd_number_is_the_middle_one() -> None:
    times = pacing.StepTimes()

    assert [times.add(step_s) for step_s in (1.0, 4.0, 4.0, 0.0)] == [1.0, 1.0, 3.0, 3.0]
