"""Time the merge of float32 vectors by another project; run in an environment that holds this project alone.

merging.py flower|tsugi CONTRIBUTIONS ELEMENTS SEED
"""

from __future__ import annotations

import json
import platform
import sys
import time
from collections.abc import Callable
from importlib.metadata import version

import numpy as np

REPEATS = 3


def flower(vectors: list[np.ndarray]) -> tuple[Callable[[], object], str, str]:
    from flwr.server.strategy.aggregate import aggregate  # noqa: PLC0415  (each environment has one of the two)

    results = [([vector], 1000 + number) for number, vector in enumerate(vectors)]
    what = "aggregate: float32, weights times arrays, then their sum"
    return lambda: aggregate(results), what, f"flwr {version('flwr')}, numpy {np.__version__}"


def tsugi(vectors: list[np.ndarray]) -> tuple[Callable[[], object], str, str]:
    import torch  # noqa: PLC0415
    from tsugi_mend.reducer import LearnerFragment, token_weighted_merge  # noqa: PLC0415

    fragments = [
        LearnerFragment(f"learner-{number}", 0, [torch.from_numpy(vector)], 1000 + number)
        for number, vector in enumerate(vectors)
    ]
    what = f"token_weighted_merge: float64 sums, {torch.get_num_threads()} threads"
    versions = f"tsugi-mend {version('tsugi-mend')}, torch {torch.__version__}"
    return lambda: token_weighted_merge(fragments), what, versions


def main() -> None:
    contributions, elements, seed = map(int, sys.argv[2:])
    dice = np.random.default_rng(seed)
    vectors = [dice.standard_normal(elements, dtype=np.float32) for _ in range(contributions)]
    merge, what, versions = {"flower": flower, "tsugi": tsugi}[sys.argv[1]](vectors)
    took = []
    for _ in range(REPEATS):
        began_s = time.perf_counter()
        merge()
        took.append(time.perf_counter() - began_s)
    versions = f"{versions}, Python {platform.python_version()}"
    print(json.dumps({"seconds": min(took), "repeats": REPEATS, "what": what, "versions": versions}))


if __name__ == "__main__":
    main()
