"""The arithmetic of a shard and of a push, at the speed of memory: survey, fold, expand, quantise, step.

A contribution is folded in as it was sent. Nobody writes its float32 form to memory: a kernel goes over the blocks of an
encoding, stages those that need it in the nearest cache, and does one *operation* on them. What is left of the cost is the
traffic that cannot be avoided: the payload read once, the running sum read and written once.

There are two sets. `fast`, `measuring`, `quantising` and `stepping` are compiled by numba and run without the interpreter's
lock; `plain` is NumPy. **They agree bit for bit**, so which one runs is a matter of speed alone: a shard without numba, a
small fragment and a replay elsewhere make the same model. For that, sums have an order that no vector length changes: they
are made in float64 (where products of two float32 are exact), block by block, in lanes that are added up in their order at
the end. A product of elements i of two blocks adds to lane i; squares of floats are added up in eights first, those at the
same place in the blocks of a tile; squares of integer codes are summed as integers. No multiplication is fused with an
addition, and a block's scale is multiplied into its share before either meets the elements.

Compiling takes ten seconds and more, once where numba can keep the code (beside the module, in a cache of the user, or in
`NUMBA_CACHE_DIR`), else at every start; compiled kernels are loaded where a fragment is large enough to be worth that,
`FAST_ELEMENTS`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

Vector = npt.NDArray[np.float32]
Bytes = npt.NDArray[np.uint8]

F32: Final = 1
BF16: Final = 2
INT8: Final = 4
INT4: Final = 5
E3M0: Final = 6
"""Encodings by their number on the wire (3 was int8 with float32 scales); `atoll.codec.encodings` says what each is."""

BLOCK: Final = 128
"""Elements that share a scale."""

COPY: Final = 0
BLEND: Final = 1
BEND: Final = 2
MULTIPLY: Final = 3
"""Operations, see `Kernels.over`."""

TILE: Final = 8 * BLOCK
"""Elements whose squares are added up in float32, eight to a lane, before float64 takes over."""
SQUARES_MIN: Final = 2.0**-60
"""A lane below it may have lost squares to underflow: all of them are done in float64 then."""
SCALE_MIN: Final = np.float32(1e-38)
E3M0_UNIT: Final = np.float32(2.0**-6)
"""The least magnitude of E3M0 before its scale; all of them are integer multiples of it, 64 at most."""
FAST_ELEMENTS: Final = 1 << 17


@dataclass(frozen=True, slots=True)
class Kernels:
    """One set of five functions.

    over(operation, kind, payload, scales, start, stop, others, acc, lanes, keep, take, add)
        Do `operation` with elements `start` to `stop` of an encoded vector v; `others` and `acc` are float32 vectors as long
        as v, or empty where they are not used, `lanes` are `BLOCK` float64 numbers.

            COPY      acc <- v
            BLEND     acc <- keep acc + take v
            BEND      acc <- keep acc + (take v + add others)
            MULTIPLY  lanes += v others

    squares(kind, payload, scales, start, stop) -> float
        Return the sum of v^2 over elements `start` to `stop`: finite if and only if all of them are.

    quantise(kind, vector, payload, scales) -> float
        Write the codes and the scales of a vector; return its largest magnitude, infinity where it is not finite, and then
        what was written says nothing.

    nesterov(values, carry, pseudo-gradient, momentum, lr, mu, next_values, next_momentum)
        One step of SGD with Nesterov momentum (`atoll.merge.outer`) from `values` plus `carry`, bits of bfloat16, or
        from `values` where it is empty; without momentum where that is empty.

    settle(kind, values, following, payload, scales, carry) -> float
        Quantise `following - values`; write what the codes make of `values` to `following`, and what they leave of it to
        `carry`, in bfloat16 (`atoll.merge.downlink`). Returns what `quantise` returns.
    """

    name: str
    over: Callable[..., None]
    squares: Callable[..., float]
    quantise: Callable[..., float]
    nesterov: Callable[..., None]
    settle: Callable[..., float]


def kernels(elements: int) -> Kernels:
    """Return the set for vectors of so many elements."""
    return fast_kernels() if elements >= FAST_ELEMENTS else plain_kernels()


@functools.cache
def plain_kernels() -> Kernels:
    """Return the NumPy set."""
    from atoll.codec.kernels import plain  # noqa: PLC0415  (either set is loaded when it is first needed)

    return Kernels("plain", plain.over, plain.squares, plain.quantise, plain.nesterov, plain.settle)


@functools.cache
def fast_kernels() -> Kernels:
    """Return the compiled set, the NumPy set where there is no numba."""
    try:
        from atoll.codec.kernels import fast, measuring, quantising, stepping  # noqa: PLC0415
    except ImportError:
        return plain_kernels()
    return Kernels("fast", fast.over, measuring.squares, quantising.quantise, stepping.nesterov, quantising.settle)
