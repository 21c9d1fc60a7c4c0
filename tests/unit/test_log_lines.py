"""What a learner's log says: adopted fragments as loudly as wished, and the fates of its tokens in one unit."""

from __future__ import annotations

import subprocess
import sys

from structlog.testing import capture_logs

from atoll.client.session import SupersededLog, account
from atoll.protocol.events import CallHeard, DrainOrdered, Fact, Push, PushSettled, StepDone
from atoll.protocol.island import Island
from atoll.protocol.settings import ProtocolSettings

LOUD_AND_QUIET = """
import structlog
from atoll.base.logs import get
from atoll.client.driver import log_adoption
log_adoption(0, 7, 1, "head/0/7", each=True)
log_adoption(1, 8, 1, "head/1/8")
get("a.module").info("learner.moved")
structlog.get_logger().debug("a line of the script's own")
"""


def test_a_script_that_configures_no_logs_gets_no_debug_lines_of_ours_and_keeps_its_own() -> None:
    """Structlog prints every level unless somebody says otherwise, and the script's structlog is not ours to configure."""
    said = subprocess.run([sys.executable, "-c", LOUD_AND_QUIET], capture_output=True, text=True, check=True)

    assert "head/0/7" in said.stderr
    assert "head/1/8" not in said.stderr
    assert "learner.moved" in said.stderr
    assert "a line of the script's own" in said.stdout
    assert "learner.moved" not in said.stdout, "the script's answers are there"


def test_the_last_line_of_a_life_adds_up() -> None:
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
