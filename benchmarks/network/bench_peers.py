"""Atoll beside what a user would take instead, in one run on one machine: `make bench-peers`.

First the syncs of two participants (`benchmarks.network.sync_race`), then the first model that a user trains
(`benchmarks.text.first_try`). The others' programs get environments of their own under `build/peers`; the first time
that takes minutes. What of it is unfair, and to whom, is told by these two modules.

Three seeds take hours. What was measured with the same sources on this machine is not measured again (`build/bench-peers`), so
a race that was stopped goes on with the next command; `--again` begins anew.
"""

from __future__ import annotations

import argparse
import signal
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

from benchmarks.faults.chaos import prepare
from benchmarks.lib.arguments import count, natural
from benchmarks.lib.kept_parts import KeptParts
from benchmarks.lib.peer_environments import HERE
from benchmarks.lib.results import Figure, write
from benchmarks.network import sync_race
from benchmarks.text import first_try

BUDGETS: Final = (614_400, 2_457_600)
LEARNERS: Final = (2, 4)
SEEDS: Final = 3
SHORT_SYNCS: Final = 6
SHORT_BUDGETS: Final = (102_400,)
SHORT_LEARNERS: Final = (2,)
ROOTS: Final = (
    *("atoll", "atoll_learner", "atoll_monitor", "atoll_synchronizer"),
    *("benchmarks.baselines", "benchmarks.network.sync_race", "benchmarks.peers", "benchmarks.text.first_try"),
)
"""What a part rests on."""


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
    parser.add_argument("--again", action="store_true", help="measure all parts anew")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # as Ctrl-C: what runs beside is ended
    syncs, budgets, learners = options.syncs, tuple(options.tokens), tuple(options.learners)
    seeds = (options.seeds or [SEEDS]) + (options.seeds or [SEEDS])[-1:] * len(budgets)
    if options.short:
        syncs, budgets, learners, seeds = SHORT_SYNCS, SHORT_BUDGETS, SHORT_LEARNERS, [1]
    kept = KeptParts(Path("build/bench-peers"), ROOTS, HERE.glob("*.txt"), again=options.again)
    told: list[Figure] = []
    if options.only != "training":
        told += [Figure(**each) for each in kept.part(f"syncs-{syncs}", lambda: syncs_of(syncs))]
    if options.only != "syncs":
        of_budgets = dict(zip(budgets, seeds, strict=False))
        found = first_try.race(of_budgets, learners, options.seed, prepare().resolve(), kept)
        for (tokens, many), tries in found.items():
            told += first_try.figures_of(tokens, many, tries)
    return write("bench-peers", options.seed, told)


def syncs_of(syncs: int) -> list[dict[str, Any]]:
    """Return the figures of a race of syncs, as JSON carries them."""
    return [asdict(figure) for figure in sync_race.figures_of(sync_race.race(syncs))]


if __name__ == "__main__":
    sys.exit(main())
