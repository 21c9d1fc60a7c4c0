"""Experiments as files: grids, names of cells, what is kept and gone on with, tables, goals, and clear refusals."""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from atoll.protocol.settings import ProtocolSettings
from benchmarks.experiments import grid as grids
from benchmarks.experiments.cells import CellStore, Crew, Record, cell_of, record_of
from benchmarks.experiments.experiment import in_order
from benchmarks.experiments.experiment_page import Raw, answers, figures, gap, load, page, save
from benchmarks.experiments.grid import (
    FOLDER,
    FORMER_STANDING,
    Experiment,
    GridCell,
    axes_of,
    parse,
    read,
    rows,
    sensible,
    standing_settings,
    unsaid,
)
from benchmarks.lib.kept_parts import closure, source_digest
from benchmarks.lib.publish import page_differences, publish

ROOT = Path(__file__).resolve().parents[2]
GRID = """
question = "Which?"
measures = ["final", "gap", "loss_time"]
seeds = 2
skip = [{ learners = 4, merging = "rda" }]

[settings]
tokens_per_learner = 1000
protocol = { quorum = "= learners", interval_steps = 8 }

[axes]
learners = [2, 4]

[axes.merging]
mean = { "protocol.merge" = "mean" }
rda = { protocol = { merge = "rda", outer_lr = 0.5 } }

[baseline]
name = "data-parallel"
settings = { method = "data-parallel" }
best = { "train.rate" = [1e-3, 2e-3] }

[[goals]]
says = "the mean is close"
measure = "gap"
where = { merging = "mean" }
at_most = 0.2

[[goals]]
says = "rda is quicker"
measure = "loss_time"
where = { learners = 2, merging = "rda" }
below = [{ merging = "mean" }]

[[plots]]
x = "learners"

[[plots]]
x = "merged"
y = "final"
"""


def grid(text: str = GRID) -> Experiment:
    return parse(text, "a test")


def settings_of(cell: GridCell) -> dict[str, Any]:
    settings: dict[str, Any] = cell.describe()["settings"]
    return settings


def result(cell: GridCell, final: float | None, **facts: object) -> Record:
    half, end = cell.tokens // 2, cell.tokens
    return {
        "cell": cell.describe(),
        "ended": "finished",
        "initial": 8.0,
        "final": final,
        "curve": [(0, 8.0), (half, 4.0), (end, 3.0)],
        "tokens": end,
        "merged": end,
        "merged_late": 0,
        "lost": 0,
        "time_s": None if cell.method == "data-parallel" else 100.0,
        "goodput": 1.0,
        "contributors": 2.0,
        "commits": 5,
        "refused": 0,
        "bytes_up": 10,
        "data": "d",
        "took_s": 3.0,
        "machine": "a machine",
        "commit": "0123456789abcdef",
        "sources": "s",
        **facts,
    }


# --- questions ----------------------------------------------------------------------------------------------------------


def test_a_grid_has_every_combination_but_those_skipped() -> None:
    found = rows(grid(), range(2))

    assert [tuple(row.labels.values()) for row in found] == [("2", "mean"), ("2", "rda"), ("4", "mean")]
    assert [len(row.cells) for row in found] == [2, 2, 2]
    assert settings_of(found[1].cells[0])["protocol.outer_lr"] == 0.5


def test_budgets_and_computed_settings_follow_the_learners() -> None:
    """Tokens per learner times learners, and a text that begins with `=` is computed for every cell."""
    found = rows(grid(), range(1), scale=0.5)

    assert [(row.cells[0].learners, row.cells[0].tokens) for row in found] == [(2, 1000), (2, 1000), (4, 2000)]
    assert [settings_of(row.cells[0])["protocol.quorum"] for row in found] == [2, 2, 4]


