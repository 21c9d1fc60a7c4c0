"""`python -m atoll.sim.dst`: play schedules from seeds until one breaks a promise, the time is up or enough are played.

    --minutes M, --schedules N   how long, or how many (default: 1000 schedules)
    --first S                    the first seed; the others follow it
    --seed S                     play this one schedule and print its whole log
    --planted                    plant each known bug and show what it takes to catch it

Leaves with 0 when every promise held, 1 after a broken promise, 4 when something that must happen did not, 2 for wrong
arguments. What was played is told in numbers: schedules in which nothing happens would hold every promise too.
"""

from __future__ import annotations

import argparse
import gc
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import dataclass
from multiprocessing import get_context

from atoll.sim.dst.planted import BUGS, Caught, hunt
from atoll.sim.dst.schedule import Outcome, play

CHUNK = 25
SHOWN_LINES = 30
SAY_S = 10.0
SCHEDULES = 1000
PLANTED_MAX = 4000
EXIT = {"": 0, "safety": 1, "liveness": 4}
COVERED = (
    "tenures",
    "owners deposed",
    "handovers",
    "retirements",
    "crashes of candidates",
    "crashes of learners",
    "freezes",
    "deposed writes refused",
    "fences repeated",
    "readers removed",
    "acks of removed readers",
    "answers lost",
    "lost writes found",
    "requests doubled",
    "redeliveries by silence",
    "disk full",
    "queue full",
    "broker crashes",
    "partitions both",
    "partitions up",
    "partitions down",
    "clock jumps",
    "blobs gone",
    "blobs swept",
    "ids taken over",
    "pushes given up",
    "quarantines",
    "quorum waits",
    "commits",
    "farewells",
    "events",
)


def chunk(first: int, count: int) -> tuple[int, Counter[str], Outcome | None]:
    """Play `count` schedules from `first`; return how many were played, what happened in them, and the first failure."""
    tally: Counter[str] = Counter()
    gc.disable()
    for played in range(count):
        outcome = play(first + played)
        tally.update(outcome.tally)
        if outcome.violation:
            return played + 1, tally, outcome
    gc.enable()
    gc.collect()
    return count, tally, None


def chunks(first: int, schedules: int | None, until_s: float) -> Iterator[tuple[int, int]]:
    """Yield first seed and length of one chunk after another, until there are enough or the time is up."""
    done = 0
    while (schedules is None or done < schedules) and time.monotonic() < until_s:
        count = CHUNK if schedules is None else min(CHUNK, schedules - done)
        yield first + done, count
        done += count


@dataclass(frozen=True, slots=True)
class Campaign:
    """Schedules that were played in a row: how many, in what time, what happened in them, and the first that failed."""

    played: int
    took_s: float
    tally: Counter[str]
    failure: Outcome | None


def played(first: int, schedules: int | None, minutes: float | None, workers: int) -> Campaign:
    """Play schedules over `workers` processes, for so many or so long, and print progress."""
    began_s = said_s = time.monotonic()
    until_s = float("inf") if minutes is None else began_s + 60.0 * minutes
    wanted = chunks(first, schedules, until_s)
    total, tally, failure = 0, Counter[str](), None
    with ProcessPoolExecutor(workers, get_context("spawn")) as pool:
        under_way: set[Future[tuple[int, Counter[str], Outcome | None]]] = set()
        while failure is None:
            while len(under_way) < 2 * workers and (next_one := next(wanted, None)) is not None:
                under_way.add(pool.submit(chunk, *next_one))
            if not under_way:
                break
            done, under_way = wait(under_way, return_when=FIRST_COMPLETED)
            for future in done:
                count, happened, failed = future.result()
                total += count
                tally.update(happened)
                failure = failure or failed
            if time.monotonic() - said_s >= SAY_S:
                said_s = time.monotonic()
                say(progress(total, said_s - began_s, workers, tally))
        pool.shutdown(cancel_futures=True)
    took_s = time.monotonic() - began_s
    say(progress(total, took_s, workers, tally))
    return Campaign(total, took_s, tally, failure)


