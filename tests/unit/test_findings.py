"""What stands out in a run: by cause, with its consequences beneath, its time, and the shards that it is of."""

from __future__ import annotations

import re
from pathlib import Path
from typing import get_args

import pytest

from atoll.run.decisions import CLIP_CURE, describe_clip, describe_outlier
from atoll.story.findings import (
    EPISODES_MAX,
    GRAVITY,
    SAME_CULPRIT,
    SAME_TIME,
    TELLS_MORE,
    Cause,
    RunFinding,
    by_cause,
    by_urgency,
    finding,
    findings,
    hindered_commits,
)
from atoll.story.history import RunClock
from atoll.story.questions import behind, loss, refused
from atoll.story.slowness import slowness
from support.told_runs import SteppedRun

AWAY = "it did not answer: it was gone, cut off, or its disk was full"
PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "ask-a-run.md"


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


def test_a_share_that_is_exceeded_is_told_with_the_cure(told: SteppedRun) -> None:
    told.log("filled", "shard-0", 40.0, subjects_of="mallory", removed=1200)
    told.log("filled", "shard-0", 50.0, subjects_of="mallory", removed=34)
    (found,) = findings(told.history)

    assert (found.cause, found.culprit, found.from_s, found.until_s) == ("share exceeded", "mallory", 40.0, 50.0)
    assert "1,234 messages beyond it were removed" in found.text
    assert "atoll keys revoke" in found.text
    assert found.evidence == ("shard-0: 1,200 removed", "shard-0: 34 removed")


def test_clips_are_told_with_both_lengths_the_setting_and_the_cure(told: SteppedRun) -> None:
    """As a finding, and to whoever asks why contributions were refused: none was."""
    for version in (50, 51, 52):
        told.steps = {"a": 1.0}
        told.round(version, norm=12.0, norm_max=4.5)
    (found,) = [each for each in findings(told.history) if each.cause == "clipped"]
    answer = "\n".join(refused(told.history, "a"))

    assert found.culprit == "a"
    assert CLIP_CURE in found.text
    assert found.evidence[-1] == f"push/a/1/0/52 {describe_clip(12.0, 4.5)}"
    for words in ("no contribution of a was refused", describe_clip(12.0, 4.5), CLIP_CURE, "protocol.outlier_ratio"):
        assert words in answer


def test_an_outlier_is_told_with_its_length_and_the_bound(told: SteppedRun) -> None:
    told.refuse("a", 40.0, "outlier", norm=12.0, norm_max=4.5)
    told.refuse("b", 41.0, "outlier")
    answer = "\n".join(refused(told.history, None))

    assert f"push/a/1/0/1, {describe_outlier(12.0, 4.5)}" in answer
    assert answer.splitlines()[-1].endswith("push/b/1/0/1")


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
    return finding(cause, culprit, "", from_s=from_s, until_s=until_s)


def test_a_full_disk_explains_what_fell_into_its_time_and_nothing_else() -> None:
    """Whoever that befell; a shard that died later has a cause of its own."""
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
    """A learner that was late all the time between them was so for a reason of its own."""
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


def test_a_round_that_waited_for_its_quorum_without_a_broker_is_told(told: SteppedRun) -> None:
    told.round(11, at_s=160.0, quorum_s=40.0, away_s=38.0)
    (found,) = [each for each in findings(told.history) if each.cause == "broker was away"]

    assert found.text == f"1 round and 0 uploads waited 38 s in all, because {AWAY}"
    assert found.evidence == ("commit/0/11 by shard-0: 38 s of its 2 s from its call until it was visible",)


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


def test_who_adopts_again_before_any_round_is_no_finding() -> None:
    """Below its quorum a run makes no round, and its learner begins anew from the version that it has."""
    run = SteppedRun()
    run.join("a")
    run.log("sample", "a", 200.0, incarnation=1, step=10, tokens=100, superseded=60)
    run.log("sample", "b", 200.0, incarnation=1, step=0, tokens=0, superseded=1)

    assert findings(run.history) == []


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
    """The graver cause comes first among those; a measurement of the last minute goes on."""
    ended = [one("shard without owner", f"shard-{number}", 10.0 * number, 10.0 * number + 5.0) for number in range(3)]
    dead, isolated = one("shard without owner", "shard-9", 50.0, None), one("quarantine", "a", 5.0, None)
    slow, former = one("slow learner", "b", 0.0, 990.0), one("slow learner", "c", 0.0, 100.0)
    broker = one("broker was away", "broker", 1.0, 3.0)
    told = by_urgency([broker, *ended, isolated, slow, former, dead], 940.0)

    assert told == [dead, isolated, slow, broker, *reversed(ended), former]
    assert set(GRAVITY) == set(get_args(Cause))
    assert len(GRAVITY) == len(set(GRAVITY))


def test_what_had_ended_before_the_oldest_round_that_is_kept_is_not_told() -> None:
    """A page tells of its newest rounds; a report, which has all rounds, still tells of it."""
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


def test_why_a_learner_is_behind_counts_all_that_came_too_late(told: SteppedRun) -> None:
    """As the finding does that leads there: segments that were deleted before they were read count as well."""
    for number in range(3):
        told.refuse("a", 50.0 + number, "chunks_gone")
    told.refuse("b", 60.0, "stale")
    (found,) = findings(told.history)
    answer = behind(told.history, None)

    assert (found.cause, found.command) == ("stale refusals", "atoll why behind a")
    assert answer[0].startswith(
        "a: 0 of its 20 merged contributions were late, and 3 more were refused because they came"
    )


