"""How fast simulated learners step: `make bench-simulator`.

A bare loop of jitted steps of the demo's model on one device of one thread is what one core can do. `atoll sim train`
with four learners has as many devices as the machine has cores, and does all else that a run needs besides: bus,
codecs, merges, commits. The goal is four fifths of all cores. The same loop with as many learners and devices as the
simulation says what this machine gives to anybody who wants all its cores now. All are measured in turns, in processes
of their own; the medians count.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Final

from benchmarks.lib.arguments import natural, positive
from benchmarks.lib.results import Figure, write

FOLDER = Path("build/simulator")
LEARNERS: Final = 4
TURNS: Final = 3
TOKENS_PER_MINUTE: Final = 150_000
SHARE_MIN: Final = 0.8
BARE: Final = """
import json, os, sys, time
from pathlib import Path
if sys.argv[4] == "1" and hasattr(os, "sched_setaffinity"):
    # XLA has more threads than its flags say; a process that may use one core is one core.
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
from atoll_simulator.process_setup import one_thread_for_algebra, use_cores
one_thread_for_algebra()
use_cores(int(sys.argv[4]))
import jax
from atoll_learner.compiling import enable_compile_cache
from atoll_learner.data.batches import BatchReader
from atoll_learner.data.shards import TokenShards
from atoll_learner.model import init_params
from atoll_learner.model_settings import model_settings
from atoll_learner.train import init_optimizer, make_step
from atoll_learner.train_settings import train_settings
enable_compile_cache(Path(sys.argv[2]))
shards = TokenShards(Path(sys.argv[1]))
model = model_settings({}, vocab=shards.meta.vocab)
train = train_settings({}, model=model)
reader = BatchReader(shards, train.sequence, train.batch, 0)
reader.grant(0, 0, 256)
step, devices = make_step(model, train), jax.local_devices()
learners = []
for number in range(int(sys.argv[4])):
    params = jax.device_put(init_params(model, 0), devices[number % len(devices)])
    state = jax.device_put(init_optimizer(train, params), devices[number % len(devices)])
    learners.append(step(params, state, reader.next(), 1e-3))
jax.block_until_ready(learners)
began_s, steps = time.monotonic(), 0
while time.monotonic() - began_s < float(sys.argv[3]):
    for number, (params, state, loss) in enumerate(learners):
        loss.block_until_ready()
        learners[number] = step(params, state, reader.next(), 1e-3)
        steps += 1
jax.block_until_ready(learners)
print(json.dumps(steps / (time.monotonic() - began_s)))
"""
SIMULATED: Final = """
import json, sys
from atoll_simulator.process_setup import one_thread_for_algebra
one_thread_for_algebra()
from atoll.local.options import UpRequest
from atoll_simulator.workshop import run_sim
ran = run_sim(UpRequest(assignments=(*sys.argv[3:], f"up.learners={sys.argv[1]}", f"up.out={sys.argv[2]}")))
print(json.dumps(ran.steps_per_s))
"""


def main() -> int:
    """Measure in turns and write `build/results/bench-simulator.json`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=positive, default=4.0, help="about this long in all")
    parser.add_argument("--seed", type=natural, default=0)
    options = parser.parse_args()
    shutil.rmtree(FOLDER, ignore_errors=True)
    data, cache = (FOLDER / "data").absolute(), (FOLDER / "cache").absolute()
    subprocess.run([sys.executable, "-m", "atoll.cli", "data", "prepare", "--stdlib", "--out", str(data)], check=True)
    tokens = int(TOKENS_PER_MINUTE * options.minutes / TURNS)
    told = [f"data.dir={data}", f"learner.compile_cache={cache}", f"protocol.tokens_target={tokens}"]
    # A bare loop measures no held-out text, so the run does so only at its beginning and its end.
    told += [f"seed={options.seed}", "sim.step_cv=0.1", f"sim.evaluate_tokens={1 << 60}"]
    seconds = str(60 * options.minutes / TURNS / 6)
    bare, wide, simulated = [], [], []
    for turn in range(TURNS):
        bare.append(measured(BARE, str(data), str(cache), seconds, "1"))
        wide.append(measured(BARE, str(data), str(cache), seconds, str(LEARNERS)))
        simulated.append(measured(SIMULATED, str(LEARNERS), str(FOLDER / str(turn)), *told))
    cores = os.cpu_count() or 1
    one, all_of_them = statistics.median(bare), statistics.median(simulated)
    share, given = all_of_them / (cores * one), statistics.median(wide)
    how = f"median of {TURNS} turns: {', '.join(f'{rate:.2f}' for rate in simulated)}"
    return write(
        "bench-simulator",
        options.seed,
        [
            Figure(
                "steps of a bare loop on one core", one, "1/s", "", None, "the demo's model, batch of 8 x 128 tokens"
            ),
            Figure(f"steps of a simulated run, {LEARNERS} learners", all_of_them, "1/s", "", None, how),
            Figure(
                f"steps of a bare loop, {LEARNERS} learners", given, "1/s", "", None, "on all cores, as they are now"
            ),
            Figure("of that bare loop", all_of_them / given, "ratio", "", None, how),
            Figure(f"of what {cores} cores could do", share, "ratio", f">= {SHARE_MIN}", share >= SHARE_MIN, how),
        ],
    )


def measured(code: str, *words: str) -> float:
    """Return the steps per second that a program prints last."""
    done = subprocess.run([sys.executable, "-c", code, *words], check=True, stdout=subprocess.PIPE, text=True)
    rate: float = json.loads(done.stdout.splitlines()[-1])
    return rate


if __name__ == "__main__":
    sys.exit(main())
