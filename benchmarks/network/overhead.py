"""What being in an island costs a training step: `make bench`.

One process trains the demo model in alternating blocks of steps: bare, and inside an island with a real broker and shard that
call fragments at the demo's pace. Where there are two cores, the training thread and its compute stay on the first, broker,
shard and the island's own threads on the second: the question is the protocol's cost, not who gets the core.

What happens inside `island.step` is clocked. What the island's other threads do to the step itself (caches, memory, the
interpreter's lock) shows as a longer step, by medians of many. The figure is the sum, its limit (1 %) the goal, and the
interval (bootstrap over pairs of blocks) says how much of it is resolved.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
from rich.progress import track

from atoll.bus.server import EmbeddedBroker
from atoll.client.join import join
from atoll.protocol.settings import ProtocolSettings
from atoll_learner.model_settings import model_settings
from atoll_learner.process import limit_threads
from atoll_learner.train_settings import train_settings
from benchmarks.lib.harness import Figure, at_most, fact, run_benchmark
from benchmarks.lib.runs import shard_process

RUN = "overhead"
BLOCK_STEPS = 12
CORES = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else [0]
TRAINING, OTHERS = 0, -1
OVERHEAD_MAX = 0.01
RESAMPLES = 1000

Step = Callable[[], tuple[float, float]]


def main(*, minutes: float = 3.0, seed: int = 0) -> list[Figure]:
    limit_threads(1)
    stay_on(OTHERS)
    with (
        tempfile.TemporaryDirectory() as folder,
        EmbeddedBroker(Path(folder)) as broker,
        shard_process(broker.url, RUN),  # it stays where we are now
    ):
        blocks = measure(broker.url, minutes * 60.0, seed)
    overhead = blocks.slower() + blocks.inside()
    low, high = blocks.interval(seed)
    how = f"{blocks.bare.size} steps of either kind in turns of {BLOCK_STEPS}, one process; 95 %: {low:+.2%} to {high:+.2%}"
    return [
        at_most("step-time overhead of an island", overhead, "ratio", OVERHEAD_MAX, how),
        fact("of it the step itself", blocks.slower(), "ratio", "ratio of the medians of all steps"),
        fact("of it inside island.step", blocks.inside(), "ratio", "clocked: mean over the bare step"),
        fact("bare step", float(np.median(blocks.bare)) * 1e3, "ms", "median"),
    ]


@dataclass(frozen=True, slots=True)
class Blocks:
    """Seconds of every step, shape (pairs, BLOCK_STEPS): bare, the same step in an island, and `island.step` after it."""

    bare: npt.NDArray[np.float64]
    island: npt.NDArray[np.float64]
    after: npt.NDArray[np.float64]

    def slower(self) -> float:
        """Return by which share the step itself takes longer in an island."""
        return float(np.median(self.island) / np.median(self.bare)) - 1.0

    def inside(self) -> float:
        """Return the time in `island.step` as a share of a bare step."""
        return float(np.mean(self.after) / np.median(self.bare))

    def interval(self, seed: int) -> tuple[float, float]:
        """Return the 95 % interval of the sum of both, by drawing pairs of blocks anew."""
        dice = np.random.default_rng(seed)
        sums = []
        for _ in range(RESAMPLES):
            drawn = dice.integers(0, len(self.bare), len(self.bare))
            again = Blocks(self.bare[drawn], self.island[drawn], self.after[drawn])
            sums.append(again.slower() + again.inside())
        low, high = np.quantile(sums, [0.025, 0.975])
        return float(low), float(high)


def stay_on(core: int) -> None:
    """Keep this thread, and the threads and processes it starts from now on, on one core of those we may use."""
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {CORES[core]})


def measure(url: str, seconds: float, seed: int) -> Blocks:
    stay_on(TRAINING)
    from atoll_learner.model import init_params  # noqa: PLC0415  (after the thread limits are set)
    from atoll_learner.train import init_optimizer, make_step  # noqa: PLC0415

    model = model_settings({}, vocab=256)
    train = train_settings({}, model=model)
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

        def bare() -> tuple[float, float]:
            nonlocal params, state
            began_s = time.perf_counter()
            params, state, loss = step(params, state, tokens, 1e-4)
            float(loss)
            return time.perf_counter() - began_s, 0.0

        def inside() -> tuple[float, float]:
            nonlocal params
            step_s, _ = bare()
            began_s = time.perf_counter()
            params = island.step(params, tokens=tokens.size, loss=0.0)
            return step_s, time.perf_counter() - began_s

        return paired(bare, inside, seconds)


def paired(bare: Step, inside: Step, seconds: float) -> Blocks:
    """Run blocks of both kinds in turn, the order swapped each time."""
    once_s = float(np.mean(block(bare)[0]))
    pairs = max(4, int(seconds / (2 * BLOCK_STEPS * once_s)))
    found: list[tuple[npt.NDArray[np.float64], ...]] = []
    for number in track(range(pairs), description="measuring"):
        if number % 2 == 0:
            alone, (joined, after) = block(bare)[0], block(inside)
        else:
            joined, after = block(inside)
            alone = block(bare)[0]
        found.append((alone, joined, after))
    return Blocks(*(np.stack(part) for part in zip(*found, strict=True)))


def block(one: Step) -> npt.NDArray[np.float64]:
    return np.array([one() for _ in range(BLOCK_STEPS)]).T


if __name__ == "__main__":
    run_benchmark("bench", main)
