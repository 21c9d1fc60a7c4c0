"""Enters several contributions into a sum in one pass over memory.

The sum of a large fragment is larger than any cache, so entering one contribution costs as much as reading and writing
the sum, however few bits the contribution has. Waiting contributions share that cost: a `BatchedAccumulation` goes over
the sum part by part, and enters all of them into one part while that part is in the cache. Every element sees the same
operations in the same order as if they had been entered one by one, so the bits are the same. They are also the same
with any number of threads, because threads take different parts.

The share of a waiting contribution in the sum is decided already, slice by slice: an `AccumulateStep`. It stays encoded
as it came. Codes wait up to the size of a sum, 32 bits for each element: eight contributions of four bits, two in
bfloat16, and none in float32, which is entered at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from atoll.base import buffer_pool
from atoll.base.buffer_pool import Vector
from atoll.base.parallel import each, parts
from atoll.codec.encoded import Encoded
from atoll.codec.formats import F32
from atoll.codec.formats.interface import blocks
from atoll.model.layout import FragmentSlice


@dataclass(frozen=True, slots=True)
class AccumulateStep:
    """The step of one slice of a sum: `keep` of itself, `take` of a contribution, and `add` of the momentum, if any."""

    keep: float
    take: float
    add: float | None = None


@dataclass(frozen=True, slots=True)
class AccumulateEntry:
    """A contribution and its step per slice, or None for nothing to do; `anew`: the sum begins as a copy of it."""

    pseudo_gradient: Encoded
    steps: Sequence[AccumulateStep | None]
    momentum: Vector | None
    anew: bool


class BatchedAccumulation:
    """A sum over these slices, and the entries that wait for it."""

    def __init__(self, slices: Sequence[FragmentSlice]) -> None:
        """Begin without a sum."""
        self._slices = tuple(slices)
        self._waiting: list[AccumulateEntry] = []
        self._total: Vector | None = None

    def add(self, entry: AccumulateEntry) -> None:
        """Put an entry on the waiting list, and enter all of them when they are many."""
        if entry.anew:
            self._waiting.clear()
            self._total = None
        self._waiting.append(entry)
        elements = entry.pseudo_gradient.elements
        if (len(self._waiting) + 1) * entry.pseudo_gradient.codes.nbytes > blocks(elements) * F32.block_bytes:
            self.total(elements)

    def total(self, elements: int) -> Vector:
        """Enter all waiting entries and return the sum, zeros if it has none; it is the same memory until `anew`."""
        total = self._total
        if total is None:
            total = self._total = buffer_pool.empty(elements)
            if not self._waiting:
                total[:] = 0.0
        entries, self._waiting = self._waiting, []
        pieces = [
            (number, *part) for number, tensor_slice in enumerate(self._slices) for part in parts(*tensor_slice.bounds)
        ]

        def enter_all(piece: tuple[int, int, int]) -> None:
            number, start, stop = piece
            for entry in entries:
                step = entry.steps[number]
                if entry.anew:
                    entry.pseudo_gradient.copy(total, start, stop)
                if step is not None and step.add is not None and entry.momentum is not None:
                    factors = step.keep, step.take, step.add
                    entry.pseudo_gradient.bend(total, (start, stop), factors, entry.momentum)
                elif step is not None:
                    entry.pseudo_gradient.blend(total, start, stop, step.keep, step.take)

        each(enter_all, pieces, elements if entries else 0)
        return total
