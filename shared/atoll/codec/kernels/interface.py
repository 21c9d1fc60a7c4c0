"""One set of kernels: its operations, its four functions, and the sum of squares that both sets make of these."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import numpy as np

from atoll.base.buffer_pool import Vector
from atoll.codec.formats.interface import BLOCK, Bytes, Format

COPY: Final = 0
BLEND: Final = 1
BEND: Final = 2
MULTIPLY: Final = 3
"""Operations, see `Kernels.over`."""


@dataclass(frozen=True, slots=True)
class Kernels:
    """One set of four functions, for one format.

    over(operation, payload, scales, start, stop, others, acc, lanes, keep, take, add)
        Do `operation` with elements `start` to `stop` of an encoded vector v; `others` and `acc` are float32 vectors as long
        as v, or empty where they are not used, `lanes` are `BLOCK` float64 numbers.

            COPY      acc <- v
            BLEND     acc <- keep acc + take v
            BEND      acc <- keep acc + (take v + add others)
            MULTIPLY  lanes += v others

    squares(payload, scales, start, stop) -> float
        Return the sum of v^2 over elements `start` to `stop`: finite if and only if all of them are.

    quantise(vector, payload, scales) -> float
        Write the codes and the scales of a vector; return its largest magnitude, infinity where it is not finite, and then
        what was written says nothing.

    settle(values, following, payload, scales, carry) -> float
        Quantise `following - values`; write what the codes make of `values` to `following`, and what they leave of it to
        `carry`, in bfloat16 (`atoll.merge.global_update`). Returns what `quantise` returns;
        where that is infinity, a part of `following` may be written already.
    """

    name: str
    over: Callable[..., None]
    squares: Callable[..., float]
    quantise: Callable[..., float]
    settle: Callable[..., float]


def squares_of_scaled_floats(
    form: Format, over: Callable[..., None], payload: Bytes, scales: Vector, start: int, stop: int
) -> float:
    """Return the sum of squares of elements `start` to `stop`: their product with themselves, by the set's own `over`."""
    first = start // BLOCK
    low, high, codes, own = (
        start - first * BLOCK,
        stop - first * BLOCK,
        payload[first * form.block_bytes :],
        scales[first:],
    )
    none, values, lanes = np.empty(0, np.float32), np.empty(high, np.float32), np.zeros(BLOCK)
    over(COPY, codes, own, low, high, none, values, lanes, 0.0, 0.0, 0.0)
    over(MULTIPLY, codes, own, low, high, values, none, lanes, 0.0, 0.0, 0.0)
    return float(np.add.accumulate(lanes)[-1])
