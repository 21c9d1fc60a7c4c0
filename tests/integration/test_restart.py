"""A run whose every island died goes on: loops of their own, killed by SIGKILL with their shard, started again."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from atoll.bus.server import EmbeddedBroker
from support.links import unique_run

pytestmark = pytest.mark.second_tier

DEADLINE_S = 240.0
LOOP = Path(__file__).parents[1] / "support" / "restarting_loop.py"


class OwnLoops:
    """Two loops and a shard of one run, as processes; every one is waited for."""

    def __init__(self, folder: Path, url: str) -> None:
        self.folder, self.url, self.run = folder, url, unique_run()
        self.processes: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, name: str, *words: str) -> None:
        """Start a program; its log and what it tells go to two files, so that no thread writes into another's line."""
        with (self.folder / f"{name}.log").open("wb") as log, (self.folder / f"{name}.told").open("wb") as told:
            self.processes[name] = subprocess.Popen(
                [sys.executable, *words],
                stdout=told,
                stderr=log,
                stdin=subprocess.DEVNULL,
                env={**os.environ, "ATOLL_BROKER__URL": self.url, "PYTHONUNBUFFERED": "1"},
            )

    def begin(self, life: str) -> None:
        self.start(f"shard-{life}", "-m", "atoll.cli", "synchronizer", "--run", self.run)
        for learner in ("a", "b"):
            words = (str(LOOP), self.url, self.run, learner, str(self.folder / "checkpoints"))
            self.start(f"{learner}-{life}", *words)

    def said(self, name: str) -> str:
        return "".join((self.folder / f"{name}.{kind}").read_text(encoding="utf-8") for kind in ("log", "told"))

    def told(self, name: str, field: str) -> list[dict[str, Any]]:
        text = (self.folder / f"{name}.told").read_text(encoding="utf-8")
        lines = [line for line in text.splitlines() if line.startswith("{") and line.endswith("}")]
        return [line for line in map(json.loads, lines) if field in line]

    def wait_for(self, name: str, text: str, count: int) -> None:
        deadline_s = time.monotonic() + DEADLINE_S
        while self.said(name).count(text) < count:
            assert self.processes[name].poll() is None, self.said(name)[-3000:]
            assert time.monotonic() < deadline_s, self.said(name)[-3000:]
            time.sleep(0.02)

    def kill(self) -> None:
        for process in self.processes.values():
            process.kill()
        for process in self.processes.values():
            process.wait(DEADLINE_S)


@pytest.fixture
def loops(tmp_path: Path) -> Iterator[OwnLoops]:
    with EmbeddedBroker(tmp_path / "nats") as broker:
        loops = OwnLoops(tmp_path, broker.url)
        try:
            yield loops
        finally:
            loops.kill()


def test_a_run_whose_every_process_was_killed_goes_on_from_its_checkpoints(loops: OwnLoops) -> None:
    """Optimizer, key and place in the data; the run reaches its target, and every token has one fate."""
    loops.begin("first")
    for learner in ("a", "b"):
        loops.wait_for(f"{learner}-first", "checkpoint.saved", 2)
        # No more than both have long before the target, however busy the machine is.
        loops.wait_for(f"{learner}-first", "fragment.adopted", 4)
    loops.kill()
    loops.begin("second")
    for name in ("a-second", "b-second", "shard-second"):
        assert loops.processes[name].wait(DEADLINE_S) == 0, loops.said(name)[-3000:]

    untrained = max(mean(loops.told(f"{learner}-first", "loss")[:3]) for learner in ("a", "b"))
    for learner in ("a", "b"):
        before, after = loops.told(f"{learner}-first", "loss"), loops.told(f"{learner}-second", "loss")
        (start,) = loops.told(f"{learner}-second", "source")
        assert start["source"] == "checkpoint"
        assert 0 < start["read"] <= before[-1]["read"]
        assert (after[0]["count"], after[0]["read"]) == (start["read"] + 1, start["read"] + 1)
        assert after[-1]["count"] == after[-1]["read"] == start["read"] + len(after)
        assert mean(after[:20]) < 0.5 * untrained, "the loss goes on from where it was, not from the founder's"
        assert loops.told(f"{learner}-second", "accuracy")[0]["accuracy"] > 0.85
    fates = subprocess.run(
        [sys.executable, "-m", "atoll.cli", "fates", "--run", loops.run],
        env={**os.environ, "ATOLL_BROKER__URL": loops.url},
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=True,
    ).stdout

    assert "every token has one fate" in fates
    assert [word for word in ("a/1", "a/2", "b/1", "b/2") if word in fates] == ["a/1", "a/2", "b/1", "b/2"]
    # How much is `lost` depends on the moment: steps of which a killed life had told nobody are in no ledger.


def mean(lines: list[dict[str, Any]]) -> float:
    return float(sum(line["loss"] for line in lines) / len(lines))
