"""Outer optimizers against recorded numbers, so that a change of arithmetic is seen and meant.

`ATOLL_REWRITE_GOLDEN=1` writes the file anew; the test then skips, so that a rewrite never passes for a check.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest

from atoll.merge.outer import make_outer

GOLDEN = Path(__file__).with_name("outer_golden.json")
STEPS = 10
START = [1.0, -2.0, 0.5, 0.0]
PSEUDO_GRADIENT = [0.1, -0.25, 1.0, 0.0]
CASES = {
    "nesterov lr=0.7 momentum=0.9": ("nesterov", 0.7, 0.9),
    "nesterov lr=0.4 momentum=0.5": ("nesterov", 0.4, 0.5),
    "nesterov lr=1.0 momentum=0.0": ("nesterov", 1.0, 0.0),
    "optax:adam lr=0.1": ("optax:adam", 0.1, 0.0),
}


def trajectory(spec: str, lr: float, momentum: float) -> list[list[float]]:
    """Return the values after each of ten steps along one constant pseudo-gradient."""
    outer = make_outer(spec, lr, momentum)
    params = np.array(START, np.float32)
    pseudo_gradient = np.array(PSEUDO_GRADIENT, np.float32)
    state, found = outer.init(params), []
    for _ in range(STEPS):
        params, state = outer.update(params, pseudo_gradient, state)
        found.append([float(value) for value in params])
    return found


@pytest.mark.parametrize("case", list(CASES))
def test_the_trajectory_is_the_recorded_one(case: str) -> None:
    found = trajectory(*CASES[case])
    if os.environ.get("ATOLL_REWRITE_GOLDEN") == "1":
        recorded = json.loads(GOLDEN.read_text(encoding="utf-8")) if GOLDEN.exists() else {}
        recorded[case] = found
        kept = {name: recorded[name] for name in CASES if name in recorded}
        GOLDEN.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")
        pytest.skip("rewritten, not checked")
    recorded = json.loads(GOLDEN.read_text(encoding="utf-8"))
    np.testing.assert_allclose(found, recorded[case], rtol=1e-6, atol=1e-7)


def test_nothing_else_is_recorded() -> None:
    assert list(json.loads(GOLDEN.read_text(encoding="utf-8"))) == list(CASES)
