"""What the runner of experiments refuses before it trains, and what it survives: damaged records, a second runner."""

from __future__ import annotations

import fcntl
import json
from pathlib import Path

import pytest

from atoll.base.errors import SettingsError
from benchmarks.experiments.cells import CellStore
from benchmarks.experiments.experiment import main
from benchmarks.experiments.grid import GridCell, computed, rows
from benchmarks.experiments.questions import FOLDER, parse, read, sensible

ROOT = Path(__file__).resolve().parents[2]
HEAD = 'question = "?"\n'
GRID = "[settings]\ntokens = 5\n[axes]\nlearners = [2, 4]\n"
CELL = GridCell("atoll", 2, 100, 0, 0.0, ())


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[axes]\nlearners = [2, 2]", "an axis has a value twice"),
        ('[axes]\n"train.batch" = [4]\n[axes.train]\nbatch = [8]', "an axis is there twice"),
        ("[axes]\nx = {}", "an axis has no value"),
        ("skip = [{ learners = 9 }]\n" + GRID, "no row has this value"),
        (
            GRID + '[[goals]]\nsays = "s"\nmeasure = "final"\nat_most = 1\nwhere = { learners = 9 }',
            "no row has this value",
        ),
        (GRID + '[[goals]]\nsays = "s"\nmeasure = "final"', "a goal has no bound"),
        (GRID + '[[goals]]\nsays = "s"\nmeasure = "final"\nnear = 0', "a goal has no bound"),
        (GRID + '[[goals]]\nsays = "s"\nmeasure = "final"\nat_most = nan', "a goal has no bound"),
        (GRID + '[[goals]]\nsays = "s"\nmeasure = "gap"\nat_most = 1', "a goal needs a"),
        (GRID + '[[plots]]\nx = "rate"', "no such axis"),
        ("seeds = 0\n" + GRID, "a seed and a measure"),
        ("measures = []\n" + GRID, "a seed and a measure"),
        (GRID + '[baseline]\nname = "b"\nbest = { "train.rate" = [] }', "the best of nothing"),
    ],
)
def test_what_would_be_of_no_effect_is_refused(text: str, words: str) -> None:
    """A misspelt value of a goal is not found out after hours, when the goal was never judged."""
    with pytest.raises(SettingsError, match=words):
        sensible(parse(HEAD + text, "a test"), "a test")


def test_every_experiment_of_the_repository_makes_sense() -> None:
    """Each could be answered as it asks."""
    for path in sorted((ROOT / FOLDER).glob("*.toml")):
        sensible(read(path)[0], path.name)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ('tokens = 5\nwarm = "x"', "warm is a share"),
        ("tokens = 5\nmethod = {}", "unknown method"),
        ("tokens = 5\nlearners = 65", "learners is wrong"),
        ("tokens = 5\nlearners = true", "learners is wrong"),
    ],
)
def test_settings_of_another_kind_are_refused(settings: str, words: str) -> None:
    """In words, and as many learners as no run has before any run begins."""
    with pytest.raises(SettingsError, match=words):
        rows(parse(f"{HEAD}[settings]\n{settings}", "a test"), range(1))


@pytest.mark.parametrize("text", ["= " + "9" * 400 + " / 3", "= " + "1+" * 5000 + "1"])
def test_expressions_too_large_are_refused(text: str) -> None:
    """As others that cannot be computed."""
    with pytest.raises((ArithmeticError, RecursionError)):
        computed(text[1:], {})
    with pytest.raises(SettingsError, match="this cannot be computed"):
        rows(parse(f'{HEAD}[settings]\ntokens = 5\n"train.rate" = "{text}"', "a test"), range(1))


def test_a_file_that_is_no_text_is_refused(tmp_path: Path) -> None:
    """It is named."""
    (tmp_path / "odd.toml").write_bytes(b'question = "\xff"')

    with pytest.raises(SettingsError, match=r"odd\.toml"):
        read(tmp_path / "odd.toml")


@pytest.mark.parametrize("left", ["", "{", "[]", "{}", '{"cell": 5}', "\0\0"])
def test_a_damaged_record_is_a_cell_not_done(tmp_path: Path, left: str) -> None:
    """It is run again; estimates do without it."""
    store = CellStore(tmp_path, "sources")
    store.keep(CELL, {"cell": CELL.describe(), "final": None, "took_s": 1.0})
    assert store.find(CELL) is not None
    (tmp_path / "sources" / f"{CELL.digest}.json").write_text(left, encoding="utf-8")

    assert store.find(CELL) is None
    assert store.paces() == []


def test_a_record_of_another_cell_is_none_of_this_one(tmp_path: Path) -> None:
    """The name is the digest of what the record says it is of."""
    store = CellStore(tmp_path, "sources")
    store.keep(CELL, {"cell": {**CELL.describe(), "seed": 7}, "final": 1.0, "took_s": 1.0})
    assert json.loads((tmp_path / "sources" / f"{CELL.digest}.json").read_text(encoding="utf-8"))["final"] == 1.0

    assert store.find(CELL) is None


@pytest.mark.parametrize(
    "flags",
    [("--jobs", "0"), ("--threads", "0"), ("--seeds", "0"), ("--seed", "-1"), ("--minutes", "nan"), ("--scale", "x")],
)
def test_numbers_that_no_go_has_are_refused(
    tmp_path: Path, flags: tuple[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    """By the name of the flag, as in every benchmark (`benchmarks.lib.harness`)."""
    with pytest.raises(SystemExit) as left:
        main(["--list", "--build", str(tmp_path), *flags])

    assert left.value.code == 2
    assert f"argument {flags[0]}: " in capsys.readouterr().err


def test_sources_that_were_never_there_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A misspelt name would train everything again."""
    assert main(["--list", "--build", str(tmp_path), "--also", "nowhere"]) == 2
    assert "--also names no sources" in capsys.readouterr().err


def test_a_folder_without_published_cells_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A wrong folder would train everything again."""
    assert main(["--list", "--build", str(tmp_path), "--published", str(tmp_path)]) == 2
    assert "--published has no raw files" in capsys.readouterr().err


def test_a_folder_has_one_runner(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Two would delete each other's cells."""
    with (tmp_path / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert main(["--build", str(tmp_path)]) == 3
    assert "another runner uses this folder" in capsys.readouterr().err


def test_a_folder_that_cannot_be_written_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Without a traceback."""
    (tmp_path / "file").touch()

    assert main(["--build", str(tmp_path / "file" / "build")]) == 3
    assert "Not a directory" in capsys.readouterr().err
