"""The compiled sums of squares: `squares` of `atoll.codec.kernels`, to the bit what `plain` has.

Squares of floats are added up in float32 first, those at one place of the eight blocks of a *tile*, as a tree: half the work
of float64, and a few parts in ten million off at most. That holds as long as squares are in the range of float32. Where a
sum comes out infinite, or tiny, all of it is done again in float64, where no square of a float32 is either: what is finite
is told from what is not by the sum alone, and a length of 1e-15 is as right as any other. Tiles are counted from the
beginning of the vector; what a stretch does not cover of one is zero.

Squares of codes are integers, and exact for a block.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from numba import njit, types

from atoll.codec.kernels import Bytes, Vector
from atoll.codec.kernels.compiling import BYTES, F32_IN, agree, compiled

Rows = npt.NDArray[Any]
Lanes = npt.NDArray[np.float64]

# numba knows kept code by this file alone: a constant of another file could change and old code be used with it.
F32, BF16, INT8, INT4, E3M0 = 1, 2, 4, 5, 6
BLOCK, TILE = 128, 1024
E3M0_UNIT = np.float32(2.0**-6)
SQUARES_MIN = 2.0**-60
agree(globals(), "F32", "BF16", "INT8", "INT4", "E3M0", "BLOCK", "TILE", "E3M0_UNIT", "SQUARES_MIN")

HALF = BLOCK // 2
EIGHT = TILE // BLOCK

_LANES = types.Array(types.float64, 1, "C")
_FLOATS = types.Array(types.float32, 3, "C")
_FLOATS_IN = types.Array(types.float32, 3, "C", readonly=True)
_HALVES_IN = types.Array(types.uint16, 3, "C", readonly=True)
_CODES_IN = types.Array(types.uint8, 2, "C", readonly=True)


@njit(inline="always")
def _widened(half: np.uint16) -> np.float32:
    """Return the bfloat16 that has these bits."""
    return np.uint32(np.uint32(half) << np.uint32(16)).view(np.float32)


@njit(inline="always")
def _tree(a: Any, b: Any, c: Any, d: Any, e: Any, f: Any, g: Any, h: Any) -> Any:  # noqa: ANN401  (floats of one type)
    """Return the sum of eight squares, in the type of the numbers."""
    return ((a * a + b * b) + (c * c + d * d)) + ((e * e + f * f) + (g * g + h * h))


@compiled(types.void(_FLOATS, _LANES), types.void(_FLOATS_IN, _LANES))
def _of_floats(tiles: Rows, lanes: Lanes) -> None:
    """Add the squares of tiles of float32."""
    for t in range(tiles.shape[0]):
        for i in range(BLOCK):
            a, b, c, d = tiles[t, 0, i], tiles[t, 1, i], tiles[t, 2, i], tiles[t, 3, i]
            e, f, g, h = tiles[t, 4, i], tiles[t, 5, i], tiles[t, 6, i], tiles[t, 7, i]
            lanes[i] += np.float64(_tree(a, b, c, d, e, f, g, h))


@compiled(types.void(_HALVES_IN, _LANES))
def _of_halves(tiles: Rows, lanes: Lanes) -> None:
    """Add the squares of tiles of bfloat16."""
    for t in range(tiles.shape[0]):
        for i in range(BLOCK):
            a, b, c, d = (
                _widened(tiles[t, 0, i]),
                _widened(tiles[t, 1, i]),
                _widened(tiles[t, 2, i]),
                _widened(tiles[t, 3, i]),
            )
            e, f, g, h = (
                _widened(tiles[t, 4, i]),
                _widened(tiles[t, 5, i]),
                _widened(tiles[t, 6, i]),
                _widened(tiles[t, 7, i]),
            )
            lanes[i] += np.float64(_tree(a, b, c, d, e, f, g, h))


@compiled(types.void(_FLOATS, _LANES))
def _exactly(tiles: Rows, lanes: Lanes) -> None:
    """Add the squares of tiles of float32, all in float64."""
    for t in range(tiles.shape[0]):
        for i in range(BLOCK):
            a, b = np.float64(tiles[t, 0, i]), np.float64(tiles[t, 1, i])
            c, d = np.float64(tiles[t, 2, i]), np.float64(tiles[t, 3, i])
            e, f = np.float64(tiles[t, 4, i]), np.float64(tiles[t, 5, i])
            g, h = np.float64(tiles[t, 6, i]), np.float64(tiles[t, 7, i])
            lanes[i] += _tree(a, b, c, d, e, f, g, h)


@compiled(types.void(types.intp, BYTES, types.intp, types.intp, types.intp, _LANES, types.boolean))
def _of_tile(kind: int, payload: Bytes, tile: int, start: int, stop: int, lanes: Lanes, exactly: bool) -> None:  # noqa: FBT001
    """Add the squares of elements `start` to `stop` of one tile, from a copy that is zero elsewhere."""
    copy = np.zeros(TILE, dtype=np.float32)
    low, high = start - tile * TILE, stop - tile * TILE
    if kind == F32:
        copy[low:high] = payload[4 * start : 4 * stop].view(np.float32)
    else:
        halves = payload[2 * start : 2 * stop].view(np.uint16)
        for i in range(halves.size):
            copy[low + i] = _widened(halves[i])
    if exactly:
        _exactly(copy.reshape(1, EIGHT, BLOCK), lanes)
    else:
        _of_floats(copy.reshape(1, EIGHT, BLOCK), lanes)


@compiled(types.void(types.intp, BYTES, types.intp, types.intp, _LANES, types.boolean))
def _squares_of_floats(kind: int, payload: Bytes, start: int, stop: int, lanes: Lanes, exactly: bool) -> None:  # noqa: FBT001
    """Write the lanes of elements `start` to `stop` of f32 or bf16."""
    lanes[:] = 0.0
    at = start
    while at < stop:
        tile = at // TILE
        whole = stop // TILE if at == tile * TILE and not exactly else tile
        if whole > tile:
            end = whole * TILE
            if kind == F32:
                _of_floats(payload[4 * at : 4 * end].view(np.float32).reshape(-1, EIGHT, BLOCK), lanes)
            else:
                _of_halves(payload[2 * at : 2 * end].view(np.uint16).reshape(-1, EIGHT, BLOCK), lanes)
        else:
            end = min((tile + 1) * TILE, stop)
            _of_tile(kind, payload, tile, at, end, lanes, exactly)
        at = end


@njit(inline="always")
def _of_power(code: np.int32) -> np.int32:
    """Return (2^p / 2)^2 for the power p in the last three bits of a code, nothing for p = 0."""
    doubled = np.int32(np.int32(code & np.int32(7)) << np.int32(1))
    return np.int32(np.int32(np.int32(1) << doubled) >> np.int32(2))


@compiled(types.float64(types.intp, _CODES_IN, F32_IN, types.intp, types.float64))
def _of_codes(kind: int, packed: Rows, scales: Vector, first: int, total: float) -> float:
    """Return `total` and the squares of whole blocks of codes; `first` is the first one's place among the scales."""
    for block in range(packed.shape[0]):
        small, sum_of_block = np.int16(0), np.int32(0)
        if kind == INT8:
            for i in range(BLOCK):
                code = np.int32(np.int8(packed[block, i]))
                sum_of_block = np.int32(sum_of_block + np.int32(code * code))
        elif kind == INT4:
            for i in range(HALF):
                a = np.int16(np.int16(packed[block, i] & np.uint8(15)) - np.int16(8))
                b = np.int16(np.int16(packed[block, i] >> np.uint8(4)) - np.int16(8))
                small = np.int16(small + np.int16(np.int16(a * a) + np.int16(b * b)))  # 128 times 64 at most
            sum_of_block = np.int32(small)
        else:
            for i in range(HALF):
                both = np.int32(packed[block, i])
                pair = np.int32(_of_power(both) + _of_power(np.int32(both >> np.int32(4))))
                sum_of_block = np.int32(sum_of_block + pair)
        unit = E3M0_UNIT * scales[first + block] if kind == E3M0 else scales[first + block]
        total += np.float64(unit) * np.float64(unit) * np.float64(sum_of_block)
    return total


