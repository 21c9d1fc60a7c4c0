"""Experiments of the repository from file to table, with real trainings of a tiny model: every kind of cell once."""

from __future__ import annotations

from pathlib import Path

import pytest
from experiment import main
from experiment_page import load
from questions import FOLDER

from atoll_learner.data.prepare import prepare

ROOT = Path(__file__).resolve().parents[2]
TINY = ["model.size=1", "model.context=32", "train.batch=2", "data.lease_blocks=2", "protocol.fragments=2"]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Token shards of a few short documents."""
    folder = tmp_path_factory.mktemp("text")
    for number in range(40):
        words = " ".join(f"{word}{number * word % 17}" for word in range(120))
        (folder / f"{number}.txt").write_text(words, encoding="utf-8")
    prepare(sorted(folder.glob("*.txt")), folder / "shards", block_tokens=256, validation=0.2)
    return folder / "shards"


@pytest.fixture(scope="module")
def build(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where all tests keep their cells, so that they share what is compiled."""
    return tmp_path_factory.mktemp("build")


@pytest.mark.parametrize(
    ("name", "only", "methods"),
    [
        ("precision", ["protocol.codec_up=int8"], {"atoll"}),
        ("interval", ["method=diloco", "protocol.interval_steps=8"], {"diloco", "data-parallel"}),
    ],
)
def test_an_experiment_runs_from_its_file_to_its_table(
    name: str, only: list[str], methods: set[str], corpus: Path, build: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A row and its baseline are trained, measured and shown; asked again, nothing is trained."""
    words = [name, "--folder", str(ROOT / FOLDER), "--build", str(build), "--data", str(corpus)]
    words += ["--scale", "0.0004", "--seeds", "1", "--jobs", "2"]
    words += [word for text in TINY for word in ("--set", text)] + [word for text in only for word in ("--only", text)]

    first, said = main(words), capsys.readouterr().out
    second, said_again = main(words), capsys.readouterr().out
    records = load(build / "quick" / f"experiment-{name}.json.zst").records.values()

    assert (first, second) == (0, 0), said
    assert "2 of 2 cells to run" in said
    assert "cells to run" not in said_again
    assert {record["cell"]["method"] for record in records} == methods
    assert all(1.0 < record["final"] < 9.0 and record["merged"] > 0 for record in records)
    assert "A quick look" in (build / "quick" / f"experiment-{name}.md").read_text(encoding="utf-8")
