"""A first look at quality: data-parallel training beside Atoll at equal tokens. `make bench-parity`.

For each seed and M in {2, 4}: one process trains data-parallel with M times the batch (`benchmarks.baselines`), and
`atoll up` trains M learners over two shards as real processes; both see the same number of tokens of the same corpus and
are measured on the same held-out bytes. A cell that is done is kept under `build/parity/` and not run again while the
sources are the same, so the benchmark can be stopped and resumed. The goal is to be no worse than our first probe's best
setting at a comparable length (12 % behind at 600 steps); more of the question is asked by `make experiment NAME=parity`.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path

from rich.progress import Progress

from atoll.base.wording import counted
from atoll_learner.process import prepare_work
from benchmarks.baselines.run import baseline_settings
from benchmarks.experiments.experiment import prepare
from benchmarks.lib.arguments import count, natural, positive
from benchmarks.lib.results import Figure, sources, write

FOLDER = Path("build/parity")
LEARNERS = (2, 4)
TOKENS_PER_LEARNER = 600_000
TOKENS_PER_MINUTE = 60_000
GAP_MAX = 0.12


def main() -> int:
    """Run every cell that is not done yet and write `build/results/bench-parity.json`."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=positive, default=0.0, help="shorten: about this long for all cells")
    parser.add_argument("--seeds", type=count, default=1)
    parser.add_argument("--seed", type=natural, default=0)
    options = parser.parse_args()
    per_learner = int(options.minutes * TOKENS_PER_MINUTE / 12) if options.minutes else TOKENS_PER_LEARNER
    corpus = prepare(FOLDER / "corpus")
    figures: list[Figure] = []
    for learners in LEARNERS:
        tokens = per_learner * learners
        seeds = range(options.seed, options.seed + options.seeds)
        data_parallel = [
            cell(f"dp-{learners}-{tokens}-{seed}", run_dp, corpus, learners, tokens, seed) for seed in seeds
        ]
        islands = [
            cell(f"atoll-{learners}-{tokens}-{seed}", run_atoll, corpus, learners, tokens, seed) for seed in seeds
        ]
        figures += compare(learners, tokens, data_parallel, islands)
    return write("bench-parity", options.seed, figures)


def compare(
    learners: int, tokens: int, data_parallel: list[dict[str, float]], islands: list[dict[str, float]]
) -> list[Figure]:
    """Return the figures of one M: both losses and the relative gap, averaged over seeds."""
    dp = statistics.fmean(c["bits_per_byte"] for c in data_parallel)
    us = statistics.fmean(c["bits_per_byte"] for c in islands)
    how = f"{counted(len(islands), 'seed')}, {tokens} tokens, held-out bits per byte of the global model"
    gap = us / dp - 1.0
    return [
        Figure(f"data-parallel, M={learners}", dp, "bits/byte", "", None, how),
        Figure(f"atoll, M={learners}", us, "bits/byte", "", None, how),
        Figure(f"gap to data-parallel, M={learners}", gap, "ratio", f"<= {GAP_MAX}", gap <= GAP_MAX, how),
    ]


def cell(name: str, run, corpus: Path, learners: int, tokens: int, seed: int) -> dict[str, float]:  # type: ignore[no-untyped-def]  # noqa: ANN001
    """Return a cell's result, from disk when it was measured before with the same committed sources."""
    version = sources()
    path, out = FOLDER / version / f"{name}.json", FOLDER / version / name
    if path.exists() and version != "changed":
        done: dict[str, float] = json.loads(path.read_text(encoding="utf-8"))
        return done
    print(f"cell {name}", flush=True)
    began_s = time.monotonic()
    result: dict[str, float] = run(corpus, learners, tokens, seed, out)
    result["took_s"] = time.monotonic() - began_s
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result) + "\n", encoding="utf-8")
    return result


def run_dp(corpus: Path, learners: int, tokens: int, seed: int, out: Path) -> dict[str, float]:
    """Train data-parallel in this machine's one process: the batch of M learners in every step."""
    del out
    from benchmarks.baselines.lockstep import train_baseline  # noqa: PLC0415  (JAX only where it is needed)

    settings = baseline_settings(
        None, (f"seed={seed}", f"protocol.tokens_target={tokens}", f"data.dir={corpus.resolve()}"), learners
    )
    with Progress() as bar:
        task = bar.add_task(f"data-parallel M={learners}", total=None)

        def say(step: int, steps: int, _: float) -> None:
            bar.update(task, completed=step, total=steps)

        trained = train_baseline(settings, prepare_work(settings), "data-parallel", learners, say=say)
    if trained.final is None:
        raise FloatingPointError(f"the loss is not finite after step {trained.steps}")
    return {"bits_per_byte": trained.final, "steps": trained.steps}


def run_atoll(corpus: Path, learners: int, tokens: int, seed: int, out: Path) -> dict[str, float]:
    """Train with `atoll up` as any user would."""
    command = [sys.executable, "-m", "atoll.cli", "up", "--again", "--learners", str(learners), "--shards", "2"]
    command += [
        "--tokens",
        str(tokens),
        "--seed",
        str(seed),
        "--out",
        str(out),
        "--set",
        f"data.dir={corpus.resolve()}",
    ]
    subprocess.run(command, check=True)
    report = json.loads((out / "report.json").read_text(encoding="utf-8"))
    return {
        "bits_per_byte": report["validation"]["final_bits_per_byte"],
        "tokens_trained": report["tokens_trained"],
        "merged": report["tokens_by_fate"].get("merged", 0),
        "wall_s": report["wall_s"],
    }


if __name__ == "__main__":
    sys.exit(main())
