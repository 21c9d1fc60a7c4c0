"""What stands out in a run: by cause, with its consequences beneath, its time, and the shards that it is of."""

from __future__ import annotations

import pytest

from atoll.run.decisions import describe_outlier
from atoll.run.history import RunClock
from atoll.story.findings import (
    EPISODES_MAX,
    GRAVITY,
    SAME_CULPRIT,
    SAME_TIME,
    Cause,
    RunFinding,
    by_cause,
    by_urgency,
    findings,
    hindered_commits,
)
from atoll.story.slowness import slowness
from support.told_runs import SteppedRun

AWAY = "it did not answer: it was gone, cut off, or its disk was full"


@pytest.fixture
def told() -> SteppedRun:
    """A run of three learners and two shards, whose fragments make a round every ten seconds."""
    run = SteppedRun()
    run.serve("shard-0", 9.0, fragments=(0, 2))
    run.serve("shard-1", 9.0, fragments=(1,))
    for who in run.steps:
        run.join(who)
    for version in range(1, 11):
        run.round(version)
        run.round(version, fragment=1, shard="shard-1")
    return run


def test_a_run_that_goes_as_it_should_has_no_findings(told: SteppedRun) -> None:
    assert findings(told.history) == []


def test_half_of_the_others_cannot_make_an_honest_learner_slow() -> None:
    """One that tells of steps of a microsecond leaves two honest ones as they are; one that is slow still stands out."""
    run = SteppedRun()
    run.steps = {"a": 1.0, "b": 1.1, "liar": 1e-6}
    for version in range(1, 11):
        run.round(version)
    assert [each.culprit for each in findings(run.history) if each.cause == "slow learner"] == []
    assert not [each for each in slowness(run.history).lost if each.what == "slow learner"]

    honest = SteppedRun()
    honest.steps = {"a": 1.0, "b": 1.0, "c": 4.0}
    for version in range(1, 11):
        honest.round(version)
    assert [each.culprit for each in findings(honest.history) if each.cause == "slow learner"] == ["c"]


def test_a_quarantine_names_the_shards_and_fragments_that_read_the_learner_no_more(told: SteppedRun) -> None:
    """One of two shards has isolated it: the other reads it still, and nobody may take that for the whole run."""
    told.refuse("a", 40.0, "outlier", norm=12.0, norm_max=4.5)
    told.isolate("a", 41.0)
    (found,) = findings(told.history)

    assert (found.cause, found.culprit, found.from_s, found.until_s) == ("quarantine", "a", 41.0, None)
    assert "isolated at shard-0 (fragments 0, 2); shard-1 (fragments 1) still reads it" in found.text
    assert "shard-0 after 3 offences, the last 'outlier'" in found.text
    assert found.evidence == (f"push/a/1/0/1 was refused by shard-0: outlier, {describe_outlier(12.0, 4.5)}",)
    told.isolate("a", 50.0, shard="shard-1")
    told.join("a", 60.0, incarnation=2)
    (both,) = findings(told.history)
    assert "no shard reads it any more" in both.text
    assert both.until_s == 60.0


def test_one_cause_is_one_finding_with_its_consequences_beneath(told: SteppedRun) -> None:
    """A slow link, what was refused because of it, and that nothing of the learner was merged."""
    told.join("far", 10.0)
    for number in range(3):
        told.refuse("far", 50.0 + number, "stale", upload_s=20.0)
    for version in range(11, 16):
        told.round(version, upload_s=0.5)
        told.round(version, fragment=1, shard="shard-1", upload_s=0.5)
    (found,) = findings(told.history)

    assert (found.cause, found.culprit) == ("slow link", "far")
    assert [each.cause for each in found.consequences] == ["stale refusals", "nothing merged"]
    assert all(not each.consequences for each in found.consequences)
    lines = found.lines(RunClock(0.0, virtual=True))
    assert lines[1] == "    from 30.0 s to 52.0 s"
    so = [line.strip() for line in lines if line.startswith("    so: ")]
    assert so[0].startswith("so: stale refusals, far: 3 of its contributions were refused")
    assert so[1].startswith("so: nothing merged, far: ")


def one(cause: Cause, culprit: str, from_s: float, until_s: float | None) -> RunFinding:
    return RunFinding(cause, culprit, "", from_s, until_s)


def test_a_full_disk_explains_what_fell_into_its_time_and_nothing_else() -> None:
    disk, meanwhile = one("disk was full", "broker", 10.0, 20.0), one("shard without owner", "shard-0", 9.0, 19.0)
    later, open_ended = one("shard without owner", "shard-1", 30.0, 40.0), one("stale refusals", "a", 18.0, None)
    found = by_cause([disk, meanwhile, later, open_ended], 100.0)

    assert [(each.cause, each.culprit) for each in found] == [
        ("disk was full", "broker"),
        ("shard without owner", "shard-1"),
        ("stale refusals", "a"),
    ]
    assert found[0].consequences == (meanwhile,)


def test_two_short_hiccups_hours_apart_are_two_findings_and_explain_nothing_between(told: SteppedRun) -> None:
    hour_s = 3600.0
    told.round(11, at_s=120.0, commit_s=3.0, hindered=2.0)
    told.round(11, at_s=130.0, commit_s=3.0, hindered=2.5, fragment=1, shard="shard-1")
    for number in range(3):
        told.refuse("a", (1 + number) * hour_s, "stale")
    told.round(12, at_s=4 * hour_s, commit_s=3.0, hindered=2.0)
    told.round(12, at_s=4 * hour_s, fragment=1, shard="shard-1")
    found = [each for each in findings(told.history) if each.cause != "shard without owner"]

    assert [(each.cause, each.from_s, each.until_s) for each in found] == [
        ("broker was away", 4 * hour_s - 3.0, 4 * hour_s),
        ("broker was away", 117.0, 130.0),
        ("stale refusals", hour_s, 3 * hour_s),
    ]
    assert found[1].text == f"2 rounds and 0 uploads waited 4.5 s in all, because {AWAY}"
    assert not any(each.consequences for each in found)


