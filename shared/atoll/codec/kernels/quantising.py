"""The compiled quantiser: `quantise` and `settle` of `atoll.codec.kernels`, to the bit what `plain` has.

The largest magnitude of a block is found on the bits of its numbers: as integers magnitudes are in order, infinity and what
is not a number above all others, and a maximum of integers is one vector instruction.

Blocks are rows of a view, and what is done with one is put in its place by numba (see `atoll.codec.kernels.fast`): a slice per
block would cost as much as the work, for numba counts who holds it. Every integer says how wide it is, or numba makes it
64 bits wide. Where a vector ends within a block, that block is done on a copy that is zero beyond.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from numba import njit, types

from atoll.codec.kernels import Bytes, Vector
from atoll.codec.kernels.compiling import BYTES_OUT, F32_IN, F32_OUT, U16_OUT, agree, compiled

Rows = npt.NDArray[Any]
Halves = npt.NDArray[np.uint16]

# numba knows kept code by this file alone: a constant of another file could change and old code be used with it.
F32, BF16, INT8, INT4, E3M0 = 1, 2, 4, 5, 6
BLOCK = 128
SCALE_MIN = np.float32(1e-38)
E3M0_UNIT = np.float32(2.0**-6)
agree(globals(), "F32", "BF16", "INT8", "INT4", "E3M0", "BLOCK", "SCALE_MIN", "E3M0_UNIT")

HALF = BLOCK // 2
INFINITE = 0x7F800000

_ROWS = types.Array(types.float32, 2, "C", readonly=True)
_ROWS_OUT = types.Array(types.float32, 2, "C")
_PACKED_OUT = types.Array(types.uint8, 2, "C")
_HALVES_OUT = types.Array(types.uint16, 2, "C")


@njit(inline="always")
def _magnitude(number: np.float32) -> np.int32:
    """Return the bits of a magnitude: as integers they are in order, and NaN is above infinity."""
    return np.int32(np.float32(number).view(np.int32) & np.int32(0x7FFFFFFF))


@njit(inline="always")
def _said(largest: np.int32) -> float:
    """Return the magnitude that has these bits, infinity for what is not finite."""
    return float(np.int32(largest).view(np.float32)) if largest < INFINITE else np.inf


@njit(inline="always")
def _scale(kind: int, largest: np.int32) -> np.float32:
    """Return what the largest magnitude of a block is so many levels of, rounded up to bfloat16; 0 below `SCALE_MIN`."""
    levels = np.float32(127.0) if kind == INT8 else np.float32(7.0) if kind == INT4 else np.float32(1.0)
    bits = np.float32(np.int32(largest).view(np.float32) / levels).view(np.int32)
    scale = np.int32(np.int32(bits + np.int32(0xFFFF)) & np.int32(-65536)).view(np.float32)
    return scale if scale > SCALE_MIN else np.float32(0.0)


@njit(inline="always")
def _halved(number: np.float32) -> np.uint16:
    """Return the bits of the nearest bfloat16, the even one of two."""
    bits = np.float32(number).view(np.uint32)
    even = np.uint32(np.uint32(bits >> np.uint32(16)) & np.uint32(1))
    return np.uint16(np.uint32(np.uint32(bits + np.uint32(0x7FFF)) + even) >> np.uint32(16))


@njit(inline="always")
def _widened(half: np.uint16) -> np.float32:
    """Return the bfloat16 that has these bits."""
    return np.uint32(np.uint32(half) << np.uint32(16)).view(np.float32)


@njit(inline="always")
def _exponent(number: np.float32, inverse: np.float32) -> np.int32:
    """Return the code of E3M0: the nearest of 0 and 2^-6 to 2^0, with the sign."""
    magnitude = np.float32(np.float32(abs(number)) * inverse)
    exponent = np.int32(np.float32(magnitude * np.float32(4.0 / 3.0)).view(np.int32) >> np.int32(23))
    nearest = min(np.int32(exponent - np.int32(120)), np.int32(7))
    power = max(nearest, np.int32(magnitude >= np.float32(2.0**-7)))
    sign = np.int32(np.int32(np.float32(number).view(np.int32) >> np.int32(28)) & np.int32(8))
    return np.int32(power | sign)


@njit(inline="always")
def _power(code: np.int32) -> np.float32:
    """Return what a code of E3M0 stands for, in units of 2^-6; bits above its four do not count."""
    size = np.int32(np.int32(np.int32(1) << np.int32(code & np.int32(7))) >> np.int32(1))
    return np.float32(np.int32(-size) if code & np.int32(8) else size)


@njit(inline="always")
def _encode(kind: int, rows: Rows, row: int, scale: np.float32, packed: Rows, at: int) -> None:
    """Write the codes of a block that has this scale to row `at` of `packed`."""
    inverse = np.float32(1.0) / scale if scale > 0.0 else np.float32(0.0)
    if kind == INT8:
        for i in range(BLOCK):
            packed[at, i] = np.uint8(np.int32(rows[row, i] * inverse + np.float32(128.5)) - np.int32(128))
    elif kind == INT4:
        for i in range(HALF):
            one = np.int32(rows[row, i] * inverse + np.float32(8.5))
            other = np.int32(rows[row, HALF + i] * inverse + np.float32(8.5))
            packed[at, i] = np.uint8(one | np.int32(other << np.int32(4)))
    else:
        for i in range(HALF):
            one = _exponent(rows[row, i], inverse)
            other = _exponent(rows[row, HALF + i], inverse)
            packed[at, i] = np.uint8(one | np.int32(other << np.int32(4)))


@njit(inline="always")
def _decode(kind: int, packed: Rows, at: int, rows: Rows, row: int) -> None:
    """Write what row `at` of `packed` stands for before its scale; numbers of E3M0 in units of 2^-6."""
    if kind == INT8:
        for i in range(BLOCK):
            rows[row, i] = np.float32(np.int8(packed[at, i]))
    elif kind == INT4:
        for i in range(HALF):
            rows[row, i] = np.float32(np.int32(np.int32(packed[at, i] & np.uint8(15)) - np.int32(8)))
            rows[row, HALF + i] = np.float32(np.int32(np.int32(packed[at, i] >> np.uint8(4)) - np.int32(8)))
    else:
        for i in range(HALF):
            rows[row, i] = _power(np.int32(packed[at, i]))
            rows[row, HALF + i] = _power(np.int32(packed[at, i] >> np.uint8(4)))


@compiled(types.int32(types.intp, _ROWS, _PACKED_OUT, F32_OUT))
def _quantise(kind: int, rows: Rows, packed: Rows, scales: Vector) -> np.int32:
    """Write the codes and the scales of whole blocks; return the bits of the largest magnitude."""
    largest = np.int32(0)
    for row in range(rows.shape[0]):
        here = np.int32(0)
        for i in range(BLOCK):
            here = max(here, _magnitude(rows[row, i]))
        largest = max(largest, here)
        if largest >= INFINITE:
            break
        scales[row] = _scale(kind, here)
        _encode(kind, rows, row, scales[row], packed, row)
    return largest


@compiled(types.float32(types.intp, F32_IN, BYTES_OUT, F32_OUT))
def quantise(kind: int, vector: Vector, payload: Bytes, scales: Vector) -> float:
    """Write the codes and the scales of a vector; return its largest magnitude."""
    largest, whole = np.int32(0), vector.size // BLOCK
    if kind in (F32, BF16):
        bits = vector.view(np.int32)
        for i in range(bits.size):
            largest = max(largest, np.int32(bits[i] & np.int32(0x7FFFFFFF)))
        if kind == F32:
            payload.view(np.int32)[:] = bits
        else:
            half = payload.view(np.uint16)
            for i in range(vector.size):
                half[i] = _halved(vector[i])
        return _said(largest)
    width = BLOCK if kind == INT8 else HALF
    packed = payload.reshape(-1, width)
    largest = _quantise(kind, vector[: whole * BLOCK].reshape(-1, BLOCK), packed[:whole], scales[:whole])
    if whole * BLOCK < vector.size and largest < INFINITE:
        last = np.zeros((1, BLOCK), dtype=np.float32)
        last[0, : vector.size - whole * BLOCK] = vector[whole * BLOCK :]
        largest = max(largest, _quantise(kind, last, packed[whole:], scales[whole:]))
    return _said(largest)


@compiled(types.int32(types.intp, _ROWS, _ROWS_OUT, _PACKED_OUT, _HALVES_OUT, F32_OUT, _HALVES_OUT))
def _settle(
    kind: int, values: Rows, following: Rows, packed: Rows, sent: Rows, scales: Vector, carry: Rows
) -> np.int32:
    """Do `settle` with whole blocks, codes going to `packed`, those of bfloat16 to `sent`; return bits as `_quantise`."""
    largest, work = np.int32(0), np.empty((2, BLOCK), dtype=np.float32)
    for row in range(values.shape[0]):
        here, share = np.int32(0), np.float32(1.0)
        for i in range(BLOCK):
            work[0, i] = following[row, i] - values[row, i]
            here = max(here, _magnitude(following[row, i] - values[row, i]))
        if here >= INFINITE:
            return here
        if kind == BF16:
            for i in range(BLOCK):
                sent[row, i] = _halved(work[0, i])
                work[1, i] = _widened(_halved(work[0, i]))
        else:
            scale = _scale(kind, here)
            scales[row] = scale
            share = E3M0_UNIT * scale if kind == E3M0 else scale
            _encode(kind, work, 0, scale, packed, row)
            _decode(kind, packed, row, work, 1)
        for i in range(BLOCK):
            settled = values[row, i] + share * work[1, i]
            left = following[row, i] - settled
            following[row, i] = settled
            carry[row, i] = _halved(left)
            here = max(here, _magnitude(left))
        largest = max(largest, here)
        if largest >= INFINITE:
            return largest
    return largest


@compiled(types.float32(types.intp, F32_IN, F32_OUT, BYTES_OUT, F32_OUT, U16_OUT))
def settle(kind: int, values: Vector, following: Vector, payload: Bytes, scales: Vector, carry: Halves) -> float:
    """Write the codes and scales of `following - values`, what they make of `values`, and what they leave."""
    width = 2 * BLOCK if kind == BF16 else BLOCK if kind == INT8 else HALF
    whole, size = values.size // BLOCK, values.size
    start = whole * BLOCK
    packed = payload[: whole * width].reshape(-1, width)
    sent = packed.view(np.uint16) if kind == BF16 else np.empty((0, BLOCK), dtype=np.uint16)
    now, then, left = (values[:start], following[:start], carry[:start])
    largest = _settle(
        kind, now.reshape(-1, BLOCK), then.reshape(-1, BLOCK), packed, sent, scales, left.reshape(-1, BLOCK)
    )
    if start < size and largest < INFINITE:
        last, after = np.zeros((1, BLOCK), dtype=np.float32), np.zeros((1, BLOCK), dtype=np.float32)
        last[0, : size - start], after[0, : size - start] = values[start:], following[start:]
        codes, over = np.zeros((1, width), dtype=np.uint8), np.zeros((1, BLOCK), dtype=np.uint16)
        halves = codes.view(np.uint16) if kind == BF16 else np.empty((0, BLOCK), dtype=np.uint16)
        largest = max(largest, _settle(kind, last, after, codes, halves, scales[whole:], over))
        following[start:], carry[start:] = after[0, : size - start], over[0, : size - start]
        rest = payload[whole * width :]
        rest[:] = codes[0, : rest.size]
    return _said(largest)
