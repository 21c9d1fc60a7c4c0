"""Time `flwr.server.strategy.aggregate.aggregate` on float32 arrays; run in an environment that holds Flower alone."""

from __future__ import annotations

import json
import platform
import sys
import time
from importlib.metadata import version

import numpy as np
from flwr.server.strategy.aggregate import aggregate

REPEATS = 3


def main() -> None:
    contributions, elements, seed = map(int, sys.argv[1:])
    dice = np.random.default_rng(seed)
    results = [([dice.standard_normal(elements, dtype=np.float32)], 1000 + number) for number in range(contributions)]
    took = []
    for _ in range(REPEATS):
        began_s = time.perf_counter()
        aggregate(results)
        took.append(time.perf_counter() - began_s)
    versions = f"flwr {version('flwr')}, numpy {np.__version__}, Python {platform.python_version()}"
    what = "aggregate: float32, weights times arrays, then their sum"
    print(json.dumps({"seconds": min(took), "repeats": REPEATS, "what": what, "versions": versions}))


if __name__ == "__main__":
    main()
