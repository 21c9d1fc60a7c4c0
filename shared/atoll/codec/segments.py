"""A frame is segments: each travels as one message, describes itself, and is checked and opened on its own.

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

The number of elements and the codec alone determine where segments begin and end: each takes as many whole blocks as
fill a message. So a reader knows all segments and their sizes before the first byte, allocates once, and refuses
everything else. Segments may arrive in any order, be read again, and be used before the others are there. Every refusal
is a `FrameRejected` with a stable reason word.
"""

from __future__ import annotations

import struct
import threading
from dataclasses import dataclass, field

import numpy as np
import xxhash
import zstandard

from atoll.base.errors import FrameRejected
from atoll.codec.encoded import Encoded
from atoll.codec.formats import Format, format_of
from atoll.codec.formats.interface import BLOCK
from atoll.wire.limits import CHUNK_BYTES, Buffer

MAGIC = b"ATOL"
VERSION = 2
COMPRESSED = 1
HEADER = struct.Struct("<4sBBBBQQIIQ")


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

    Raises:
        FrameRejected: `truncated`, `foreign`, `version`, `codec`, `size`, `checksum` or `compression`.
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
    """Return the segments of a frame in one piece, cut by their headers.

    Raises:
        FrameRejected: `truncated`.
    """
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
    """Return `size` bytes, or refuse before anything larger is allocated."""
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
    """Return this thread's compressor: making one costs more than a small segment, and threads cannot share one."""
    kept: dict[int, zstandard.ZstdCompressor] = vars(_compressors).setdefault("by_level", {})
    if level not in kept:
        kept[level] = zstandard.ZstdCompressor(level=level)
    return kept[level]
