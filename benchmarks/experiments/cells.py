"""Runs cells in processes of their own and keeps what they came to, so that any work can be stopped and gone on with.

A cell that is done lies as `<digest>.json` in the folder of the sources and data it was made with, written whole or not at
all; nothing else decides whether it is run again. Children die with the runner. What a cell takes is estimated from
what cells like it took per token; a go that is bounded in time starts only what is expected to fit.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from atoll.base.files import write_whole
from atoll.base.machine import commit, machine
from atoll.local.processes import DIE_WITH_PARENT
from benchmarks.experiments.grid import GridCell, Value, unsaid
from benchmarks.lib.runs import flag_words

PACE_S: Final = 1 / 40_000
START_S: Final = 8.0
POLL_S: Final = 0.1
MARGIN: Final = 1.1
WARM_SEED: Final = 10_000
LOG_LINES: Final = 12
HELD_OUT: Final = "data.held_out_tokens"
HELD_OUT_TOKENS: Final = 131_072
"""Four times what a run measures by default: seeds differ by little."""
POINTS: Final = 8
"""Of a curve. Each costs a third of the time in which as many tokens are trained as are held out."""
EVALUATE: Final = "sim.evaluate_tokens"

Record = dict[str, Any]
Commands = Callable[[GridCell, Path], list[list[str]]]


class CellStore:
    """Records of cells, in `folder`/`name`.

    Cells made with sources that `also` names count as well, where the defaults that they leave unsaid were today's.
    """

    def __init__(self, folder: Path, name: str, also: Sequence[str] = ()) -> None:
        self.here = folder / name
        self._places = [self.here, *(folder / other for other in also)]
        self._folder = folder

    def find(self, cell: GridCell) -> Record | None:
        """Return what a cell came to, None when it is not done."""
        for place in self._places:
            record = _kept(place / f"{cell.digest}.json")
            if record is not None and (place == self.here or record.get("unsaid") == unsaid(cell)):
                return record
        return None

    def keep(self, cell: GridCell, record: Record) -> None:
        self.here.mkdir(parents=True, exist_ok=True)
        write_whole(self.here / f"{cell.digest}.json", (json.dumps(record) + "\n").encode())

    def paces(self) -> list[tuple[GridCell, float]]:
        """Return every cell that was ever done here, whatever its sources, with the seconds it took."""
        found = []
        for path in sorted(self._folder.glob("*/*.json")):
            record = _kept(path)
            if record is not None:
                found.append((cell_of(record["cell"]), float(record["took_s"])))
        return found


def _kept(path: Path) -> Record | None:
    """Return the record of a file; None where there is none, or one that a failing disk has left: that cell is run again."""
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
        whole = isinstance(record, dict) and path.stem == cell_of(record["cell"]).digest and "final" in record
        return record if whole and isinstance(record["took_s"], int | float) else None
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def cell_of(described: Mapping[str, Any]) -> GridCell:
    settings = tuple((name, json.dumps(value, sort_keys=True)) for name, value in sorted(described["settings"].items()))
    own = {name: described[name] for name in ("method", "learners", "tokens", "seed", "warm")}
    return GridCell(**own, settings=settings)


class Paces:
    """Seconds a cell will take: by the tokens per second of cells of its method, learners and model, else of less alike ones.

    Sums of seconds over sums of tokens, so that long cells count for more than quick looks.
    """

    def __init__(self, known: Iterable[tuple[GridCell, float]]) -> None:
        self._known: dict[tuple[str, ...], tuple[float, int]] = {}
        for cell, took_s in known:
            self.add(cell, took_s)

    def add(self, cell: GridCell, took_s: float) -> None:
        for key in self._keys(cell):
            seconds, tokens = self._known.get(key, (0.0, 0))
            self._known[key] = (seconds + max(0.1, took_s - START_S), tokens + cell.tokens)

    def seconds(self, cell: GridCell) -> float:
        """Return the estimate, of the nearest kind that is known."""
        seconds, tokens = next((self._known[key] for key in self._keys(cell) if key in self._known), (PACE_S, 1))
        return START_S + cell.tokens * seconds / tokens

    @staticmethod
    def _keys(cell: GridCell) -> list[tuple[str, ...]]:
        shape = [f"{name}={value}" for name, value in cell.settings if name.startswith(("model.", "train.batch"))]
        return [(cell.method, str(cell.learners), *shape), (cell.method, *shape), (cell.method,)]


@dataclass(slots=True)
class _Job:
    """A cell at work: its present process, and the commands that are left."""

    cell: GridCell
    out: Path
    ahead: list[list[str]]
    began_s: float
    process: subprocess.Popen[bytes] | None = None


@dataclass(slots=True)
class Crew:
    """Runs cells, `jobs` at a time, with `environment` over this process's own (without its ATOLL_ variables)."""

    store: CellStore
    commands: Commands
    jobs: int
    environment: Mapping[str, str] = field(default_factory=dict)
    say: Callable[[str], None] = print
    failed: list[GridCell] = field(default_factory=list)

    def work(self, cells: Sequence[GridCell], within_s: float = 0.0) -> list[GridCell]:
        """Run those of `cells` that are not done; return what is left because it would not fit into `within_s` (0: all).

        What fails is said, noted in `failed` and not tried again. On any error or Ctrl-C all children are killed.
        """
        paces = Paces(self.store.paces())
        pending = [cell for cell in dict.fromkeys(cells) if self.store.find(cell) is None]
        total, done = len(pending), 0
        if total:
            self.say(f"{total} of {len(dict.fromkeys(cells))} cells to run, about {left(pending, paces, self.jobs)}")
        began_s, running = time.monotonic(), list[_Job]()
        try:
            while True:
                while len(running) < self.jobs and (cell := _fitting(pending, paces, within_s, began_s)) is not None:
                    pending.remove(cell)
                    running.append(self._start(cell))
                if not running:
                    return pending
                time.sleep(POLL_S)
                for job in [job for job in running if job.process is not None and job.process.poll() is not None]:
                    if job.process is not None and job.process.returncode == 0 and job.ahead:
                        self._next(job)
                        continue
                    running.remove(job)
                    done += 1
                    said = self._finish(job, paces)
                    ahead = [*pending, *(other.cell for other in running)]
                    self.say(f"[{done}/{total}] {said}; {len(ahead)} left, about {left(ahead, paces, self.jobs)}")
        finally:
            for job in running:
                if job.process is not None:
                    job.process.kill()
                    job.process.wait()

    def _start(self, cell: GridCell) -> _Job:
        out = self.store.here / cell.digest
        shutil.rmtree(out, ignore_errors=True)
        out.mkdir(parents=True)
        job = _Job(cell, out, self.commands(cell, out), time.monotonic())
        self._next(job)
        return job

    def _next(self, job: _Job) -> None:
        command = job.ahead.pop(0)
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("ATOLL_")}
        with (job.out / "log").open("ab") as log:
            job.process = subprocess.Popen(
                [sys.executable, "-c", DIE_WITH_PARENT, str(os.getpid()), *command],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**inherited, **self.environment},
            )

    def _finish(self, job: _Job, paces: Paces) -> str:
        took_s = time.monotonic() - job.began_s
        code = job.process.returncode if job.process is not None else 0
        report = job.out / "run" / "report.json"
        if code or not report.exists():
            self.failed.append(job.cell)
            words = (job.out / "log").read_text(encoding="utf-8", errors="replace").splitlines()[-LOG_LINES:]
            return "\n".join([f"{in_words(job.cell)} FAILED with exit code {code}, see {job.out / 'log'}:", *words])
        warm = job.out / "warm" / "report.json"
        before = json.loads(warm.read_text(encoding="utf-8")) if warm.exists() else None
        record = record_of(job.cell, json.loads(report.read_text(encoding="utf-8")), before)
        record |= {
            "took_s": round(took_s, 2),
            "machine": machine(),
            "commit": commit(),
            "sources": self.store.here.name,
            "unsaid": unsaid(job.cell),
        }
        self.store.keep(job.cell, record)
        shutil.rmtree(job.out, ignore_errors=True)
        paces.add(job.cell, took_s)
        final = "diverged" if record["final"] is None else f"{record['final']:.4f} bits/byte"
        return f"{in_words(job.cell)}: {final} in {took_s:.0f} s"


