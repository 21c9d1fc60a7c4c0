"""What the learners notice of a takeover: `make bench-takeover`.

One `atoll up` as in `chaos` (three paced learners, two shards, a standby for each, relays), in which nothing happens but
that the owner of one shard and then of the other gets SIGKILL, every `EVERY_S` seconds; `atoll up` starts each again.
Between the kill and the shard's next commit the learners must go on as if nothing were: their steps there are compared with
their own in the quiet time between two takeovers. What a learner could lose inside `island.step` it clocks itself.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from typing import Any

import numpy as np

from benchmarks.faults.chaos import FOLDER, LEARNERS
from benchmarks.faults.metrics import COMMIT_MAX_S, PACE_MIN, Course, Extract, after, next_commit, paces, quiet, save
from benchmarks.faults.storm import Planned
from benchmarks.faults.up_in_storm import SHARDS, run_up
from benchmarks.lib.harness import Figure, at_least, at_most, fact, run_benchmark
from benchmarks.lib.runs import prepare, read_report

EVERY_S = 13.0
MINUTES = 13.0
INSIDE_MAX = 0.01
RESAMPLES = 2000


def main(*, minutes: float = MINUTES, seed: int = 0) -> list[Figure]:
    seconds = 60.0 * minutes
    course = Course("takeovers", "atoll", 60.0 / EVERY_S, seed, seconds, 0.0, LEARNERS)
    out = FOLDER / "takeovers"
    shutil.rmtree(out, ignore_errors=True)
    extract = run_up(course, prepare(), out, kills(seconds))
    save(extract, out.with_suffix(".json.zst"))
    return figures(extract, read_report(out), seed)


def kills(seconds: float) -> list[Planned]:
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
