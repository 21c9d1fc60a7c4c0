"""The compiled quantiser: `quantise` of `atoll.kernels`, to the bit what `plain` has.

The largest magnitude of a block is found on the bits of its numbers: as integers magnitudes are in order, infinity and what
is not a number above all others, and a maximum of integers is one vector instruction.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from numba import njit, types

from atoll.kernels import Bytes, Vector
from atoll.kernels.compiling import BYTES_OUT, F32_IN, F32_OUT, agree, compiled

Levels = npt.NDArray[np.int32]

# numba knows kept code by this file alone: a constant of another file could change and old code be used with it.
F32, BF16, INT8, INT4 = 1, 2, 4, 5
BLOCK = 128
SCALE_MIN = np.float32(1e-38)
agree(globals(), "F32", "BF16", "INT8", "INT4", "BLOCK", "SCALE_MIN")

HALF = BLOCK // 2
INFINITE = 0x7F800000


@njit(nogil=True)
def _largest(vector: Vector) -> np.int32:
    """Return the bits of the largest magnitude: as integers they are in order, and NaN is above infinity."""
    bits, largest = vector.view(np.int32), np.int32(0)
    for i in range(bits.size):
        largest = max(largest, bits[i] & np.int32(0x7FFFFFFF))
    return largest


@njit(nogil=True)
def _scale(vector: Vector, levels: np.float32, least: Levels) -> np.float32:
    """Return what the largest magnitude of a block is `levels` of, rounded up to bfloat16; 0 below `SCALE_MIN`."""
    one = np.empty(1, dtype=np.int32)
    one[0] = _largest(vector)
    least[0] = max(least[0], one[0])
    largest = one.view(np.float32)
    largest[0] /= levels
    one[0] = (one[0] + np.int32(0xFFFF)) & np.int32(-65536)
    return largest[0] if largest[0] > SCALE_MIN else np.float32(0.0)


@njit(nogil=True)
def _exponents(block: Vector, inverse: np.float32, codes: Levels) -> None:
    """Write codes of E3M0: the nearest of 0 and 2^-6 to 2^0, with the sign."""
    magnitude = np.abs(block) * inverse
    shifted = magnitude * np.float32(4.0 / 3.0)
    bits, signs = shifted.view(np.int32), block.view(np.int32)
    for i in range(codes.size):
        nearest = min((bits[i] >> 23) - 120, 7)
        power = max(nearest, np.int32(1) if magnitude[i] >= np.float32(2.0**-7) else np.int32(0))
        codes[i] = power | (signs[i] >> 28) & 8


@compiled(types.float32(types.intp, F32_IN, BYTES_OUT, F32_OUT))
def quantise(kind: int, vector: Vector, payload: Bytes, scales: Vector) -> float:
    """Write the codes and the scales of a vector; return its largest magnitude."""
    found = np.zeros(1, dtype=np.int32)
    if kind in (F32, BF16):
        found[0] = _largest(vector)
        bits = vector.view(np.uint32)
        if kind == F32:
            wide = payload.view(np.uint32)
            for i in range(bits.size):
                wide[i] = bits[i]
        else:
            half = payload.view(np.uint16)
            for i in range(bits.size):
                even = (bits[i] >> np.uint32(16)) & np.uint32(1)
                half[i] = np.uint16((bits[i] + np.uint32(0x7FFF) + even) >> np.uint32(16))
    else:
        levels = np.float32(127.0) if kind == INT8 else np.float32(7.0) if kind == INT4 else np.float32(1.0)
        block, codes = np.empty(BLOCK, dtype=np.float32), np.empty(BLOCK, dtype=np.int32)
        for number in range(scales.size):
            here = vector[number * BLOCK : (number + 1) * BLOCK]
            block[here.size :] = 0.0
            block[: here.size] = here
            scale = _scale(block, levels, found)
            scales[number] = scale
            if found[0] >= INFINITE:
                break
            inverse = np.float32(1.0) / scale if scale > 0.0 else np.float32(0.0)
            if kind == INT8:
                signed = payload[number * BLOCK : (number + 1) * BLOCK]
                for i in range(BLOCK):
                    signed[i] = np.uint8(np.int32(block[i] * inverse + np.float32(128.5)) - 128)
                continue
            if kind == INT4:
                for i in range(BLOCK):
                    codes[i] = np.int32(block[i] * inverse + np.float32(8.5))
            else:
                _exponents(block, inverse, codes)
            pairs, low, high = payload[number * HALF : (number + 1) * HALF], codes[:HALF], codes[HALF:]
            for i in range(HALF):
                pairs[i] = np.uint8(low[i] | high[i] << 4)
    return float(found.view(np.float32)[0]) if found[0] < INFINITE else np.inf
