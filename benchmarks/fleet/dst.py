"""What the schedules of faults find, as a table: `make bench-dst`.

First schedules are played as `make dst` does, so many or for so long; all must hold. Then every mutant is hunted, from the
same seed, where it shows (`tests/schedules/mutants.py`); every one must be caught.
"""

from __future__ import annotations

import math
import os
import sys
import time
from typing import Annotated

from benchmarks.lib.harness import Figure, run_benchmark
from schedules import campaign
from schedules.long_campaign import begun
from schedules.mutants import MUTANTS, hunt

SCHEDULES_MAX = 400
SHARE_PLAYED = 0.3


def main(
    *,
    minutes: float = 5.0,
    schedules: Annotated[int | None, "play so many, however long it takes"] = None,
    seed: int = 0,
) -> list[Figure]:
    done, until_s = begun(seed), time.monotonic() + 60.0 * SHARE_PLAYED * minutes
    schedules, until_s = (schedules, math.inf) if schedules else (sys.maxsize, until_s)
    campaign.play_part(done, schedules, until_s, os.cpu_count() or 1)
    figures = campaign.figures_of(done)
    for name in MUTANTS:
        caught = hunt(name, seed, SCHEDULES_MAX)
        how = f"{caught.took_s:.1f} s of a core; {caught.kind}: {caught.what}" if caught.what else "never"
        figures.append(Figure(f"mutant: {name}", caught.schedules, "schedules", "caught", bool(caught.what), how))
    return figures


if __name__ == "__main__":
    run_benchmark("bench-dst", main)
