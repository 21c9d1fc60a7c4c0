"""How tensors become bytes: encodings, self-describing frames, and named arrays for state."""

from __future__ import annotations

from atoll.codecs.arrays import pack_arrays, unpack_arrays
from atoll.codecs.encoded import Encoded
from atoll.codecs.encodings import CODEC_DOWN, ENCODINGS, encoding_of
from atoll.codecs.frame import decode_frame, encode_frame, frame_bytes, framed, open_frame

__all__ = [
    "CODEC_DOWN",
    "ENCODINGS",
    "Encoded",
    "decode_frame",
    "encode_frame",
    "encoding_of",
    "frame_bytes",
    "framed",
    "open_frame",
    "pack_arrays",
    "unpack_arrays",
]