@pytest.mark.parametrize(
    ("losses", "answer"),
    [
        (
            (0.0, 0.0, 0.0),
            "the loss did not jump: the training loss of a never rose by more than 0.0%",
        ),
        ((0.0, 0.0, 2.5), "the training loss of a rose: from 0 to 2.5"),
        ((-2.0, -3.0, -1.5), "the training loss of a rose by 50.0%: from -3 to -1.5"),
        ((2.0, 1.0, 1.5), "the training loss of a rose by 50.0%: from 1 to 1.5"),
    ],
)
def test_a_loss_of_zero_or_below_is_a_loss_too(losses: tuple[float, ...], answer: str) -> None:
    """A loop of one's own tells what it calls its loss; nothing divides by it."""
    run = SteppedRun()
    run.steps = {"a": 1.0}
    for version, told_loss in enumerate(losses, 1):
        run.round(version, loss=told_loss)

    assert loss(run.history)[0].startswith(answer)


def test_learners_with_other_data_are_no_jump_of_the_loss() -> None:
    """Rounds of a, whose data are easy, and of b, whose are not, once told of a rise by 61,610 %. Noise near 0 is none."""
    run = SteppedRun()
    for version, (name, told_loss) in enumerate([("a", 2.0), ("b", 0.5), ("a", 0.001), ("b", 0.49), ("a", 0.002)], 1):
        run.steps = {name: 1.0}
        run.round(version, loss=told_loss)

    assert loss(run.history)[0].startswith("the loss did not jump")


def test_a_consequence_of_a_consequence_is_the_causes_too() -> None:
    found = by_cause(
        [
            one("disk was full", "broker", 0.0, 9.0),
            one("stale refusals", "a", 1.0, 2.0),
            one("nothing merged", "a", 0.0, None),
        ],
        9.0,
    )

    assert [each.cause for each in found] == ["disk was full"]
    assert [each.cause for each in found[0].consequences] == ["stale refusals", "nothing merged"]


@pytest.mark.parametrize("cause", ["learner was gone", "slow link", "slow learner", "bad direction", "stale refusals"])
def test_what_had_ended_before_a_cause_began_is_no_effect_of_it(cause: Cause) -> None:
    """What a learner lost before it died was not lost by its death; what goes on while it is away may be."""
    effect = SAME_CULPRIT[cause][0]
    before, beyond = one(effect, "a", 0.0, 9.1), one(effect, "a", 0.0, 9.8)
    later = one(cause, "a", 9.7, 12.0)

    assert by_cause([later, before], 20.0) == [later, before]
    assert by_cause([later, beyond], 20.0)[0].consequences == (beyond,)


def test_the_offences_that_a_quarantine_is_for_are_beneath_it() -> None:
    offences = one("refusals", "a", 1.0, 2.0)
    (found,) = by_cause([one("quarantine", "a", 2.1, None), offences], 20.0)

    assert found.consequences == (offences,)


def test_no_cause_explains_itself() -> None:
    """Neither table has a circle: every finding is shown."""
    explains = {cause: {*SAME_CULPRIT.get(cause, ()), *SAME_TIME.get(cause, ())} for cause in get_args(Cause)}
    for cause, led_to in explains.items():
        seen, due = set[Cause](), set(led_to)
        while due:
            seen |= due
            due = {after for each in due for after in explains[each]} - seen
        assert cause not in seen


def test_a_finding_says_when_in_time_of_the_run_and_by_the_clock() -> None:
    """A simulated run has no clock; what lasts has no end."""
    began_s = 1_772_366_400.0  # 2026-03-01 12:00 UTC
    real, simulated = RunClock(began_s), RunClock(began_s, virtual=True)

    assert real.span(began_s + 5.0, began_s + 65.0) == "from 5.0 s to 65.0 s (2026-03-01 12:00:05 to 12:01:05 UTC)"
    assert real.span(began_s, began_s + 86_400.0).endswith("(2026-03-01 12:00:00 to 2026-03-02 12:00:00 UTC)")
    assert real.span(began_s + 5.0, None) == "from 5.0 s to the end of the event log (since 2026-03-01 12:00:05 UTC)"
    assert real.at(began_s + 1.5) == "1.500 s (2026-03-01 12:00:01.500+00:00)"
    assert simulated.span(began_s + 5.0, began_s + 65.0) == "from 5.0 s to 65.0 s"
    assert simulated.at(began_s + 1.5) == "1.500 s"


def test_what_was_there_but_not_yet_read_missed_nothing_by_a_negative_time(told: SteppedRun) -> None:
    """It arrived 1 ms before the end of the round, which did not wait for its reading."""
    # Version 10 ended at 109.5 s and was visible at 110; version 11 is called at 118.
    told.round(11, age=1, arrived_s=-8.501)
    told.round(12, age=1, arrived_s=-8.0)
    answer = "\n".join(behind(told.history, "a"))

    assert "push/a/1/0/11: arrived 0.001 s before the end of commit/0/10, and was still being read then" in answer
    assert "push/a/1/0/12: missed commit/0/11 by 0.5 s" in answer
    assert "by -" not in answer


def test_the_page_says_of_every_finding_what_it_means_and_what_to_do() -> None:
    table = PAGE.read_text(encoding="utf-8").partition("| finding |")[2].partition("\n\n")[0]
    rows = [[cell.strip() for cell in row.strip("|").split("|")] for row in table.splitlines()[2:]]

    assert {re.sub("`", "", row[0]) for row in rows} == set(get_args(Cause))
    assert all(len(row) == 3 and all(row) for row in rows)


def test_every_finding_has_a_command() -> None:
    """A cause that is new needs one."""
    assert set(TELLS_MORE) == set(get_args(Cause))
