"""What a first use costs, with every cache empty: `make bench-start`.

Each use is a process of its own, with an empty folder for numba's machine code and none for JAX's programs; bytecode of Python
is there, as after `pip install`. Joining counts from the call of `atoll.join` (its own imports are in it) until it returns, by
a loop that has imported JAX and has its parameters; exporting counts the whole process. The broker is this machine's. The
middle of `REPEATS` is told. Kernels are compiled on a thread of their own, later and only where there is much to do
(`atoll.codec.kernels.background`): how long one set of them takes is told beside it.
"""

from __future__ import annotations

import itertools
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Final

from atoll.bus.server import EmbeddedBroker
from benchmarks.lib.harness import Figure, at_most, run_benchmark

REPEATS: Final = 3
GOAL_S: Final = 3.0
SIZES: Final = {"the digits model (4,736 parameters)": (64, 74), "1M parameters": (1000, 1000)}

TIMED = """
import sys, time
began_s = time.perf_counter()
{body}
print("took", time.perf_counter() - began_s)
"""
JOIN = """
import sys, time
import jax
url, run, seed, rows, columns = sys.argv[1], sys.argv[2], *map(int, sys.argv[3:])
params = {"w": jax.block_until_ready(jax.random.normal(jax.random.key(seed), (rows, columns)))}
began_s = time.perf_counter()
import atoll
island = atoll.join(url, run=run, learner="a", params=params)
print("took", time.perf_counter() - began_s)
island.close()
"""
COMPILE = (
    "from atoll.codec import FORMATS\nfrom atoll.codec.kernels import fast_kernels\nfast_kernels(FORMATS[sys.argv[1]])"
)
VERB = """
import subprocess
subprocess.run([sys.executable, "-m", "atoll.cli", *sys.argv[1:]], check=True, stdout=subprocess.DEVNULL)
"""
READ = "import atoll\natoll.read_model(sys.argv[1], run=sys.argv[2])"


def main(*, seed: int = 0) -> list[Figure]:
    figures = [
        figure("import atoll", partial(run_timed, TIMED.format(body="import atoll"))),
        figure("atoll --help", partial(process_s, "--help")),
    ]
    with tempfile.TemporaryDirectory() as folder, EmbeddedBroker(Path(folder) / "broker") as broker:
        for size, shape in SIZES.items():
            figures.append(
                figure(f"join, {size}", partial(join_s, broker.url, itertools.count(1), str(seed), shape), GOAL_S)
            )
        run = run_of(SIZES["1M parameters"], 1)
        read = partial(run_timed, TIMED.format(body=READ), broker.url, run)
        export = partial(process_s, "export", "--run", run, "--broker", broker.url, "--out", f"{folder}/out")
        figures += [figure("read_model, 1M parameters", read), figure("atoll export, 1M parameters", export, GOAL_S)]
    for codec in ("f32", "int4"):
        compiling = partial(run_timed, TIMED.format(body=COMPILE), codec)
        figures.append(figure(f"compiling the kernels of {codec}", compiling))
    return figures


def join_s(url: str, numbers: Iterator[int], seed: str, shape: tuple[int, int]) -> float:
    """Return how long `join` takes that founds the next run of this shape, seconds."""
    return run_timed(JOIN, url, run_of(shape, next(numbers)), seed, *map(str, shape))


def run_of(shape: tuple[int, int], number: int) -> str:
    return f"r{shape[0]}-{number}"


def figure(name: str, measure: Callable[[], float], most_s: float | None = None) -> Figure:
    """Return the middle of several measurements, seconds."""
    taken = sorted(measure() for _ in range(REPEATS))
    return at_most(name, statistics.median(taken), "s", most_s, f"{taken[0]:.2f} to {taken[-1]:.2f} s")


def process_s(*words: str) -> float:
    """Return how long `atoll <words>` takes, as its caller sees it, seconds."""
    return run_timed(TIMED.format(body=VERB), *words)


def run_timed(program: str, *words: str) -> float:
    """Return the seconds that a program prints at the end of its output; all caches are empty."""
    with tempfile.TemporaryDirectory() as caches:
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("JAX_", "NUMBA_", "ATOLL_"))}
        bytecode = {"PYTHONDONTWRITEBYTECODE": ""}
        done = subprocess.run(
            [sys.executable, "-c", program, *words],
            env={**kept, **bytecode, "NUMBA_CACHE_DIR": caches},
            capture_output=True,
            text=True,
            check=False,
        )
    if done.returncode:
        raise SystemExit(f"{program}\nleft with {done.returncode}:\n{done.stderr}")
    return next(float(line.removeprefix("took ")) for line in done.stdout.splitlines() if line.startswith("took "))


if __name__ == "__main__":
    run_benchmark("bench-start", main)