def record_of(cell: GridCell, report: Mapping[str, Any], warm: Mapping[str, Any] | None = None) -> Record:
    """Return what is kept of a cell's report, and of that of its warm start: enough for every measure, and small."""
    fates, validation, rounds = report["tokens_by_fate"], report["validation"], report.get("rounds", {})
    before = 0 if warm is None else int(warm["tokens_trained"])
    curve = [] if warm is None else [(p["tokens_merged"], p["bits_per_byte"]) for p in warm["validation"]["curve"]]
    curve += [(before + p["tokens_merged"], p["bits_per_byte"]) for p in validation["curve"]]
    return {
        "cell": cell.describe(),
        "ended": report["ended"],
        "initial": validation["initial_bits_per_byte"],
        "final": validation["final_bits_per_byte"],
        "average": validation.get("average_bits_per_byte"),
        "curve": curve,
        "tokens": before + report["tokens_trained"],
        "merged": before + fates["merged"],
        "merged_late": fates["merged_late"],
        "lost": fates["lost"],
        "time_s": report["wall_s"] if cell.method == "atoll" else None,
        "goodput": report.get("goodput"),
        "contributors": rounds.get("contributors_mean"),
        "commits": report.get("commits"),
        "refused": sum(report.get("refused", {}).values()),
        "bytes_up": report.get("bytes_up"),
        "data": report["data_source_hash"],
    }


