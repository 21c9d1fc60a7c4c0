"""The examples do what their first lines promise: those lines are run as they are, from the root of the repository."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from support.documents import ROOT, Reader, documented


@pytest.fixture
def reader(tmp_path: Path) -> Iterator[Reader]:
    reader = Reader(tmp_path / "atoll")
    yield reader
    left = reader.leave()
    assert left == [], "processes were left behind"


def lines_of(example: str) -> list[str]:
    tree = ast.parse((ROOT / "examples" / example).read_text(encoding="utf-8"))
    return documented(ast.get_docstring(tree) or "")


def test_commands_stand_before_their_explanation() -> None:
    assert documented("Title.\n\n    a -b c      what it is\n    d \\\n      -e\n\nProse.") == ["a -b c", "d -e"]


def test_two_islands_find_what_neither_sees(reader: Reader) -> None:
    [command] = lines_of("two_islands.py")
    said = reader.type("tour", command).finish(reader.deadline_s)
    slopes = [float(number) for number in re.findall(r"'(?:left|right)': ([\d.]+)", said)]

    assert len(slopes) == 2, said
    assert slopes == pytest.approx([3.0, 3.0], abs=0.1)


@pytest.mark.second_tier
def test_learners_train_on_a_source_of_grain(reader: Reader) -> None:
    """Real learners, a real broker, and none of the text that `up` prepares but what is held out.

    All of them find their programs in the user's cache, where the first compiled them.
    """
    reader.programs = None
    [command] = lines_of("grain_source.py")
    said = reader.type("up", command).finish(reader.deadline_s)
    [bits] = re.findall(r"bits per byte: ([\d.]+) to ([\d.]+)", said)

    assert "finished: " in said
    assert any((reader.folder / "user" / "atoll" / "programs").glob("*/*-cache"))
    assert float(bits[1]) < float(bits[0]) - 1.0


def run_as_written(reader: Reader, example: str) -> tuple[list[str], int]:
    """Type the lines at the head of a loop; return what its learners printed and how many versions the shard committed."""
    lines = lines_of(example)
    broker_at = next(i for i, line in enumerate(lines) if line.startswith("atoll broker"))
    for line in lines[:broker_at]:
        reader.type("before", line).finish(reader.deadline_s)
    reader.terminals["broker"] = reader.type("broker", lines[broker_at])
    reader.wait_for(reader.terminals["broker"], "broker at nats://")
    shard_line, *learner_lines = lines[broker_at + 1 :]
    started = {line: reader.type("process", line) for line in (shard_line, *learner_lines)}
    reader.terminals |= started
    said = [started[line].finish(reader.deadline_s) for line in learner_lines]
    return said, started[shard_line].finish(reader.deadline_s).count("round.committed")


def measures_of(said: list[str]) -> list[float]:
    """Return the measures of the merged model that learners printed, after a look at their losses."""
    losses = [re.search(r": loss ([\d.]+) to ([\d.]+) in \d+ steps", text) for text in said]
    measures = [re.search(r"(?:accuracy|loss) on held-out \w+ ([\d.]+)", text) for text in said]
    assert all(loss and float(loss[2]) < 0.9 * float(loss[1]) for loss in losses), said
    assert all(measures), said
    return [float(measure[1]) for measure in measures if measure]


@pytest.mark.parametrize(
    "example", ["digits.py", "keras_digits.py", "nnx_batchnorm.py", "equinox_digits.py", "cnn.py", "numpy_loop.py"]
)
@pytest.mark.second_tier
def test_a_loop_becomes_an_island(reader: Reader, example: str) -> None:
    """Two learners and a shard on a real broker: loss falls for both, and both read the same good merged model."""
    said, commits = run_as_written(reader, example)
    measures = measures_of(said)

    assert commits >= 2
    assert len(measures) == 2
    assert measures[0] == measures[1] > 0.9


@pytest.mark.second_tier
def test_two_islands_tune_a_llama(reader: Reader) -> None:
    """Its loss on held-out pages falls, and both write the same model in the words of Hugging Face."""
    said, commits = run_as_written(reader, "llama_finetune.py")
    measures = measures_of(said)
    before = re.search(r"before ([\d.]+)", said[0])
    folders = [reader.folder / "runs" / f"llama-by-{name}" for name in "ab"]
    models = [load_file(folder / "model.safetensors") for folder in folders]

    assert commits >= 2
    assert before
    assert measures[0] == measures[1] < 0.9 * float(before[1])
    assert models[0].keys() == load_file(reader.folder / "runs" / "llama" / "model.safetensors").keys()
    assert all(np.array_equal(models[0][name], models[1][name]) for name in models[0])
    assert (folders[0] / "config.json").exists()
