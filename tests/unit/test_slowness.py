"""What was slow in a run: which share of whose time, and which command tells more."""

from __future__ import annotations

import pytest

from atoll.story.goodput import goodput_of
from atoll.story.questions import goodput
from atoll.story.slowness import FINDINGS_MAX, LostTime, slowness
from support.told_runs import SteppedRun


def lost_of(run: SteppedRun) -> dict[tuple[str, str], LostTime]:
    return {(one.what, one.who): one for one in slowness(run.history).lost}


@pytest.fixture
def told() -> SteppedRun:
    """A run that goes as it should: joined in 10 s of 110, then always stepping."""
    run = SteppedRun()
    for who in run.steps:
        run.join(who)
    return run


def leave(run: SteppedRun, steps: int = 100) -> None:
    """Let all learners leave after 110 s, of which `steps` were spent stepping."""
    for who, step_s in run.steps.items():
        run.log("left", who, 110.0, incarnation=1, tokens=100, steps=round(steps / step_s))


def test_joining_is_a_share_of_the_time_of_all_learners(told: SteppedRun) -> None:
    """Each was there 110 s and joined in 10 of them; there is nothing else to tell of learners."""
    for version in range(1, 11):
        told.round(version)
    leave(told)
    lost = lost_of(told)

    assert {key for key in lost if lost[key].of == "learners"} == {("joining", who) for who in "abc"}
    assert lost["joining", "a"].seconds == pytest.approx(10.0)
    assert lost["joining", "a"].share == pytest.approx(10.0 / 330.0)
    assert lost["joining", "a"].command == "atoll why learner a"


def test_parts_of_a_learners_time_never_exceed_what_it_did_not_step(told: SteppedRun) -> None:
    """Of 30 s without steps 10 are joining; overhead takes the share that it claims, and the rest is not explained."""
    for version in range(1, 11):
        told.round(version)
    leave(told, steps=80)
    for who, overhead in (("a", 0.05), ("b", 0.9)):
        told.log("sample", who, 100.0, incarnation=1, step=80, tokens=100, overhead=overhead)
    lost = lost_of(told)

    assert lost["adoption", "a"].seconds == pytest.approx(5.0)
    assert lost["unexplained", "a"].seconds == pytest.approx(15.0)
    assert lost["adoption", "b"].seconds == pytest.approx(20.0)
    assert ("unexplained", "b") not in lost
    assert lost["unexplained", "c"].command == "atoll why goodput"


@pytest.mark.parametrize(
    ("samples", "compiling_s"),
    [
        (((11.0, 0), (12.0, 0), (24.0, 0), (30.0, 4)), 16.0),  # steps take a second: the first one began at 26 s
        (((11.0, 0), (12.0, 0), (24.0, 0), (30.0, 29)), 14.0),  # not before the last sample that has none
        (((11.0, 0), (24.0, 0)), 14.0),  # it never stepped
        (((11.0, 1), (30.0, 12)), 0.0),  # its program was there
        (((30.0, 12),), 0.0),
    ],
)
def test_the_time_between_joining_and_the_first_step_is_compiling(
    told: SteppedRun, samples: tuple[tuple[float, int], ...], compiling_s: float
) -> None:
    """A learner that joins before its step is compiled is there and steps not; the rest of such time stays unexplained."""
    told.log("sample", "c", 11.0, incarnation=1, step=0, tokens=0)
    for at_s, step in samples:
        told.log("sample", "a", at_s, incarnation=1, step=step, tokens=100 * step)
    for version in range(1, 11):
        told.round(version)
    leave(told, steps=80)
    lost = lost_of(told)

    assert (lost["compiling", "a"].seconds if compiling_s else 0.0) == pytest.approx(compiling_s)
    assert (("compiling", "a") in lost) == (compiling_s > 0.0)
    assert lost["unexplained", "a"].seconds == pytest.approx(20.0 - compiling_s)


def test_silence_is_from_the_last_sign_of_a_life_to_the_start_of_the_next(told: SteppedRun) -> None:
    """Its last sample came at 40 s; it was back at 70, after a start of 5 s."""
    told.log("sample", "a", 40.0, incarnation=1, step=30, tokens=300)
    told.join("a", 70.0, incarnation=2, took_s=5.0)
    for version in range(1, 4):
        told.round(version)
    told.log("left", "a", 110.0, incarnation=2, tokens=1, steps=40)
    lost = lost_of(told)

    assert lost["silence", "a"].seconds == pytest.approx(25.0)
    assert lost["joining", "a"].seconds == pytest.approx(15.0)
    assert ("unexplained", "a") not in lost
    assert told.history.faults == 1


def test_a_slow_learner_is_beside_the_median_of_the_others(told: SteppedRun) -> None:
    """Half of what it stepped, because its steps take twice as long; a small difference is none."""
    told.steps = {"a": 2.0, "b": 1.0, "c": 1.1}
    for version in range(1, 11):
        told.round(version)
    leave(told)
    lost = lost_of(told)

    # Of the two in the middle of the others the longer one counts.
    assert lost["slow learner", "a"].seconds == pytest.approx(100.0 * (1.0 - 1.1 / 2.0))
    assert lost["slow learner", "a"].command == "atoll why behind a"
    assert ("slow learner", "c") not in lost


