"""A shard without an owner: in the story of its rounds, among the long ones, and in its own story."""

from __future__ import annotations

import pytest

from atoll.cli.story import story_lines as story_told
from atoll.cli.story import why_lines
from atoll.story.findings import findings
from atoll.story.lives import long_bound_s, outages_of, round_lengths, stood_still
from atoll.story.telling import fragment_story, long_rounds
from support.told_runs import SteppedRun

NEVER = {"version": 5, "end": "nobody left"}


@pytest.fixture
def run() -> SteppedRun:
    """A run whose shard 0 died after its round at 60 s and was taken over at 100 s, while shard 1 went on."""
    run = SteppedRun()
    run.serve("shard-0", 9.0)
    run.serve("shard-1", 9.0, fragments=(1,))
    for who in run.steps:
        run.join(who)
    for version in range(1, 6):
        run.round(version)
    for version in range(1, 10):
        run.round(version, fragment=1, shard="shard-1")
    run.serve("shard-0", 100.0, epoch=2)
    return run


def test_an_outage_is_from_the_last_sign_of_an_owner_to_the_next(run: SteppedRun) -> None:
    (outage,) = outages_of(run.history)
    assert (outage.shard, outage.from_s, outage.until_s) == ("shard-0", 60.0, 100.0)

    noted = SteppedRun()
    noted.serve("shard-0", 9.0)
    noted.log("hosted", "process", 80.0, moved={}, owns=[0])
    noted.serve("shard-0", 100.0, epoch=2)
    assert [each.from_s for each in outages_of(noted.history)] == [80.0]


def test_a_shard_that_was_handed_over_had_no_outage(run: SteppedRun) -> None:
    run.round(6, at_s=110.0)
    run.log("ledger", "shard-0", 111.0, ledger={})
    run.serve("shard-0", 150.0, epoch=3)

    assert [each.until_s for each in outages_of(run.history) if each.shard == "shard-0"] == [100.0]


def test_the_story_of_a_round_tells_the_outage_of_its_shard(run: SteppedRun) -> None:
    """Its present owner knows only that no learner was left: that is not why nobody was called for forty seconds."""
    run.round(6, at_s=101.0, why=NEVER)
    story = "\n".join(why_lines(run.history, 0, 6))

    assert "outage     40.000 s  shard-0 had no owner from 51.0 s to 91.0 s" in story
    assert "until process 2 on h took it over" in story
    assert "it was never called: shard-0 had no owner until then" in story
    assert "because no live learner was left to ask" not in story
    other = "\n".join(why_lines(run.history, 1, 9))
    assert "outage" not in other


def test_a_round_that_an_outage_interrupted_is_the_longest(run: SteppedRun) -> None:
    """It stood still for forty seconds before its present owner called; the rounds after it did not."""
    run.round(6, at_s=110.0)
    run.round(7, at_s=120.0)
    longest, *rest = round_lengths(run.history)
    told = long_rounds(run.history)

    assert (longest.line.round.version, longest.line.shard) == (6, "shard-0")
    assert (longest.outage_s, longest.whole_s) == (40.0, 42.0)
    assert all(each.outage_s == 0.0 for each in rest)
    assert long_bound_s([longest, *rest]) == 4.0
    assert told[0].startswith(
        "1 of 16 rounds are long (from the call of a round until its version was visible, and while its shard had no owner"
    )
    assert told[1].startswith("  42.000 s, of these 40.000 s without an owner: fragment 0 version 6")
    assert stood_still(run.history, longest.line, outages_of(run.history))[0].until_s == 100.0


def test_a_shard_that_nobody_took_over_is_named_to_the_end() -> None:
    dead = SteppedRun()
    dead.serve("shard-0", 9.0)
    for version in range(1, 5):
        dead.round(version)
    dead.round(9, fragment=1, shard="shard-1")

    assert long_rounds(dead.history)[0] == (
        "no round of shard-0 has ended for 50 s, to the end of the event log: it has no owner"
    )
    assert "version 5 is not there yet: shard-0 has no owner from 41.0 s" in "\n".join(fragment_story(dead.history, 0))
    assert "it has none to the end of the event log, 50 s" in "\n".join(story_told(dead.history, "shard", "0"))


@pytest.fixture
def quick() -> SteppedRun:
    """A run with a round every half second for a minute; its shard's process writes a sample of its presence every 30 s."""
    run = SteppedRun()
    run.serve("shard-0", 9.0)
    for version in range(1, 121):
        run.round(version, at_s=10.0 + version / 2)
        if version % 60 == 0:
            run.log("hosted", "process", 10.0 + version / 2, moved={}, owns=[0])
    return run


@pytest.mark.parametrize("silent_s", [15.0, 45.0, 60.0])
def test_a_shard_that_waits_for_its_quorum_has_an_owner(quick: SteppedRun, silent_s: float) -> None:
    """All learners but one died, so it commits nothing. It says why at growing intervals, and its process that it is there."""
    if silent_s > 30.0:
        quick.log("hosted", "process", 100.0, moved={}, owns=[0])
    quick.log("sample", "a", 70.0 + silent_s, incarnation=1, step=1, tokens=1)

    assert outages_of(quick.history) == []
    assert findings(quick.history) == []


def test_a_dead_shard_is_missed_when_two_samples_of_its_presence_are_due(quick: SteppedRun) -> None:
    """It lasts from its last sign; a takeover at once ends it, and is told exactly, however short it was."""
    quick.log("sample", "a", 134.0, incarnation=1, step=1, tokens=1)
    assert outages_of(quick.history) == []
    quick.log("sample", "a", 136.0, incarnation=1, step=1, tokens=1)
    (dead,) = outages_of(quick.history)
    assert (dead.from_s, dead.until_s, dead.heir) == (70.0, 136.0, None)

    quick.serve("shard-0", 137.0, epoch=2)
    quick.round(121, at_s=138.0)
    quick.serve("shard-0", 141.0, epoch=3)
    assert [(each.from_s, each.until_s) for each in outages_of(quick.history)] == [(70.0, 137.0), (138.0, 141.0)]
