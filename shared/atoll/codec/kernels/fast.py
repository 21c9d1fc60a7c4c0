"""The compiled set. `atoll.codec.kernels` says what each function does; `plain` says the same in NumPy, to the bit.

An operation is done on rows, one for each block. Rows of f32, bf16 and int8 are views of the payload; nibbles are unpacked
to bytes, a tile at a time, in memory that stays in the first cache. A block that a span shares with its neighbours is done
on copies, of which only the span's part counts.

Written so that LLVM turns inner loops into vector instructions by itself: rows of a view first, then indices from zero to a
constant (no wrap-around to check, no remainder), one plain statement per element, integers kept as narrow as their sums
allow. What differs by the type of a row is chosen when it is compiled, and put in its place by numba: what LLVM puts in
place later has lost its vector loops. Functions are no arguments here: numba could not keep such code.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from numba import types
from numba.extending import overload

from atoll.codec.kernels import Bytes, Vector
from atoll.codec.kernels.compiling import BYTES, F32_IN, F32_OUT, agree, compiled

Rows = npt.NDArray[Any]
Codes = npt.NDArray[np.int8]
Lanes = npt.NDArray[np.float64]

# numba knows kept code by this file alone: a constant of another file could change and old code be used with it.
COPY, BLEND, BEND, MULTIPLY = 0, 1, 2, 3
F32, BF16, INT8, INT4, E3M0 = 1, 2, 4, 5, 6
BLOCK = 128
agree(globals(), "COPY", "BLEND", "BEND", "MULTIPLY", "F32", "BF16", "INT8", "INT4", "E3M0", "BLOCK")

HALF = BLOCK // 2
TILE_BLOCKS = 64
E3M0_UNIT = np.float32(2.0**-6)
agree(globals(), "E3M0_UNIT")

_F32_ROWS = types.Array(types.float32, 2, "C", readonly=True)
_F32_ROWS_OUT = types.Array(types.float32, 2, "C")
_PAIRS = types.Array(types.uint8, 2, "C", readonly=True)
_LANES = types.Array(types.float64, 1, "C")
_FACTORS = (types.float32, types.float32, types.float32)


def _on_rows(*kinds: Any) -> list[Any]:  # noqa: ANN401  (types of numba)
    """Return the signatures of `_operate` for rows of these types."""
    return [
        types.void(types.intp, types.intp, rows, F32_IN, _F32_ROWS, _F32_ROWS_OUT, _LANES, *_FACTORS)
        for rows in (types.Array(kind, 2, "C", readonly=fixed) for kind, fixed in kinds)
    ]


def _number(x: Any) -> Any:  # noqa: ANN401  (the element of a row)
    """Return what an element of a row stands for before its scale, as float32; compiled in two ways."""
    return x


def _of_bfloat16(x: Any) -> Any:  # noqa: ANN401
    return np.uint32(np.uint32(x) << np.uint32(16)).view(np.float32)


def _of_float_or_integer(x: Any) -> Any:  # noqa: ANN401
    return np.float32(x)


@overload(_number, inline="always")
def _number_of(x: Any) -> Any:  # noqa: ANN401  (a type of numba)
    return _of_bfloat16 if x == types.uint16 else _of_float_or_integer


@compiled(
    *_on_rows(
        (types.float32, True),
        (types.float32, False),
        (types.uint16, True),
        (types.int8, True),
        (types.int8, False),
    )
)
def _operate(
    operation: int,
    kind: int,
    rows: Rows,
    scales: Vector,
    others: Rows,
    here: Rows,
    lanes: Lanes,
    keep: float,
    take: float,
    add: float,
) -> None:
    """Do `operation` with rows and what lies beside them; no scales are scales of one."""
    count, scaled = rows.shape[0], scales.size > 0
    unit = E3M0_UNIT if kind == E3M0 else np.float32(1.0)
    if operation == BLEND:
        for block in range(count):
            row, out = rows[block], here[block]
            share = take * (unit * scales[block]) if scaled else take
            for i in range(BLOCK):
                out[i] = keep * out[i] + share * _number(row[i])
    elif operation == BEND:
        for block in range(count):
            row, out, beside = rows[block], here[block], others[block]
            share = take * (unit * scales[block]) if scaled else take
            for i in range(BLOCK):
                out[i] = keep * out[i] + (share * _number(row[i]) + add * beside[i])
    elif operation == COPY:
        for block in range(count):
            row, out = rows[block], here[block]
            scale = unit * scales[block] if scaled else unit
            for i in range(BLOCK):
                out[i] = scale * _number(row[i])
    else:
        for block in range(count):
            row, beside = rows[block], others[block]
            wide = np.float64(unit * scales[block] if scaled else unit)
            for i in range(BLOCK):
                lanes[i] += wide * (np.float64(_number(row[i])) * np.float64(beside[i]))


@compiled(types.void(types.intp, _PAIRS, types.Array(types.int8, 3, "C")))
def _unpack(kind: int, pairs: Rows, halves: Rows) -> None:
    """Write what blocks of nibbles stand for: the low ones of a block's bytes are its first half, the high ones its second.

    Of E3M0 in units of 2^-6: zero, or a sign and 1 to 64.
    """
    if kind == INT4:
        for block in range(pairs.shape[0]):
            pair, low, high = pairs[block], halves[block, 0], halves[block, 1]
            for i in range(HALF):
                low[i] = np.int8(pair[i] & 15) - np.int8(8)
            for i in range(HALF):
                high[i] = np.int8(pair[i] >> 4) - np.int8(8)
    else:
        for block in range(pairs.shape[0]):
            pair, low, high = pairs[block], halves[block, 0], halves[block, 1]
            for i in range(HALF):
                size = np.int16(np.int16(np.int16(1) << np.int16(pair[i] & 7)) >> 1)
                low[i] = np.int8(np.int16(-size) if pair[i] & 8 else size)
            for i in range(HALF):
                size = np.int16(np.int16(np.int16(1) << np.int16((pair[i] >> 4) & 7)) >> 1)
                high[i] = np.int8(np.int16(-size) if pair[i] & 128 else size)


@compiled(types.void(types.intp, _PAIRS, F32_IN, _F32_ROWS_OUT, types.float32, types.float32))
def _blend_nibbles(kind: int, pairs: Rows, scales: Vector, here: Rows, keep: float, take: float) -> None:
    """Do BLEND with nibbles: `_unpack` and `_operate`, block by block, which hides the unpacking behind the memory."""
    codes = np.empty(BLOCK, dtype=np.int8)
    low, high = codes[:HALF], codes[HALF:]
    unit = E3M0_UNIT if kind == E3M0 else np.float32(1.0)
    for block in range(pairs.shape[0]):
        pair, out = pairs[block], here[block]
        if kind == INT4:
            for i in range(HALF):
                low[i] = np.int8(pair[i] & 15) - np.int8(8)
            for i in range(HALF):
                high[i] = np.int8(pair[i] >> 4) - np.int8(8)
        else:
            for i in range(HALF):
                size = np.int16(np.int16(np.int16(1) << np.int16(pair[i] & 7)) >> 1)
                low[i] = np.int8(np.int16(-size) if pair[i] & 8 else size)
            for i in range(HALF):
                size = np.int16(np.int16(np.int16(1) << np.int16((pair[i] >> 4) & 7)) >> 1)
                high[i] = np.int8(np.int16(-size) if pair[i] & 128 else size)
        share = take * (unit * scales[block])
        for i in range(BLOCK):
            out[i] = keep * out[i] + share * np.float32(codes[i])


_OVER = (types.intp, types.intp, BYTES, F32_IN, types.intp, types.intp, F32_IN, F32_OUT, _LANES, *_FACTORS)


@compiled(types.void(*_OVER))
def _blocks(
    operation: int,
    kind: int,
    payload: Bytes,
    scales: Vector,
    first: int,
    last: int,
    others: Vector,
    acc: Vector,
    lanes: Lanes,
    keep: float,
    take: float,
    add: float,
) -> None:
    """Do `operation` with the whole blocks `first` to `last`."""
    beside = others[first * BLOCK : last * BLOCK].reshape(-1, BLOCK)
    here = acc[first * BLOCK : last * BLOCK].reshape(-1, BLOCK)
    own = scales[first:last]
    if kind == F32:
        rows = payload[4 * BLOCK * first : 4 * BLOCK * last].view(np.float32).reshape(-1, BLOCK)
        _operate(operation, kind, rows, own, beside, here, lanes, keep, take, add)
    elif kind == BF16:
        halves = payload[2 * BLOCK * first : 2 * BLOCK * last].view(np.uint16).reshape(-1, BLOCK)
        _operate(operation, kind, halves, own, beside, here, lanes, keep, take, add)
    elif kind == INT8:
        signed = payload[BLOCK * first : BLOCK * last].view(np.int8).reshape(-1, BLOCK)
        _operate(operation, kind, signed, own, beside, here, lanes, keep, take, add)
    else:
        pairs = payload[HALF * first : HALF * last].reshape(-1, HALF)
        if operation == BLEND:
            _blend_nibbles(kind, pairs, own, here, keep, take)
            return
        codes = np.empty(TILE_BLOCKS * BLOCK, dtype=np.int8)
        for at in range(0, last - first, TILE_BLOCKS):
            end = min(at + TILE_BLOCKS, last - first)
            tile = codes[: (end - at) * BLOCK]
            _unpack(kind, pairs[at:end], tile.reshape(-1, 2, HALF))
            signed = tile.reshape(-1, BLOCK)
            _operate(operation, kind, signed, own[at:end], beside[at:end], here[at:end], lanes, keep, take, add)


@compiled(types.void(*_OVER))
def _part(
    operation: int,
    kind: int,
    payload: Bytes,
    scales: Vector,
    start: int,
    stop: int,
    others: Vector,
    acc: Vector,
    lanes: Lanes,
    keep: float,
    take: float,
    add: float,
) -> None:
    """Do `operation` with elements `start` to `stop` of one block, on copies that are zero elsewhere."""
    block = start // BLOCK
    low, high = start - block * BLOCK, stop - block * BLOCK
    beside, here = np.zeros((1, BLOCK), np.float32), np.zeros((1, BLOCK), np.float32)
    if others.size:
        beside[0, low:high] = others[start:stop]
    if acc.size:
        here[0, low:high] = acc[start:stop]
    own, codes, wide = scales[block : block + 1], np.zeros(BLOCK, np.int8), np.zeros(BLOCK, np.float32)
    if kind in (F32, BF16):
        if kind == F32:
            wide[low:high] = payload[4 * start : 4 * stop].view(np.float32)
        else:
            halves = payload[2 * start : 2 * stop].view(np.uint16)
            for i in range(halves.size):
                wide[low + i] = _number(halves[i])
        _operate(operation, kind, wide.reshape(1, BLOCK), own, beside, here, lanes, keep, take, add)
    else:
        if kind == INT8:
            codes[low:high] = payload[BLOCK * block + low : BLOCK * block + high].view(np.int8)
        else:
            pairs = payload[HALF * block : HALF * (block + 1)].reshape(1, HALF)
            _unpack(kind, pairs, codes.reshape(1, 2, HALF))
            codes[:low] = 0
            codes[high:] = 0
        _operate(operation, kind, codes.reshape(1, BLOCK), own, beside, here, lanes, keep, take, add)
    if acc.size:
        acc[start:stop] = here[0, low:high]


@compiled(types.void(*_OVER))
def over(
    operation: int,
    kind: int,
    payload: Bytes,
    scales: Vector,
    start: int,
    stop: int,
    others: Vector,
    acc: Vector,
    lanes: Lanes,
    keep: float,
    take: float,
    add: float,
) -> None:
    """Do `operation` with elements `start` to `stop`: a part of a block, whole blocks, and a part of a block again."""
    first, last = (start + BLOCK - 1) // BLOCK, stop // BLOCK
    if first > last:
        _part(operation, kind, payload, scales, start, stop, others, acc, lanes, keep, take, add)
        return
    if start < first * BLOCK:
        _part(operation, kind, payload, scales, start, first * BLOCK, others, acc, lanes, keep, take, add)
    _blocks(operation, kind, payload, scales, first, last, others, acc, lanes, keep, take, add)
    if last * BLOCK < stop:
        _part(operation, kind, payload, scales, last * BLOCK, stop, others, acc, lanes, keep, take, add)
