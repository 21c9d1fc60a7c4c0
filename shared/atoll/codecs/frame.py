"""A tensor frame: a fixed header and a payload, safe to read from anybody.

    offset  bytes  field
    0       4      magic "ATOL"
    4       1      version, 1
    5       1      encoding
    6       1      flags: 1 = payload is zstd-compressed
    7       1      zero
    8       8      elements
    16      8      payload bytes as sent
    24      8      xxh3-64 of the payload as sent

A decoder is told how many elements to expect, and in which codec if there is only one that an honest sender would use. It
checks every size against that before it allocates anything, and decompresses into a buffer of exactly the size that the
encoding needs: a frame cannot make its reader use more memory than an honest one. What is decoded is finite. Every
refusal is a `FrameRejected` with a stable reason word.
"""

from __future__ import annotations

import math
import struct

import numpy as np
import xxhash
import zstandard

from atoll.codecs.encoded import Encoded
from atoll.codecs.encodings import ENCODINGS, Encoding, encoding_of
from atoll.errors import FrameRejected
from atoll.kernels import Vector

MAGIC = b"ATOL"
VERSION = 1
COMPRESSED = 1
HEADER = struct.Struct("<4sBBBBQQQ")


def frame_bytes(elements: int, codec: str) -> int:
    """Return the length of an uncompressed frame of `elements` numbers, which no frame of theirs exceeds."""
    return HEADER.size + encoding_of(codec).size(elements)


def encode_frame(vector: Vector, codec: str) -> bytearray:
    """Return the frame of a flat float32 vector, compressed where its encoding gains by that. Raises what `framed` does."""
    return framed(vector, codec)[0]


def framed(vector: Vector, codec: str) -> tuple[bytearray, Encoded]:
    """Return the frame of a flat float32 vector, and what its reader will see, which may share the frame's memory.

    Raises:
        SettingsError: there is no such codec.
        FrameRejected: `not_finite`; what would not arrive finite in this encoding is not sent.
    """
    encoding = encoding_of(codec)
    frame, flags = bytearray(HEADER.size + encoding.size(vector.size)), 0
    payload = memoryview(frame)[HEADER.size :]
    codes = np.frombuffer(payload, dtype=np.uint8)
    encoding.encode(vector, codes)
    if encoding.zstd_level is not None:
        shorter = zstandard.ZstdCompressor(level=encoding.zstd_level).compress(payload)
        if len(shorter) < len(payload):
            frame, flags = bytearray(HEADER.size + len(shorter)), COMPRESSED
            payload = memoryview(frame)[HEADER.size :]
            payload[:] = shorter
    digest = xxhash.xxh3_64_intdigest(payload)
    HEADER.pack_into(frame, 0, MAGIC, VERSION, encoding.number, flags, 0, vector.size, len(payload), digest)
    return frame, encoding.view(codes, vector.size)


def open_frame(data: bytes | bytearray | memoryview, *, elements_expected: int, codec: str | None = None) -> Encoded:
    """Return what a frame that must hold `elements_expected` numbers, in `codec` if one is given, stands for, still encoded.

    An uncompressed frame is not copied: it must not change while the result is used. Whether all numbers are finite is for
    the first reader of them to see (`Encoded.squares`).

    Raises:
        FrameRejected: `truncated`, `foreign`, `version`, `codec`, `size`, `checksum` or `compression`.
    """
    view = memoryview(data)
    if len(view) < HEADER.size:
        raise FrameRejected("truncated", "a frame is shorter than its header", got=len(view), allowed=HEADER.size)
    magic, version, number, flags, zero, elements, length, digest = HEADER.unpack_from(view)
    if magic != MAGIC:
        raise FrameRejected("foreign", "not a tensor frame", got=bytes(magic))
    if version != VERSION or zero or flags & ~COMPRESSED:
        raise FrameRejected("version", "a frame of another version", got=(version, flags), allowed=VERSION)
    encoding = next((e for e in ENCODINGS.values() if e.number == number), None)
    if encoding is None or (codec is not None and encoding is not ENCODINGS[codec]):
        raise FrameRejected("codec", "a frame of another encoding", got=number, allowed=codec or list(ENCODINGS))
    payload = view[HEADER.size :]
    if elements != elements_expected or length != len(payload):
        got, allowed = (elements, length), (elements_expected, len(payload))
        raise FrameRejected("size", "a frame says another size than it has", got=got, allowed=allowed)
    if xxhash.xxh3_64_intdigest(payload) != digest:
        raise FrameRejected("checksum", "a frame's payload is damaged")
    plain = _expanded(payload, encoding, elements, compressed=bool(flags & COMPRESSED))
    return encoding.view(np.frombuffer(plain, dtype=np.uint8), elements)


def decode_frame(data: bytes | bytearray | memoryview, *, elements_expected: int, codec: str | None = None) -> Vector:
    """Return the float32 vector of a frame, in memory of its own; the arguments are those of `open_frame`.

    Raises:
        FrameRejected: as `open_frame`, and `not_finite`.
    """
    encoded = open_frame(data, elements_expected=elements_expected, codec=codec)
    if not math.isfinite(encoded.squares(0, elements_expected)):
        raise FrameRejected("not_finite", "a frame holds infinities or NaN")
    return encoded.expanded()


def _expanded(payload: memoryview, encoding: Encoding, elements: int, *, compressed: bool) -> memoryview:
    """Return the payload decompressed, exactly as long as its encoding needs."""
    size = encoding.size(elements)
    if compressed:
        try:
            declared = zstandard.frame_content_size(payload)
            if declared != size:
                raise FrameRejected("compression", "a compressed payload of another size", got=declared, allowed=size)
            payload = memoryview(
                zstandard.ZstdDecompressor().decompress(payload, max_output_size=size, allow_extra_data=False)
            )
        except zstandard.ZstdError as error:
            raise FrameRejected("compression", "a payload cannot be decompressed", got=str(error)) from error
    if len(payload) != size:
        raise FrameRejected("size", "a payload has the wrong length", got=len(payload), allowed=size)
    return payload
