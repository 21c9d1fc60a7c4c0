"""What being in an island costs a training step: `make bench`.

One process trains the demo model in alternating blocks of steps: bare (the jitted step alone) and inside an island (the
same step, then `island.step`, with a real broker and a real shard calling fragments at the demo's pace). Where there are
two cores, the training thread and its compute stay on the first, the broker, the shard and the island's own threads on
the second: the question is the protocol's cost, not who gets the core. The median over pairs of blocks of the ratio of
their mean steps is the figure, its limit (1 %) the goal.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from results import Figure, write
from rich.progress import track

from atoll.bus.broker import EmbeddedBroker
from atoll.island.join import IslandHandle, join
from atoll.protocol.settings import ProtocolSettings
from atoll_learner.model_settings import model_settings
from atoll_learner.process import limit_threads
from atoll_learner.train_settings import train_settings

RUN = "overhead"
BLOCK_STEPS = 12
CORES = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else [0]
TRAINING, OTHERS = 0, -1
OVERHEAD_MAX = 0.01


def main() -> int:
    """Measure for the given minutes and write `build/results/bench.json`."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=3.0)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    limit_threads(1)
    stay_on(OTHERS)
    with tempfile.TemporaryDirectory() as folder, EmbeddedBroker(Path(folder)) as broker:
        shard = spawn_shard(broker.url)
        try:
            pairs, inside = measure(broker.url, options.minutes * 60.0, options.seed)
        finally:
            shard.terminate()
            shard.wait(30)
    ratios = [island / bare - 1.0 for bare, island in pairs]
    overhead = statistics.median(ratios)
    spread = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else [overhead] * 3
    quartiles = f"quartiles {spread[0]:+.2%} {spread[2]:+.2%}"
    how = f"median over {len(pairs)} paired blocks of {BLOCK_STEPS} steps in one process, {quartiles}"
    figures = [
        Figure("step-time overhead of an island", overhead, "ratio", "<= 0.01", overhead <= OVERHEAD_MAX, how),
        Figure(
            "time inside island.step", inside, "ratio", "<= 0.01", inside <= OVERHEAD_MAX, "own clock, share of a step"
        ),
        Figure("bare step", statistics.median(b for b, _ in pairs) * 1e3, "ms", "", None, "median of block means"),
    ]
    return write("bench", options.seed, figures)


def spawn_shard(url: str) -> subprocess.Popen[bytes]:
    """Start one real shard; it stays where we are now."""
    command = [sys.executable, "-m", "atoll_synchronizer", "--set", f"run={RUN}", "--set", f"broker.url={url}"]
    return subprocess.Popen([*command, "--set", "log.level=warning"])


def stay_on(core: int) -> None:
    """Keep this thread, and the threads and processes it starts from now on, on one core of those we may use."""
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {CORES[core]})


def measure(url: str, seconds: float, seed: int) -> tuple[list[tuple[float, float]], float]:
    """Return (bare, island) mean step seconds per pair of blocks, and the share of time inside `island.step`."""
    stay_on(TRAINING)
    from atoll_learner.model import init_params  # noqa: PLC0415  (after the thread limits are set)
    from atoll_learner.train import init_optimizer, make_step  # noqa: PLC0415

    model = model_settings({}, vocab=256)
    train = train_settings({}, context=model.context)
    params = init_params(model, seed)
    protocol = ProtocolSettings(shards=1)
    stay_on(OTHERS)
    with join(url, run=RUN, learner="bench", params=params, protocol=protocol) as island:
        stay_on(TRAINING)
        step = make_step(model, train)
        state = init_optimizer(train, params)
        tokens = np.random.default_rng(seed).integers(0, 256, (train.batch, train.sequence + 1)).astype(np.int32)
        params, state, loss = step(island.params, state, tokens, 1e-4)
        float(loss)

        def bare() -> None:
            nonlocal params, state
            params, state, loss = step(params, state, tokens, 1e-4)
            float(loss)

        def inside() -> None:
            nonlocal params
            bare()
            params = island.step(params, tokens=tokens.size, loss=0.0)

        return paired(bare, inside, seconds), share_inside(island, inside)


def paired(bare: Callable[[], None], inside: Callable[[], None], seconds: float) -> list[tuple[float, float]]:
    """Run blocks of both kinds in turn, order swapped each time, and return the means of each pair."""
    once_s = block(bare)
    pairs = max(4, int(seconds / (2 * BLOCK_STEPS * once_s)))
    found = []
    for number in track(range(pairs), description="measuring"):
        first, second = (bare, inside) if number % 2 == 0 else (inside, bare)
        a, b = block(first), block(second)
        found.append((a, b) if number % 2 == 0 else (b, a))
    return found


def block(one: Callable[[], None]) -> float:
    """Return the mean seconds of a step in a block: the mean, because only some steps adopt."""
    began_s = time.perf_counter()
    for _ in range(BLOCK_STEPS):
        one()
    return (time.perf_counter() - began_s) / BLOCK_STEPS


def share_inside(island: IslandHandle, inside: Callable[[], None]) -> float:
    """Return the share of a step spent inside `island.step`, by clocking it over two blocks."""
    before_s, began_s = island.inside_s, time.perf_counter()
    for _ in range(2 * BLOCK_STEPS):
        inside()
    return (island.inside_s - before_s) / (time.perf_counter() - began_s)


if __name__ == "__main__":
    sys.exit(main())
