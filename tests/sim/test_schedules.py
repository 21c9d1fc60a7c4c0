"""Whole schedules on production's drivers: all holds under faults, all comes to rest after them, and a seed decides it all."""

from __future__ import annotations

import asyncio
import os
import random
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from schedules import campaign, long_campaign, tuning
from schedules.faults import HOSTILE, KINDS, REPLICATED, Happening, drawn
from schedules.minimise import minimised
from schedules.mutants import CRASHES, FAST, hunt, planted
from schedules.processes import Process, ProcessLoop
from schedules.schedule import Outcome, draw, play
from schedules.world import World

SCHEDULES = int(os.environ.get("SCHEDULES", "4"))
AT_ONCE = (
    "a fast loop is not held",
    "head before chunks",
    "no fence",
    "counted twice",
    "tokens of one commit",
    "downlink not settled",
)
"""Mutants that the first schedules catch; `make bench-dst` hunts all of them."""
ONCE_BROKEN = (3, 22, 5023, 6332, 12823, 13115)
"""Seeds that found something; others are in the lab log."""
OFTEN = (
    *("tenures", "fences", "commits of several", "merged late", "keyframes", "versions by delta alone", "pushes"),
    "farewells",
)


def happenings_of(seeds: Iterable[int]) -> Counter[str]:
    """Play the schedules of these seeds, in which nothing may break, and return what happened in them."""
    happened: Counter[str] = Counter()
    for seed in seeds:
        outcome = play(seed)
        assert outcome.violation == "", campaign.told(outcome)
        happened.update(outcome.tally)
    return happened


def test_no_schedule_breaks_anything_and_none_is_empty() -> None:
    """Safety under faults, liveness after them, an exact ledger at the end; and what is meant to happen does happen."""
    happened = happenings_of(range(100, 100 + SCHEDULES))

    assert [kind for kind in OFTEN if not happened[kind]] == []
    assert happened["versions computed again"] == happened["commits"] > 0


@pytest.mark.second_tier
@pytest.mark.parametrize("seeds", [range(200, 204), range(204, 208), ONCE_BROKEN[:3], ONCE_BROKEN[3:]], ids=str)
def test_no_more_schedules_break_anything(seeds: Iterable[int]) -> None:
    """Among them are those that once did."""
    assert happenings_of(seeds)["commits"] > 0


