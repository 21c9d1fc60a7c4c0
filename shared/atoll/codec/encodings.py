"""Encodings of a flat float32 vector: exact, and a half, a quarter and an eighth of its size.

    f32    4 bytes a number, exact
    bf16   2 bytes, rounded to nearest even (the paper's dtype for outer gradients)
    int8   1 byte: q = round(x / s) from -127 to 127
    int4   half a byte: q from -7 to 7
    e3m0   half a byte: a sign and one of 0, 2^-6 ... 2^0 (Streaming DiLoCo, arXiv 2501.18512)

The last three share a scale s per block of 128 numbers: its largest magnitude over 127, 7 or 1, as bfloat16 rounded up, so
that nothing is clipped. A payload is the scales, then the codes, in whole blocks; nibbles lie as the first half of a block
below the second. A scale below 1e-38 is sent as zero, and so is its block.

The size of a payload is known from the number of elements alone, so a decoder can check it before it allocates. All numbers
are little-endian. `largest` is the magnitude up to which every number comes back finite, and no scale is larger. The
arithmetic is `atoll.codec.kernels`; a received vector stays encoded until it is used (`atoll.codec.encoded`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from atoll.base.errors import FrameRejected, SettingsError
from atoll.codec.encoded import Encoded, codes_bytes, scales_count
from atoll.codec.kernels import BF16, E3M0, F32, INT4, INT8, Bytes, Vector, kernels

FLOAT32_MAX = float(np.finfo(np.float32).max)
BFLOAT16_MAX = 2.0**127 * (2 - 2.0**-7)
SCALED_MAX = 2.0**120
SCALE_BYTES = 2
KEYFRAME: Final = "f32"
"""What keyframes are encoded in: exactly."""


@dataclass(frozen=True, slots=True)
class Encoding:
    """One encoding: its number on the wire, and the largest magnitude it can hold.

    `zstd_level` is the level of compression that pays for itself, None where none does (docs/lab/LOG.md).
    """

    number: int
    largest: float
    zstd_level: int | None = None

    def size(self, elements: int) -> int:
        """Return the bytes of the payload of so many elements."""
        return SCALE_BYTES * scales_count(self.number, elements) + codes_bytes(self.number, elements)

    def encoded(self, vector: Vector) -> Encoded:
        """Return the codes and scales of a vector, as its reader will see them.

        Raises:
            FrameRejected: `not_finite`; what would not arrive finite in this encoding is not sent.
        """
        codes = np.empty(codes_bytes(self.number, vector.size), dtype=np.uint8)
        scales = np.empty(scales_count(self.number, vector.size), dtype=np.float32)
        largest = kernels(vector.size).quantise(self.number, vector, codes, scales)
        self.check(largest)
        return Encoded(self.number, vector.size, codes, scales)

    def check(self, largest: float) -> None:
        """Raise `FrameRejected` `not_finite` unless numbers up to this magnitude arrive finite."""
        if not largest <= self.largest:
            raise FrameRejected("not_finite", "this encoding cannot hold it", got=largest, allowed=self.largest)

    def pack(self, payload: Bytes, codes: Bytes, scales: Vector) -> None:
        """Write scales and codes into `payload`, which is as long as they are."""
        split = SCALE_BYTES * scales.size
        payload[:split].view("<u2")[:] = scales.view(np.uint32) >> 16
        payload[split:] = codes

    def view(self, payload: Bytes, elements: int) -> Encoded:
        """Return what a payload of the right size stands for; nothing is copied but the scales.

        Raises:
            FrameRejected: `not_finite`; a scale is none, or larger than any that a sender of ours would use.
        """
        count = scales_count(self.number, elements)
        bits = payload[: SCALE_BYTES * count].view("<u2").astype(np.uint32) << 16
        scales = bits.view(np.float32)
        largest = float(np.abs(scales).max(initial=0.0))
        if not largest <= self.largest:
            raise FrameRejected("not_finite", "a scale is too large", got=largest, allowed=self.largest)
        return Encoded(self.number, elements, payload[SCALE_BYTES * count :], scales)


ENCODINGS = {
    "f32": Encoding(F32, largest=FLOAT32_MAX),
    "bf16": Encoding(BF16, largest=BFLOAT16_MAX),
    "int8": Encoding(INT8, largest=SCALED_MAX),
    "int4": Encoding(INT4, largest=SCALED_MAX, zstd_level=1),
    "e3m0": Encoding(E3M0, largest=SCALED_MAX, zstd_level=1),
}


def encoding_of(codec: str) -> Encoding:
    """Return the encoding of that name; raise `SettingsError` where there is none."""
    if codec not in ENCODINGS:
        raise SettingsError("unknown codec", got=codec, allowed=", ".join(ENCODINGS), todo="set protocol.codec_up")
    return ENCODINGS[codec]
