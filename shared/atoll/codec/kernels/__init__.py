"""The arithmetic of a shard and of a push, at the speed of memory: the loops that are the same for every format.

A contribution is folded in as it was sent; its float32 form is never written to memory. A kernel decodes a block of a vector
into the nearest cache and does one *operation* on it. There are two sets for each format: of its NumPy form (`in_numpy`) and
of its compiled form (`compiled`, which runs without the interpreter's lock). **They agree bit for bit**, so the choice matters
for speed alone. To that end sums have an order that no vector length changes. They are made in float64 (where products of two
float32 are exact), block by block, in lanes that are added in order at the end. A product of elements i of two blocks adds to
lane i. Squares of floats are first added in eights, those at the same place in the blocks of a tile; squares of integer codes
are summed as integers. No multiplication is fused with an addition, and a block's scale is multiplied into its share before
either meets the elements.

NumPy does the work at first. Once a format has much to do, a thread of its own compiles the other set (`background`). Only
vectors of at least `FAST_ELEMENTS` ask for it; once it is there, all take it.
"""

from __future__ import annotations

import functools
from typing import Final

from atoll.base.parallel import PART
from atoll.codec.formats.interface import Format
from atoll.codec.kernels import in_numpy
from atoll.codec.kernels.background import CompiledLater
from atoll.codec.kernels.in_numpy import Kernels

FAST_ELEMENTS: Final = 1 << 17


def kernels(form: Format, elements: int) -> Kernels:
    """Return the set for a part of a vector of so many elements in this format; it never waits for a compiler."""
    later = _compiled_later(form)
    made = later.made if elements < FAST_ELEMENTS else later.found(min(elements, PART))
    return made or plain_kernels(form)


@functools.cache
def plain_kernels(form: Format) -> Kernels:
    """Return the NumPy set."""
    return in_numpy.kernels(form)


def fast_kernels(form: Format) -> Kernels:
    """Return the compiled set, compiled now if it is not yet, or the NumPy set if there is no numba."""
    return _compiled_later(form).now() or plain_kernels(form)


_later: dict[Format, CompiledLater[Kernels]] = {}


def _compiled_later(form: Format) -> CompiledLater[Kernels]:
    # Several workers may get the first large vector at once: `setdefault` keeps one place for each format.
    return _later.get(form) or _later.setdefault(form, CompiledLater(form.name, functools.partial(_compiled, form)))


def _compiled(form: Format) -> Kernels | None:
    try:
        from atoll.codec.kernels import compiled  # noqa: PLC0415
    except ImportError:
        return None
    return compiled.kernels(form)
