"""A vector on its way out, and one on its way in: frames, segment by segment (`atoll.codec.segments`).

`FrameEncoder` encodes a segment when it is due, so a large vector is never encoded as a whole in memory. `FrameDecoder`
checks a segment when it comes, puts its codes in their place and measures them while they are in the cache. Both
measure *what was sent*, after rounding, in the same pieces and the same order: the norms that a sender claims are those
that its reader finds, to the last bit. An arrived vector stays encoded (`Encoded`) until it is folded in, and
everything in it is finite.

A reader says how many elements it expects and in which codec. It allocates what an honest frame needs, before it reads
any.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Sequence

import numpy as np

from atoll.base import scratch_arrays
from atoll.base.buffer_pool import Vector
from atoll.base.errors import FrameRejected
from atoll.codec.encoded import Encoded
from atoll.codec.formats import F32
from atoll.codec.segments import Framing, cut_frame, is_compressed, seal, unseal
from atoll.model.layout import FragmentSlice
from atoll.wire.blobs import Portion
from atoll.wire.limits import Buffer

Read = Callable[[int, int], Vector]
"""Returns elements `start` to `stop` of a vector, flat float32."""


class _Measured:
    """A frame whose segments are measured in any order: the L2 norms of its vector's slices, or of all of it."""

    def __init__(self, framing: Framing, slices: Sequence[FragmentSlice]) -> None:
        self.framing = framing
        self._bounds = [tensor_slice.bounds for tensor_slice in slices] or [(0, framing.elements)]
        self._ends = [stop for _, stop in self._bounds]
        self._squares: dict[int, list[tuple[int, float]]] = {}

    @property
    def size_bytes_max(self) -> int:
        """Return the length of all segments, if none can be compressed."""
        return self.framing.size_bytes

    def __len__(self) -> int:
        return self.framing.segments

    def _measure(self, number: int, segment: Encoded) -> None:
        first, last = self.framing.bounds(number)
        here: list[tuple[int, int]] = []
        index = bisect_right(self._ends, first)
        while index + len(here) < len(self._bounds) and self._bounds[index + len(here)][0] < last:
            start, stop = self._bounds[index + len(here)]
            here.append((max(start, first) - first, min(stop, last) - first))
        squares = segment.products(here)
        if not math.isfinite(sum(squares)):
            raise FrameRejected("not_finite", "a frame holds infinities or NaN")
        self._squares[number] = list(enumerate(squares, index))

    def norms(self) -> list[float]:
        """Return the norms, once all segments are measured."""
        totals = [0.0] * len(self._bounds)
        for number in range(self.framing.segments):
            for index, square in self._squares[number]:
                totals[index] += square
        return [math.sqrt(total) for total in totals]


class FrameEncoder(_Measured):
    """A frame to be sent: the pieces of a blob. `slices` are to be measured on the way.

    If a `residue` is given, a vector of the same length, it receives what rounding takes. `compress`: see `seal`.
    """

    def __init__(
        self,
        framing: Framing,
        read: Read,
        slices: Sequence[FragmentSlice] = (),
        residue: Vector | None = None,
        *,
        compress: bool = True,
    ) -> None:
        """Read a vector through `read`, which several threads may call several times for the same elements."""
        super().__init__(framing, slices)
        self._read = read
        self._residue = residue
        self._compress = compress

    def piece(self, number: int) -> bytearray:
        """Return a segment.

        Raises:
            FrameRejected: `not_finite`; a vector that would not arrive finite in this codec is not sent.
        """
        start, stop = self.framing.bounds(number)
        vector = self._read(start, stop)
        segment = Encoded.of(vector, self.framing.format)
        self._measure(number, segment)
        if self._residue is not None:
            np.subtract(vector, segment.expanded(), out=self._residue[start:stop])
        scratch_arrays.release_pages(vector)
        return seal(self.framing, number, segment, compress=self._compress)


