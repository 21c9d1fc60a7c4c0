"""One set of kernels (`Kernels`), and the set of a format's NumPy form: to the bit what `compiled` computes.

An operation works on whole blocks, a stretch at a time: long enough that NumPy's calls do not count, short enough that its
temporary arrays stay in a cache, and come from memory that the process has already. Elements of the first and last block
outside the bounds are zero in a copy, so that lanes and results are those of whole blocks. Sums over the blocks of a stretch
run along the first axis, which NumPy adds in order; the lanes so far are its first row.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Final

import numpy as np

from atoll.base.large_arrays import Vector
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
    load_codes,
    store_codes,
)

COPY: Final = 0
BLEND: Final = 1
BEND: Final = 2
MULTIPLY: Final = 3
"""Operations, see `Kernels.over`."""

STRETCH = 256 * BLOCK
_NONE = np.empty(0, dtype=np.float32)


@dataclass(frozen=True, slots=True)
class Kernels:
    """One set of four functions, for one format.

    over(operation, payload, scales, start, stop, others, acc, lanes, keep, take, add)
        Do `operation` with elements `start` to `stop` of an encoded vector v; `others` and `acc` are float32 vectors as long
        as v, or empty where they are not used, `lanes` are `BLOCK` float64 numbers.

            COPY      acc <- v
            BLEND     acc <- keep acc + take v
            BEND      acc <- keep acc + (take v + add others)
            MULTIPLY  lanes += v others

    squares(payload, scales, start, stop) -> float
        Return the sum of v^2 over elements `start` to `stop`: finite if and only if all of them are.

    quantise(vector, payload, scales) -> float
        Write the codes and the scales of a vector; return its largest magnitude, infinity where it is not finite, and then
        what was written says nothing.

    settle(values, following, payload, scales, carry) -> float
        Quantise `following - values`; write what the codes make of `values` to `following`, and what they leave of it to
        `carry`, in bfloat16 (`atoll.merge.global_update`). Returns what `quantise` returns;
        where that is infinity, a part of `following` may be written already.
    """

    name: str
    over: Callable[..., None]
    squares: Callable[..., float]
    quantise: Callable[..., float]
    settle: Callable[..., float]


def kernels(form: Format) -> Kernels:
    """Return the set of a format."""
    squares = _squares_of_floats if form.levels is None else _squares_of_whole_numbers
    return Kernels(
        "plain", partial(_over, form), partial(squares, form), partial(_quantise, form), partial(_settle, form)
    )


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
    # A hostile payload or scale may overflow here: the caller checks that all is finite.
    with np.errstate(over="ignore", invalid="ignore"):
        for at in range(start // BLOCK * BLOCK, stop, STRETCH):
            low, high = max(start, at), min(at + STRETCH, stop)
            count = blocks(high - at)
            rows, scale = _rows(form, payload, scales, (at, low, high), count)
            if operation == MULTIPLY:
                sums = np.empty((count + 1, BLOCK), np.float64)
                sums[0] = lanes
                np.multiply(rows, _padded(others, low, high, at, count), out=sums[1:], dtype=np.float64)
                sums[1:] *= scale
                np.add.reduce(sums, axis=0, out=lanes)
                continue
            result = (scale if operation == COPY else np.float32(take) * scale) * rows
            if operation == BEND:
                result += np.float32(add) * _padded(others, low, high, at, count)
            if operation != COPY:
                result += np.float32(keep) * _padded(acc, low, high, at, count)
            acc[low:high] = result.reshape(-1)[low - at : high - at]


def _squares_of_floats(form: Format, payload: Bytes, scales: Vector, start: int, stop: int) -> float:
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
    total = 0.0
    for at in range(start // BLOCK * BLOCK, stop, STRETCH):
        end = min(at + STRETCH, stop)
        count = blocks(end - at)
        rows, scale = _rows(form, payload, scales, (at, max(start, at), end), count)
        wide, whole = scale[:, 0].astype(np.float64), rows.astype(np.int32)
        with np.errstate(over="ignore", invalid="ignore"):
            of_blocks = wide * wide * np.einsum("ij,ij->i", whole, whole)
            total = float(np.add.accumulate(np.concatenate([[total], of_blocks]))[-1])
    return total


def _quantise(form: Format, vector: Vector, payload: Bytes, scales: Vector) -> float:
    codes, largest = payload.view(form.code), np.float32(0.0)
    for at in range(0, vector.size, STRETCH):
        part, first = vector[at : at + STRETCH], at // BLOCK
        rows = _padded(part, 0, part.size, 0, blocks(part.size))
        of_blocks = np.abs(rows).max(axis=1)
        largest = np.maximum(largest, of_blocks.max())  # NaN stays
        if not np.isfinite(largest):
            return float("inf")
        inverse = np.ones((len(rows), 1), np.float32)
        if form.levels:
            shares = of_blocks / np.float32(form.levels)
            rounded = ((shares.view(np.int32) + np.int32(0xFFFF)) & np.int32(-65536)).view(np.float32)
            own = scales[first : first + len(rows)]
            own[:] = np.where(rounded > SCALE_MIN, rounded, np.float32(0.0))
            inverse = np.divide(np.float32(1.0), own, out=np.zeros_like(own), where=own > 0)[:, None]
        here = codes[first * form.items :][: len(rows) * form.items]
        made = form.numpy.encode(rows, inverse)
        # Codes that are packed fit into a byte: a quarter of the work of shifting them.
        here[:] = store_codes(form, made.astype(np.uint8) if form.packed else made).reshape(-1)[: here.size]
    return float(largest)


def _settle(form: Format, values: Vector, following: Vector, payload: Bytes, scales: Vector, carry: Halves) -> float:
    largest, none = 0.0, np.empty(BLOCK)
    for at in range(0, values.size, STRETCH):
        here, first = slice(at, at + STRETCH), at // BLOCK
        wanted = following[here].copy()
        codes, own = payload[first * form.block_bytes :], scales[first:]
        largest = max(largest, _quantise(form, np.subtract(wanted, values[here]), codes, own))
        if largest == np.inf:
            return largest
        following[here] = values[here]
        _over(form, BLEND, codes, own, 0, wanted.size, _NONE, following[here], none, 1.0, 1.0, 0.0)
        left = np.subtract(wanted, following[here])
        largest = max(largest, _quantise(bf16.BF16, left, carry[here].view(np.uint8), _NONE))
    return largest


def _rows(form: Format, payload: Bytes, scales: Vector, place: tuple[int, int, int], count: int) -> tuple[Rows, Rows]:
    """Return `count` blocks from element `at` on, zero but for elements `low` to `high`, and the factor of each, a column."""
    at, low, high = place
    codes = payload.view(form.code)[at // BLOCK * form.items : (at // BLOCK + count) * form.items]
    if codes.size < count * form.items:  # of a format without scales, which ends where its elements do
        codes = np.concatenate([codes, np.zeros(count * form.items - codes.size, form.code)])
    rows = form.numpy.decode(load_codes(form, codes.reshape(count, form.items)))
    if (low, high) != (at, at + rows.size):
        rows = np.array(rows)  # decoded floats are the payload itself
        rows.reshape(-1)[: low - at] = 0
        rows.reshape(-1)[high - at :] = 0
    own = scales[at // BLOCK : at // BLOCK + count, None] if scales.size else np.ones((count, 1), np.float32)
    return rows, np.float32(form.unit) * own


def _padded(vector: Vector, low: int, high: int, at: int, count: int) -> Rows:
    """Return elements `low` to `high` in their places in blocks that begin at `at`, zero elsewhere; no copy of whole blocks."""
    if (low, high) == (at, at + count * BLOCK):
        return vector[low:high].reshape(count, BLOCK)
    rows = np.zeros(count * BLOCK, np.float32)
    rows[low - at : high - at] = vector[low:high]
    return rows.reshape(count, BLOCK)