def test_rivals_read_only_what_concerns_them() -> None:
    """Data-parallel cells of rows that differ in the protocol alone are one cell, done once."""
    first, second, third = rows(grid(), range(1))

    assert first.rivals == second.rivals
    assert first.rivals != third.rivals
    assert [settings_of(cell) for (cell,) in first.rivals] == [{"train.rate": 0.001}, {"train.rate": 0.002}]
    assert len(in_order([first, second, third])) == 3 + 2 * 2


def test_a_default_is_the_same_cell_said_or_not() -> None:
    """What learners have anyway, and what `atoll up` sets, are no part of a cell's name; other values are."""
    text = f"""
    question = "?"
    [settings]
    tokens = 10
    [axes.said]
    nothing = {{}}
    same = {{ "train.beta2" = 0.99, "protocol.outer_lr" = {ProtocolSettings().outer_lr}, "protocol.adoption" = "carry" }}
    another = {{ "protocol.adoption" = "overwrite" }}
    sequence = {{ "train.sequence" = 128 }}
    """
    nothing, said, another, sequence = (row.cells[0].digest for row in rows(grid(text), range(1)))

    assert nothing == said
    assert len({nothing, another, sequence}) == 3


def test_names_of_cells_differ_when_cells_do() -> None:
    """The digest is that of method, learners, tokens, seed, warm start and every setting, in whatever order."""
    cell = GridCell("atoll", 2, 100, 0, 0.0, (("protocol.merge", '"mean"'), ("train.rate", "0.001")))
    others = [
        GridCell("diloco", 2, 100, 0, 0.0, cell.settings),
        GridCell("atoll", 3, 100, 0, 0.0, cell.settings),
        GridCell("atoll", 2, 101, 0, 0.0, cell.settings),
        GridCell("atoll", 2, 100, 1, 0.0, cell.settings),
        GridCell("atoll", 2, 100, 0, 0.1, cell.settings),
        GridCell("atoll", 2, 100, 0, 0.0, cell.settings[:1]),
    ]

    assert len({cell.digest, *(other.digest for other in others)}) == 7
    assert cell_of(cell.describe()) == cell
    assert cell_of(json.loads(json.dumps(cell.describe()))).digest == cell.digest


def test_every_experiment_of_the_repository_can_be_asked() -> None:
    files = sorted((ROOT / FOLDER).glob("*.toml"))
    counted = {path.stem: len(rows(read(path)[0], range(3))) for path in files}

    assert {"parity", "m-scaling", "failures", "heterogeneity", "merge", "scavenging"} <= counted.keys()
    assert min(counted.values()) >= 2
    assert all(axes_of(read(path)[0]) for path in files)
    for path in files:
        sensible(read(path)[0], path.name)


def published() -> list[Path]:
    """Return the raw files of the pages that an experiment of the repository made."""
    return sorted((ROOT / "docs/results/raw").glob("experiment-*.json.zst"))


@pytest.mark.parametrize("path", published(), ids=lambda path: path.name.partition(".")[0])
def test_a_file_still_asks_for_the_runs_of_its_page(path: Path) -> None:
    """Whatever has become a default since: said where it is not the same, so `make experiment` makes the page's runs."""
    raw = load(path)
    today = standing_settings()
    stood = FORMER_STANDING if raw.standing is None else {name: raw.standing.get(name) for name in FORMER_STANDING}
    asked = [cell for row in rows(read(ROOT / FOLDER / f"{raw.name}.toml")[0], raw.seeds) for cell in row.cells]
    made = [cell for row in raw.rows for cell in row.cells]

    assert len(asked) == len(made)
    for now, then in zip(asked, made, strict=True):
        said, page = settings_of(now), settings_of(then)
        former = {name: value for name, value in stood.items() if grids._reads(now.method, name)}
        assert {name: said.get(name, today.get(name)) for name in {*page, *former}} == former | page
        if now.method == "atoll":
            assert former.keys() == FORMER_STANDING.keys()


# --- cells --------------------------------------------------------------------------------------------------------------

