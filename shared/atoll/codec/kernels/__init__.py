"""The arithmetic of a shard and of a push, at the speed of memory: the loops that are the same for every format.

A contribution is folded in as it was sent; its float32 form is never written to memory. A kernel goes over the blocks
of a vector, decodes each one into the nearest cache, and does one *operation* on it. Only the unavoidable traffic
remains: the payload read once, the running sum read and written once.

There are two sets for each format: of its NumPy form (`in_numpy`) and of its compiled form (`compiled`, which runs
without the interpreter's lock). **They agree bit for bit**, so the choice matters for speed alone: a shard without
numba, a small fragment and a replay elsewhere make the same model. To that end sums have an order that no vector length
changes. They are made in float64 (where products of two float32 are exact), block by block, in lanes that are added in
order at the end. A product of elements i of two blocks adds to lane i. Squares of floats are first added in eights,
those at the same place in the blocks of a tile; squares of integer codes are summed as integers. No multiplication is
fused with an addition, and a block's scale is multiplied into its share before either meets the elements.

Our images bring the compiled set (`atoll.codec.kernels.ready`). Elsewhere compiling takes some seconds per format, or less
than one where numba has kept the code (`atoll.codec.kernels.compiling`). It is done on a thread of its own, for formats that
have much to do (`atoll.codec.kernels.later`). Only vectors of at least `FAST_ELEMENTS` ask for the compiled set; once it is
there, all take it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np

from atoll.base.buffer_pool import Vector
from atoll.base.parallel import PART
from atoll.codec.formats.interface import BLOCK, Bytes, Format
from atoll.codec.kernels import ready
from atoll.codec.kernels.later import CompiledLater

COPY: Final = 0
BLEND: Final = 1
BEND: Final = 2
MULTIPLY: Final = 3
"""Operations, see `Kernels.over`."""

FAST_ELEMENTS: Final = 1 << 17


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


def kernels(form: Format, elements: int) -> Kernels:
    """Return the set for a part of a vector of so many elements in this format; it never waits for a compiler."""
    later = _compiled_later(form)
    made = later.there() if elements < FAST_ELEMENTS else later.found(min(elements, PART))
    return made or plain_kernels(form)


@functools.cache
def plain_kernels(form: Format) -> Kernels:
    """Return the NumPy set."""
    from atoll.codec.kernels import in_numpy  # noqa: PLC0415  (either set is loaded when it is first needed)

    return Kernels("plain", *in_numpy.loops(form))


def fast_kernels(form: Format) -> Kernels:
    """Return the compiled set, compiled now if it is not yet, or the NumPy set if there is no numba."""
    return _compiled_later(form).now() or plain_kernels(form)


_later: dict[Format, CompiledLater[Kernels]] = {}


def _compiled_later(form: Format) -> CompiledLater[Kernels]:
    """Return the one place of a format's compiled set: several workers may get the first large vector at once."""
    make, brought = functools.partial(_compiled, form), functools.partial(ready_kernels, form)
    return _later.get(form) or _later.setdefault(form, CompiledLater(form.name, make, brought=brought))


def ready_kernels(form: Format, folder: Path = ready.FOLDER) -> Kernels | None:
    """Return the compiled set that was made beforehand, None if there is none in `folder` that counts."""
    found = ready.opened(folder)
    over = found.get(f"{form.name}_over")
    if over is None:
        return None
    squares = found.get(f"{form.name}_squares") or functools.partial(squares_of_scaled_floats, form, over)
    return Kernels("fast", over, squares, found[f"{form.name}_quantise"], found[f"{form.name}_settle"])


def _compiled(form: Format) -> Kernels | None:
    """Compile or load the set of a format; None if there is no numba."""
    try:
        from atoll.codec.kernels import compiled  # noqa: PLC0415
    except ImportError:
        return None
    return Kernels("fast", *compiled.loops(form))
