"""A storm over real processes, beside the same storm over a synchronous baseline: `make chaos`.

Runs of the same length, `--minutes`, so that losses compare after the same time as well as at equal tokens:

    undisturbed        `atoll up`, three learners, two shards and a standby for each: no fault
    storm-1, -4, -16   the same at so many faults a minute (see `storm` for the kinds), with one partition of a minute
    sync-…             the synchronous baseline (see `synchronous`), undisturbed and under the same forecasts
    gauntlet           `atoll up` at `--gauntlet` faults a minute, until `--kills` processes were killed: safety only

A run that was measured with the same sources and course is kept, so the parts can be made one after the other (`--only
storm-4`). Figures are computed from all extracts that are there, and from nothing else (`metrics`): nothing is believed that a
process says of itself during a storm.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

from benchmarks.faults.metrics import SCHEMA, Course, Extract, figures, load, save
from benchmarks.faults.storm import seconds_for
from benchmarks.lib.harness import BenchmarkResult, numbers, run_benchmark, sources
from benchmarks.lib.runs import prepare

FOLDER = Path("build/chaos")
RATES = (1.0, 4.0, 16.0)
MINUTES = 9.0
GAUNTLET = 32.0
KILLS_MIN = 200
LEARNERS = 3
PARTITION_S = 60.0


def main(
    *,
    minutes: Annotated[float, "length of every run but the gauntlet"] = MINUTES,
    rates: Annotated[Sequence[float], numbers, "faults per minute, as 1,4,16"] = RATES,
    kills: Annotated[int, "kills at which the gauntlet ends"] = KILLS_MIN,
    gauntlet: Annotated[float, "faults per minute of the gauntlet"] = GAUNTLET,
    only: Annotated[list[str] | None, "do this run and no other; repeatable"] = None,
    seed: int = 0,
) -> BenchmarkResult:
    every = courses(seed, minutes, rates, kills, gauntlet)
    names = [course.name for course in every]
    if unknown := {*(only or ())} - {*names}:
        raise SystemExit(f"no such run: {', '.join(sorted(unknown))}; there are {', '.join(names)}")
    wanted = [course for course in every if not only or course.name in only]
    for course in wanted:
        about = "about " if course.kills_min else ""
        length = f"{course.seconds / 60.0:.1f} minutes, and about two more to begin and end"
        print(f"{course.name}: {about}{length}", flush=True)
    measured = {c.name: measure(c, path_of(c)) for c in wanted if kept(c, path_of(c)) is None}
    # Read at the end only: another invocation may have measured others meanwhile.
    found = [(measured.get(c.name) or kept(c, path_of(c)), path_of(c)) for c in every]
    there = [(extract, path) for extract, path in found if extract is not None]
    return BenchmarkResult(figures([extract for extract, _ in there]), [path for _, path in there])


def courses(
    seed: int,
    minutes: float = MINUTES,
    rates: Sequence[float] = RATES,
    kills: int = KILLS_MIN,
    gauntlet: float = GAUNTLET,
) -> list[Course]:
    """Return every run, in the order in which they are made."""
    found = []
    for system, calm, stem in (("atoll", "undisturbed", "storm"), ("synchronous", "sync-undisturbed", "sync")):
        for rate in (0.0, *rates):
            name = f"{stem}-{rate:g}".replace(".", "_") if rate else calm
            found.append(Course(name, system, rate, seed, 60.0 * minutes, PARTITION_S if rate else 0.0, LEARNERS))
    lasts_s = seconds_for(seed, gauntlet, kills)
    return [*found, Course("gauntlet", "atoll", gauntlet, seed, lasts_s, PARTITION_S, LEARNERS, kills)]


def path_of(course: Course) -> Path:
    return FOLDER / sources() / f"seed-{course.seed}" / f"{course.name}.json.zst"


def kept(course: Course, path: Path) -> Extract | None:
    """Return what was measured before of the same course, with the same committed sources."""
    if not path.exists() or sources() == "changed":
        return None
    extract = load(path)
    same = (extract.course, extract.sources, extract.schema) == (course, sources(), SCHEMA)
    return extract if same else None


def measure(course: Course, path: Path) -> Extract:
    from benchmarks.faults.synchronous import run_group  # noqa: PLC0415  (what runs is loaded when something runs)
    from benchmarks.faults.up_in_storm import run_up  # noqa: PLC0415

    print(f"run {course.name}", flush=True)
    corpus, out = prepare(), path.with_name(course.name)
    shutil.rmtree(out, ignore_errors=True)
    extract = (run_up if course.system == "atoll" else run_group)(course, corpus, out)
    save(extract, path)
    return extract


if __name__ == "__main__":
    run_benchmark("chaos", main)
