"""Experiments of the repository from file to table, with real trainings of a tiny model: a run, a warm start, a baseline."""

from __future__ import annotations

from pathlib import Path

import pytest

from atoll_learner.data.prepare import prepare
from benchmarks.experiments.experiment import main
from benchmarks.experiments.experiment_page import load
from benchmarks.experiments.grid import FOLDER

pytestmark = pytest.mark.second_tier

ROOT = Path(__file__).resolve().parents[2]
TINY = ["model.size=1", "model.context=32", "train.batch=2", "data.lease_blocks=2", "protocol.fragments=2"]


def test_experiments_run_from_their_files_to_tables(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Rows and baselines are trained, measured and shown; what one experiment trained the next one uses."""
    build, common = tmp_path / "build", ["--folder", str(ROOT / FOLDER), "--data", str(corpus_in(tmp_path))]
    common += ["--build", str(build), "--scale", "0.0004", "--seeds", "1", "--jobs", "2"]
    common += [word for text in TINY for word in ("--set", text)]
    sizes = ["parity-size", "--only", "model.size=xs", *common]
    budget = ["--only", "tokens_per_learner=1228800", *common]
    parity = ["parity", "--only", "learners=4", "--only", "method=atoll", *budget]
    warm = ["warm-start", "--only", "warm=0.1", *budget]

    codes = [main(sizes), main(parity), main(warm), main(warm)]
    said = capsys.readouterr().out
    names = ("parity-size", "parity", "warm-start")
    records = [load(build / "quick" / f"experiment-{name}.json.zst").records for name in names]
    cells = [record["cell"] for record in (records[0] | records[1] | records[2]).values()]

    assert codes == [0, 0, 0, 0], said
    assert said.count("2 of 2 cells to run") == 2
    assert said.count("1 of 3 cells to run") == said.count("cells to run") - 2 == 1
    assert sorted((cell["method"], cell["warm"], cell["settings"]["train.rate"]) for cell in cells) == [
        ("atoll", 0.0, 4e-3),
        ("atoll", 0.1, 4e-3),
        ("data-parallel", 0.0, 4e-3),
        ("data-parallel", 0.0, 8e-3),
        ("data-parallel", 0.0, 8e-3),
    ]
    assert all(1.0 < record["final"] < 9.0 and record["merged"] > 0 for record in records[2].values())
    assert all(1.0 < record["average"] < 9.0 for record in records[2].values())
    assert "A quick look" in (build / "quick" / "experiment-parity-size.md").read_text(encoding="utf-8")


def corpus_in(folder: Path) -> Path:
    for number in range(40):
        words = " ".join(f"{word}{number * word % 17}" for word in range(120))
        (folder / f"{number}.txt").write_text(words, encoding="utf-8")
    prepare(sorted(folder.glob("*.txt")), folder / "shards", block_tokens=256, validation=0.2)
    return folder / "shards"
