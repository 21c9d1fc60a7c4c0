"""How tensors become bytes: encodings, self-describing frames, and named arrays for state."""

from __future__ import annotations

from atoll.codecs.arrays import pack_arrays, unpack_arrays
from atoll.codecs.encodings import ENCODINGS
from atoll.codecs.frame import decode_frame, encode_frame, frame_bytes, frame_bytes_max

__all__ = [
    "ENCODINGS",
    "decode_frame",
    "encode_frame",
    "frame_bytes",
    "frame_bytes_max",
    "pack_arrays",
    "unpack_arrays",
]
