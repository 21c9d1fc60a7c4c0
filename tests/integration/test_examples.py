"""The examples do what their first lines promise, as a reader would run them."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from atoll.bus.broker import EmbeddedBroker

EXAMPLES = Path(__file__).parents[2] / "examples"
ENVIRONMENT = {name: value for name, value in os.environ.items() if not name.startswith("ATOLL_")}
DEADLINE_S = 120.0


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[EmbeddedBroker]:
    """A broker as a reader of the example has one."""
    with EmbeddedBroker(tmp_path / "nats") as broker:
        yield broker


@dataclass
class Program:
    """A program of this environment, whose output goes to a file: nobody reads a pipe while it runs."""

    process: subprocess.Popen[bytes]
    log: Path

    def finish(self) -> str:
        """Return what it said once it has ended well."""
        try:
            self.process.wait(DEADLINE_S)
        finally:
            self.process.kill()
        said = self.log.read_text(encoding="utf-8")
        assert self.process.returncode == 0, said[-4000:]
        return said


def start(log: Path, *words: str) -> Program:
    """Start a program."""
    with log.open("wb") as output:
        process = subprocess.Popen([sys.executable, *words], stdout=output, stderr=output, env=ENVIRONMENT)
    return Program(process, log)


def test_two_islands_find_what_neither_sees(tmp_path: Path) -> None:
    """Both end with the slope that goes through both places."""
    said = start(tmp_path / "log", str(EXAMPLES / "two_islands.py")).finish()
    slopes = [float(number) for number in re.findall(r"'(?:left|right)': ([\d.]+)", said)]

    assert len(slopes) == 2, said
    assert slopes == pytest.approx([3.0, 3.0], abs=0.1)


def test_your_own_loop_becomes_an_island(broker: EmbeddedBroker, tmp_path: Path) -> None:
    """Two digits learners and a shard on a real broker: both classify held-out digits well."""
    words = ("-m", "atoll.cli", "synchronizer", "--run", "digits", "--broker", broker.url)
    shard = start(tmp_path / "shard", *words)
    learners = [start(tmp_path / name, str(EXAMPLES / "digits.py"), name, broker.url) for name in "ab"]
    said = [learner.finish() for learner in learners]
    commits = shard.finish().count("round.committed")

    assert commits >= 8
    for name, text in zip("ab", said, strict=True):
        found = re.search(rf"{name}: accuracy on held-out digits ([\d.]+)", text)
        assert found, text
        assert float(found[1]) > 0.9
