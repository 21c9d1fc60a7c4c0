"""Experiments as files: grids, names of cells, what is kept and gone on with, tables, goals, and clear refusals."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from atoll.base.errors import SettingsError
from atoll.protocol.settings import ProtocolSettings
from atoll_learner.data.shards import TokenShards
from benchmarks.experiments import grid as grids
from benchmarks.experiments.cells import PACE_S, CellStore, Crew, Paces, Record, cell_of, record_of, toml, verbs
from benchmarks.experiments.experiment import in_order, main
from benchmarks.experiments.experiment_page import Raw, answers, figures, gap, load, page, save, svgs
from benchmarks.experiments.grid import FORMER_STANDING, GridCell, computed, rows, standing_settings, unsaid
from benchmarks.experiments.questions import FOLDER, Experiment, axes_of, parse, read
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
    """Axes of values and of named bundles are combined; a skipped point is none."""
    found = rows(grid(), range(2))

    assert [tuple(row.labels.values()) for row in found] == [("2", "mean"), ("2", "rda"), ("4", "mean")]
    assert [len(row.cells) for row in found] == [2, 2, 2]
    assert settings_of(found[1].cells[0])["protocol.outer_lr"] == 0.5


def test_budgets_and_computed_settings_follow_the_learners() -> None:
    """Tokens per learner times learners, and a text that begins with `=` is computed for every cell."""
    found = rows(grid(), range(1), scale=0.5)

    assert [(row.cells[0].learners, row.cells[0].tokens) for row in found] == [(2, 1000), (2, 1000), (4, 2000)]
    assert [settings_of(row.cells[0])["protocol.quorum"] for row in found] == [2, 2, 4]


@pytest.mark.parametrize(("text", "value"), [("7", 7), ("learners * 2", 8), ("(tokens - 4) / learners // 3", 8.0)])
def test_expressions_have_four_operations(text: str, value: float) -> None:
    """Numbers, names, brackets and the four operations, no more."""
    assert computed(text, {"learners": 4, "tokens": 100}) == value


@pytest.mark.parametrize("text", ["__import__('os')", "learners ** 9", "x", "1 +", "tokens.real"])
def test_other_expressions_are_refused(text: str) -> None:
    """Nothing is evaluated but arithmetic."""
    with pytest.raises((SyntaxError, KeyError)):
        computed(text, {"learners": 4, "tokens": 100})


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


def test_an_empty_table_takes_away_what_the_row_has() -> None:
    """A baseline can be undisturbed: an empty table clears every setting below its name."""
    text = """
    question = "?"
    [settings]
    tokens = 10
    [axes.speed]
    two = { sim = { speed = { learner-1 = 0.5, learner-2 = 0.5 }, step_s = 2.0 } }
    [baseline]
    name = "equal"
    settings = { "sim.speed" = {} }
    """
    (row,) = rows(grid(text), range(1))

    assert settings_of(row.rivals[0][0]) == {"sim.step_s": 2.0}
    assert settings_of(row.cells[0])["sim.speed.learner-1"] == 0.5


def test_cells_are_ordered_seed_by_seed() -> None:
    """The first seed of the whole grid comes before the second of anything."""
    seeds = [cell.seed for cell in in_order(rows(grid(), range(2)))]

    assert seeds == sorted(seeds)


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


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("question = ", "this is no experiment"),
        ('question = "?"\nseed = 3', "unknown field `seed`"),
        ('question = "?"\nmeasures = ["loss"]', "allowed: final, gap"),
        ('question = "?"\nmeasures = ["gap"]', "a gap needs a \\[baseline\\]"),
        ('question = "?"\nskip = [{ a = 1 }]\n[axes]\nlearners = [1]', "no such axis"),
        ('question = "?"\n[settings]\ntokens = 5\n[axes]\nlearners = 4', "an axis is a list of values"),
        ('question = "?"\n[settings]\nmethod = "sgd"\ntokens = 5', "allowed: atoll, data-parallel, diloco"),
        ('question = "?"', "a cell needs a budget"),
        ('question = "?"\n[settings]\ntokens = 5\ntokens_per_learner = 5', "one of the two"),
        ('question = "?"\n[settings]\ntokens = 5\nwarm = 1.0', "below 1"),
        ('question = "?"\n[settings]\ntokens = 5\n"protocol.merge" = "median"', "setting protocol.merge is wrong"),
        ('question = "?"\n[settings]\ntokens = 5\n"protocol.mergers" = 1', "unknown setting protocol.mergers"),
        ('question = "?"\n[settings]\ntokens = 5\nrate = 1', "unknown setting in an experiment"),
        ('question = "?"\n[settings]\ntokens = 5\n"train.rate" = 7', "setting train.rate is out of range"),
        ('question = "?"\n[settings]\ntokens = 5\nprotocol.quorum = 9', "quorum is out of range"),
        ('question = "?"\n[settings]\ntokens = 5\nprotocol.overlap_steps = 6', "overlap_steps is out of range"),
        ('question = "?"\n[settings]\ntokens = 5\nprotocol.quorum = "= twelve"', "this cannot be computed"),
    ],
)
def test_a_wrong_file_is_refused_in_words(text: str, words: str) -> None:
    """Before anything runs, with what was got and what is allowed."""
    with pytest.raises(SettingsError, match=words):
        rows(grid(text), range(1))


def test_every_experiment_of_the_repository_can_be_asked() -> None:
    """Each file is read, and each of its cells has settings that a run accepts."""
    files = sorted((ROOT / FOLDER).glob("*.toml"))
    counted = {path.stem: len(rows(read(path)[0], range(3))) for path in files}

    assert {"parity", "m-scaling", "failures", "heterogeneity", "merge", "scavenging"} <= counted.keys()
    assert min(counted.values()) >= 2
    assert all(axes_of(read(path)[0]) for path in files)


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


def test_a_cell_that_is_done_is_not_run_again(tmp_path: Path) -> None:
    """Only its file decides; equal cells asked for twice are one."""
    first: list[str] = []
    second: list[str] = []
    crew_of(tmp_path, first, jobs=2).work([small(0), small(1), small(0)])
    crew_of(tmp_path, second).work([small(0), small(1), small(2)])

    assert first[0].startswith("2 of 2 cells to run")
    assert second[0].startswith("1 of 3 cells to run")
    assert len(second) == 2
    assert "seed 2" in second[1]


def test_a_failure_is_said_and_the_others_go_on(tmp_path: Path) -> None:
    """With the end of the cell's own output; what fails is not kept, so it is tried again next time."""
    said: list[str] = []
    crew = crew_of(tmp_path, said)
    crew.work([small(13), small(1)])

    assert crew.failed == [small(13)]
    assert "no luck" in said[1]
    assert crew.store.find(small(13)) is None
    assert crew.store.find(small(1)) is not None


