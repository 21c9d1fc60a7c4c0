"""What a learner's log says: adopted fragments as loudly as wished, and the fates of its tokens in one unit."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from atoll.client.driver import AdoptionLog
from atoll.client.session import SupersededLog, UncalledLog, account
from atoll.protocol.events import CallHeard, DrainOrdered, Fact, Push, PushSettled, StepDone
from atoll.protocol.island import Island
from atoll.protocol.settings import ProtocolSettings

LOUD_AND_QUIET = """
import structlog
from atoll.base.logs import get
from atoll.client.driver import AdoptionLog
AdoptionLog(each=True).note_adoption(0, 7, 1, "head/0/7")
AdoptionLog().note_adoption(1, 8, 1, "head/1/8")
get("a.module").info("learner.moved")
structlog.get_logger().debug("a line of the script's own")
"""


@pytest.mark.parametrize(("each", "level"), [(True, "info"), (False, "debug")])
def test_adoptions_are_logged_as_loudly_as_wished_and_counted(each: bool, level: str) -> None:  # noqa: FBT001
    """The summary has the number of those since the one before."""
    told = AdoptionLog(each=each)
    with capture_logs() as lines:
        for fragment in (0, 1):
            told.note_adoption(fragment, 7, 12, f"head/{fragment}/7")

    assert [(line["event"], line["fragment"], line["log_level"]) for line in lines] == [
        ("fragment.adopted", 0, level),
        ("fragment.adopted", 1, level),
    ]
    assert (told.take_count(), told.take_count()) == (2, 0)


def test_a_script_that_configures_no_logs_gets_no_debug_lines_of_ours_and_keeps_its_own() -> None:
    """Structlog prints every level unless somebody says otherwise, and the script's structlog is not ours to configure."""
    said = subprocess.run([sys.executable, "-c", LOUD_AND_QUIET], capture_output=True, text=True, check=True)

    assert "head/0/7" in said.stderr
    assert "head/1/8" not in said.stderr
    assert "learner.moved" in said.stderr
    assert "a line of the script's own" in said.stdout
    assert "learner.moved" not in said.stdout, "the script's answers are there"


def test_the_last_line_of_a_life_adds_up() -> None:
    """Each token-fragment has a fate, and the names say which figures are to be compared."""
    island = Island(ProtocolSettings(fragments=2, shards=1, interval_steps=4).check(), {0: 0, 1: 0})
    facts: list[Fact] = [StepDone(at_s=1.0, tokens=5), CallHeard(at_s=2.0, fragment=0, version=0, attempt=1)]
    for fact in [*facts, StepDone(at_s=3.0, tokens=5), DrainOrdered(at_s=4.0)]:
        for action in island.handle(fact):
            if isinstance(action, Push):
                reason = "not_finite" if action.fragment else ""
                island.handle(PushSettled(at_s=5.0, fragment=action.fragment, push=action.push, reason=reason))
    assert island.left
    assert min(island.pushed, island.superseded, island.refused_local) > 0

    told = account(island)

    assert (told["steps"], told["tokens"], told["trained_token_fragments"]) == (2, 10, 20)
    fates = ("pushed", "superseded", "refused_local")
    assert sum(told[f"{fate}_token_fragments"] for fate in fates) == told["trained_token_fragments"]
    assert all(name in ("steps", "tokens") or name.endswith("_token_fragments") for name in told)


def test_a_learner_whose_intervals_are_short_is_told_once_that_its_work_is_superseded() -> None:
    """By two stretches in a row, each of three adoptions of a fragment; an hour of good training does not hide it."""
    island = Island(ProtocolSettings(fragments=2, shards=1, interval_steps=4).check(), {0: 0, 1: 0})
    watch = SupersededLog()
    said: list[list[float]] = []
    good, bad, empty, short = (1000, 100, 6), (1000, 1100, 6), (0, 700, 6), (1000, 900, 1)
    for tokens, superseded, adopted in (good, bad, good, short, empty, good, bad, bad, bad):
        island.tokens, island.superseded = island.tokens + tokens, island.superseded + superseded
        with capture_logs() as lines:
            watch.look(island, adopted)
        said.append([line["share"] for line in lines])

    assert said == [[], [], [], [], [], [], [], [0.55], []]


def test_a_learner_that_nobody_calls_is_told_so() -> None:
    machine, watch = Island(ProtocolSettings(fragments=1, shards=1, interval_steps=4).check(), {0: 0}), UncalledLog()

    def steps(count: int, *, adopted: int = 0) -> list[str]:
        for _ in range(count):
            machine.handle(StepDone(at_s=0.0, tokens=10))
        with capture_logs() as lines:
            watch.look(machine, adopted, 4)
        return [line["event"] for line in lines]

    assert steps(8) == [], "the first call may still come"
    assert [steps(9), steps(9)] == [["learner.uncalled"], []], "once"
    assert steps(9, adopted=1) == []
    assert steps(9) == ["learner.uncalled"]


def test_a_learner_whose_steps_count_no_tokens_is_told_so() -> None:
    """Its log once doubted the synchronizer, and everybody else's rounds waited for it."""
    machine, watch = Island(ProtocolSettings(fragments=1, shards=1, interval_steps=4).check(), {0: 0}), UncalledLog()

    def steps(count: int, tokens: int, *, adopted: int = 0) -> list[str]:
        for _ in range(count):
            machine.handle(StepDone(at_s=0.0, tokens=tokens))
        with capture_logs() as lines:
            watch.look(machine, adopted, 4)
        return [line["event"] for line in lines]

    assert steps(8, 0) == [], "a loop may begin with a few"
    assert [steps(9, 0), steps(9, 0)] == [["learner.tokenless"], []], "once"
    assert steps(9, 5, adopted=1) == []
    assert steps(9, 0, adopted=1) == ["learner.tokenless"], "others make versions, and it is part of none"


def test_lines_of_a_script_are_in_its_file_at_once(tmp_path: Path) -> None:
    """Whoever looks into the file of a loop that runs sees that it has joined; a buffer would end with this process."""
    script = """
import os
from atoll.base.logs import get
get("a.module").info("learner.joined")
os._exit(0)
"""
    with (tmp_path / "log").open("w", encoding="utf-8") as log:
        subprocess.run([sys.executable, "-c", script], stderr=log, timeout=240, check=True)

    assert "learner.joined" in (tmp_path / "log").read_text(encoding="utf-8")
