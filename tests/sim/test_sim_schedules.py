"""Whole schedules: every promise holds under faults, everything comes to rest after them, and a seed decides it all."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import pytest

from atoll.sim.dst import campaign
from atoll.sim.dst.faults import CALM
from atoll.sim.dst.schedule import play, settings_of, world_of
from atoll.sim.dst.world import NotLive, World

SCHEDULES = int(os.environ.get("SCHEDULES", "300"))
SHARE = 25
OFTEN = (
    "tenures",
    "owners deposed",
    "handovers",
    "retirements",
    "crashes of candidates",
    "crashes of learners",
    "freezes",
    "deposed writes refused",
    "readers removed",
    "answers lost",
    "lost writes found",
    "requests doubled",
    "redeliveries by silence",
    "disk full",
    "queue full",
    "broker crashes",
    "clock jumps",
    "ids taken over",
    "quorum waits",
    "commits",
    "farewells",
)


def test_no_schedule_breaks_a_promise_and_none_is_empty() -> None:
    """Safety under faults, liveness after them, exact books at the end; and what is meant to happen does happen."""
    happened: Counter[str] = Counter()
    firsts = range(0, SCHEDULES, SHARE)
    with ProcessPoolExecutor(2, get_context("spawn")) as pool:
        for _, tally, failure in pool.map(campaign.chunk, firsts, [min(SHARE, SCHEDULES - first) for first in firsts]):
            assert failure is None, campaign.told(failure)
            happened.update(tally)

    assert [kind for kind in OFTEN if not happened[kind]] == []


def test_a_schedule_is_decided_by_its_seed_alone() -> None:
    """Another process with another hash seed writes the identical log."""
    ours = play(11, log=True)
    program = (
        "import sys; from atoll.sim.dst.schedule import play; sys.stdout.write('\\n'.join(play(11, log=True).log))"
    )
    told = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PYTHONHASHSEED": "4711"},
    ).stdout

    assert told == "\n".join(ours.log)
    assert len(ours.log) > 100
    assert play(11).tally == ours.tally


def test_a_world_in_which_nobody_commits_is_not_live(monkeypatch: pytest.MonkeyPatch) -> None:
    """The demand for liveness can fail: here no candidate may live."""
    monkeypatch.setattr(World, "_keep_candidates", lambda _: None)
    world = world_of(3, weather=CALM)
    for candidate in world.candidates:
        candidate.process.crash()

    with pytest.raises(NotLive, match="every fragment is committed"):
        world.heal()


def test_settings_of_schedules_are_valid_and_vary() -> None:
    """Quorums, adoptions and ages are drawn."""
    drawn = [settings_of(random.Random(seed)) for seed in range(40)]

    assert {each.quorum for each in drawn} == {1, 2}
    assert {each.adoption for each in drawn} == {"overwrite", "carry"}
    assert {each.age_max for each in drawn} == {0, 1, 2}


def test_a_campaign_tells_what_it_covered(capsys: pytest.CaptureFixture[str]) -> None:
    """Progress, coverage and the verdict are printed; the exit code is 0."""
    assert campaign.main(["--schedules", "6", "--workers", "2", "--first", "100"]) == 0
    said = capsys.readouterr().out
    assert "every promise held in 6 schedules (seeds 100 to 105)" in said
    assert "crashes of candidates" in said


def test_a_replay_prints_the_whole_log(capsys: pytest.CaptureFixture[str]) -> None:
    """`--seed` shows one schedule."""
    assert campaign.main(["--seed", "5"]) == 0
    said = capsys.readouterr().out
    assert said.startswith("\n".join(play(5, log=True).log[:20]))
    assert "seed 5: every promise held" in said


@pytest.mark.parametrize("wrong", [["--minutes", "0"], ["--schedules", "0"], ["--seed", "x"], ["--nonsense"]])
def test_wrong_arguments_leave_with_2(wrong: list[str]) -> None:
    """As everywhere in the house."""
    with pytest.raises(SystemExit) as left:
        campaign.main(wrong)

    assert left.value.code == 2
