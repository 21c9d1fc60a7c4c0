"""The loops of a format's NumPy form: to the bit what `compiled` computes (see `atoll.codec.kernels`).

An operation works on whole blocks, a stretch at a time. Elements of the first and last block outside the stretch are
zero in a copy, so that lanes and results are those of whole blocks. Sums over the blocks of a stretch run along the
first axis, which NumPy adds in order; the lanes so far are its first row.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np

from atoll.base.buffer_pool import Vector
from atoll.codec.formats import bf16
from atoll.codec.formats.interface import (
    BLOCK,
    SCALE_MIN,
    SQUARES_MIN,
    TILE,
    Bytes,
    Format,
    Halves,
    Lanes,
    Rows,
    blocks,
    loaded,
    stored,
)
from atoll.codec.kernels import BEND, BLEND, COPY, MULTIPLY, squares_of_scaled_floats

Loops = tuple[Callable[..., None], Callable[..., float], Callable[..., float], Callable[..., float]]

STRETCH = 128 * BLOCK
_NONE = np.empty(0, dtype=np.float32)


def loops(form: Format) -> Loops:
    """Return `over`, `squares`, `quantise` and `settle` of a format."""
    over = partial(_over, form)
    squares = (
        partial(_squares_of_floats, form)
        if form.levels is None
        else partial(_squares_of_whole_numbers, form)
        if form.whole
        else partial(squares_of_scaled_floats, form, over)
    )
    return over, squares, partial(_quantise, form), partial(_settle, form)


def _over(
    form: Format,
    operation: int,
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
        low, high = max(start, at), min(at + STRETCH, stop)
        count = blocks(high - at)
        rows, scale = _rows(form, payload, scales, (at, low, high), count)
        beside, before = (_padded(vector, low, high, at, count) for vector in (others, acc))
        # A hostile payload or scale may overflow here: the caller checks that all is finite.
        with np.errstate(over="ignore", invalid="ignore"):
            if operation == MULTIPLY:
                addends = scale.astype(np.float64) * (rows.astype(np.float64) * beside.astype(np.float64))
                lanes[:] = np.add.reduce(np.concatenate([lanes[None], addends]), axis=0)
                continue
            if operation == COPY:
                result = scale * rows
            else:
                result = (np.float32(take) * scale) * rows
                if operation == BEND:
                    result = result + np.float32(add) * beside
                result = np.float32(keep) * before + result
        acc[low:high] = result.reshape(-1)[low - at : high - at]


def _squares_of_floats(form: Format, payload: Bytes, scales: Vector, start: int, stop: int) -> float:
    """Return the sum of squares of elements `start` to `stop`: in float32 by eights, or all in float64."""
    lanes = np.zeros(BLOCK)
    # A hostile payload may give infinity: the caller checks that the sum is finite. A tiny sum is done again.
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        for dtype in (np.float32, np.float64):
            lanes[:] = 0.0
            for at in range(start // TILE * TILE, stop, STRETCH):
                end = min(at + STRETCH, stop)
                count = -(-(end - at) // TILE) * (TILE // BLOCK)
                rows, _ = _rows(form, payload, scales, (at, max(start, at), end), count)
                squared = np.square(rows.astype(dtype)).reshape(-1, TILE // BLOCK, BLOCK)
                while squared.shape[1] > 1:
                    squared = squared[:, ::2] + squared[:, 1::2]
                lanes[:] = np.add.reduce(np.concatenate([lanes[None], squared[:, 0].astype(np.float64)]), axis=0)
            if SQUARES_MIN <= lanes.max() < np.inf:
                break
        return float(np.add.accumulate(lanes)[-1])


def _squares_of_whole_numbers(form: Format, payload: Bytes, scales: Vector, start: int, stop: int) -> float:
    """Return the sum of squares of elements `start` to `stop` of scaled codes, block by block."""
    total = 0.0
    for at in range(start // BLOCK * BLOCK, stop, STRETCH):
        end = min(at + STRETCH, stop)
        count = blocks(end - at)
        rows, scale = _rows(form, payload, scales, (at, max(start, at), end), count)
        wide = scale[:, 0].astype(np.float64)
        with np.errstate(over="ignore", invalid="ignore"):
            of_blocks = wide * wide * np.square(rows.astype(np.int32)).sum(axis=1)
            total = float(np.add.accumulate(np.concatenate([[total], of_blocks]))[-1])
    return total


def _quantise(form: Format, vector: Vector, payload: Bytes, scales: Vector) -> float:
    """Write the codes and the scales of a vector; return its largest magnitude."""
    largest = float(np.abs(vector).max(initial=0.0))
    if not np.isfinite(largest):
        return float("inf")
    rows = _padded(vector, 0, vector.size, 0, blocks(vector.size))
    inverse = np.ones((len(rows), 1), np.float32)
    if form.levels:
        shares = np.abs(rows).max(axis=1) / np.float32(form.levels)
        rounded = ((shares.view(np.int32) + np.int32(0xFFFF)) & np.int32(-65536)).view(np.float32)
        scales[:] = np.where(rounded > SCALE_MIN, rounded, np.float32(0.0))
        inverse = np.divide(np.float32(1.0), scales, out=np.zeros_like(scales), where=scales > 0)[:, None]
    codes = payload.view(form.code)
    codes[:] = stored(form, form.numpy.encode(rows, inverse)).reshape(-1)[: codes.size]
    return largest


def _settle(form: Format, values: Vector, following: Vector, payload: Bytes, scales: Vector, carry: Halves) -> float:
    """Write the codes and scales of `following - values`, what they make of `values`, and what they leave."""
    wanted = following.copy()
    largest = _quantise(form, np.subtract(wanted, values), payload, scales)
    if not np.isfinite(largest):
        return largest
    following[:] = values
    _over(form, BLEND, payload, scales, 0, values.size, _NONE, following, np.empty(BLOCK), 1.0, 1.0, 0.0)
    left = np.subtract(wanted, following)
    return max(largest, _quantise(bf16.BF16, left, carry.view(np.uint8), _NONE))


def _rows(form: Format, payload: Bytes, scales: Vector, place: tuple[int, int, int], count: int) -> tuple[Rows, Rows]:
    """Return `count` blocks from element `at` on, zero but for elements `low` to `high`, and the factor of each, a column."""
    at, low, high = place
    codes = payload.view(form.code)[at // BLOCK * form.items : (at // BLOCK + count) * form.items]
    if codes.size < count * form.items:  # of a format without scales, which ends where its elements do
        codes = np.concatenate([codes, np.zeros(count * form.items - codes.size, form.code)])
    rows = np.array(form.numpy.decode(loaded(form, codes.reshape(count, form.items))))
    rows.reshape(-1)[: low - at] = 0
    rows.reshape(-1)[high - at :] = 0
    own = scales[at // BLOCK : at // BLOCK + count, None] if scales.size else np.ones((count, 1), np.float32)
    return rows, np.float32(form.unit) * own


def _padded(vector: Vector, low: int, high: int, at: int, count: int) -> Rows:
    """Return elements `low` to `high` in their places in blocks that begin at `at`, zero elsewhere."""
    rows = np.zeros(count * BLOCK, np.float32)
    if vector.size:
        rows[low - at : high - at] = vector[low:high]
    return rows.reshape(count, BLOCK)