REPORT = {
    "ended": "finished",
    "tokens_trained": 100,
    "tokens_by_fate": {"merged": 80, "merged_late": 10, "superseded": 0, "lost": 10},
    "validation": {
        "initial_bits_per_byte": 8.0,
        "final_bits_per_byte": 2.0,
        "curve": [{"run_tokens": 100, "tokens_merged": 90, "bits_per_byte": 2.1}],
    },
    "wall_s": 5.0,
    "goodput": 0.9,
    "data_source_hash": "d",
}
CHILD = "import os,sys; os.mkdir(sys.argv[1]); open(sys.argv[1] + '/report.json', 'w').write(sys.argv[2])"


def quick(cell: GridCell, out: Path) -> list[list[str]]:
    """Return the command of a cell that needs no training; seed 13 fails, seed 99 kills its runner."""
    if cell.seed == 13:
        return [[sys.executable, "-S", "-c", "import sys; sys.exit('no luck')"]]
    if cell.seed == 99:
        return [[sys.executable, "-S", "-c", f"import os; os.kill(os.getppid(), {int(signal.SIGKILL)})"]]
    return [[sys.executable, "-S", "-c", CHILD, str(out / "run"), json.dumps(REPORT)]]


def small(seed: int) -> GridCell:
    return GridCell("atoll", 2, 100, seed, 0.0, ())


def crew_of(folder: Path, said: list[str], jobs: int = 1) -> Crew:
    return Crew(CellStore(folder, "sources"), quick, jobs, say=said.append)


@pytest.mark.parametrize("left", ["", "{", "[]", "{}", '{"cell": 5}', "\0\0"])
def test_a_damaged_record_is_a_cell_not_done(tmp_path: Path, left: str) -> None:
    store = CellStore(tmp_path, "sources")
    store.keep(small(0), {"cell": small(0).describe(), "final": None, "took_s": 1.0})
    assert store.find(small(0)) is not None
    (tmp_path / "sources" / f"{small(0).digest}.json").write_text(left, encoding="utf-8")

    assert store.find(small(0)) is None
    assert store.paces() == []


def test_a_record_of_another_cell_is_none_of_this_one(tmp_path: Path) -> None:
    store = CellStore(tmp_path, "sources")
    store.keep(small(0), {"cell": {**small(0).describe(), "seed": 7}, "final": 1.0, "took_s": 1.0})
    assert json.loads((tmp_path / "sources" / f"{small(0).digest}.json").read_text(encoding="utf-8"))["final"] == 1.0

    assert store.find(small(0)) is None


def test_cells_of_other_sources_count_when_named(tmp_path: Path) -> None:
    """What was made with other sources is not found, unless somebody says that they are as good."""
    crew_of(tmp_path, []).work([small(0)])

    assert CellStore(tmp_path, "newer").find(small(0)) is None
    assert CellStore(tmp_path, "newer", ["sources"]).find(small(0)) is not None


def test_cells_made_with_other_defaults_never_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A default is no part of a cell's name: where it has changed since, the same name means another run."""
    crew_of(tmp_path, []).work([small(0)])
    standing = dict(grids._standing())
    monkeypatch.setattr(grids, "_standing", lambda: standing | {"protocol.outer_lr": 0.123})

    assert CellStore(tmp_path, "newer", ["sources"]).find(small(0)) is None
    assert CellStore(tmp_path, "sources").find(small(0)) is not None


def test_the_record_of_a_warm_start_counts_both_parts() -> None:
    warm = {**REPORT, "tokens_trained": 50, "validation": {**REPORT["validation"], "curve": []}}  # type: ignore[dict-item]
    record = record_of(small(0), REPORT, warm)

    assert (record["tokens"], record["merged"], record["merged_late"], record["lost"]) == (150, 130, 10, 10)
    assert record["curve"] == [(140, 2.1)]


