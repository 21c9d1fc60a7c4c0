"""A vector on its way out, and one on its way in: frames, segment by segment (`atoll.codecs.segments`).

`Outgoing` encodes a segment when it is due, so a large vector is never encoded as a whole in memory; `Arriving` checks a
segment when it comes, puts its codes where they belong and measures them while they are hot. Both measure *what was sent*,
after rounding, in the same pieces and the same order: the norms that a sender claims are those that its reader finds, to
the last bit. What has arrived stays encoded (`Encoded`) until it is folded in, and everything in it is finite.

A reader says how many elements it expects and in which codec. It allocates what an honest frame needs, before it reads any.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Sequence

import numpy as np

from atoll.bus.interface import Buffer, Portion
from atoll.codecs.encoded import Encoded, blocks, codes_bytes, scales_count
from atoll.codecs.segments import Framing, cut_frame, opened, seal, unseal
from atoll.errors import FrameRejected
from atoll.kernels import BLOCK, F32, Bytes, Vector
from atoll.kernels.memory import empty
from atoll.layout import Span

Read = Callable[[int, int], Vector]
"""Returns elements `start` to `stop` of a vector, flat float32."""


class Gauge:
    """The L2 norms of the slices of a vector that is measured segment by segment, in any order; one slice if none are named."""

    def __init__(self, framing: Framing, spans: Sequence[Span]) -> None:
        """Begin with nothing measured."""
        self._framing = framing
        self._bounds = [(span.offset, span.offset + span.size) for span in spans] or [(0, framing.elements)]
        self._ends = [stop for _, stop in self._bounds]
        self._squares: dict[int, list[tuple[int, float]]] = {}

    def measure(self, number: int, segment: Encoded) -> None:
        """Measure a segment; raise `FrameRejected` `not_finite` unless all of it is."""
        first, last = self._framing.bounds(number)
        found = []
        index = bisect_right(self._ends, first)
        while index < len(self._bounds) and self._bounds[index][0] < last:
            start, stop = self._bounds[index]
            square = segment.squares(max(start, first) - first, min(stop, last) - first)
            if not math.isfinite(square):
                raise FrameRejected("not_finite", "a frame holds infinities or NaN")
            found.append((index, square))
            index += 1
        self._squares[number] = found

    def norms(self) -> list[float]:
        """Return the norms, once all segments are measured."""
        totals = [0.0] * len(self._bounds)
        for number in range(len(self._framing)):
            for index, square in self._squares[number]:
                totals[index] += square
        return [math.sqrt(total) for total in totals]


class Outgoing:
    """A frame to be sent: the pieces of a blob. `spans` are the slices to be measured on the way.

    What rounding takes is written to `residue`, a vector as long, where it is wanted.
    """

    def __init__(self, framing: Framing, read: Read, spans: Sequence[Span] = (), residue: Vector | None = None) -> None:
        """Look at a vector through `read`, which may be called several times for the same elements, by several threads."""
        self.framing = framing
        self._read = read
        self._residue = residue
        self._gauge = Gauge(framing, spans)

    def __len__(self) -> int:
        """Return how many segments there are."""
        return len(self.framing)

    def piece(self, number: int) -> bytearray:
        """Return a segment.

        Raises:
            FrameRejected: `not_finite`; what would not arrive finite in this codec is not sent.
        """
        start, stop = self.framing.bounds(number)
        vector = self._read(start, stop)
        segment = self.framing.encoding.encoded(vector)
        self._gauge.measure(number, segment)
        if self._residue is not None:
            np.subtract(vector, segment.expanded(), out=self._residue[start:stop])
        return seal(self.framing, number, segment.codes, segment.scales)

    def norms(self) -> list[float]:
        """Return the L2 norms per slice of what was sent, once every segment was made."""
        return self._gauge.norms()


class Sealed:
    """A vector that is encoded already, as the pieces of a blob."""

    def __init__(self, codec: str, vector: Encoded) -> None:
        """Look at the codes, which must not change while they are sent."""
        self.framing = Framing(vector.elements, codec)
        self._vector = vector

    def __len__(self) -> int:
        """Return how many segments there are."""
        return len(self.framing)

    def piece(self, number: int) -> bytearray:
        """Return a segment."""
        codes, scales = _places(self._vector, *self.framing.bounds(number))
        return seal(self.framing, number, codes, scales)


class Segments:
    """A frame that lies in one piece, as the pieces of a blob; raises `FrameRejected` `truncated`."""

    def __init__(self, data: Buffer) -> None:
        """Look at the frame, which must not change while it is sent."""
        self._segments = cut_frame(data)

    def __len__(self) -> int:
        """Return how many segments there are."""
        return len(self._segments)

    def piece(self, number: int) -> memoryview:
        """Return a segment."""
        return self._segments[number]


class Arriving:
    """A frame on its way in: `elements` numbers in `codec`. `spans` are the slices to be measured on the way."""

    def __init__(self, elements: int, codec: str, spans: Sequence[Span] = ()) -> None:
        """Allocate what an honest frame needs."""
        self.framing = Framing(elements, codec)
        self._gauge = Gauge(self.framing, spans)
        kind = self.framing.encoding.number
        # What comes as float32 becomes the values, and takes the memory of former ones.
        codes = empty(elements).view(np.uint8) if kind == F32 else np.empty(codes_bytes(kind, elements), dtype=np.uint8)
        self._vector = Encoded(kind, elements, codes, np.empty(scales_count(kind, elements), dtype=np.float32))

    def take(self, number: int, data: Buffer) -> None:
        """Check a segment and keep it; several threads may take different ones.

        Raises:
            FrameRejected: what `unseal` says, or `not_finite`.
        """
        if not 0 <= number < len(self.framing):
            raise FrameRejected("size", "a segment too many", got=number, allowed=len(self.framing))
        came = opened(self.framing, number, unseal(self.framing, number, data))
        start, stop = self.framing.bounds(number)
        codes, scales = _places(self._vector, start, stop)
        scales[:], codes[:] = came
        self._gauge.measure(number, Encoded(self._vector.kind, stop - start, codes, scales))

    def take_all(self, portion: Portion) -> None:
        """Check and keep segments that came together, by number; raise what `take` raises."""
        for number, data in portion:
            self.take(number, data)

    def encoded(self) -> Encoded:
        """Return the vector, once all segments are here."""
        return self._vector

    def norms(self) -> list[float]:
        """Return the L2 norms per slice, once all segments are here."""
        return self._gauge.norms()

    def values(self) -> Vector:
        """Return the numbers, once all segments are here; what came as float32 is not copied."""
        vector = self._vector
        return vector.codes.view(np.float32) if vector.kind == F32 else vector.expanded()


def encode_frame(vector: Vector, codec: str) -> bytearray:
    """Return the frame of a flat float32 vector in one piece.

    Raises:
        SettingsError: there is no such codec.
        FrameRejected: `not_finite`; what would not arrive finite in this codec is not sent.
    """
    outgoing = Outgoing(Framing(vector.size, codec), lambda start, stop: vector[start:stop])
    return bytearray().join(outgoing.piece(number) for number in range(len(outgoing)))


def decode_frame(data: Buffer, *, elements_expected: int, codec: str) -> Vector:
    """Return the float32 vector of a frame in one piece, in memory of its own; raise `FrameRejected`."""
    arriving = Arriving(elements_expected, codec)
    segments = cut_frame(data)
    if len(segments) != len(arriving.framing):
        raise FrameRejected("size", "a frame of another length", got=len(segments), allowed=len(arriving.framing))
    for number, segment in enumerate(segments):
        arriving.take(number, segment)
    return arriving.values()


def frame_bytes(elements: int, codec: str) -> int:
    """Return the length of an uncompressed frame of `elements` numbers, which no frame of theirs exceeds."""
    return Framing(elements, codec).size_bytes


def _places(vector: Encoded, start: int, stop: int) -> tuple[Bytes, Vector]:
    """Return where codes and scales of elements `start` (the first of a block) to `stop` lie."""
    kind = vector.kind
    first = codes_bytes(kind, start)
    codes = vector.codes[first : first + codes_bytes(kind, stop - start)]
    return codes, vector.scales[start // BLOCK : blocks(stop)] if vector.scales.size else vector.scales
