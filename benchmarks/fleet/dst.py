"""What the schedules of faults find, as a table: `make bench-dst`.

First schedules are played as `make dst` does, so many or for so long; all must hold. Then every mutant is hunted, from the
same seed, where it shows (`tests/schedules/mutants.py`); every one must be caught.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
import time

from benchmarks.lib.arguments import count, natural, positive
from benchmarks.lib.results import Figure, write
from schedules import campaign
from schedules.long_campaign import begun
from schedules.mutants import MUTANTS, hunt

SCHEDULES_MAX = 400
SHARE_PLAYED = 0.3


def main() -> int:
    """Play, hunt, write; return 1 if a schedule failed or a mutant got away."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=positive, default=5.0)
    parser.add_argument("--schedules", type=count, help="play so many, however long it takes")
    parser.add_argument("--seed", type=natural, default=0)
    chosen = parser.parse_args()
    done, until_s = begun(chosen.seed), time.monotonic() + 60.0 * SHARE_PLAYED * chosen.minutes
    schedules, until_s = (chosen.schedules, math.inf) if chosen.schedules else (sys.maxsize, until_s)
    campaign.play_part(done, schedules, until_s, os.cpu_count() or 1)
    figures = campaign.figures_of(done)
    for name in MUTANTS:
        caught = hunt(name, chosen.seed, SCHEDULES_MAX)
        how = f"{caught.took_s:.1f} s of a core; {caught.kind}: {caught.what}" if caught.what else "never"
        figures.append(Figure(f"mutant: {name}", caught.schedules, "schedules", "caught", bool(caught.what), how))
    return write("bench-dst", chosen.seed, figures)


if __name__ == "__main__":
    sys.exit(main())
