"""What the simulation finds, as a table: `make bench-dst`.

First schedules are played as `make dst` does, so many or for so long; every promise must hold. Then every planted bug is
hunted, from the same seed, in the weather that makes it likely (`atoll.sim.dst.planted`); every one must be caught.
"""

from __future__ import annotations

import argparse
import os
import sys

from atoll.sim.dst import campaign
from atoll.sim.dst.planted import BUGS, hunt
from benchmarks.lib.results import Figure, write

SCHEDULES_MAX = 4000
SHARE_PLAYED = 0.5


def played(schedules: int | None, minutes: float, first: int) -> list[Figure]:
    """Play so many schedules, or for so long, on all cores; return the rate and what they were made of."""
    workers = os.cpu_count() or 1
    done = campaign.played(first, schedules, None if schedules else minutes, workers)
    count, tally, failure = done.played, done.tally, done.failure
    how = f"seeds {first} to {first + count - 1}" if failure is None else f"seed {failure.seed}: {failure.violation}"
    rate = count / done.took_s
    made_of = [
        Figure(f"{name} per schedule", tally[name] / count, "", "", None, "mean over these schedules")
        for name in (
            "events",
            "commits",
            "tenures",
            "crashes of candidates",
            "freezes",
            "answers lost",
            "deposed writes refused",
        )
    ]
    return [
        Figure("schedules played", count, "schedules", "every promise holds", failure is None, how),
        Figure("rate", rate, "per s", "", None, f"{workers} processes"),
        *made_of,
    ]


def main() -> int:
    """Play, hunt, write; return 1 if a promise broke or a bug got away."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=2.0)
    parser.add_argument("--schedules", type=int, help="play so many, however long it takes")
    parser.add_argument("--seed", type=int, default=0)
    chosen = parser.parse_args()
    figures = played(chosen.schedules, SHARE_PLAYED * chosen.minutes, chosen.seed)
    for bug in BUGS:
        caught = hunt(bug, chosen.seed, SCHEDULES_MAX)
        how = (
            f"{caught.took_s:.1f} s; {caught.kind}: {caught.violation.splitlines()[0]}" if caught.violation else "never"
        )
        figures.append(Figure(f"planted: {bug}", caught.schedules, "schedules", "caught", bool(caught.violation), how))
    return write("bench-dst", chosen.seed, figures)


if __name__ == "__main__":
    sys.exit(main())
