"""Vectors as frames: on their way out and in, segment by segment.

A frame is segments: each travels as one message, describes itself, and is checked and opened on its own.

    offset  bytes  field
    0       4      magic "ATOL"
    4       1      version, 2
    5       1      format
    6       1      flags: 1 = payload is zstd-compressed
    7       1      zero
    8       8      elements of the whole vector
    16      8      first element of this segment
    24      4      elements of this segment
    28      4      payload bytes as sent
    32      8      xxh3-64 of the payload as sent
    40             payload: scales, then codes (`atoll.codec.formats`)

The number of elements and the codec alone determine where segments begin and end (`Framing`): each takes as many whole blocks
as fill a message. So a reader knows all segments and their sizes before the first byte, allocates once, and refuses everything
else. Segments may arrive in any order, be read again, and be used before the others are there. Every refusal is a
`FrameRejected` with a stable reason word.

Sender and reader measure *what was sent*, after rounding, in the same pieces and the same order: the norms that a sender claims
are those that its reader finds, to the last bit. An arrived vector stays encoded (`Encoded`) until it is folded in.
"""

from __future__ import annotations

import math
import struct
import threading
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import xxhash
import zstandard

from atoll.base import large_arrays
from atoll.base.errors import FrameRejected
from atoll.base.large_arrays import Vector
from atoll.codec.encoded import Encoded
from atoll.codec.formats import F32, Format, format_of
from atoll.codec.formats.interface import BLOCK
from atoll.model.layout import FragmentSlice
from atoll.wire.blobs import Portion
from atoll.wire.limits import CHUNK_BYTES, Buffer

MAGIC = b"ATOL"
VERSION = 2
COMPRESSED = 1
HEADER = struct.Struct("<4sBBBBQQIIQ")
Read = Callable[[int, int], Vector]
"""Returns elements `start` to `stop` of a vector, flat float32."""


