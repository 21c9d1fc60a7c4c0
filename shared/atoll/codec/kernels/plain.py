"""The set in NumPy: what `fast` computes, to the bit. `atoll.codec.kernels` says what each function does.

An operation is done on whole blocks, a stretch at a time; what a span shares with its neighbours is zero in a copy, so that
lanes and results are those of whole blocks. Sums over the blocks of a stretch run along the first axis, which NumPy adds in
order; the lanes so far are its first row.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from atoll.codec.kernels import (
    BEND,
    BF16,
    BLEND,
    BLOCK,
    COPY,
    E3M0,
    E3M0_UNIT,
    F32,
    INT4,
    INT8,
    SCALE_MIN,
    SQUARES_MIN,
    TILE,
    Bytes,
    Vector,
)

Lanes = npt.NDArray[np.float64]
Rows = npt.NDArray[Any]
Halves = npt.NDArray[np.uint16]

STRETCH = 128 * BLOCK
_NONE = np.empty(0, dtype=np.float32)
LEVELS = {INT8: np.float32(127.0), INT4: np.float32(7.0), E3M0: np.float32(1.0)}


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
    """Do `operation` with elements `start` to `stop`."""
    for at in range(start // BLOCK * BLOCK, stop, STRETCH):
        end = min(at + STRETCH, stop)
        first, blocks = at // BLOCK, -(-(end - at) // BLOCK)
        low, high = max(start, at), end
        rows = _rows(kind, payload, at, end, blocks)
        rows.reshape(-1)[: low - at] = 0
        rows.reshape(-1)[high - at :] = 0
        scale = scales[first : first + blocks, None] if scales.size else np.ones((blocks, 1), np.float32)
        scale = E3M0_UNIT * scale if kind == E3M0 else scale
        beside = _padded(others, low, high, at, blocks)
        if operation in (COPY, BLEND, BEND):
            result = _combined(operation, rows, scale, beside, _padded(acc, low, high, at, blocks), (keep, take, add))
            acc[low:high] = result.reshape(-1)[low - at : high - at]
        else:
            wide = scale.astype(np.float64)
            # Of a hostile payload: who asks for a sum looks whether it is finite.
            with np.errstate(over="ignore", invalid="ignore"):
                addends = wide * (rows.astype(np.float64) * beside.astype(np.float64))
                lanes[:] = np.add.reduce(np.concatenate([lanes[None], addends]), axis=0)


def squares(kind: int, payload: Bytes, scales: Vector, start: int, stop: int) -> float:
    """Return the sum of squares of elements `start` to `stop`."""
    if kind not in (F32, BF16):
        return _squares_of_codes(kind, payload, scales, start, stop)
    lanes = np.zeros(BLOCK)
    # What is infinite may be a hostile payload's: who asks looks whether the sum is finite. What is tiny is done again.
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        for dtype in (np.float32, np.float64):
            lanes[:] = 0.0
            for at in range(start // TILE * TILE, stop, STRETCH):
                end = min(at + STRETCH, stop)
                rows = _rows(kind, payload, at, end, -(-(end - at) // TILE) * (TILE // BLOCK)).reshape(-1)
                rows[: max(start - at, 0)] = 0
                squared = np.square(rows.astype(dtype)).reshape(-1, TILE // BLOCK, BLOCK)
                while squared.shape[1] > 1:
                    squared = squared[:, ::2] + squared[:, 1::2]
                lanes[:] = np.add.reduce(np.concatenate([lanes[None], squared[:, 0].astype(np.float64)]), axis=0)
            if SQUARES_MIN <= lanes.max() < np.inf:
                break
        return float(np.add.accumulate(lanes)[-1])


def quantise(kind: int, vector: Vector, payload: Bytes, scales: Vector) -> float:
    """Write the codes and the scales of a vector; return its largest magnitude."""
    bits = vector.view(np.uint32)
    largest = float(np.abs(vector).max(initial=0.0))
    if not np.isfinite(largest):
        return float("inf")
    if kind == F32:
        payload.view(np.uint32)[:] = bits
    elif kind == BF16:
        payload.view(np.uint16)[:] = (bits + np.uint32(0x7FFF) + (bits >> 16 & 1)) >> 16
    else:
        blocks = np.zeros((scales.size, BLOCK), np.float32)
        blocks.reshape(-1)[: vector.size] = vector
        shares = np.abs(blocks).max(axis=1) / LEVELS[kind]
        rounded = ((shares.view(np.int32) + np.int32(0xFFFF)) & np.int32(-65536)).view(np.float32)
        scales[:] = np.where(rounded > SCALE_MIN, rounded, np.float32(0.0))
        inverse = np.divide(np.float32(1.0), scales, out=np.zeros_like(scales), where=scales > 0)[:, None]
        if kind == INT8:
            payload.view(np.int8)[:] = ((blocks * inverse + np.float32(128.5)).astype(np.int32) - 128).reshape(-1)
        else:
            codes = _exponents(blocks, inverse) if kind == E3M0 else _nibbles(blocks, inverse)
            halves = codes.reshape(-1, 2, BLOCK // 2)
            payload[:] = (halves[:, 0] | halves[:, 1] << 4).reshape(-1)
    return largest


def settle(kind: int, values: Vector, following: Vector, payload: Bytes, scales: Vector, carry: Halves) -> float:
    """Write the codes and scales of `following - values`, what they make of `values`, and what they leave."""
    wanted = following.copy()
    largest = quantise(kind, np.subtract(wanted, values), payload, scales)
    if not np.isfinite(largest):
        return largest
    following[:] = values
    over(BLEND, kind, payload, scales, 0, values.size, _NONE, following, np.empty(BLOCK), 1.0, 1.0, 0.0)
    left = np.subtract(wanted, following)
    return max(largest, quantise(BF16, left, carry.view(np.uint8), _NONE))


def nesterov(
    values: Vector,
    carry: Halves,
    pseudo_gradient: Vector,
    momentum: Vector,
    lr: float,
    mu: float,
    next_values: Vector,
    next_momentum: Vector,
) -> None:
    """Do one step of SGD with Nesterov momentum."""
    step = pseudo_gradient
    if momentum.size:
        np.add(np.float32(mu) * momentum, pseudo_gradient, out=next_momentum)
        step = pseudo_gradient + np.float32(mu) * next_momentum
    unrounded = values + _widened(carry) if carry.size else values
    np.subtract(unrounded, np.float32(lr) * step, out=next_values)


def _widened(halves: Halves) -> Vector:
    """Return the bfloat16 numbers that have these bits."""
    return (halves.astype(np.uint32) << 16).view(np.float32)


def _rows(kind: int, payload: Bytes, at: int, end: int, blocks: int) -> Rows:
    """Return blocks before their scale, a copy of shape (blocks, BLOCK)."""
    first = at // BLOCK
    if kind in (F32, BF16):
        rows = np.zeros(blocks * BLOCK, np.float32)
        if kind == F32:
            rows[: end - at] = payload[4 * at : 4 * end].view(np.float32)
        else:
            rows[: end - at] = _widened(payload[2 * at : 2 * end].view(np.uint16))
        return rows.reshape(blocks, BLOCK)
    if kind == INT8:
        return payload[BLOCK * first : BLOCK * (first + blocks)].view(np.int8).reshape(blocks, BLOCK).copy()
    pairs = payload[BLOCK // 2 * first : BLOCK // 2 * (first + blocks)].reshape(blocks, BLOCK // 2)
    codes = np.concatenate([pairs & 15, pairs >> 4], axis=1).view(np.int8)
    if kind == INT4:
        codes -= np.int8(8)
        return codes
    powers: Rows = np.left_shift(np.int16(1), (codes & 7).astype(np.int16)) >> 1
    return np.where(codes & 8, -powers, powers).astype(np.int8)


def _squares_of_codes(kind: int, payload: Bytes, scales: Vector, start: int, stop: int) -> float:
    """Return the sum of squares of elements `start` to `stop` of scaled codes, block by block."""
    total = 0.0
    for at in range(start // BLOCK * BLOCK, stop, STRETCH):
        end = min(at + STRETCH, stop)
        first, blocks = at // BLOCK, -(-(end - at) // BLOCK)
        rows = _rows(kind, payload, at, end, blocks)
        rows.reshape(-1)[: max(start - at, 0)] = 0
        rows.reshape(-1)[end - at :] = 0
        units = scales[first : first + blocks]
        wide = (E3M0_UNIT * units if kind == E3M0 else units).astype(np.float64)
        with np.errstate(over="ignore", invalid="ignore"):
            of_blocks = wide * wide * np.square(rows.astype(np.int32)).sum(axis=1)
            total = float(np.add.accumulate(np.concatenate([[total], of_blocks]))[-1])
    return total


def _combined(
    operation: int, rows: Rows, scale: Rows, others: Rows, acc: Rows, factors: tuple[float, float, float]
) -> Rows:
    """Return what `acc` becomes."""
    keep, take, add = (np.float32(factor) for factor in factors)
    values = rows.astype(np.float32)
    with np.errstate(over="ignore", invalid="ignore"):  # a hostile scale; who asks looks for what is not finite
        if operation == COPY:
            return scale * values
        blended = (take * scale) * values
        if operation == BEND:
            blended = blended + add * others
        return keep * acc + blended


def _padded(vector: Vector, low: int, high: int, at: int, blocks: int) -> Rows:
    """Return elements `low` to `high` in their places in blocks that begin at `at`, zero elsewhere."""
    rows = np.zeros(blocks * BLOCK, np.float32)
    if vector.size:
        rows[low - at : high - at] = vector[low:high]
    return rows.reshape(blocks, BLOCK)


def _nibbles(blocks: Rows, inverse: Rows) -> npt.NDArray[np.int32]:
    """Return codes of INT4: the nearest integer from -7 to 7, plus eight."""
    codes: npt.NDArray[np.int32] = (blocks * inverse + np.float32(8.5)).astype(np.int32)
    return codes


def _exponents(blocks: Rows, inverse: Rows) -> npt.NDArray[np.int32]:
    """Return codes of E3M0: the nearest of 0 and 2^-6 to 2^0, with the sign."""
    magnitude = np.abs(blocks) * inverse
    nearest = np.minimum(((magnitude * np.float32(4.0 / 3.0)).view(np.int32) >> 23) - 120, 7)
    power = np.maximum(nearest, (magnitude >= np.float32(2.0**-7)).astype(np.int32))
    codes: npt.NDArray[np.int32] = power | (blocks.view(np.int32) >> 28) & 8
    return codes
