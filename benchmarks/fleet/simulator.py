"""How fast simulated learners step: `make bench-simulator`.

A bare loop of jitted steps of the demo's model on one device of one thread is what one core can do. `atoll sim train`
with four learners has as many devices as the machine has cores, and does all else that a run needs besides: bus,
codecs, merges, commits. The goal is four fifths of all cores. The same loop with as many learners and devices as the
simulation says what this machine gives to anybody who wants all its cores now. All are measured in turns, in processes
of their own; the medians count.
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Annotated, Final

from benchmarks.lib.harness import Figure, at_least, fact, run_benchmark
from benchmarks.lib.runs import prepare

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
from atoll_simulator import one_thread_for_algebra
one_thread_for_algebra()
from atoll_simulator.workshop import use_cores
use_cores(int(sys.argv[4]))
import jax
from atoll_learner.process import enable_compile_cache
from atoll_learner.feed import BatchReader
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
from atoll_simulator import one_thread_for_algebra
one_thread_for_algebra()
from atoll.local.options import UpRequest
from atoll_simulator.workshop import run_sim
ran = run_sim(UpRequest(assignments=(*sys.argv[3:], f"up.learners={sys.argv[1]}", f"up.out={sys.argv[2]}")))
print(json.dumps(ran.steps_per_s))
"""


def main(*, minutes: Annotated[float, "about this long in all"] = 4.0, seed: int = 0) -> list[Figure]:
    shutil.rmtree(FOLDER, ignore_errors=True)
    data, cache = prepare(), (FOLDER / "cache").absolute()
    tokens = int(TOKENS_PER_MINUTE * minutes / TURNS)
    told = [f"data.dir={data}", f"learner.compile_cache={cache}", f"protocol.tokens_target={tokens}"]
    # A bare loop measures no held-out text, so the run does so only at its beginning and its end.
    told += [f"seed={seed}", "sim.step_cv=0.1", f"sim.evaluate_tokens={1 << 60}"]
    seconds = str(60 * minutes / TURNS / 6)
    bare, wide, simulated = [], [], []
    for turn in range(TURNS):
        bare.append(steps_per_s(BARE, str(data), str(cache), seconds, "1"))
        wide.append(steps_per_s(BARE, str(data), str(cache), seconds, str(LEARNERS)))
        simulated.append(steps_per_s(SIMULATED, str(LEARNERS), str(FOLDER / str(turn)), *told))
    cores = os.cpu_count() or 1
    one, all_of_them = statistics.median(bare), statistics.median(simulated)
    share, given = all_of_them / (cores * one), statistics.median(wide)
    how = f"median of {TURNS} turns: {', '.join(f'{rate:.2f}' for rate in simulated)}"
    return [
        fact("steps of a bare loop on one core", one, "1/s", "the demo's model, batch of 8 x 128 tokens"),
        fact(f"steps of a simulated run, {LEARNERS} learners", all_of_them, "1/s", how),
        fact(f"steps of a bare loop, {LEARNERS} learners", given, "1/s", "on all cores, as they are now"),
        fact("of that bare loop", all_of_them / given, "ratio", how),
        at_least(f"of what {cores} cores could do", share, "ratio", SHARE_MIN, how),
    ]


def steps_per_s(code: str, *words: str) -> float:
    done = subprocess.run([sys.executable, "-c", code, *words], check=True, stdout=subprocess.PIPE, text=True)
    rate: float = json.loads(done.stdout.splitlines()[-1])
    return rate


if __name__ == "__main__":
    run_benchmark("bench-simulator", main)
