"""Orders that are functions of a key: any learner looks up any place of them, on every machine and version the same.

Both are built on SplitMix64 (Steele, Lea and Flood, 2014), in arithmetic of arrays: a learner that reads many short windows
looks up thousands of places a second, beside its training.

`permute` is a bijection of any size without a table: a Feistel network of four rounds over the smallest even-width power of
two, walked until it lands in range (Black and Rogaway, 2002). `mix_order` sorts by hash, so it needs a table; it is for few.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

from atoll.base.errors import DataError

ROUNDS: Final = 4


def permute(
    positions: npt.NDArray[np.int64], count: int, seed: int, epochs: npt.NDArray[np.int64] | int
) -> npt.NDArray[np.int64]:
    """Return the images of `positions`, int64 (n,), under the bijection of `range(count)` of the seed and each one's epoch.

    Raises:
        DataError: a position is not below `count`.
    """
    if positions.size and not 0 <= int(positions.min()) <= int(positions.max()) < count:
        got = f"{positions.min()} to {positions.max()}"
        raise DataError("no such position in an epoch", got=got, allowed=f"0 to {count - 1}")
    half = np.uint64(max(1, ((count - 1).bit_length() + 1) // 2))
    mask = (np.uint64(1) << half) - np.uint64(1)
    values = positions.astype(np.uint64)
    key = _keyed(_hash_of(seed), np.asarray(epochs))
    keys = [np.broadcast_to(_keyed(key, np.asarray(number)), values.shape) for number in range(ROUNDS)]
    outside = np.ones(values.shape, dtype=bool)
    while outside.any():
        left, right = values[outside] >> half, values[outside] & mask
        for each in keys:
            left, right = right, left ^ (_scrambled(each[outside] ^ right) & mask)
        values[outside] = (left << half) | right
        outside = values >= count
    return values.astype(np.int64)


def mix_order(count: int, key: tuple[int, ...]) -> npt.NDArray[np.int64]:
    """Return the numbers below `count`, int64 (count,), in the order of their hashes under `key`."""
    return np.argsort(_scrambled(np.arange(count, dtype=np.uint64) ^ _hash_of(*key)), kind="stable")


def _hash_of(*parts: int) -> npt.NDArray[np.uint64]:
    """Return the hash of integers from 0 to 2^64 - 1, uint64 of shape (1,)."""
    state = np.zeros(1, dtype=np.uint64)
    for part in parts:
        state = _keyed(state, np.asarray(part, dtype=np.uint64))
    return state


def _keyed(state: npt.NDArray[np.uint64], part: npt.NDArray[np.integer]) -> npt.NDArray[np.uint64]:
    """Return the hashes of keys that have one more part, uint64, elementwise."""
    return _scrambled(state ^ part.astype(np.uint64))


def _scrambled(values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Return SplitMix64 of uint64 values, elementwise; arithmetic wraps."""
    values = values + np.uint64(0x9E3779B97F4A7C15)
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))