@pytest.mark.parametrize(("superseded", "rounds", "is_told"), [(60, 8, True), (15, 8, False), (60, 7, False)])
def test_what_new_versions_overwrite_is_told(superseded: int, rounds: int, *, is_told: bool) -> None:
    """Of 100 token-fragments, once every fragment had its rounds: goodput is high all the same."""
    run = SteppedRun()
    run.join("a")
    for version in range(1, rounds + 1):
        run.round(version, at_s=10.0 + 5.0 * version)
    run.log("sample", "a", 200.0, incarnation=1, step=10, tokens=100, superseded=superseded)
    found = [each for each in findings(run.history) if each.cause == "superseded"]

    assert [each.culprit for each in found] == (["a"] if is_told else [])
    assert all(each.text.startswith("60 % of what it trained was overwritten") for each in found)


def test_of_many_hiccups_the_newest_and_the_longest_are_told() -> None:
    run = SteppedRun()
    for version in range(1, 41):
        run.round(version, at_s=1000.0 * version, commit_s=30.0, hindered=20.0 if version == 7 else 1.0 + version / 100)
    run.round(41, at_s=41_000.0, commit_s=3.0, hindered=1.0)
    found = hindered_commits(run.history)

    assert len(found) == EPISODES_MAX
    assert [each.until_s for each in found] == [7000.0, 37_000.0, 38_000.0, 39_000.0, 40_000.0, 41_000.0]
    assert found[-1].evidence[-1] == "it was so at 35 other times, which are not told here"
    assert not any("other times" in line for each in found[:-1] for line in each.evidence)


def test_nothing_merged_is_told_only_of_a_learner_that_was_there_and_was_never_merged() -> None:
    """On a page, which keeps the newest rounds: of one that left in good order those rounds know nothing."""
    page = SteppedRun(rounds_kept=20)
    for who in ("a", "b", "c", "never", "passed by"):
        page.join(who)
    page.log("left", "passed by", 15.0, incarnation=1, tokens=1, steps=1)
    for version in range(1, 41):
        page.round(version)
        if version == 10:
            del page.steps["c"]
            page.log("left", "c", 111.0, incarnation=1, tokens=1000, steps=100)
    assert {share.learner for _, share in page.history.contributions()} == {"a", "b"}
    found = findings(page.history)

    assert [(each.cause, each.culprit, each.until_s) for each in found] == [("nothing merged", "never", None)]


def test_what_goes_on_comes_before_what_has_ended_and_the_newer_before_the_older() -> None:
    ended = [one("shard without owner", f"shard-{number}", 10.0 * number, 10.0 * number + 5.0) for number in range(3)]
    dead, isolated = one("shard without owner", "shard-9", 50.0, None), one("quarantine", "a", 5.0, None)
    slow, former = one("slow learner", "b", 0.0, 990.0), one("slow learner", "c", 0.0, 100.0)
    broker = one("broker was away", "broker", 1.0, 3.0)
    told = by_urgency([broker, *ended, isolated, slow, former, dead], 940.0)

    assert told == [dead, isolated, slow, broker, *reversed(ended), former]


def test_what_had_ended_before_the_oldest_round_that_is_kept_is_not_told() -> None:
    page, report = SteppedRun(rounds_kept=10), SteppedRun()
    for run in (page, report):
        run.serve("shard-0", 9.0)
        for version in range(1, 4):
            run.round(version)
        run.serve("shard-0", 100.0, epoch=2)
        for version in range(10, 30):
            run.round(version)

    assert [each.cause for each in findings(report.history)] == ["shard without owner"]
    assert findings(page.history) == []


def test_a_shard_that_is_dead_for_longer_than_rounds_are_kept_is_still_told() -> None:
    """The page has forgotten all of its rounds, and so its usual pace, but not that it was there."""
    page = SteppedRun(rounds_kept=10)
    page.serve("shard-1", 9.0, fragments=(1,))
    for version in range(1, 5):
        page.round(version, fragment=1, shard="shard-1")
    page.log("hosted", "process", 50.0, moved={}, owns=[1])
    for version in range(1, 41):
        page.round(version)
    (dead,) = findings(page.history)

    assert (dead.cause, dead.culprit, dead.from_s, dead.until_s) == ("shard without owner", "shard-1", 50.0, None)
    assert dead.text.endswith("and nobody took it over: its fragments (1) stood still")


@pytest.mark.parametrize("cause", ["learner was gone", "slow link", "slow learner", "bad direction", "stale refusals"])
def test_what_had_ended_before_a_cause_began_is_no_effect_of_it(cause: Cause) -> None:
    """What a learner lost before it died was not lost by its death; what goes on while it is away may be."""
    effect = SAME_CULPRIT[cause][0]
    before, beyond = one(effect, "a", 0.0, 9.1), one(effect, "a", 0.0, 9.8)
    later = one(cause, "a", 9.7, 12.0)

    assert by_cause([later, before], 20.0) == [later, before]
    assert by_cause([later, beyond], 20.0)[0].consequences == (beyond,)


def test_no_cause_explains_itself() -> None:
    """Neither table has a circle: every finding is shown."""
    explains = {cause: {*SAME_CULPRIT.get(cause, ()), *SAME_TIME.get(cause, ())} for cause in GRAVITY}
    for cause, led_to in explains.items():
        seen, due = set[Cause](), set(led_to)
        while due:
            seen |= due
            due = {after for each in due for after in explains[each]} - seen
        assert cause not in seen
