"""Atoll beside what a user would take instead, in one run on one machine: `make bench-peers`.

First the syncs of two participants (`benchmarks.network.sync_race`), then the first model that a user trains
(`benchmarks.text.first_try`). The others' programs get environments of their own under `build/peers`; the first time
that takes minutes. What of it is unfair, and to whom, is told by these two modules.
"""

from __future__ import annotations

import argparse
import signal
import sys
import tempfile
from pathlib import Path
from typing import Final

from benchmarks.faults.chaos import prepare
from benchmarks.lib.arguments import count, natural
from benchmarks.lib.results import Figure, write
from benchmarks.network import sync_race
from benchmarks.text import first_try

BUDGETS: Final = (614_400, 2_457_600)
LEARNERS: Final = (2, 4)
SEEDS: Final = 3
SHORT_SYNCS: Final = 6
SHORT_BUDGETS: Final = (102_400,)
SHORT_LEARNERS: Final = (2,)


def main() -> int:
    """Race, and write `build/results/bench-peers.json`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--short", action="store_true", help="few syncs, one small budget, one seed")
    parser.add_argument("--syncs", type=count, default=sync_race.SYNCS, help="counted syncs of each system")
    parser.add_argument("--tokens", type=count, nargs="*", default=BUDGETS, help="budgets of the trainings")
    parser.add_argument("--learners", type=count, nargs="*", default=LEARNERS, help="of the trainings of each budget")
    parser.add_argument(
        "--seeds", type=count, nargs="*", default=[SEEDS], help="of each budget; the last one of the rest"
    )
    parser.add_argument("--seed", type=natural, default=0, help="the first one")
    parser.add_argument("--only", choices=("syncs", "training"), help="one of the two tables")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # as Ctrl-C: what runs beside is ended
    syncs, budgets, learners = options.syncs, tuple(options.tokens), tuple(options.learners)
    seeds = (options.seeds or [SEEDS]) + (options.seeds or [SEEDS])[-1:] * len(budgets)
    if options.short:
        syncs, budgets, learners, seeds = SHORT_SYNCS, SHORT_BUDGETS, SHORT_LEARNERS, [1]
    told: list[Figure] = []
    if options.only != "training":
        told += sync_race.figures_of(sync_race.race(syncs))
    if options.only != "syncs":
        corpus = prepare().resolve()
        with tempfile.TemporaryDirectory() as folder:
            for tokens, many in zip(budgets, seeds, strict=False):
                for each in learners:
                    found = first_try.tried(
                        tokens, each, range(options.seed, options.seed + many), corpus, Path(folder)
                    )
                    told += first_try.figures_of(tokens, each, found)
    return write("bench-peers", options.seed, told)


if __name__ == "__main__":
    sys.exit(main())
