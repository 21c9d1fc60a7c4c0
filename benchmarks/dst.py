"""What the simulation finds, as a table: `make bench-dst`.

First schedules are played as `make dst` does, for most of the time; every promise must hold. Then every planted bug is
hunted, from the same seed, in the weather that makes it likely (`atoll.sim.planted`); every one must be caught.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter

from results import Figure, write

from atoll.sim import dst
from atoll.sim.planted import BUGS, hunt

SCHEDULES_MAX = 4000
SHARE_PLAYED = 0.5


def played(minutes: float, first: int) -> list[Figure]:
    """Play schedules in this process for so long; return the rate and what they were made of."""
    began_s = time.monotonic()
    until_s = began_s + 60.0 * minutes
    count, tally, failure = 0, Counter[str](), None
    while failure is None and time.monotonic() < until_s:
        more, happened, failure = dst.chunk(first + count, dst.CHUNK)
        count += more
        tally.update(happened)
    how = "seeds in order, in one process" if failure is None else f"seed {failure.seed}: {failure.violation}"
    rate = count / (time.monotonic() - began_s)
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
        Figure("rate", rate, "per s", "", None, "one core"),
        *made_of,
    ]


def main() -> int:
    """Play, hunt, write; return 1 if a promise broke or a bug got away."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=2.0)
    parser.add_argument("--seed", type=int, default=0)
    chosen = parser.parse_args()
    figures = played(SHARE_PLAYED * chosen.minutes, chosen.seed)
    for bug in BUGS:
        caught = hunt(bug, chosen.seed, SCHEDULES_MAX)
        how = (
            f"{caught.took_s:.1f} s; {caught.kind}: {caught.violation.splitlines()[0]}" if caught.violation else "never"
        )
        figures.append(Figure(f"planted: {bug}", caught.schedules, "schedules", "caught", bool(caught.violation), how))
    return write("bench-dst", chosen.seed, figures)


if __name__ == "__main__":
    sys.exit(main())
