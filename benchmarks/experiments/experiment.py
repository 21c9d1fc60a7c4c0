"""Runs experiments written as TOML files: `make experiment NAME=m-scaling`, or `make experiments` for all of them.

Every cell is a process of its own, `JOBS` at a time, kept when it is done (`cells`). A go can be stopped at any time and is
gone on with by the same command. Cells are ordered seed by seed, so that the first seed of the whole grid is there before
the second begins. At the end the table is printed and, unless this is a quick look (`--scale`, `--set`), left for `make
results`. The exit code is 1 when a cell failed or a goal is missed, 2 when a file says what cannot be.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from atoll.base.errors import INTERRUPTED, AtollError, EnvironmentFault, SettingsError
from atoll.base.files import hold
from atoll_learner.data.shards import TokenShards
from benchmarks.experiments.cells import CellStore, Crew, Paces, cell_of, left, verbs
from benchmarks.experiments.experiment_page import PREFIX, Raw, answers, figures, load, page, save, svgs
from benchmarks.experiments.grid import (
    FOLDER,
    Experiment,
    GridCell,
    GridRow,
    matches,
    read,
    rows,
    sensible,
    standing_settings,
)
from benchmarks.lib.harness import count, natural, positive, write
from benchmarks.lib.kept_parts import source_digest
from benchmarks.lib.runs import prepare

BUILD = Path("build/experiments")
ROOTS = ("atoll_simulator", "benchmarks.baselines")


@dataclass(frozen=True, slots=True)
class ExperimentRequest:
    """An experiment as it was read: a file may be edited while its cells run."""

    name: str
    text: str
    experiment: Experiment
    over: dict[str, Any]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what was asked for; return the exit code."""
    options = _parser().parse_args(arguments)
    try:
        with _alone(options):
            return _go(options)
    except AtollError as error:
        print(f"experiment: {error}", file=sys.stderr)
        return error.exit_code
    except OSError as error:
        print(f"experiment: {error.filename or options.build}: {error.strerror}; what is done is kept", file=sys.stderr)
        return EnvironmentFault.exit_code


@contextmanager
def _alone(options: argparse.Namespace) -> Iterator[None]:
    """Hold the folder of the cells: a second runner would delete under the first one's cells what they write."""
    if options.list:
        yield
        return
    options.build.mkdir(parents=True, exist_ok=True)
    lock = hold(options.build / "lock")
    if lock is None:
        raise EnvironmentFault(
            "another runner uses this folder", got=options.build, todo="wait for it, or choose another --build"
        )
    with lock:
        yield


def _go(options: argparse.Namespace) -> int:
    names = options.names or sorted(path.stem for path in options.folder.glob("*.toml"))
    if not names:
        raise SettingsError("no experiments are there", got=options.folder, allowed="a folder with TOML files")
    _check_sources(options)
    asked = [(*read(options.folder / f"{name}.toml"), name) for name in names]
    for experiment, _, name in asked:
        sensible(experiment, f"{name}.toml")
    over = _over(options.set)
    work = [
        (ExperimentRequest(name, text, experiment, over), _rows(experiment, options, over))
        for experiment, text, name in asked
    ]
    data = options.data or prepare(options.build / "corpus")
    fingerprint = TokenShards(data).meta.fingerprint
    also = [*options.also, *(laid_back(options, fingerprint[:8]) if options.published else ())]
    store = CellStore(options.build, f"{source_digest(ROOTS)}-{fingerprint[:8]}", also)
    crew = Crew(store, verbs, options.jobs, _environment(options, data), say=lambda text: print(text, flush=True))
    ends_s = time.monotonic() + 60.0 * options.minutes
    code = 0
    for one, found in work:
        print(f"== {one.name}: {one.experiment.question}")
        cells = in_order([row for row in found if all(matches(row.labels, where) for where in options.only)])
        if not cells:
            print("no row is as --only says")
            code = max(code, SettingsError.exit_code)
            continue
        if options.list:
            undone = [cell for cell in dict.fromkeys(cells) if store.find(cell) is None]
            print(
                f"{len(undone)} of {len(dict.fromkeys(cells))} cells to run, about {_left(undone, store, options.jobs)}"
            )
            continue
        within_s = max(0.001, ends_s - time.monotonic()) if options.minutes else 0.0
        try:
            pending = crew.work(cells, within_s)
        except KeyboardInterrupt:
            finish(one, options, store)
            print("stopped: the same command goes on")
            return INTERRUPTED
        if pending:
            print(
                f"{len(pending)} cells are left, about {_left(pending, store, options.jobs)}: the same command goes on"
            )
        code = max(code, finish(one, options, store))
    return max(code, int(bool(crew.failed)))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="experiments of the folder; none: all")
    parser.add_argument("--folder", type=Path, default=FOLDER, help="where the TOML files are")
    parser.add_argument("--build", type=Path, default=BUILD, help="where cells are kept")
    parser.add_argument("--data", type=Path, help="token shards of `atoll data prepare`; default: Python's own source")
    parser.add_argument("--seeds", type=count, default=0, help="how many seeds; default: as the file says")
    parser.add_argument("--seed", type=natural, default=0, help="the first seed")
    parser.add_argument(
        "--only", type=_where, action="append", default=[], help="only rows with AXIS=VALUE; repeatable"
    )
    parser.add_argument(
        "--scale", type=positive, default=1.0, help="token budgets times this: a quick look, not published"
    )
    parser.add_argument("--set", action="append", default=[], help="a.b=c over every cell: a quick look, not published")
    parser.add_argument(
        "--minutes", type=positive, default=0.0, help="start only cells that are expected to end in time"
    )
    parser.add_argument("--jobs", type=count, default=os.cpu_count() or 1, help="cells at a time")
    parser.add_argument("--threads", type=count, default=1, help="compute threads of a cell")
    parser.add_argument(
        "--also", action="append", default=[], help="cells of these sources count too (a folder's name)"
    )
    parser.add_argument(
        "--published", type=Path, help="cells in the raw files of this folder count too, of whatever sources"
    )
    parser.add_argument("--list", action="store_true", help="only say how many cells are left, and how long they take")
    return parser


