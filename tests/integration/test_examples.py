"""The examples do what their first lines promise, as a reader would run them."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from atoll.bus.server import EmbeddedBroker

EXAMPLES = Path(__file__).parents[2] / "examples"
ENVIRONMENT = {name: value for name, value in os.environ.items() if not name.startswith("ATOLL_")}
DEADLINE_S = 240.0


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[EmbeddedBroker]:
    """A broker as a reader of the example has one."""
    with EmbeddedBroker(tmp_path / "nats") as broker:
        yield broker


@dataclass
class Programs:
    """Programs of this environment; their output goes to files, for nobody reads a pipe while they run."""

    folder: Path
    started: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    def start(self, name: str, *words: str) -> None:
        """Start `python <words>`."""
        with (self.folder / name).open("wb") as output:
            self.started[name] = subprocess.Popen(
                [sys.executable, *words], stdout=output, stderr=output, env=ENVIRONMENT
            )

    def finish(self, name: str) -> str:
        """Return what it said once it has ended well."""
        self.started[name].wait(DEADLINE_S)
        said = (self.folder / name).read_text(encoding="utf-8")
        assert self.started[name].returncode == 0, said[-4000:]
        return said


@pytest.fixture
def programs(tmp_path: Path) -> Iterator[Programs]:
    """Programs that end with the test, whatever happens."""
    programs = Programs(tmp_path)
    yield programs
    for process in programs.started.values():
        process.kill()
        process.wait(DEADLINE_S)


def test_two_islands_find_what_neither_sees(programs: Programs) -> None:
    """Both end with the slope that goes through both places."""
    programs.start("tour", str(EXAMPLES / "two_islands.py"))
    said = programs.finish("tour")
    slopes = [float(number) for number in re.findall(r"'(?:left|right)': ([\d.]+)", said)]

    assert len(slopes) == 2, said
    assert slopes == pytest.approx([3.0, 3.0], abs=0.1)


def test_your_own_loop_becomes_an_island(broker: EmbeddedBroker, programs: Programs) -> None:
    """Two digits learners and a shard on a real broker: both classify held-out digits well."""
    programs.start("shard", "-m", "atoll.cli", "synchronizer", "--run", "digits", "--broker", broker.url)
    for name in "ab":
        programs.start(name, str(EXAMPLES / "digits.py"), name, broker.url)
    said = {name: programs.finish(name) for name in "ab"}
    commits = programs.finish("shard").count("round.committed")

    assert commits >= 8
    for name, text in said.items():
        found = re.search(rf"{name}: accuracy on held-out digits ([\d.]+)", text)
        assert found, text
        assert float(found[1]) > 0.9
