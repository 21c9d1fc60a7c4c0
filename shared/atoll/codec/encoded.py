"""A vector as it was sent; it is measured, folded in and expanded from its codes, never held as float32 in memory.

The loops are in `atoll.codec.kernels`. Sums over a stretch of elements are computed part by part and added in the order
of the parts (`atoll.base.parallel`), so that several threads may share a large sum.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np

from atoll.base import large_arrays
from atoll.base.errors import FrameRejected, ProtocolMisuse
from atoll.base.large_arrays import Vector
from atoll.base.parallel import for_each, parts
from atoll.codec.formats import F32, Format
from atoll.codec.formats.interface import BLOCK, NO_SCALES, SCALE_BYTES, Bytes, Halves, Lanes, blocks
from atoll.codec.kernels import kernels
from atoll.codec.kernels.in_numpy import BEND, BLEND, COPY, MULTIPLY

_NONE = np.empty(0, dtype=np.float32)


class Encoded(msgspec.Struct, frozen=True, eq=False):
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
        """Return room for so many numbers, uninitialised; it may be in a file (`atoll.base.large_arrays`)."""
        codes = large_arrays.spare(form.codes_bytes(elements), np.uint8)
        return cls(form, elements, codes, np.empty(form.scales_count(elements), dtype=np.float32))

    @classmethod
    def of(cls, vector: Vector, form: Format) -> Encoded:
        """Return a vector in a format, as its reader will see it.

        Raises `FrameRejected`: `not_finite`; a vector that would not arrive finite in this format is not sent.
        """
        encoded = cls.blank(form, vector.size)
        form.check(kernels(form, vector.size).quantise(vector, encoded.codes, encoded.scales))
        return encoded

    def pack_into(self, payload: Bytes) -> None:
        """Write scales and codes to `payload`, which has exactly their length."""
        split = SCALE_BYTES * self.scales.size
        payload[:split].view("<u2")[:] = self.scales.view(np.uint32) >> 16
        payload[split:] = self.codes

    def unpack_from(self, payload: Bytes) -> None:
        """Take over the scales and codes of `payload`, which has exactly their length.

        Raises `FrameRejected`: `not_finite`; a scale is not a number, or larger than any that an honest sender uses.
        """
        split = SCALE_BYTES * self.scales.size
        scales = (payload[:split].view("<u2").astype(np.uint32) << 16).view(np.float32)
        largest = float(np.abs(scales).max(initial=0.0))
        if not largest <= self.format.largest:
            raise FrameRejected("not_finite", "a scale is too large", got=largest, allowed=self.format.largest)
        self.codes[:], self.scales[:] = payload[split:], scales

    def stretch(self, start: int, stop: int) -> Encoded:
        """Return elements `start`, the first of a block, to `stop` without decoding them; memory is shared."""
        first = self.format.codes_bytes(start)
        codes = self.codes[first : first + self.format.codes_bytes(stop - start)]
        scales = self.scales[start // BLOCK : blocks(stop)] if self.scales.size else self.scales
        return Encoded(self.format, stop - start, codes, scales)

    def expanded(self) -> Vector:
        """Return the numbers."""
        out = large_arrays.empty(self.elements)
        for_each(lambda part: self.copy(out, *part), parts(0, self.elements), self.elements)
        return out

    def copy(self, out: Vector, start: int, stop: int) -> None:
        """Write elements `start` to `stop` to their places in `out`, which has our length."""
        self._over(COPY, (start, stop), acc=out)

    def part(self, start: int, stop: int) -> Vector:
        """Return elements `start` to `stop`; only their blocks are decoded."""
        first = start // BLOCK * BLOCK
        here, out = self.stretch(first, stop), np.empty(stop - first, dtype=np.float32)
        over = kernels(self.format, self.elements).over  # those of the whole: they are loaded already, and fast
        over(COPY, here.codes, here.scales, 0, here.elements, _NONE, out, np.empty(BLOCK), 0.0, 0.0, 0.0)
        return out[start - first :]

    def products(self, slices: Sequence[tuple[int, int]], other: Vector | None = None) -> list[float]:
        """Return the scalar product of the elements of each slice with those of `other`, which has our length.

        Without `other` it is their product with themselves, finite if and only if all of them are. Sums are in float64.
        """
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
                self._release(start, stop)

        for_each(take, range(len(pieces)), sum(stop - start for start, stop in slices))
        for (number, _), value in zip(pieces, found, strict=True):
            sums[number] += value
        return sums

    def blend(self, acc: Vector, start: int, stop: int, keep: float, take: float) -> None:
        """Do `acc <- keep acc + take v` for elements `start` to `stop`; `acc` has our length."""
        factors = keep, take, 0.0
        for_each(lambda part: self._over(BLEND, part, acc=acc, factors=factors), parts(start, stop), stop - start)

    def bend(self, acc: Vector, bounds: tuple[int, int], factors: tuple[float, float, float], other: Vector) -> None:
        """Do `acc <- keep acc + (take v + add other)` for the elements within `bounds`; factors are keep, take and add."""
        self._over(BEND, bounds, others=other, acc=acc, factors=factors)

    def settle(self, values: Vector, following: Vector, carry: Halves) -> float:
        """Become `following - values`, rounded; write the new values to `following` and the residue to `carry`.

        All have our length, `carry` in bits of bfloat16. Return the largest magnitude that was found.
        """
        self._checked((0, self.elements), values, following)
        if carry.shape != (self.elements,):
            raise ProtocolMisuse("a carry that does not belong to its values", got=carry.shape, allowed=self.elements)
        settle = kernels(self.format, self.elements).settle
        return settle(values, following, self.codes, self.scales, carry)

    def _checked(self, bounds: tuple[int, int], *vectors: Vector) -> tuple[int, int]:
        """Return bounds within ours, checked: compiled kernels check none, so every argument is checked here.

        Raises `ProtocolMisuse`: the bounds are not within ours, a vector does not have our length, or we are not whole.
        """
        count = self.elements
        others = [vector for vector in vectors if vector is not _NONE and vector.size != count]
        whole = (self.codes.size, self.scales.size) == (self.format.codes_bytes(count), self.format.scales_count(count))
        if others or not (whole and 0 <= bounds[0] <= bounds[1] <= count):
            got = (bounds, [vector.size for vector in vectors], self.codes.size, self.scales.size)
            raise ProtocolMisuse("vectors that do not belong together", got=got, allowed=f"{count} elements")
        return bounds

    def _over(
        self,
        operation: int,
        bounds: tuple[int, int],
        *,
        others: Vector = _NONE,
        acc: Vector = _NONE,
        lanes: Lanes | None = None,
        factors: tuple[float, float, float] = (0.0, 0.0, 0.0),
    ) -> None:
        start, stop = self._checked(bounds, others, acc)
        if start < stop:
            sums = np.empty(BLOCK) if lanes is None else lanes
            over = kernels(self.format, self.elements).over
            over(operation, self.codes, self.scales, start, stop, others, acc, sums, *factors)
            self._release(start, stop, others, acc)

    def _release(self, start: int, stop: int, *vectors: Vector) -> None:
        if large_arrays.policy.is_used:
            codes = self.stretch(start // BLOCK * BLOCK, stop).codes
            large_arrays.release_pages(codes, *(vector[start:stop] for vector in vectors))