def _check_sources(options: argparse.Namespace) -> None:
    """Refuse sources that were never there: everything would be trained again."""
    for other in options.also:
        if not other or not (options.build / other).is_dir():
            known = sorted(path.name for path in options.build.glob("*-*") if path.is_dir())
            raise SettingsError("--also names no sources", got=other, allowed=", ".join(known) or "none are kept yet")


def _where(text: str) -> dict[str, str]:
    name, equals, value = text.partition("=")
    if not equals:
        raise argparse.ArgumentTypeError(f"{text!r} is not AXIS=VALUE")
    return {name: value}


def _over(texts: Sequence[str]) -> dict[str, Any]:
    over: dict[str, Any] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals:
            raise SettingsError("not an assignment", got=text, allowed="a.b=c", todo="write --set name=value")
        over[name] = _number(value)
    return over


def _number(text: str) -> int | float | str:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def _seeds(experiment: Experiment, options: argparse.Namespace) -> range:
    return range(options.seed, options.seed + (options.seeds or experiment.seeds))


def _rows(experiment: Experiment, options: argparse.Namespace, over: dict[str, Any]) -> list[GridRow]:
    if not 0.0 < options.scale <= 100.0:
        raise SettingsError("--scale is out of range", got=options.scale, allowed="above 0, at most 100")
    return rows(experiment, _seeds(experiment, options), scale=options.scale, over=over)


def in_order(found: Sequence[GridRow]) -> list[GridCell]:
    """Return the cells of rows and their rivals, seed by seed, each once."""
    seeds = range(max((len(row.cells) for row in found), default=0))
    groups = [group for row in found for group in (*row.rivals, row.cells)]
    return list(dict.fromkeys(group[number] for number in seeds for group in groups))


def finish(one: ExperimentRequest, options: argparse.Namespace, store: CellStore) -> int:
    """Print the table and leave raw file, figures, or a quick look's page; return 1 when a goal is missed.

    Every seed of which anything is known is in it, also when fewer were asked for this time.
    """
    name, experiment, over = one.name, one.experiment, one.over
    asked = {*range(experiment.seeds), *_seeds(experiment, options)}
    cells = in_order(rows(experiment, sorted(asked), scale=options.scale, over=over))
    records = {cell.digest: record for cell in cells if (record := store.find(cell)) is not None}
    if not records:
        return 0
    seeds = sorted({cell.seed for cell in cells if cell.digest in records})
    stood = standing_settings()
    raw = Raw(name=name, text=one.text, seeds=seeds, records=records, scale=options.scale, over=over, standing=stood)
    quick = options.scale != 1.0 or bool(over)
    folder = options.build / ("quick" if quick else "pages")
    save(raw, folder / f"{PREFIX}{name}.json.zst")
    (folder / f"{PREFIX}{name}.md").write_text(page(raw), encoding="utf-8")
    for file, drawing in svgs(raw).items():
        (folder / file).write_text(drawing, encoding="utf-8")
    print(page(raw))
    print(f"written to {folder / PREFIX}{name}.md")
    if quick:
        return 0
    made = figures(raw.experiment, answers(raw.rows, records))
    return write(f"{PREFIX}{name}", options.seed, made, [folder / f"{PREFIX}{name}.json.zst"])


def laid_back(options: argparse.Namespace, text: str) -> list[str]:
    """Lay the cells of published raw files back on the stores that they came from; return those trained on this text."""
    files = sorted(options.published.glob(f"{PREFIX}*.json.zst"))
    if not files:
        raise SettingsError(
            "--published has no raw files", got=options.published, allowed=f"a folder with {PREFIX}….json.zst"
        )
    stores: dict[str, CellStore] = {}
    for record in (record for path in files for record in load(path).records.values()):
        store = stores.setdefault(record["sources"], CellStore(options.build, record["sources"]))
        cell = cell_of(record["cell"])
        if store.find(cell) is None:
            store.keep(cell, record)
    return [name for name in stores if name.endswith(f"-{text}")]


def _environment(options: argparse.Namespace, data: Path) -> dict[str, str]:
    """Return what every cell is told beside its own settings; nothing of it changes a figure."""
    return {
        "ATOLL_DATA__DIR": str(data.resolve()),
        "ATOLL_LEARNER__THREADS": str(options.threads),
        "ATOLL_LEARNER__COMPILE_CACHE": str((options.build / "compiled").resolve()),
        "ATOLL_LOG__FORMAT": "json",
        "OMP_NUM_THREADS": str(options.threads),
        # XLA divides even one device's work over as many threads as there are cores, and spends more on it than it saves.
        "PJRT_NPROC": str(options.threads),
        # Hundreds of short processes: compiling Python anew in each, where that is the habit, would cost seconds a cell.
        "PYTHONDONTWRITEBYTECODE": "",
        "PYTHONPYCACHEPREFIX": str((options.build / "bytecode").resolve()),
    }


def _left(cells: Sequence[GridCell], store: CellStore, jobs: int) -> str:
    return left(cells, Paces(store.paces()), jobs)


if __name__ == "__main__":
    sys.exit(main())
