"""How tensors become bytes: encodings, self-describing frames, and named arrays for state."""

from __future__ import annotations

from atoll.codec.arrays import ArraysDecoder, PackedArrays, pack_arrays, unpack_arrays
from atoll.codec.encoded import Encoded
from atoll.codec.encodings import ENCODINGS, KEYFRAME, encoding_of
from atoll.codec.frame import (
    EncodedFrame,
    FrameDecoder,
    FrameEncoder,
    MeasuredFrame,
    Read,
    StoredFrame,
    decode_frame,
    encode_frame,
    frame_bytes,
)
from atoll.codec.segments import Framing

__all__ = [
    "ENCODINGS",
    "KEYFRAME",
    "ArraysDecoder",
    "Encoded",
    "EncodedFrame",
    "FrameDecoder",
    "FrameEncoder",
    "Framing",
    "MeasuredFrame",
    "PackedArrays",
    "Read",
    "StoredFrame",
    "decode_frame",
    "encode_frame",
    "encoding_of",
    "frame_bytes",
    "pack_arrays",
    "unpack_arrays",
]