def test_an_interrupted_go_keeps_what_is_done(tmp_path: Path) -> None:
    """Ctrl-C ends the children and loses only the cells at work."""

    def interrupted(text: str) -> None:
        if text.startswith("[1/"):
            raise KeyboardInterrupt

    crew = Crew(CellStore(tmp_path, "sources"), quick, 1, say=interrupted)
    with pytest.raises(KeyboardInterrupt):
        crew.work([small(0), small(1)])
    said: list[str] = []
    crew_of(tmp_path, said).work([small(0), small(1)])

    assert said[0].startswith("1 of 2 cells to run")


def test_a_killed_go_is_gone_on_with(tmp_path: Path) -> None:
    """A runner that is killed in the middle of its second cell has its first one kept, whole."""
    here = Path(__file__)
    program = (
        f"import sys; sys.path[:0] = {[str(here.parents[2]), str(here.parents[1]), str(here.parent)]!r}\n"
        "from pathlib import Path; from test_experiments import crew_of, small\n"
        f"crew_of(Path({str(tmp_path)!r}), []).work([small(0), small(99), small(1)])"
    )
    killed = subprocess.run([sys.executable, "-c", program], capture_output=True, check=False)
    said: list[str] = []
    crew = crew_of(tmp_path, said)
    crew.work([small(0), small(1)])

    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert said[0].startswith("1 of 2 cells to run")
    assert not (tmp_path / "sources" / small(99).digest).with_suffix(".json").exists()


