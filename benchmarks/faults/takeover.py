"""What the learners notice of a takeover: `make bench-takeover`.

One `atoll up` as in `chaos` (three paced learners, two shards, a standby for each, relays), in which nothing happens but
that the owner of one shard and then of the other gets SIGKILL, every `EVERY_S` seconds; `atoll up` starts each again.
Between the kill and the shard's next commit the learners must go on as if nothing were: their steps there are compared with
their own in the quiet time between two takeovers. What a learner could lose inside `island.step` it clocks itself.

`make bench-takeover OUTAGES=20` asks for the opposite in a run of its own: the broker is away so many times, for 1 to 20 s, by
turns killed and stopped (SIGSTOP). Nobody else dies, so no shard may change hands; the epochs of the leases count takeovers.
"""

from __future__ import annotations

import random
import shutil
from collections.abc import Sequence
from typing import Annotated, Any

import numpy as np

from benchmarks.faults.chaos import FOLDER, LEARNERS
from benchmarks.faults.extracts import Course, Extract, save
from benchmarks.faults.metrics import COMMIT_MAX_S, PACE_MIN, after, next_commit, paces, quiet
from benchmarks.faults.storm import Planned
from benchmarks.faults.up_in_storm import SHARDS, run_up
from benchmarks.lib.harness import BenchmarkResult, Figure, at_least, at_most, fact, natural, run_benchmark, true, zero
from benchmarks.lib.runs import prepare, read_report

EVERY_S = 13.0
MINUTES = 13.0
INSIDE_MAX = 0.01
AWAY_S = (1.0, 20.0)
"""The shortest and the longest absence of the broker: elections take 4 to 9 s, and a lease lasts for 3."""
QUIET_S = 12.0
"""Between two absences."""
RESAMPLES = 2000


def main(
    *,
    minutes: float = MINUTES,
    seed: int = 0,
    outages: Annotated[int, natural, "absences of the broker, in place of kills of owners"] = 0,
) -> BenchmarkResult:
    if outages:
        return BenchmarkResult(broker_outages(outages, seed), target="bench-takeover-outages")
    seconds = 60.0 * minutes
    course = Course("takeovers", "atoll", 60.0 / EVERY_S, seed, seconds, 0.0, LEARNERS)
    out = FOLDER / "takeovers"
    shutil.rmtree(out, ignore_errors=True)
    extract = run_up(course, prepare(), out, kills(seconds))
    save(extract, out.with_suffix(".json.zst"))
    report = read_report(out)
    return BenchmarkResult(figures(extract, report, seed))


def broker_outages(number: int, seed: int) -> list[Figure]:
    planned = absences(number, seed)
    seconds = planned[-1].at_s + planned[-1].over_s + QUIET_S
    course = Course("outages", "atoll", 60.0 * number / seconds, seed, seconds, 0.0, LEARNERS)
    out = FOLDER / "outages"
    shutil.rmtree(out, ignore_errors=True)
    extract = run_up(course, prepare(), out, planned)
    save(extract, out.with_suffix(".json.zst"))
    return outage_figures(extract)


def absences(number: int, seed: int) -> list[Planned]:
    """Return so many absences of the broker, of lengths that cover all there may be, in any order."""
    dice = random.Random(seed)  # noqa: S311  (reproducible, not secret)
    shortest_s, longest_s = AWAY_S
    lengths_s = [shortest_s + (longest_s - shortest_s) * (i + dice.random()) / number for i in range(number)]
    dice.shuffle(lengths_s)
    planned, at_s = [], QUIET_S
    for i, over_s in enumerate(lengths_s):
        planned.append(Planned(at_s, ("kill", "freeze")[i % 2], "broker", 0.0, over_s))
        at_s += over_s + QUIET_S
    return planned


def outage_figures(extract: Extract) -> list[Figure]:
    """Return how often a shard changed hands, and how soon each made its next version."""
    away = [fault for fault in extract.storm if fault.over_at_s]
    longest_s = max((fault.over_at_s - fault.at_s for fault in away), default=0.0)
    waits = [
        (fault, next_commit(extract.rounds, fault.over_at_s, f"shard-{p}")) for fault in away for p in range(SHARDS)
    ]
    taken = sum(extract.tenures.values())
    return [
        fact("absences of the broker", float(len(away)), "times", f"killed or stopped; longest {longest_s:.1f} s"),
        zero("shards taken from an owner that lives", taken, "takeovers", "by the epochs of leases"),
        *after("next commit of a shard after an absence", waits, None),
        true("fates exact", extract.report["fates_exact"], "by the report"),
    ]


def kills(seconds: float) -> list[Planned]:
    """Return the kills of owners, one shard after the other."""
    number = int(seconds / EVERY_S)
    return [Planned(EVERY_S * (i + 1), "kill", "owner", (i % SHARDS + 0.5) / SHARDS) for i in range(number)]


def figures(extract: Extract, report: dict[str, Any], seed: int) -> list[Figure]:
    waits = [(f, next_commit(extract.rounds, f.at_s, f"shard-{f.shard}")) for f in extract.storm]
    windows = [(fault.at_s, fault.at_s + wait) for fault, wait in waits if wait < float("inf")]
    pairs = paces(extract, windows, quiet(extract))
    pace, (low, high) = ratio(pairs), interval(pairs, seed)
    how = f"steps over those of the same learners in quiet time; {len(pairs)} windows; 95 %: {low:.3f} to {high:.3f}"
    inside = [x for learner in report["learners"] for life in learner["incarnations"] if (x := life["overhead"])]
    return [
        fact("owners killed", float(len(waits)), "kills", f"one every {EVERY_S:g} s"),
        *after("next commit of the shard", waits, COMMIT_MAX_S),
        at_least("pace during a takeover", pace, "ratio", PACE_MIN, how),
        at_most(
            "share of their time inside island.step",
            max(inside),
            "ratio",
            INSIDE_MAX,
            "the largest, by their own clocks, over the whole run",
        ),
    ]


def ratio(pairs: Sequence[tuple[float, float]]) -> float:
    """Return the steps taken over those that quiet time would have had."""
    return sum(taken for taken, _ in pairs) / sum(expected for _, expected in pairs)


def interval(pairs: Sequence[tuple[float, float]], seed: int) -> tuple[float, float]:
    """Return the 95 % interval of the ratio, by drawing windows anew."""
    dice = np.random.default_rng(seed)
    table = np.array(pairs)
    drawn = table[dice.integers(0, len(table), (RESAMPLES, len(table)))].sum(axis=1)
    low, high = np.quantile(drawn[:, 0] / drawn[:, 1], [0.025, 0.975])
    return float(low), float(high)


if __name__ == "__main__":
    run_benchmark("bench-takeover", main)
