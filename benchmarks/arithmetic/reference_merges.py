"""The round of `merge_round` as others would write it: textbook NumPy, and one plain `jax.jit`."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from atoll.base.buffer_pool import Vector
from atoll.codec.formats.interface import BLOCK, Bytes

RATE, MOMENTUM = np.float32(0.6), np.float32(0.3)
Timed = Callable[[], tuple[float, Vector]]


@dataclass(frozen=True, slots=True)
class RivalRound:
    """Codes and scales of int4 per contribution, their weights, values, momentum, and where slices begin."""

    codes: Sequence[Bytes]
    scales: Sequence[Vector]
    weights: Vector
    values: Vector
    momentum: Vector
    offsets: tuple[int, ...]


def textbook(work: RivalRound) -> Timed:
    """Return the round in NumPy, as one would write it down, timed."""

    def run() -> tuple[float, Vector]:
        began_s = time.perf_counter()
        directions = lengths = np.float32(0.0)
        for codes, scales, weight in zip(work.codes, work.scales, work.weights, strict=True):
            pairs = codes.reshape(-1, BLOCK // 2)
            signed = np.concatenate([pairs & 15, pairs >> 4], axis=1).astype(np.float32) - np.float32(8.0)
            vector = (signed * scales[:, None]).reshape(-1)
            norms = np.sqrt(np.add.reduceat(vector * vector, work.offsets, dtype=np.float64)).astype(np.float32)
            directions = directions + weight * vector / _spread(norms, work)
            lengths = lengths + weight * norms
        total = work.weights.sum()
        directions, lengths = directions / total, lengths / total
        norms = np.sqrt(np.add.reduceat(directions * directions, work.offsets, dtype=np.float64)).astype(np.float32)
        merged = _spread(lengths / norms, work) * directions
        momentum = MOMENTUM * work.momentum + merged
        values = work.values - RATE * (merged + MOMENTUM * momentum)
        return time.perf_counter() - began_s, values

    return run


def jitted(work: RivalRound) -> Timed:
    """Return the round as one compiled function of all contributions, values and momentum donated, timed without compiling."""
    codes, scales = (jnp.asarray(np.stack(parts)) for parts in (work.codes, work.scales))
    lengths = np.diff([*work.offsets, work.values.size])
    step = jax.jit(partial(_step, lengths=tuple(int(length) for length in lengths)), donate_argnums=(3, 4))
    done: Any = jax.block_until_ready
    weights = jnp.asarray(work.weights)

    def run() -> tuple[float, Vector]:
        values, momentum = jnp.array(work.values), jnp.array(work.momentum)
        done((values, momentum))
        began_s = time.perf_counter()
        after = done(step(codes, scales, weights, values, momentum))
        took = time.perf_counter() - began_s
        return took, np.asarray(after[0])

    return run


def _step(
    codes: Any,  # noqa: ANN401  (arrays of JAX)
    scales: Any,  # noqa: ANN401
    weights: Any,  # noqa: ANN401
    values: Any,  # noqa: ANN401
    momentum: Any,  # noqa: ANN401
    lengths: tuple[int, ...],
) -> tuple[Any, Any]:
    """Do the round: decode, directions and lengths per slice, their means, the step."""
    pairs = codes.reshape(codes.shape[0], -1, BLOCK // 2)
    signed = jnp.concatenate([pairs & 15, pairs >> 4], axis=2).astype(jnp.float32) - 8.0
    vectors = (signed * scales[:, :, None]).reshape(codes.shape[0], -1)
    shares, cuts, merged = weights / weights.sum(), np.cumsum(lengths)[:-1], []
    for part in jnp.split(vectors, cuts, axis=1):
        norms = jnp.linalg.norm(part, axis=1)
        direction = (shares / norms) @ part
        merged.append((shares @ norms) / jnp.linalg.norm(direction) * direction)
    pseudo_gradient = jnp.concatenate(merged)
    pushed = MOMENTUM * momentum + pseudo_gradient
    return values - RATE * (pseudo_gradient + MOMENTUM * pushed), pushed


def _spread(per_slice: Vector, work: RivalRound) -> npt.NDArray[np.float32]:
    """Return a number for every element from one for every slice."""
    return np.repeat(per_slice, np.diff([*work.offsets, work.values.size]))