def test_a_bounded_go_starts_only_what_fits(tmp_path: Path) -> None:
    """Cells that would not end in time stay, also when a later, shorter one is run; nothing is lost."""
    large = GridCell("atoll", 2, 10**9, 0, 0.0, ())
    said: list[str] = []

    assert crew_of(tmp_path, said).work([large, small(1)], within_s=60.0) == [large]
    assert len(said) == 2


def test_estimates_come_from_the_nearest_kind() -> None:
    """Cells of the same method, learners and model first, then less alike ones; long ones count for more."""
    model = (("model.size", "2"),)
    paces = Paces(
        [(GridCell("atoll", 4, 30, 0, 0.0, model), 8 + 30.0), (GridCell("atoll", 8, 10, 0, 0.0, model), 8 + 50.0)]
    )

    assert paces.seconds(GridCell("atoll", 8, 100, 1, 0.0, model)) == pytest.approx(8 + 500)
    assert paces.seconds(GridCell("atoll", 2, 100, 1, 0.0, model)) == pytest.approx(8 + 200)
    assert paces.seconds(GridCell("atoll", 2, 100, 1, 0.0, (("model.size", "3"),))) == pytest.approx(8 + 200)
    assert paces.seconds(GridCell("diloco", 2, 100, 1, 0.0, ())) == pytest.approx(8 + 100 * PACE_S)


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


def test_a_warm_start_is_two_trainings(tmp_path: Path) -> None:
    """A share of the tokens data-parallel, on the schedule of all, in another order; then the rest from its model."""
    cell = GridCell("atoll", 4, 1000, 3, 0.1, (("protocol.quorum", "2"), ("train.tokens_before", "100")))
    first, second = verbs(cell, tmp_path)
    words = " ".join(first)

    assert "benchmarks.baselines --method data-parallel" in words
    assert "--seed 10003 --tokens 1000 --stop 100" in words
    assert words.endswith("--set train.tokens_before=0")
    assert "train" in second
    assert second[second.index("--tokens") + 1] == "900"
    assert second[-1] == f"learner.initial_model={tmp_path / 'warm' / 'model.safetensors'}"
    settings = "data.held_out_tokens = 131072\nprotocol.quorum = 2\ntrain.tokens_before = 100\n"
    assert (tmp_path / "cell.toml").read_text(encoding="utf-8") == settings


def test_the_record_of_a_warm_start_counts_both_parts() -> None:
    """Tokens and curve of the second part are counted on from the first."""
    warm = {**REPORT, "tokens_trained": 50, "validation": {**REPORT["validation"], "curve": []}}  # type: ignore[dict-item]
    record = record_of(small(0), REPORT, warm)

    assert (record["tokens"], record["merged"], record["merged_late"], record["lost"]) == (150, 130, 10, 10)
    assert record["curve"] == [(140, 2.1)]


def test_settings_become_toml() -> None:
    """Every kind of value that a scenario has survives the way through the file."""
    import tomllib  # noqa: PLC0415

    settings = {
        "protocol.merge": "mean",
        "sim.kills": [{"who": "shard-0", "at_s": 5.5}],
        "sim.speed.learner-2": 0.5,
        "x.yes": True,
    }
    wanted = {
        "protocol": {"merge": "mean"},
        "sim": {"kills": [{"who": "shard-0", "at_s": 5.5}], "speed": {"learner-2": 0.5}},
        "x": {"yes": True},
    }

    assert tomllib.loads(toml(settings)) == wanted


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
    """Where the baseline keeps none, with its last values."""
    records = records_of(FINALS)
    row = rows(grid(), range(2))[0]
    for cell, average in zip(row.cells, (2.1, 2.2), strict=True):
        records[cell.digest]["average"] = average
    without = answers([row], records)[0].values["average_gap"]
    records[row.rivals[1][0].digest]["average"] = 1.5

    assert without == {0: pytest.approx(0.05), 1: pytest.approx(0.1)}
    assert answers([row], records)[0].values["average_gap"] == {0: pytest.approx(0.4), 1: pytest.approx(0.1)}


