"""The compiled outer step: `nesterov` of `atoll.codec.kernels`, to the bit what `plain` has.

What a step has of momentum and of carry is asked once per stretch, not once per number, and a stretch stays in the first
cache between its loops: each of them is a vector loop, and memory is read and written once.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from numba import types

from atoll.codec.kernels import Vector
from atoll.codec.kernels.compiling import F32_IN, F32_OUT, U16_IN, compiled

Halves = npt.NDArray[np.uint16]

STRETCH = 1024


@compiled(types.void(F32_IN, U16_IN, F32_IN, F32_IN, types.float32, types.float32, F32_OUT, F32_OUT))
def nesterov(
    values: Vector,
    carry: Halves,
    pseudo_gradient: Vector,
    momentum: Vector,
    lr: float,
    mu: float,
    next_values: Vector,
    next_momentum: Vector,
) -> None:
    """Do one step of SGD with Nesterov momentum, a stretch after the other that stays in the first cache."""
    for start in range(0, values.size, STRETCH):
        now, delta = values[start : start + STRETCH], pseudo_gradient[start : start + STRETCH]
        then, lost = next_values[start : start + STRETCH], carry[start : start + STRETCH]
        if momentum.size:
            before, after = momentum[start : start + STRETCH], next_momentum[start : start + STRETCH]
            for i in range(now.size):
                pushed = mu * before[i] + delta[i]
                after[i] = pushed
                then[i] = lr * (delta[i] + mu * pushed)
        else:
            for i in range(now.size):
                then[i] = lr * delta[i]
        if carry.size:
            for i in range(now.size):
                then[i] = (now[i] + np.uint32(np.uint32(lost[i]) << np.uint32(16)).view(np.float32)) - then[i]
        else:
            for i in range(now.size):
                then[i] = now[i] - then[i]