def test_sources_are_named_by_what_is_imported(tmp_path: Path) -> None:
    """A change to an imported module changes the name, one to a module that is not imported does not."""
    kernel, service = tmp_path / "shared" / "k", tmp_path / "services" / "s" / "s_pkg"
    for folder in (kernel, service):
        folder.mkdir(parents=True)
        (folder / "__init__.py").touch()
    (kernel / "used.py").write_text("x = 1", encoding="utf-8")
    (kernel / "lazy.py").write_text("x = 1", encoding="utf-8")
    (kernel / "other.py").write_text("x = 1", encoding="utf-8")
    (service / "main.py").write_text("from k import used\ndef f():\n    import k.lazy", encoding="utf-8")
    before = source_digest(["s_pkg"], tmp_path)
    (kernel / "other.py").write_text("x = 2", encoding="utf-8")
    unchanged = source_digest(["s_pkg"], tmp_path)
    (kernel / "lazy.py").write_text("x = 2", encoding="utf-8")

    assert sorted(closure(["s_pkg"], tmp_path)) == ["k", "k.lazy", "k.used", "s_pkg", "s_pkg.main"]
    assert before == unchanged
    assert source_digest(["s_pkg"], tmp_path) != before


# --- answers ------------------------------------------------------------------------------------------------------------


def records_of(finals: dict[tuple[str, str], Sequence[float | None]]) -> dict[str, Record]:
    """Return records of the grid: by labels, the final losses by seed; data-parallel gets 2.0, at the worse rate 2.5."""
    records = {}
    for row in rows(grid(), range(2)):
        for cell, final in zip(row.cells, finals[tuple(row.labels.values())], strict=True):
            records[cell.digest] = result(cell, final)
        for number, group in enumerate(row.rivals):
            for cell in group:
                records[cell.digest] = result(cell, 2.5 - 0.5 * number)
    return records


FINALS: dict[tuple[str, str], Sequence[float | None]] = {
    ("2", "mean"): (2.2, 2.4),
    ("2", "rda"): (2.1, 2.6),
    ("4", "mean"): (2.0, None),
}


def test_gaps_are_taken_seed_by_seed_to_the_best_rival() -> None:
    """Of the two rates the better one is the baseline; the interval is that of the seeds' own gaps."""
    found = answers(rows(grid(), range(2)), records_of(FINALS))
    spread = found[0].spread("gap")

    assert found[0].rival == 1
    assert found[0].values["gap"] == {0: pytest.approx(0.1), 1: pytest.approx(0.2)}
    assert spread is not None
    assert spread.mean == pytest.approx(0.15)
    assert spread.half == pytest.approx(12.7062 * 0.05, rel=1e-4)


def test_an_average_is_compared_with_an_average() -> None:
    records = records_of(FINALS)
    row = rows(grid(), range(2))[0]
    for cell, average in zip(row.cells, (2.1, 2.2), strict=True):
        records[cell.digest]["average"] = average
    without = answers([row], records)[0].values["average_gap"]
    records[row.rivals[1][0].digest]["average"] = 1.5

    assert without == {0: pytest.approx(0.05), 1: pytest.approx(0.1)}
    assert answers([row], records)[0].values["average_gap"] == {0: pytest.approx(0.4), 1: pytest.approx(0.1)}


def test_a_divergence_is_counted_and_not_averaged() -> None:
    found = answers(rows(grid(), range(2)), records_of(FINALS))

    assert (found[2].diverged, found[2].values["final"]) == (1, {0: 2.0})


