"""Encodings of a flat float32 vector: exact, half, and a quarter of its size.

    f32    4 bytes a number, exact
    bf16   2 bytes, rounded to nearest even (the paper's dtype for outer gradients)
    int8   1 byte and a float32 scale per block of 128: q = round(x / s), s = max|x| / 127

Each is a pair of pure functions over whole vectors; sizes are known from the number of elements alone, so a decoder can
check them before it allocates. All numbers are little-endian on the wire. `largest` is the magnitude up to which every
number comes back finite: above it bf16 rounds to infinity, and so may int8 when it multiplies its scale again.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import ml_dtypes
import numpy as np
import numpy.typing as npt

Vector = npt.NDArray[np.float32]

BLOCK = 128
FLOAT32_MAX = float(np.finfo(np.float32).max)
BFLOAT16_MAX = 2.0**127 * (2 - 2.0**-7)


@dataclass(frozen=True, slots=True)
class Encoding:
    """One encoding: its number on the wire, the payload bytes of n elements, both directions, the largest magnitude."""

    number: int
    size: Callable[[int], int]
    encode: Callable[[Vector], bytes]
    decode: Callable[[memoryview, int], Vector]
    largest: float


def _decode_f32(payload: memoryview, elements: int) -> Vector:
    return np.frombuffer(payload, dtype="<f4", count=elements).astype(np.float32)


def _encode_bf16(vector: Vector) -> bytes:
    encoded: bytes = vector.astype(ml_dtypes.bfloat16).tobytes()
    return encoded


def _decode_bf16(payload: memoryview, elements: int) -> Vector:
    wide = np.frombuffer(payload, dtype="<u2", count=elements).astype(np.uint32)
    np.left_shift(wide, 16, out=wide)
    return wide.view(np.float32)


def _encode_int8(vector: Vector) -> bytes:
    blocks = -(-vector.size // BLOCK)
    padded = np.zeros(blocks * BLOCK, dtype=np.float32)
    padded[: vector.size] = vector
    grid = padded.reshape(blocks, BLOCK)
    scales = np.abs(grid).max(axis=1) / np.float32(127.0)
    inverse = np.divide(np.float32(1.0), scales, out=np.zeros_like(scales), where=scales > np.float32(1e-38))
    codes = np.rint(grid * inverse[:, None]).clip(-127, 127).astype(np.int8)
    encoded: bytes = scales.astype("<f4").tobytes() + codes.reshape(-1)[: vector.size].tobytes()
    return encoded


def _decode_int8(payload: memoryview, elements: int) -> Vector:
    blocks = -(-elements // BLOCK)
    scales = np.frombuffer(payload, dtype="<f4", count=blocks)
    codes = np.frombuffer(payload, dtype=np.int8, count=elements, offset=4 * blocks)
    vector = codes.astype(np.float32)
    with np.errstate(over="ignore", invalid="ignore"):  # a hostile scale; the frame refuses what is not finite
        vector *= np.repeat(scales, BLOCK)[:elements]
    return vector


ENCODINGS = {
    "f32": Encoding(1, lambda n: 4 * n, lambda v: v.astype("<f4", copy=False).tobytes(), _decode_f32, FLOAT32_MAX),
    "bf16": Encoding(2, lambda n: 2 * n, _encode_bf16, _decode_bf16, BFLOAT16_MAX),
    "int8": Encoding(3, lambda n: n + 4 * -(-n // BLOCK), _encode_int8, _decode_int8, BFLOAT16_MAX),
}
