"""A vector as it was sent; it is measured, folded in and expanded from its codes, never held as float32 in memory.

The loops are in `atoll.codec.kernels`. Sums over a stretch of elements are computed part by part and added in the order
of the parts (`atoll.base.parallel`), so that several threads may share a large sum.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from atoll.base import buffer_pool, scratch_arrays
from atoll.base.buffer_pool import Vector
from atoll.base.errors import FrameRejected, ProtocolMisuse
from atoll.base.parallel import each, parts
from atoll.codec.formats import F32, Format
from atoll.codec.formats.interface import BLOCK, NO_SCALES, SCALE_BYTES, Bytes, Halves, Lanes, blocks
from atoll.codec.kernels import BEND, BLEND, COPY, MULTIPLY, kernels

_NONE = np.empty(0, dtype=np.float32)


@dataclass(frozen=True, slots=True, eq=False)
class Encoded:
    """`elements` float32 numbers: their format, their codes (uint8) and the scales of their blocks."""

    format: Format
    elements: int
    codes: Bytes
    scales: Vector

    @classmethod
    def exact(cls, vector: Vector) -> Encoded:
        """Return a float32 vector in the exact format; its memory is shared."""
        return cls(F32, vector.size, np.ascontiguousarray(vector, dtype=np.float32).view(np.uint8), NO_SCALES)

    @classmethod
    def blank(cls, form: Format, elements: int) -> Encoded:
        """Return room for so many numbers, uninitialised; it may be in a file (`atoll.base.scratch_arrays`)."""
        codes = scratch_arrays.spare(form.codes_bytes(elements), np.uint8)
        return cls(form, elements, codes, np.empty(form.scales_count(elements), dtype=np.float32))

    @classmethod
    def of(cls, vector: Vector, form: Format) -> Encoded:
        """Return a vector in a format, as its reader will see it.

        Raises:
            FrameRejected: `not_finite`; a vector that would not arrive finite in this format is not sent.
        """
        codes = np.empty(form.codes_bytes(vector.size), dtype=np.uint8)
        scales = np.empty(form.scales_count(vector.size), dtype=np.float32)
        form.check(kernels(form, vector.size).quantise(vector, codes, scales))
        return cls(form, vector.size, codes, scales)

    @classmethod
    def unpacked(cls, payload: Bytes, form: Format, elements: int) -> Encoded:
        """Return the vector of a payload of the right size; only the scales are copied.

        Raises:
            FrameRejected: `not_finite`; a scale is not a number, or larger than any that an honest sender uses.
        """
        split = SCALE_BYTES * form.scales_count(elements)
        scales = (payload[:split].view("<u2").astype(np.uint32) << 16).view(np.float32)
        largest = float(np.abs(scales).max(initial=0.0))
        if not largest <= form.largest:
            raise FrameRejected("not_finite", "a scale is too large", got=largest, allowed=form.largest)
        return cls(form, elements, payload[split:], scales)

    def pack_into(self, payload: Bytes) -> None:
        """Write scales and codes to `payload`, which has exactly their length."""
        split = SCALE_BYTES * self.scales.size
        payload[:split].view("<u2")[:] = self.scales.view(np.uint32) >> 16
        payload[split:] = self.codes

    def stretch(self, start: int, stop: int) -> Encoded:
        """Return elements `start`, the first of a block, to `stop` without decoding them; memory is shared."""
        first = self.format.codes_bytes(start)
        codes = self.codes[first : first + self.format.codes_bytes(stop - start)]
        scales = self.scales[start // BLOCK : blocks(stop)] if self.scales.size else self.scales
        return Encoded(self.format, stop - start, codes, scales)

    def hold(self, other: Encoded) -> None:
        """Take over the codes and scales of a vector of the same format and length."""
        self.codes[:], self.scales[:] = other.codes, other.scales

    def release_pages(self) -> None:
        """Release our pages from the process's memory, if we are in a scratch file."""
        scratch_arrays.release_pages(self.codes)

    def expanded(self) -> Vector:
        """Return the numbers."""
        out = buffer_pool.empty(self.elements)
        self.expand_into(out)
        return out

    def expand_into(self, out: Vector) -> None:
        """Write the numbers to `out`, which has our length."""
        each(lambda part: self.copy(out, *part), parts(0, self.elements), self.elements)

    def copy(self, out: Vector, start: int, stop: int) -> None:
        """Write elements `start` to `stop` to their places in `out`, which has our length."""
        self._over(COPY, (start, stop), acc=out)

    def part(self, start: int, stop: int) -> Vector:
        """Return elements `start` to `stop`; only their blocks are decoded."""
        first, last, width = start // BLOCK, blocks(stop), self.format.block_bytes
        end = min(last * BLOCK, self.elements)
        codes = self.codes[first * width : last * width]
        around = Encoded(self.format, end - first * BLOCK, codes, self.scales[first:last])
        return around.expanded()[start - first * BLOCK : stop - first * BLOCK]

    def squares(self, start: int, stop: int) -> float:
        """Return the sum of squares of elements `start` to `stop` in float64: finite if and only if all of them are."""
        return self.squares_of([(start, stop)])[0]

    def squares_of(self, slices: Sequence[tuple[int, int]]) -> list[float]:
        """Return the sums of squares of several stretches of elements."""
        return self._sums(slices)

    def product(self, start: int, stop: int, other: Vector) -> float:
        """Return the scalar product of elements `start` to `stop` with those of `other`, which has our length."""
        return self._sums([(start, stop)], other)[0]

    def blend(self, acc: Vector, start: int, stop: int, keep: float, take: float) -> None:
        """Do `acc <- keep acc + take v` for elements `start` to `stop`; `acc` has our length."""
        factors = keep, take, 0.0
        each(lambda part: self._over(BLEND, part, acc=acc, factors=factors), parts(start, stop), stop - start)

    def bend(
        self, acc: Vector, tensor_slice: tuple[int, int], factors: tuple[float, float, float], other: Vector
    ) -> None:
        """Do `acc <- keep acc + (take v + add other)` for the elements of `span`; factors are keep, take and add."""
        self._over(BEND, tensor_slice, others=other, acc=acc, factors=factors)

    def settle(self, values: Vector, following: Vector, carry: Halves) -> float:
        """Become `following - values`, rounded; write the new values to `following` and the residue to `carry`.

        All have our length, `carry` in bits of bfloat16. Return the largest magnitude that was found.
        """
        self._checked((0, self.elements), values, following)
        if carry.shape != (self.elements,):
            raise ProtocolMisuse("a carry that does not belong to its values", got=carry.shape, allowed=self.elements)
        settle = kernels(self.format, self.elements).settle
        return settle(values, following, self.codes, self.scales, carry)

    def _sums(self, slices: Sequence[tuple[int, int]], other: Vector | None = None) -> list[float]:
        """Return the sum of squares of each slice, or its product with `other`: part by part, added in their order."""
        pieces = [(number, part) for number, whole in enumerate(slices) for part in parts(*whole) or [whole]]
        sums, found = [0.0] * len(slices), [0.0] * len(pieces)

        def take(at: int) -> None:
            start, stop = self._checked(pieces[at][1])
            if other is not None:
                lanes = np.zeros(BLOCK)
                self._over(MULTIPLY, (start, stop), others=other, lanes=lanes)
                found[at] = float(np.add.accumulate(lanes)[-1])
            elif start < stop:
                found[at] = kernels(self.format, self.elements).squares(self.codes, self.scales, start, stop)
                scratch_arrays.release_pages(self._codes_of(start, stop))

        each(take, range(len(pieces)), sum(stop - start for start, stop in slices))
        for (number, _), value in zip(pieces, found, strict=True):
            sums[number] += value
        return sums

    def _checked(self, tensor_slice: tuple[int, int], *vectors: Vector) -> tuple[int, int]:
        """Return a span of ours, checked: compiled kernels check no bounds, so every argument is checked here.

        Raises:
            ProtocolMisuse: it is no span of ours, a vector does not have our length, or we are not whole.
        """
        count = self.elements
        others = [vector for vector in vectors if vector is not _NONE and vector.size != count]
        whole = (self.codes.size, self.scales.size) == (self.format.codes_bytes(count), self.format.scales_count(count))
        if others or not (whole and 0 <= tensor_slice[0] <= tensor_slice[1] <= count):
            got = (tensor_slice, [vector.size for vector in vectors], self.codes.size, self.scales.size)
            raise ProtocolMisuse("vectors that do not belong together", got=got, allowed=f"{count} elements")
        return tensor_slice

    def _over(
        self,
        operation: int,
        tensor_slice: tuple[int, int],
        *,
        others: Vector = _NONE,
        acc: Vector = _NONE,
        lanes: Lanes | None = None,
        factors: tuple[float, float, float] = (0.0, 0.0, 0.0),
    ) -> None:
        """Go over the elements of `span`; do nothing if it is empty."""
        start, stop = self._checked(tensor_slice, others, acc)
        if start < stop:
            sums = np.empty(BLOCK) if lanes is None else lanes
            over = kernels(self.format, self.elements).over
            over(operation, self.codes, self.scales, start, stop, others, acc, sums, *factors)
            scratch_arrays.release_pages(self._codes_of(start, stop), others[start:stop], acc[start:stop])

    def _codes_of(self, start: int, stop: int) -> Bytes:
        """Return the codes of elements `start` to `stop`."""
        width = self.format.block_bytes
        return self.codes[start // BLOCK * width : blocks(stop) * width]