class EncodedFrame:
    """A vector that is encoded already, as the pieces of a blob. `compress`: see `seal`."""

    def __init__(self, codec: str, vector: Encoded, *, compress: bool = True) -> None:
        """Keep the codes, which must not change while they are sent."""
        self.framing = Framing(vector.elements, codec)
        self._vector = vector
        self._compress = compress

    @property
    def size_bytes_max(self) -> int:
        """Return the length of all segments, if none can be compressed."""
        return self.framing.size_bytes

    def __len__(self) -> int:
        return self.framing.segments

    def piece(self, number: int) -> bytearray:
        """Return a segment."""
        part = self._vector.stretch(*self.framing.bounds(number))
        data = seal(self.framing, number, part, compress=self._compress)
        scratch_arrays.release_pages(part.codes)
        return data


class MeasuredFrame(_Measured):
    """A vector that is encoded already, measured on its way out as `FrameEncoder` does; `slices` are to be measured.

    `compress`: see `seal`.
    """

    def __init__(
        self, codec: str, vector: Encoded, slices: Sequence[FragmentSlice] = (), *, compress: bool = True
    ) -> None:
        """Keep the codes, which must not change while they are sent."""
        super().__init__(Framing(vector.elements, codec), slices)
        self._vector = vector
        self._compress = compress

    def piece(self, number: int) -> bytearray:
        """Return a segment; raise `FrameRejected` `not_finite` unless all of it is."""
        part = self._vector.stretch(*self.framing.bounds(number))
        self._measure(number, part)
        data = seal(self.framing, number, part, compress=self._compress)
        scratch_arrays.release_pages(part.codes)
        return data


class StoredFrame:
    """A frame stored in one piece, as the pieces of a blob; raises `FrameRejected` `truncated`."""

    def __init__(self, data: Buffer) -> None:
        """Keep the frame, which must not change while it is sent."""
        self._segments = cut_frame(data)
        self.size_bytes_max = len(data)

    def __len__(self) -> int:
        return len(self._segments)

    def piece(self, number: int) -> memoryview:
        """Return a segment."""
        return self._segments[number]


class FrameDecoder(_Measured):
    """A frame on its way in: `elements` numbers in `codec`. `slices` are to be measured on the way."""

    def __init__(self, elements: int, codec: str, slices: Sequence[FragmentSlice] = ()) -> None:
        super().__init__(Framing(elements, codec), slices)
        self.vector = Encoded.blank(self.framing.format, elements)
        """What has arrived; whole once all segments are here."""
        self.compressed = self.framing.format.zstd_level is None
        """Whether its sender wanted it compressed, as far as can be told: a segment was, or none of the format ever is."""

    def take(self, portion: Portion) -> None:
        """Check segments that came together, and keep them; several threads may take different ones.

        Raises:
            FrameRejected: what `unseal` says, or `not_finite`.
        """
        for number, data in portion:
            if not 0 <= number < len(self):
                raise FrameRejected("size", "a segment too many", got=number, allowed=len(self))
            here = self.vector.stretch(*self.framing.bounds(number))
            here.unpack_from(np.frombuffer(unseal(self.framing, number, data), dtype=np.uint8))
            if is_compressed(data):
                self.compressed = True
            self._measure(number, here)
            scratch_arrays.release_pages(here.codes)

    def values(self) -> Vector:
        """Return the numbers, once all segments are here; a float32 vector is not copied."""
        return self.vector.codes.view(np.float32) if self.vector.format is F32 else self.vector.expanded()


def encode_frame(vector: Vector, codec: str) -> bytearray:
    """Return the frame of a flat float32 vector in one piece.

    Raises:
        SettingsError: there is no such codec.
        FrameRejected: `not_finite`; a vector that would not arrive finite in this codec is not sent.
    """
    encoder = FrameEncoder(Framing(vector.size, codec), lambda start, stop: vector[start:stop])
    return bytearray().join(encoder.piece(number) for number in range(len(encoder)))


def decode_frame(data: Buffer, *, elements_expected: int, codec: str) -> Vector:
    """Return the float32 vector of a frame in one piece, in memory of its own; raise `FrameRejected`."""
    arriving = FrameDecoder(elements_expected, codec)
    segments = cut_frame(data)
    if len(segments) != len(arriving):
        raise FrameRejected("size", "a frame of another length", got=len(segments), allowed=len(arriving))
    arriving.take(list(enumerate(segments)))
    return arriving.values()


def frame_bytes(elements: int, codec: str) -> int:
    """Return the length of an uncompressed frame of `elements` numbers; no frame of so many numbers is longer."""
    return Framing(elements, codec).size_bytes
