"""Makes pseudo-gradients and adopts versions on the parameters' device, with programs compiled per fragment shape.

`atoll.client` decides what is where and when; this module is the arithmetic. The anchor and the residue of rounding are
rows and flat vectors on one device, and so are all results. Products that are added to something pass through `alone`
(`atoll.codec.kernels.in_jax`), so that a device blends and subtracts to the same bits as the host.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from atoll.codec.formats.interface import Format
from atoll.codec.kernels.in_jax import Quantised, alone, jit, quantised

Array = jax.Array


@dataclass(frozen=True, slots=True)
class EncodingPlan:
    """The key of a compiled program.

    Attributes:
        form: the format.
        feedback: whether the caller wants the residue of rounding.
        sizes: elements of each slice.
        corners: where each of several parts begins in a slice's rows; none for a single part.
    """

    form: Format
    feedback: bool
    sizes: tuple[int, ...]
    corners: tuple[tuple[tuple[int, ...], ...], ...]


@jit("plan")
def pseudo_gradient(
    plan: EncodingPlan,
    anchor: Sequence[Array],
    parts: Sequence[Sequence[Array]],
    starts: Sequence[int],
    kept: Array | None,
    zero: int,
) -> Quantised:
    """Return `anchor - theta + kept` of a fragment, quantised; everything is on one device.

    Args:
        plan: see there.
        anchor: the rows of each slice, float32.
        parts: the pieces of theta's rows, per slice; a single part may have more rows than are wanted.
        starts: the first row wanted of a single part.
        kept: what rounding took from the fragment's last pseudo-gradient, flat float32, if it is to be sent now.
        zero: 0, see `atoll.codec.kernels.in_jax`.
    """
    flat = [jnp.zeros(size, jnp.float32) for size in plan.sizes]
    for at, rows in enumerate(anchor):
        if rows.size:
            theta = _rows(rows.shape, parts[at], starts[at], plan.corners[at])
            flat[at] = (rows - theta.astype(jnp.float32)).reshape(-1)
    vector = jnp.concatenate(flat)
    return quantised(plan.form, vector if kept is None else vector + kept, zero, feedback=plan.feedback)


@jit("rows")
def cut(leaf: Array, start: int, *, rows: int) -> Array:
    """Return `rows` rows of an array, from `start` on."""
    return lax.dynamic_slice_in_dim(leaf, start, rows, axis=0)


@jit()
def overwritten(leaf: Array, rows: Array | np.ndarray[Any, Any], start: int) -> Array:
    """Return `leaf` with `rows` in place of its own from `start` on, rounded to its dtype."""
    return _with(leaf, rows, start)


@jit()
def blended(leaf: Array, rows: Array, start: int, keep: np.float32, take: np.float32, zero: int) -> Array:
    """Return `leaf` with `keep own + take rows` in place of its own rows from `start` on."""
    own = _rows(rows.shape, [leaf], start, ()).astype(jnp.float32)
    return _with(leaf, alone(keep * own, zero) + alone(take * rows, zero), start)


def _rows(shape: tuple[int, ...], parts: Sequence[Array], start: int, corners: Sequence[tuple[int, ...]]) -> Array:
    if not corners:
        return lax.dynamic_slice_in_dim(parts[0], start, shape[0], axis=0) if shape else parts[0]
    rows = jnp.zeros(shape, parts[0].dtype)
    for part, corner in zip(parts, corners, strict=True):
        rows = lax.dynamic_update_slice(rows, part, corner)
    return rows


def _with(leaf: Array, rows: Array | np.ndarray[Any, Any], start: int) -> Array:
    own = jnp.asarray(rows, leaf.dtype)
    return lax.dynamic_update_slice_in_dim(leaf, own, start, axis=0) if leaf.ndim else own
