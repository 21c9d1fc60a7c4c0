"""How tensors become bytes: formats, self-describing frames, and named arrays for state.

A vector is encoded in one of the `formats`, a file each. An `Encoded` holds it as it was sent, measures it and folds it in. A
frame (`frames`) cuts it into `segments`, which travel as one message each and are checked one by one. `arrays` are the state
of an outer optimizer. `kernels` hold the loops over vectors, `on_device` those where parameters lie. Nothing in here knows
where its bytes go.
"""

from __future__ import annotations

from atoll.codec.arrays import ArraysDecoder, PackedArrays, pack_arrays, unpack_arrays
from atoll.codec.encoded import Encoded
from atoll.codec.formats import FORMATS, KEYFRAME, Format, check_codecs, format_of
from atoll.codec.frames import (
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
    "FORMATS",
    "KEYFRAME",
    "ArraysDecoder",
    "Encoded",
    "EncodedFrame",
    "Format",
    "FrameDecoder",
    "FrameEncoder",
    "Framing",
    "MeasuredFrame",
    "PackedArrays",
    "Read",
    "StoredFrame",
    "check_codecs",
    "decode_frame",
    "encode_frame",
    "format_of",
    "frame_bytes",
    "pack_arrays",
    "unpack_arrays",
]
