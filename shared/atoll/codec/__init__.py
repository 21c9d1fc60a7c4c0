"""How tensors become bytes: formats, self-describing frames, and named arrays for state.

A vector is encoded in one of the `formats`, one file each. An `Encoded` holds a vector as it was sent, measures it and
folds it in. `frames` cut it into segments; each travels as one message and is checked by itself. `arrays` are
the state of an outer optimizer. `kernels` hold the loops over vectors, `on_device` the programs that run where the
parameters are. The codec does not know where its bytes go.
"""

from __future__ import annotations

from atoll.codec.arrays import ArraysDecoder, PackedArrays, pack_arrays, unpack_arrays
from atoll.codec.encoded import Encoded
from atoll.codec.formats import FORMATS, KEYFRAME, check_codecs, format_of
from atoll.codec.frames import (
    EncodedFrame,
    FrameDecoder,
    FrameEncoder,
    Framing,
    Read,
    StoredFrame,
    decode_frame,
    encode_frame,
    frame_bytes,
)

__all__ = [
    "FORMATS",
    "KEYFRAME",
    "ArraysDecoder",
    "Encoded",
    "EncodedFrame",
    "FrameDecoder",
    "FrameEncoder",
    "Framing",
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