@compiled(types.void(types.intp, types.intp, types.intp, types.Array(types.uint8, 1, "C")))
def _keep(kind: int, low: int, high: int, block: Bytes) -> None:
    """Make all codes of a block zero but those of elements `low` to `high`."""
    for i in range(BLOCK):
        if low <= i < high:
            continue
        if kind == INT8:
            block[i] = 0
        else:
            zero = 8 if kind == INT4 else 0
            if i < HALF:
                block[i] = (block[i] & 0xF0) | zero
            else:
                block[i - HALF] = (block[i - HALF] & 0x0F) | zero << 4


@compiled(types.float64(types.intp, BYTES, F32_IN, types.intp, types.intp))
def squares(kind: int, payload: Bytes, scales: Vector, start: int, stop: int) -> float:
    """Return the sum of squares of elements `start` to `stop`."""
    total = 0.0
    if kind in (F32, BF16):
        lanes = np.empty(BLOCK, dtype=np.float64)
        _squares_of_floats(kind, payload, start, stop, lanes, False)
        largest, finite = 0.0, True
        for i in range(BLOCK):
            finite = finite and lanes[i] < np.inf
            largest = max(largest, lanes[i])
        if not finite or largest < SQUARES_MIN:
            _squares_of_floats(kind, payload, start, stop, lanes, True)
        for i in range(BLOCK):
            total += lanes[i]
        return total
    width, at = BLOCK if kind == INT8 else HALF, start
    while at < stop:
        block = at // BLOCK
        whole = stop // BLOCK if at == block * BLOCK else block
        end = whole * BLOCK if whole > block else min((block + 1) * BLOCK, stop)
        if whole > block:
            total = _of_codes(kind, payload[block * width : whole * width].reshape(-1, width), scales, block, total)
        else:
            copy = payload[block * width : (block + 1) * width].copy()
            _keep(kind, at - block * BLOCK, end - block * BLOCK, copy)
            total = _of_codes(kind, copy.reshape(1, width), scales, block, total)
        at = end
    return total