def test_a_divergence_is_counted_and_not_averaged() -> None:
    """A cell that diverged has no loss; its row says so."""
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


def test_plots_have_a_line_per_combination() -> None:
    """A measure against an axis, and the validation curves."""
    drawn = svgs(raw_of(records_of(FINALS)))

    assert sorted(drawn) == ["experiment-which-1.svg", "experiment-which-2.svg"]
    assert "merging mean" in drawn["experiment-which-1.svg"]
    assert drawn["experiment-which-2.svg"].count("learners ") == 3


def test_a_published_page_can_be_made_again(tmp_path: Path) -> None:
    """From its raw file alone; a page that was touched by hand is found out."""
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


@pytest.mark.second_tier
def test_the_command_line_says_what_is_left(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`--list` runs nothing; an unknown name and a wrong file end with 2 and a sentence. Published cells of this text count."""
    (tmp_path / "which.toml").write_text(GRID, encoding="utf-8")
    text = tmp_path / "text"
    text.mkdir()
    for number in range(30):
        (text / f"{number}.txt").write_text(f"{number} " * 300, encoding="utf-8")
    words = [sys.executable, "-m", "atoll.cli", "data", "prepare", str(text), "--out", str(tmp_path / "data")]
    subprocess.run(words, check=True, capture_output=True)
    common = ["--folder", str(tmp_path), "--build", str(tmp_path / "build"), "--data", str(tmp_path / "data")]

    assert main(["--list", "--only", "merging=mean", *common]) == 0
    assert "12 of 12 cells to run" in capsys.readouterr().out
    assert main(["what", *common]) == 2
    assert "allowed: which" in capsys.readouterr().err

    fingerprint = TokenShards(tmp_path / "data").meta.fingerprint[:8]
    row = rows(grid(), range(1))[0]
    (mine,), ((theirs,), _) = row.cells, row.rivals
    for name, cell in (("mine", mine), ("strange", theirs)):
        trained_on = fingerprint if name == "mine" else "other"
        record = result(cell, 2.0, sources=f"{name}-{trained_on}", unsaid=unsaid(cell))
        save(raw_of({cell.digest: record}), tmp_path / "raw" / f"experiment-{name}.json.zst")
    assert main(["--list", "--only", "merging=mean", "--published", str(tmp_path / "raw"), *common]) == 0
    assert "11 of 12 cells to run" in capsys.readouterr().out


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


def test_a_page_says_on_which_former_defaults_its_runs_stand() -> None:
    """Of settings that the question sets itself it says nothing, nor of defaults that are today's."""
    text = """
    question = "?"
    [settings]
    tokens = 10
    "train.optimizer" = "adamw"
    """
    standing = {"train.optimizer": "adamw", "train.schedule": "cosine"}
    former = Raw(name="which", text=text, seeds=[0], records={}, standing=standing_settings() | standing)
    todays = Raw(name="which", text=text, seeds=[0], records={}, standing=standing_settings())
    told = [line for line in page(former).splitlines() if "These runs are old" in line]

    assert [("train.schedule = cosine" in line, "train.optimizer" in line) for line in told] == [(True, False)]
    assert "These runs are old" not in page(todays)


def test_a_rate_that_follows_from_the_model_is_a_default_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cells of another rule do not count, except those that say their rate."""
    cells = [
        GridCell("atoll", 2, 100, 0, 0.0, (("model.size", '"xs"'), *more)) for more in ((), (("train.rate", "0.001"),))
    ]
    before = [unsaid(cell) for cell in cells]
    monkeypatch.setattr("atoll_learner.train_settings.ANCHOR_RATE", 3e-4)

    assert [unsaid(cell) == former for cell, former in zip(cells, before, strict=True)] == [False, True]