def test_a_gap_is_taken_at_equal_merged_tokens() -> None:
    """A run that merged half as much is compared with the rival's loss then, by the rival's curve."""
    cell = small(0)
    ours, theirs = result(cell, 3.0), result(cell, 2.0)
    behind = {**ours, "merged": cell.tokens // 2}

    assert gap(ours, theirs) == pytest.approx(0.5)
    assert gap(behind, theirs) == pytest.approx(3.0 / (2.0 * 4.0 / 3.0) - 1.0)
    assert gap(theirs, behind) == pytest.approx(2.0 * (4.0 / 3.0) / 3.0 - 1.0)
    assert gap({**ours, "final": None}, theirs) is None


def test_goals_hold_or_do_not() -> None:
    """A bound on a mean, and a comparison of rows seed by seed; each row that a goal speaks of has its own line."""
    experiment = grid()
    made = figures(experiment, answers(rows(experiment, range(2)), records_of(FINALS)))

    assert [(figure.name, figure.holds) for figure in made] == [
        ("the mean is close (learners 2, merging mean)", True),
        ("the mean is close (learners 4, merging mean)", True),
        ("rda is quicker (learners 2, merging rda against learners 2, merging mean)", False),
    ]
    assert made[2].value == pytest.approx(5.0)


def raw_of(records: dict[str, Record]) -> Raw:
    return Raw(name="which", text=GRID, seeds=[0, 1], records=records, standing=grids.standing_settings())


def test_a_page_has_a_table_with_spreads_and_every_seed() -> None:
    """Means with half intervals, what is missing, the rival's rate, goals, and the gap of every seed."""
    records = records_of(FINALS)
    gone = rows(grid(), range(2))[1].cells[1]
    del records[gone.digest]
    lines = page(raw_of(records)).splitlines()

    assert "| 2 | mean | 2 | 2.3 ± 1.3 | +15.00 ± 63.53 % | 230 ± 1.3e+02 | train.rate 0.002 |" in lines
    assert "| 2 | rda | 1 of 2 | 2.1 | +5.00 % | 210 | train.rate 0.002 |" in lines
    assert "| 4 | mean | 2, 1 diverged | 2 | +0.00 % | 200 | train.rate 0.002 |" in lines
    assert "| 2 | mean | 10 % | 20 % |" in lines
    assert any(line.startswith("| rda is quicker") and "| yes | paired; one seed |" in line for line in lines)


def test_a_published_page_can_be_made_again(tmp_path: Path) -> None:
    raw = tmp_path / "made" / "experiment-which.json.zst"
    save(raw_of(records_of(FINALS)), raw)
    folder = tmp_path / "results"
    publish("experiment-which", {"raw": [str(raw)]}, folder)
    kept = folder / "raw" / raw.name
    same = page_differences(kept, folder)
    page_path = folder / "experiment-which.md"
    page_path.write_text(page_path.read_text(encoding="utf-8").replace("+15.00", "+1.00"), encoding="utf-8")

    assert load(kept).records == load(raw).records
    assert same == []
    assert len(page_differences(kept, folder)) == 2


def test_a_published_page_outlives_the_defaults_that_named_its_cells() -> None:
    """Rows that say what was a default, or has become one, find their cells: by what the file keeps, or what stood before."""
    text = """
    question = "?"
    [settings]
    tokens = 10
    [axes.sent]
    former = { "protocol.codec_up" = "bf16" }
    todays = { "protocol.codec_up" = "int4" }
    """
    kept = Raw(name="which", text=text, seeds=[0], records={}, standing={"protocol.codec_up": "f32"})
    former, todays = (row.cells[0] for row in Raw(name="which", text=text, seeds=[0], records={}).rows)

    assert [settings_of(row.cells[0])["protocol.codec_up"] for row in kept.rows] == ["bf16", "int4"]
    assert ("protocol.codec_up" in settings_of(former), "protocol.codec_up" in settings_of(todays)) == (False, True)


def test_a_rate_that_follows_from_the_model_is_a_default_too(monkeypatch: pytest.MonkeyPatch) -> None:
    cells = [
        GridCell("atoll", 2, 100, 0, 0.0, (("model.size", '"xs"'), *more)) for more in ((), (("train.rate", "0.001"),))
    ]
    before = [unsaid(cell) for cell in cells]
    monkeypatch.setattr("atoll_learner.train_settings.ANCHOR_RATE", 3e-4)

    assert [unsaid(cell) == former for cell, former in zip(cells, before, strict=True)] == [False, True]