def test_a_loop_that_is_held_is_believed_by_whoever_hears_it_and_ends_exact() -> None:
    """Loops of 2 to 8 steps a second where half a step is allowed, and shards whose owners crash: no claim is beyond belief."""
    happened: Counter[str] = Counter()
    for seed in range(max(2, SCHEDULES // 4)):
        outcome = play(seed, rates=CRASHES, fixed=FAST)
        assert outcome.violation == "", (seed, outcome.violation)
        happened.update(outcome.tally)
    assert happened["steps held"] > 10


@pytest.mark.second_tier
def test_an_heir_that_does_not_know_how_old_lives_are_is_caught() -> None:
    """It would drop the heartbeats of whoever has long been at the allowed pace."""
    assert "is believed" in hunt("an heir counts a life from its own reading", 0, 12).what


@pytest.mark.second_tier
def test_a_schedule_is_decided_by_its_seed_alone() -> None:
    ours = play(11, log=True)
    program = "import sys; from schedules.schedule import play; sys.stdout.write('\\n'.join(play(11, log=True).log))"
    root = Path(__file__).parents[1]
    told = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PYTHONHASHSEED": "4711", "PYTHONPATH": os.pathsep.join([str(root), str(root.parent)])},
    ).stdout

    assert told.split("\n") == ours.log
    assert len(ours.log) > 100


@pytest.mark.parametrize("name", AT_ONCE)
def test_a_mutant_is_caught(name: str) -> None:
    """With the first schedules, by a promise that it breaks: one that no longer fits production is an error at its call."""
    caught = hunt(name, 0, 5)

    assert caught.what.startswith("InvariantBroken")
    assert caught.kind == "safety"


def test_a_world_in_which_nobody_serves_is_not_live(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(World, "_keep_hosts", lambda _: None)
    monkeypatch.setattr(World, "start_host", lambda _: None)
    outcome = play(3, rates={})

    assert outcome.kind == "liveness"
    assert outcome.what == "with a quorum of live learners every fragment is committed"


def test_a_failure_is_told_with_what_it_needs_and_how_to_see_it_again() -> None:
    """Seed, commit, the happenings that matter, and the commands; here none of them matters."""
    with planted("head before chunks"):
        (failure,) = campaign.chunk(0, 1)[3]
        told = campaign.told(failure)

    assert told.count("  | ") >= 10
    assert "safety violated in seed 0, commit " in told
    assert f"0 of {len(failure.happenings)} happenings are needed" in told
    assert told.endswith("python -m schedules --seed 0 --only none")


def test_what_a_failure_needs_is_found() -> None:
    happenings = [Happening(number, "ab"[number % 2], 0.0, 1.0, 0.0, 0.0) for number in range(12)]

    assert minimised(happenings, lambda only: {3, 8} <= only) == {3, 8}
    assert minimised(happenings, lambda _: True) == frozenset()


def test_a_hostile_campaign_has_hostile_peers_in_every_schedule() -> None:
    """All three kinds of them, and what else is drawn; a seed is drawn the same way each time."""
    lists = [draw(seed, beside="hostile").happenings for seed in range(40)]

    assert all(set(HOSTILE) <= {each.kind for each in one} for one in lists)
    assert lists[7] == draw(7, beside="hostile").happenings != draw(7).happenings


def test_streams_lose_their_leaders_and_nothing_breaks() -> None:
    """A seed means the same with and without it but for the leaders; what was proposed comes late, deliveries come again."""
    happened: Counter[str] = Counter()
    for seed in range(500, 500 + max(4, SCHEDULES // 2)):
        outcome = play(seed, beside="replicated")
        assert outcome.violation == "", campaign.told(outcome, beside="replicated")
        happened.update(outcome.tally)
        kept = [replace(each, number=0) for each in outcome.happenings if each.kind not in REPLICATED]
        assert kept == [replace(each, number=0) for each in draw(seed).happenings]
    assert [
        kind for kind in (*REPLICATED, "proposals committed late", "deliveries repeated") if not happened[kind]
    ] == []


def test_happenings_are_drawn_from_the_seed_and_vary() -> None:
    lists = [draw(seed).happenings for seed in range(200)]

    assert {each.kind for one in lists for each in one} == set(KINDS)
    assert lists[7] == draw(7).happenings
    assert [each.number for each in lists[7]] == list(range(len(lists[7])))
    assert drawn.__doc__


def test_a_process_that_crashes_does_not_tidy_up_and_one_that_freezes_goes_on() -> None:
    made: Any = ProcessLoop
    loop, said = made(random.Random(0)), list[str]()
    frozen, doomed = Process("frozen", loop), Process("doomed", loop, rate=2.0)

    async def work(name: str) -> None:
        try:
            for number in range(5):
                await asyncio.sleep(1.0)
                said.append(f"{name} {number} at {loop.now_s:g}")
        finally:
            said.append(f"{name} ends")

    async def main() -> None:
        frozen.spawn(work("frozen"))
        doomed.spawn(work("doomed"))
        doomed.doom_at = 6
        loop.at(1.5, frozen.freeze)
        loop.at(3.2, frozen.thaw)
        await asyncio.sleep(20.0)

    loop.run_until_complete(main())
    doomed.bury()

    assert [line for line in said if line.startswith("frozen")] == [
        "frozen 0 at 1",
        "frozen 1 at 3.2",
        "frozen 2 at 4.2",
        "frozen 3 at 5.2",
        "frozen 4 at 6.2",
        "frozen ends",
    ]
    assert "doomed 0 at 0.5" in said
    assert "doomed 4 at 2.5" not in said


def test_a_campaign_goes_on_and_refuses_other_sources(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next seeds follow those that were played; sources are not mixed, and what failed stays in the figures."""
    file = tmp_path / "campaign.json"
    monkeypatch.setattr(
        long_campaign, "source_digest", lambda packages: "abc" if packages == ["schedules.schedule"] else ""
    )
    failed = Outcome(1, "a promise is broken\nhere", "safety", Counter(), [])
    for next_one, failures in ((0, [failed]), (2, [])):
        known = long_campaign.resumed(file, 0)
        assert known.next == next_one
        known.add(2, 1.0, Counter({"commits": 5}), failures)
        long_campaign.save(file, known)

    whole = long_campaign.resumed(file, 0)
    assert (whole.next, whole.schedules, whole.tally) == (4, 4, {"commits": 10})
    figures = {figure.name: figure for figure in campaign.figures_of(whole)}
    assert figures["violations"].value == 1
    assert "seed 1: a promise is broken" in figures["violations"].how
    monkeypatch.setattr(long_campaign, "source_digest", lambda _packages: "def")
    assert campaign.main(["--schedules", "1", "--resume", str(file)]) == 2
    assert "is of sources abc, these are def" in capsys.readouterr().out
    file.write_text("[]", encoding="utf-8")
    assert campaign.main(["--schedules", "1", "--resume", str(file)]) == 2
    assert "holds no campaign" in capsys.readouterr().out


def test_a_campaign_is_played_in_parts_and_written_down_after_each(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    file, written = tmp_path / "campaign.json", []
    monkeypatch.setattr(campaign, "PART", 1)
    monkeypatch.setattr(campaign, "save", lambda path, done: written.append((path, done.schedules)))

    assert campaign.main(["--schedules", "2", "--workers", "1", "--resume", str(file)]) == 0
    assert written == [(file, 0), (file, 1), (file, 2)]
    assert "2 of sources" in capsys.readouterr().out


def test_a_replay_prints_the_log_and_the_happenings(capsys: pytest.CaptureFixture[str]) -> None:
    """`--seed` shows one schedule, `--only` a part of it."""
    assert campaign.main(["--seed", "5", "--only", "none"]) == 0
    said = capsys.readouterr().out

    assert "seed 5: all held" in said
    assert "drains everybody" in said


def test_a_constant_that_production_has_not_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """A schedule that no longer tunes what it means to tune would say less than it seems to."""
    monkeypatch.setitem(tuning.TUNED, "NO_SUCH_CONSTANT", 1.0)

    assert "production has no such constants" in play(0).violation
