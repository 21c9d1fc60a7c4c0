"""One step of SGD with Nesterov momentum, compiled, for large vectors: the bits of `atoll.merge.outer.Nesterov.step`.

    momentum' = mu momentum + d        values' = (values + carry) - lr (d + mu momentum')        d: the pseudo-gradient

An empty `momentum` means no momentum; an empty `carry` (bits of bfloat16) means `values` alone. Beside it is the momentum
that two versions' values tell (`atoll.merge.outer.Nesterov.derive`). No multiplication is fused with an addition. Momentum
and carry are looked for once per stretch, not once per number. A stretch stays in the first cache between its loops: each
loop is a vector loop, and memory is read and written once.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from atoll.base.buffer_pool import Vector
from atoll.codec.formats.interface import Halves
from atoll.codec.kernels import ready
from atoll.codec.kernels.later import CompiledLater

STRETCH = 1024
NAME = "nesterov"
DERIVE = "nesterov_derive"


def _compiled() -> Callable[..., None] | None:
    """Return `_step` compiled, or None if there is no numba."""
    try:
        from numba import types  # noqa: PLC0415  (loaded when there is much to step)

        from atoll.codec.kernels.compiling import F32_IN, F32_OUT, U16_IN, compiled  # noqa: PLC0415
    except ImportError:
        return None
    signature = types.void(F32_IN, U16_IN, F32_IN, F32_IN, types.float32, types.float32, F32_OUT, F32_OUT)
    return compiled(signature)(_step)


compiled_step = CompiledLater(NAME, _compiled, brought=lambda: ready.function(NAME))


def _compiled_derive() -> Callable[..., None] | None:
    """Return `_derive` compiled, or None if there is no numba."""
    try:
        from numba import types  # noqa: PLC0415  (loaded when there is much to derive)

        from atoll.codec.kernels.compiling import F32_IN, F32_OUT, compiled  # noqa: PLC0415
    except ImportError:
        return None
    signature = types.void(F32_IN, F32_IN, F32_IN, types.float32, types.float32, types.float32, F32_OUT)
    return compiled(signature)(_derive)


compiled_derive = CompiledLater(DERIVE, _compiled_derive, brought=lambda: ready.function(DERIVE))


def _step(
    values: Vector,
    carry: Halves,
    pseudo_gradient: Vector,
    momentum: Vector,
    lr: float,
    mu: float,
    next_values: Vector,
    next_momentum: Vector,
) -> None:
    """Do one step, a stretch after the other; compiled."""
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


def _derive(
    momentum: Vector, before: Vector, after: Vector, mu: float, per_lr: float, share: float, kept: Vector
) -> None:
    """Derive the momentum after a version from its values and those before it; compiled."""
    for i in range(momentum.size):
        kept[i] = (mu * momentum[i] + (before[i] - after[i]) * per_lr) * share
