"""Time `tsugi_mend.reducer.token_weighted_merge` on float32 tensors; run in an environment that holds tsugi-mend alone."""

from __future__ import annotations

import json
import platform
import sys
import time
from importlib.metadata import version

import torch
from tsugi_mend.reducer import LearnerFragment, token_weighted_merge

REPEATS = 3


def main() -> None:
    contributions, elements, seed = map(int, sys.argv[1:])
    torch.manual_seed(seed)
    fragments = [
        LearnerFragment(f"learner-{number}", 0, [torch.randn(elements)], 1000 + number)
        for number in range(contributions)
    ]
    took = []
    for _ in range(REPEATS):
        began_s = time.perf_counter()
        token_weighted_merge(fragments)
        took.append(time.perf_counter() - began_s)
    versions = f"tsugi-mend {version('tsugi-mend')}, torch {torch.__version__}, Python {platform.python_version()}"
    what = f"token_weighted_merge: float64 sums, {torch.get_num_threads()} threads"
    print(json.dumps({"seconds": min(took), "repeats": REPEATS, "what": what, "versions": versions}))


if __name__ == "__main__":
    main()