def in_words(cell: GridCell) -> str:
    settings = " ".join(
        f"{name.removeprefix('protocol.')}={value}" for name, value in cell.settings if not name.startswith("model.")
    )
    warm = f" warm={cell.warm:g}" if cell.warm else ""
    return f"{cell.method} M={cell.learners} {cell.tokens} tokens seed {cell.seed}{warm} {settings}".rstrip()


def left(cells: Sequence[GridCell], paces: Paces, jobs: int) -> str:
    return duration(sum(paces.seconds(cell) for cell in cells) / jobs)


def duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def _fitting(pending: Sequence[GridCell], paces: Paces, within_s: float, began_s: float) -> GridCell | None:
    spent_s = time.monotonic() - began_s
    fits = (cell for cell in pending if not within_s or spent_s + MARGIN * paces.seconds(cell) <= within_s)
    return next(fits, None)


def verbs(cell: GridCell, out: Path) -> list[list[str]]:
    """Return the commands of a cell: `atoll sim train` or a baseline's, and before it the data-parallel warm start."""
    config = out / "cell.toml"
    asked = {name: json.loads(value) for name, value in cell.settings}
    config.write_text(toml({HELD_OUT: HELD_OUT_TOKENS} | asked), encoding="utf-8")
    named = {name for name, _ in cell.settings}
    baseline = [sys.executable, "-m", "benchmarks.baselines"]
    warm = round(cell.warm * cell.tokens)
    flags = {"config": config, "learners": cell.learners}
    own = flags | {"seed": cell.seed, "out": out / "run", "tokens": cell.tokens - warm}
    if cell.method == "atoll":
        verb = [sys.executable, "-m", "atoll.cli", "sim", "train", *flag_words(own)]
        verb += [] if EVALUATE in named else ["--set", f"{EVALUATE}={cell.tokens // POINTS}"]
    else:
        verb = [*baseline, *flag_words({"method": cell.method, "evaluations": POINTS} | own)]
    if not warm:
        return [verb]
    first = flags | {"method": "data-parallel", "seed": cell.seed + WARM_SEED, "tokens": cell.tokens}
    before = [
        *baseline,
        *flag_words(first | {"stop": warm, "out": out / "warm"}),
        "--set",
        "protocol.average_versions=0",
    ]
    # The second part's schedule may go on where the first one's stopped, which itself begins at the beginning.
    before += ["--set", "train.tokens_before=0"] if "train.tokens_before" in named else []
    return [before, [*verb, "--set", f"learner.initial_model={out / 'warm' / 'model.safetensors'}"]]


def toml(settings: Mapping[str, Value]) -> str:
    return "".join(f"{name} = {_toml_value(value)}\n" for name, value in settings.items())


def _toml_value(value: Value) -> str:
    if isinstance(value, Mapping):
        return "{ " + ", ".join(f"{json.dumps(key)} = {_toml_value(item)}" for key, item in value.items()) + " }"
    if isinstance(value, list):
        return "[" + ", ".join(_toml_value(item) for item in value) + "]"
    return json.dumps(value)