@dataclass(frozen=True, slots=True)
class Framing:
    """The cut of a vector of so many elements into segments. Raises `SettingsError` for an unknown codec."""

    elements: int
    codec: str

    format: Format = field(init=False, repr=False, compare=False)
    width: int = field(init=False, repr=False, compare=False)
    """Elements of every segment but the last."""
    segments: int = field(init=False, repr=False, compare=False)
    """Their number; an empty vector has one, which is empty."""
    size_bytes: int = field(init=False, repr=False, compare=False)
    """The length of all segments, uncompressed; none of their frames is longer."""

    def __post_init__(self) -> None:
        form = format_of(self.codec)
        width = (CHUNK_BYTES - HEADER.size) // form.size(BLOCK) * BLOCK
        segments = max(1, -(-self.elements // width))
        object.__setattr__(self, "format", form)
        object.__setattr__(self, "width", width)
        object.__setattr__(self, "segments", segments)
        object.__setattr__(self, "size_bytes", HEADER.size * segments + form.size(self.elements))

    def bounds(self, number: int) -> tuple[int, int]:
        """Return the first element of a segment, and the first of the next one."""
        start = number * self.width
        return start, min(start + self.width, self.elements)


def seal(framing: Framing, number: int, segment: Encoded, *, compress: bool = True) -> bytearray:
    """Return a segment of encoded elements, compressed if that is wanted and makes it shorter."""
    form = framing.format
    start, stop = framing.bounds(number)
    size, flags = form.size(stop - start), 0
    data = bytearray(HEADER.size + size)
    payload = memoryview(data)[HEADER.size :]
    segment.pack_into(np.frombuffer(payload, dtype=np.uint8))
    if compress and form.zstd_level is not None:
        shorter = _compressor(form.zstd_level).compress(payload)
        if len(shorter) < size:
            payload.release()
            del data[HEADER.size + len(shorter) :]
            data[HEADER.size :] = shorter
            payload, flags = memoryview(data)[HEADER.size :], COMPRESSED
    digest = xxhash.xxh3_64_intdigest(payload)
    head = (MAGIC, VERSION, form.number, flags, 0, framing.elements, start, stop - start, len(payload), digest)
    HEADER.pack_into(data, 0, *head)
    return data


def is_compressed(data: Buffer) -> bool:
    """Return whether a segment that `unseal` takes was compressed."""
    return bool(HEADER.unpack_from(data)[3] & COMPRESSED)


def unseal(framing: Framing, number: int, data: Buffer) -> memoryview:
    """Return the payload of a segment, decompressed: exactly as long as its elements need.

    Raises `FrameRejected`: `truncated`, `foreign`, `version`, `codec`, `size`, `checksum` or `compression`.
    """
    view = memoryview(data)
    if len(view) < HEADER.size:
        raise FrameRejected("truncated", "a segment is shorter than its header", got=len(view), allowed=HEADER.size)
    magic, version, kind, flags, zero, elements, start, count, length, digest = HEADER.unpack_from(view)
    if magic != MAGIC:
        raise FrameRejected("foreign", "not a segment of a frame", got=bytes(magic))
    if version != VERSION or zero or flags & ~COMPRESSED:
        raise FrameRejected("version", "a segment of another version", got=(version, flags), allowed=VERSION)
    if kind != framing.format.number:
        raise FrameRejected("codec", "a segment in another format", got=kind, allowed=framing.codec)
    payload = view[HEADER.size :]
    first, last = framing.bounds(number)
    if (elements, start, count, length) != (framing.elements, first, last - first, len(payload)):
        allowed = (framing.elements, first, last - first, len(payload))
        raise FrameRejected(
            "size", "a segment says another place or size", got=(elements, start, count, length), allowed=allowed
        )
    if xxhash.xxh3_64_intdigest(payload) != digest:
        raise FrameRejected("checksum", "a segment's payload is damaged")
    size = framing.format.size(count)
    if flags & COMPRESSED:
        payload = _decompressed(payload, size)
    if len(payload) != size:
        raise FrameRejected("size", "a payload has the wrong length", got=len(payload), allowed=size)
    return payload


def cut_frame(data: Buffer) -> list[memoryview]:
    """Return the segments of a frame in one piece, cut by their headers. Raises `FrameRejected`: `truncated`."""
    view, at = memoryview(data), 0
    segments: list[memoryview] = []
    while at < len(view) or not segments:
        if len(view) - at < HEADER.size:
            got = len(view) - at
            raise FrameRejected("truncated", "a segment is shorter than its header", got=got, allowed=HEADER.size)
        size = HEADER.size + HEADER.unpack_from(view, at)[8]
        segments.append(view[at : at + size])
        at += size
    return segments


def _decompressed(payload: memoryview, size: int) -> memoryview:
    # Refused before anything larger than `size` is allocated.
    try:
        declared = zstandard.frame_content_size(payload)
        if declared != size:
            raise FrameRejected("compression", "a compressed payload of another size", got=declared, allowed=size)
        plain = zstandard.ZstdDecompressor().decompress(payload, max_output_size=size, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise FrameRejected("compression", "a payload cannot be decompressed", got=str(error)) from error
    return memoryview(plain)


_compressors = threading.local()


def _compressor(level: int) -> zstandard.ZstdCompressor:
    # One per thread: making one costs more than a small segment, and threads cannot share one.
    kept: dict[int, zstandard.ZstdCompressor] = vars(_compressors).setdefault("by_level", {})
    if level not in kept:
        kept[level] = zstandard.ZstdCompressor(level=level)
    return kept[level]


class _Measured:
    # Segments are measured in any order: the L2 norms of the vector's slices, or of all of it.
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
    """A frame to be sent, the pieces of a blob: a segment is encoded when it is due. `slices` are measured on the way.

    Several threads may call `read` several times for the same elements. A `residue`, a vector of the same length, receives
    what rounding takes. `compress`: see `seal`.
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
        super().__init__(framing, slices)
        self._read = read
        self._residue = residue
        self._compress = compress

    def piece(self, number: int) -> bytearray:
        """Return a segment.

        Raises `FrameRejected`: `not_finite`; a vector that would not arrive finite in this codec is not sent.
        """
        start, stop = self.framing.bounds(number)
        vector = self._read(start, stop)
        segment = Encoded.of(vector, self.framing.format)
        self._measure(number, segment)
        if self._residue is not None:
            np.subtract(vector, segment.expanded(), out=self._residue[start:stop])
        large_arrays.release_pages(vector)
        return seal(self.framing, number, segment, compress=self._compress)


class EncodedFrame(_Measured):
    """A vector that is encoded already, as the pieces of a blob, measured on its way out where `slices` are given.

    The codes must not change while they are sent. `compress`: see `seal`.
    """

    def __init__(
        self, codec: str, vector: Encoded, slices: Sequence[FragmentSlice] | None = None, *, compress: bool = True
    ) -> None:
        super().__init__(Framing(vector.elements, codec), slices or ())
        self._is_measured = slices is not None
        self._vector = vector
        self._compress = compress

    def piece(self, number: int) -> bytearray:
        """Return a segment; raise `FrameRejected` `not_finite` unless all of it is, where it is measured."""
        part = self._vector.stretch(*self.framing.bounds(number))
        if self._is_measured:
            self._measure(number, part)
        data = seal(self.framing, number, part, compress=self._compress)
        large_arrays.release_pages(part.codes)
        return data


class StoredFrame:
    """A frame stored in one piece, which must not change, as the pieces of a blob; raises `FrameRejected` `truncated`."""

    def __init__(self, data: Buffer) -> None:
        self._segments = cut_frame(data)
        self.size_bytes_max = len(data)

    def __len__(self) -> int:
        return len(self._segments)

    def piece(self, number: int) -> memoryview:
        """Return a segment."""
        return self._segments[number]


class FrameDecoder(_Measured):
    """A frame on its way in: `elements` numbers in `codec`. `slices` are measured while segments are in the cache."""

    def __init__(self, elements: int, codec: str, slices: Sequence[FragmentSlice] = ()) -> None:
        super().__init__(Framing(elements, codec), slices)
        self.vector = Encoded.blank(self.framing.format, elements)
        """What has arrived; whole once all segments are here."""
        self.compressed = self.framing.format.zstd_level is None
        """Whether its sender wanted it compressed, as far as can be told: a segment was, or none of the format ever is."""

    def take(self, portion: Portion) -> None:
        """Check segments that came together, and keep them; several threads may take different ones.

        Raises `FrameRejected`: what `unseal` says, or `not_finite`.
        """
        for number, data in portion:
            if not 0 <= number < len(self):
                raise FrameRejected("size", "a segment too many", got=number, allowed=len(self))
            here = self.vector.stretch(*self.framing.bounds(number))
            here.unpack_from(np.frombuffer(unseal(self.framing, number, data), dtype=np.uint8))
            if is_compressed(data):
                self.compressed = True
            self._measure(number, here)
            large_arrays.release_pages(here.codes)

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
