"""A storm over real processes, beside the same storm over a synchronous baseline: `make chaos`.

Runs of the same length, `--minutes`, so that losses compare after the same time as well as at equal tokens:

    undisturbed        `atoll up`, three learners, two shards and a standby for each: no fault
    storm-1, -4, -16   the same at so many faults a minute (see `storm` for the kinds), with one partition of a minute
    sync-undisturbed   the synchronous baseline (see `synchronous`), no fault
    sync-1, -4, -16    the baseline under the same forecasts

And one of its own rate, which ends when `--kills` processes were killed and is asked for safety only:

    gauntlet           `atoll up` at `--gauntlet` faults a minute

A run that was measured with the same sources and the same course is kept and not repeated, so that the parts can be made
one after the other, `--only storm-4`, or two of them at a time by two invocations. At the end figures are computed from all
extracts that are there, and from nothing else (see `extracts`, `safety`, `verdicts`, `goodput`).

Nothing is believed that a process says of itself during a storm: the event log, which the broker kept, must show every version
of every fragment once and in order and every contribution merged once; every contribution that the broker said it had
stored must have a fate in the ledgers; the ledgers must settle, and the report must give every token one fate.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from pathlib import Path

from benchmarks.faults.extracts import SCHEMA, Course, Extract, load, save
from benchmarks.faults.metrics import figures
from benchmarks.faults.storm import seconds_for
from benchmarks.lib.harness import count, natural, positive, sources, write
from benchmarks.lib.runs import prepare

FOLDER = Path("build/chaos")
RATES = (1.0, 4.0, 16.0)
MINUTES = 9.0
GAUNTLET = 32.0
KILLS_MIN = 200
LEARNERS = 3
PARTITION_S = 60.0


def main() -> int:
    """Do the runs that are wanted and not there yet, and write `build/results/chaos.json` from all that are there."""
    options = parsed()
    every = [course for seed in options.seeds for course in courses(options, seed)]
    names = [course.name for course in every]
    if unknown := set(options.only) - set(names):
        raise SystemExit(f"no such run: {', '.join(sorted(unknown))}; there are {', '.join(names)}")
    wanted = [course for course in every if not options.only or course.name in options.only]
    for course in wanted:
        about = "about " if course.kills_min else ""
        print(
            f"{course.name}: {about}{course.seconds / 60.0:.1f} minutes, and about two more to begin and end",
            flush=True,
        )
    measured = {c.name: measure(c, path_of(c)) for c in wanted if kept(c, path_of(c)) is None}
    # Read at the end only: another invocation may have measured others meanwhile.
    found = [(measured.get(c.name) or kept(c, path_of(c)), path_of(c)) for c in every]
    there = [(extract, path) for extract, path in found if extract is not None]
    return write("chaos", options.seeds[0], figures([e for e, _ in there]), [path for _, path in there])


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rates", type=numbers, default=list(RATES), help="faults per minute, as 1,4,16")
    parser.add_argument("--kills", type=count, default=KILLS_MIN, help="kills at which the gauntlet ends")
    parser.add_argument("--gauntlet", type=positive, default=GAUNTLET, help="faults per minute of the gauntlet")
    parser.add_argument("--minutes", type=positive, default=MINUTES, help="length of every run but the gauntlet")
    parser.add_argument("--partition", type=positive, default=PARTITION_S, help="seconds of the partition")
    parser.add_argument("--only", action="append", default=[], help="do this run and no other; repeatable")
    parser.add_argument("--seed", type=natural, default=0)
    parser.add_argument("--seeds", type=numbers, default=[], help="several seeds, as 0,1,2; names get -seed1")
    options = parser.parse_args()
    options.seeds = [int(seed) for seed in options.seeds] or [options.seed]
    return options


def numbers(text: str) -> list[float]:
    return [float(part) for part in text.split(",")]


def courses(options: argparse.Namespace, seed: int) -> list[Course]:
    """Return every run of one seed, in the order in which they are made."""
    seconds = 60.0 * options.minutes
    suffix = "" if seed == options.seeds[0] else f"-seed{seed}"
    found = []
    for system, calm, stem in (("atoll", "undisturbed", "storm"), ("synchronous", "sync-undisturbed", "sync")):
        for rate in (0.0, *options.rates):
            name = f"{stem}-{rate:g}".replace(".", "_") if rate else calm
            partition_s = options.partition if rate else 0.0
            found.append(Course(name + suffix, system, rate, seed, seconds, partition_s, LEARNERS))
    lasts_s = seconds_for(seed, options.gauntlet, options.kills)
    gauntlet = Course(
        "gauntlet" + suffix, "atoll", options.gauntlet, seed, lasts_s, options.partition, LEARNERS, options.kills
    )
    return [*found, gauntlet]


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
    os.environ.pop("ATOLL_BROKER__URL", None)
    sys.exit(main())
