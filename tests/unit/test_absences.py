"""When a learner was gone: from the last sign of a life without a farewell to the beginning of the next one."""

from __future__ import annotations

import pytest

from atoll.story.findings import RunFinding, findings
from atoll.story.lives import absences_of
from atoll.story.telling import learner_story
from support.told_runs import SteppedRun


def sample(run: SteppedRun, at_s: float, who: str, incarnation: int = 1) -> None:
    run.log("sample", who, at_s, incarnation=incarnation, step=30, tokens=300)


def gone(run: SteppedRun) -> list[RunFinding]:
    return [each for each in findings(run.history) if each.cause == "learner was gone"]


@pytest.fixture
def told() -> SteppedRun:
    run = SteppedRun()
    run.serve("shard-0", 9.0)
    for who in run.steps:
        run.join(who)
        sample(run, 40.0, who)
    return run


def test_a_learner_that_was_killed_and_started_again_was_gone_until_then(told: SteppedRun) -> None:
    """Its last sample came at 40 s; its next life began at 52 and joined at 57."""
    told.join("a", 57.0, incarnation=2, took_s=5.0)
    (found,) = gone(told)

    assert (found.culprit, found.from_s, found.until_s) == ("a", 40.0, 52.0)
    assert found.command == "atoll why learner a"
    assert found.text == (
        "incarnation 1 left no word, and nothing was heard of the learner for 12 s; then incarnation 2 began"
    )
    assert any(
        "was last heard: incarnation 1 left no word; it was gone for 12 s, until incarnation 2 began" in line
        for line in learner_story(told.history, "a")
    )
    assert not any("was last heard" in line for line in learner_story(told.history, "b"))


def test_a_contribution_is_a_sign_when_it_arrived_and_not_when_it_was_merged(told: SteppedRun) -> None:
    """The round at 60 s was called at 58; the contribution of a was there at 45, that of a dead life never counts later."""
    told.round(5, arrived_s=-13.0)
    told.join("a", 77.0, incarnation=2, took_s=5.0)
    (found,) = absences_of(told.history)

    assert found.from_s == pytest.approx(45.0)
    assert found.gone_s == pytest.approx(27.0)


def test_who_left_in_order_was_not_gone(told: SteppedRun) -> None:
    told.log("left", "a", 41.0, incarnation=1, tokens=300, steps=30)
    told.join("a", 57.0, incarnation=2, took_s=5.0)

    assert absences_of(told.history) == []


def test_a_learner_is_still_gone_when_the_others_have_gone_on_for_a_minute(told: SteppedRun) -> None:
    sample(told, 99.0, "b")
    assert gone(told) == []
    sample(told, 101.0, "b")
    sample(told, 101.0, "c")
    (found,) = gone(told)

    assert (found.culprit, found.from_s, found.until_s) == ("a", 40.0, None)
    assert found.text.endswith("for 61 s; it is still gone")
    assert any("it was gone for 61 s, to the end of the event log" in line for line in learner_story(told.history, "a"))


def test_a_run_that_was_stopped_as_a_whole_and_a_log_that_ends_tell_of_nobody(told: SteppedRun) -> None:
    """All learners were killed with their run, and began anew ten minutes later; then the event log ends."""
    for who in told.steps:
        told.join(who, 645.0, incarnation=2, took_s=5.0)
        sample(told, 650.0, who, 2)

    assert told.history.pauses
    assert absences_of(told.history) == []


@pytest.mark.parametrize("start_s", [-1e9, "x", None])
def test_what_a_kind_of_event_does_not_have_begins_no_pause(told: SteppedRun, start_s: object) -> None:
    told.log("serving", "shard-0", 41.0, epoch=2, versions={0: 3}, took_s=0.1, start_s=start_s)

    assert not told.history.pauses
    assert (told.history.newest_s, told.history.unreadable) == (41.0, 0)


def test_what_was_lost_is_known_once_every_shard_has_closed_its_ledger(told: SteppedRun) -> None:
    """Of 100 tokens in one fragment 70 were merged and 10 refused."""
    told.join("a", 57.0, incarnation=2, took_s=5.0)
    assert gone(told)[0].text.endswith("incarnation 2 began")
    account = {"trained": 100, "pushed": 80, "merged": 70, "refused": {"stale": 10}}
    told.log("ledger", "shard-0", 80.0, ledger={"accounts": {"a/1": account}})

    assert gone(told)[0].text.endswith("incarnation 2 began; 20 tokens were lost with it")
    assert any(line.endswith("; 20 tokens were lost with it") for line in learner_story(told.history, "a"))
    told.serve("shard-0", 81.0, epoch=2)
    assert absences_of(told.history)[0].lost_tokens is None


def test_that_nothing_of_it_was_merged_is_a_consequence(told: SteppedRun) -> None:
    told.join("late", 41.0)
    for version in range(5, 12):
        told.round(version)
        for who in told.steps:
            sample(told, 10.0 + 10.0 * version, who)
    (found,) = findings(told.history)

    assert (found.cause, found.culprit, found.until_s) == ("learner was gone", "late", None)
    assert [each.cause for each in found.consequences] == ["nothing merged"]