def test_the_time_of_rounds_is_told_apart(told: SteppedRun) -> None:
    """Of 2 s: quorum 1, grace 0.5, merge 0.1, commit 0.4; in one round the broker was away in its quorum and its commit."""
    for version in range(1, 10):
        told.round(version)
    told.round(10, hindered=0.2, away_s=0.3)
    lost = {what: one for (what, who), one in lost_of(told).items() if not who}

    assert {what: round(one.seconds, 6) for what, one in lost.items()} == {
        "quorum": 9.7,
        "grace": 5.0,
        "merge": 1.0,
        "commit": 3.8,
        "broker": 0.5,
    }
    assert lost["quorum"].share == pytest.approx(9.7 / 20.0)
    assert lost["broker"].command == "atoll doctor"
    assert lost["grace"].command == "atoll why grace"


def test_more_findings_than_are_told_are_counted_and_what_goes_on_is_among_them() -> None:
    run = SteppedRun()
    for who in run.steps:
        run.join(who)
    for epoch in range(1, 22):
        run.serve("shard-0", 40.0 * epoch, epoch=epoch)
        run.round(epoch, at_s=40.0 * epoch + 10.0)
    for version in range(1, 4):
        run.round(version, at_s=850.0 + 10.0 * version, fragment=1, shard="shard-1")
    run.isolate("a", 881.0)
    run.round(22, at_s=1000.0)
    told = slowness(run.history)

    assert [(each.cause, each.culprit) for each in told.findings[:2]] == [
        ("shard without owner", "shard-1"),
        ("quarantine", "a"),
    ]
    assert [each.from_s for each in told.findings[2:4]] == [810.0, 770.0]
    assert len(told.findings) == FINDINGS_MAX
    assert told.left_out == 22 - FINDINGS_MAX
    assert told.notes[0] == "10 more findings stand out, less urgent than these: `atoll why` names all"
    assert any(line.strip() == told.notes[0] for line in goodput(run.history))


@pytest.mark.parametrize("in_order", [True, False])
def test_a_page_that_has_forgotten_the_rounds_of_a_life_has_the_goodput_of_the_report(in_order: bool) -> None:  # noqa: FBT001
    """One life ended (killed, or in good order), and another one followed it for a longer time than the page's rounds reach."""
    page, report = SteppedRun(rounds_kept=10, samples_kept=6), SteppedRun()
    for run in (page, report):
        for who in run.steps:
            run.join(who)
        for version in range(1, 31):
            run.round(version)
            for who in run.steps:
                run.log("sample", who, 10.0 + 10.0 * version, incarnation=1, step=10 * version, tokens=1, step_s=1.0)
        if in_order:
            run.log("left", "c", 310.0, incarnation=1, tokens=1, steps=300)
        else:
            run.join("c", 330.0, incarnation=2)
        del run.steps["c"]
        for version in range(31, 61):
            run.round(version)
            for who in run.steps:
                run.log("sample", who, 10.0 + 10.0 * version, incarnation=1, step=10 * version, tokens=1, step_s=1.0)
    assert not [share for _, share in page.history.contributions("c")]
    whole, shown = goodput_of(report.history), goodput_of(page.history)

    assert whole.stepping_s == pytest.approx(600.0 + 600.0 + 300.0)
    assert (shown.stepping_s, shown.present_s) == (whole.stepping_s, whole.present_s)


def test_the_goodput_and_what_was_lost_are_one_account(told: SteppedRun) -> None:
    """What learners did not step is all lost to somebody, and the answer names who lost how much."""
    told.steps = {"a": 4.0, "b": 1.0, "c": 1.0}
    for version in range(1, 11):
        told.round(version)
    leave(told, steps=80)
    whole = goodput_of(told.history)
    lost = lost_of(told)
    answer = "\n".join(goodput(told.history))

    assert whole.share == pytest.approx(240.0 / 330.0)
    unstepped_s = sum(one.seconds for one in lost.values() if one.of == "learners" and one.what != "slow learner")
    assert unstepped_s == pytest.approx(whole.present_s - whole.stepping_s)
    assert "goodput by the event log: 72.7%" in answer
    assert "18.2%        60 s  a stepped in 4 s, while the median of the others is 1 s; atoll why behind a" in answer
    assert "slow learner, a: its inner step takes 4 s" in answer


def test_a_run_that_was_stopped_as_a_whole_has_lost_no_learners_time(told: SteppedRun) -> None:
    """Everything was killed at 60 s, and began anew a day later: the day is no silence of a learner, and no outage."""
    day_s = 86_400.0
    told.serve("shard-0", 9.0)
    for version in range(1, 6):
        told.round(version)
    told.serve("shard-0", day_s, epoch=2)
    for who in told.steps:
        told.join(who, day_s + 10.0, incarnation=2)
    for who in told.steps:
        told.log("left", who, day_s + 20.0, incarnation=2, tokens=1, steps=10)

    # 60 s of the first session, and 20 of the second.
    assert goodput_of(told.history).present_s == pytest.approx(3 * 80.0)
    assert not slowness(told.history).findings
