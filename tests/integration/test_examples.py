"""The examples do what their first lines promise: those lines are run as they are, from the root of the repository."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.documents import ROOT, Reader, documented


@pytest.fixture
def reader(tmp_path: Path) -> Iterator[Reader]:
    """A reader at the root of the repository; no process outlives the test."""
    reader = Reader(tmp_path / "atoll")
    yield reader
    left = reader.leave()
    assert left == [], "processes were left behind"


def lines_of(example: str) -> list[str]:
    """Return the commands at the head of an example."""
    tree = ast.parse((ROOT / "examples" / example).read_text(encoding="utf-8"))
    return documented(ast.get_docstring(tree) or "")


def test_commands_stand_before_their_explanation() -> None:
    """Two spaces and more end a command; prose is none."""
    assert documented("Title.\n\n    a -b c      what it is\n    d\n\nProse.") == ["a -b c", "d"]


def test_two_islands_find_what_neither_sees(reader: Reader) -> None:
    """Both end with the slope that goes through both places."""
    [command] = lines_of("two_islands.py")
    said = reader.type("tour", command).finish(reader.deadline_s)
    slopes = [float(number) for number in re.findall(r"'(?:left|right)': ([\d.]+)", said)]

    assert len(slopes) == 2, said
    assert slopes == pytest.approx([3.0, 3.0], abs=0.1)


def test_your_own_loop_becomes_an_island(reader: Reader) -> None:
    """Two digits learners and a shard on a real broker: both classify held-out digits well."""
    broker_line, shard_line, *learner_lines = lines_of("digits.py")
    reader.terminals["broker"] = reader.type("broker", broker_line)
    reader.wait_for(reader.terminals["broker"], "broker at nats://")
    started = {line: reader.type("process", line) for line in (shard_line, *learner_lines)}
    reader.terminals |= started
    said = [started[line].finish(reader.deadline_s) for line in learner_lines]
    commits = started[shard_line].finish(reader.deadline_s).count("round.committed")

    assert len(learner_lines) == 2
    assert commits >= 8
    for text in said:
        found = re.search(r"accuracy on held-out digits ([\d.]+)", text)
        assert found, text
        assert float(found[1]) > 0.9