def campaign(first: int, schedules: int | None, minutes: float | None, workers: int) -> int:
    """Play schedules, print what was covered, and a failure if there is one; return the exit code."""
    done = played(first, schedules, minutes, workers)
    say(covered(done.tally))
    if done.failure is None:
        say(f"dst: every promise held in {done.played} schedules (seeds {first} to {first + done.played - 1})")
        return 0
    say(told(done.failure))
    return EXIT[done.failure.kind]


def progress(played: int, took_s: float, workers: int, tally: Counter[str]) -> str:
    """Return one line of progress."""
    rate = played / max(took_s, 1e-9)
    return (
        f"{played} schedules in {took_s:.0f} s: {rate:.1f} per s on {workers} processes; "
        f"{tally['events']} events, {tally['commits']} commits, {tally['tenures']} tenures"
    )


def covered(tally: Counter[str]) -> str:
    """Return what happened in all schedules together, as a table."""
    return "\n".join(f"  {name:<26} {tally[name]:>12}" for name in COVERED)


def told(failure: Outcome) -> str:
    """Return all that is needed to see a failure again."""
    log = play(failure.seed, log=True).log
    return "\n".join(
        [
            *(f"  | {line}" for line in log[-SHOWN_LINES:]),
            f"{failure.kind} violated in seed {failure.seed}, commit {commit()}:",
            failure.violation,
            f"the whole schedule: .venv/bin/python -m atoll.sim.dst --seed {failure.seed}",
        ]
    )


def commit() -> str:
    """Return the commit that is simulated, 'unknown' outside a repository."""
    try:
        done = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=True)  # noqa: S607
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return done.stdout.strip()


def replay(seed: int) -> int:
    """Play one schedule, print its log and how it ended; return the exit code."""
    outcome = play(seed, log=True)
    say("\n".join(outcome.log))
    say(covered(outcome.tally))
    say(
        f"seed {seed}: {outcome.kind + ' violated: ' + outcome.violation if outcome.violation else 'every promise held'}"
    )
    return EXIT[outcome.kind]


def planted_table(first: int, schedules_max: int) -> int:
    """Hunt every planted bug, print a line for each, and return 1 if one got away."""
    say(f"{'planted bug':<32} {'schedules':>9} {'seconds':>8}  promise that caught it")
    caught: list[Caught] = []
    for bug in BUGS:
        caught.append(hunt(bug, first, schedules_max))
        one = caught[-1]
        promise = one.violation.split("\n")[0] or "NOT CAUGHT"
        say(f"{bug:<32} {one.schedules:>9} {one.took_s:>8.1f}  {one.kind}: {promise}")
    return int(not all(one.violation for one in caught))


def say(text: str) -> None:
    """Print, also into a pipe, at once."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def main(arguments: list[str] | None = None) -> int:
    """Do what the command line says and return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m atoll.sim.dst", description="Deterministic simulation of a run.")
    parser.add_argument("--minutes", type=_positive, help="how long to play")
    parser.add_argument("--schedules", type=_count, help=f"how many to play (default {SCHEDULES})")
    parser.add_argument("--first", type=int, default=0, help="the first seed (default 0)")
    parser.add_argument("--seed", type=int, help="play this one schedule and print its whole log")
    parser.add_argument("--planted", action="store_true", help="show what it takes to catch every planted bug")
    parser.add_argument("--workers", type=_count, default=os.cpu_count() or 1, help="processes (default: one per core)")
    chosen = parser.parse_args(arguments)
    if chosen.seed is not None:
        return replay(chosen.seed)
    if chosen.planted:
        return planted_table(chosen.first, chosen.schedules or PLANTED_MAX)
    schedules = chosen.schedules or (None if chosen.minutes else SCHEDULES)
    return campaign(chosen.first, schedules, chosen.minutes, chosen.workers)


def _positive(text: str) -> float:
    if not 0.0 < float(text) < float("inf"):
        raise argparse.ArgumentTypeError(f"must be above 0, got {text}")
    return float(text)


def _count(text: str) -> int:
    if int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {text}")
    return int(text)
