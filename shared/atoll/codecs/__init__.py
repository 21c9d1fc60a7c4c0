"""How tensors become bytes: encodings, self-describing frames, and named arrays for state."""

from __future__ import annotations

from atoll.codecs.arrays import ArrivingArrays, Packed, pack_arrays, unpack_arrays
from atoll.codecs.encoded import Encoded
from atoll.codecs.encodings import ENCODINGS, KEYFRAME, encoding_of
from atoll.codecs.frame import (
    Arriving,
    Measured,
    Outgoing,
    Read,
    Sealed,
    Segments,
    decode_frame,
    encode_frame,
    frame_bytes,
)
from atoll.codecs.segments import Framing

__all__ = [
    "ENCODINGS",
    "KEYFRAME",
    "Arriving",
    "ArrivingArrays",
    "Encoded",
    "Framing",
    "Measured",
    "Outgoing",
    "Packed",
    "Read",
    "Sealed",
    "Segments",
    "decode_frame",
    "encode_frame",
    "encoding_of",
    "frame_bytes",
    "pack_arrays",
    "unpack_arrays",
]
