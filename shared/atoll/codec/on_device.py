"""Programs on the parameters' device, compiled per fragment shape: the quantiser, pseudo-gradients, adoption.

`atoll.client` decides what is where and when; this module is the arithmetic, bit for bit that of `atoll.codec.kernels`. XLA
computes in its own way: it multiplies and adds in one rounding where it can, divides by multiplying with an inverse, and lets
GPUs divide with an error of two units in the last place. None of this may happen here, so

- a product that is added to something, and is not exact, passes through `alone`: its bits, as an integer, exclusive-or a
  zero that is an argument of the program. No compiler can know that this changes nothing, so none can join the two;
- there is no division of floats. A block's scale is the quotient of an integer of 24 bits and a format's levels, the
  inverse of a scale that of 2^31 and its 8 bits: integers, rounded to nearest even as IEEE 754 says.

Numbers below 2^-126 remain. XLA takes them for zero on some devices, the CPU among them, and so do we: a pseudo-gradient that
small is zero, and so are its residue of rounding and a block whose scale would be that small. No weight trains there.

Codes are returned as the format stores them, scales as the upper 16 bits of a float32, and the largest magnitude as the
bits of a float32: as integers, magnitudes are in order, with infinity and NaN above all others.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from atoll.codec.encoded import Encoded
from atoll.codec.formats.interface import BLOCK, Format, store_codes

F = TypeVar("F", bound=Callable[..., Any])
Array = jax.Array

HIDDEN = 1 << 23
"""The bit of a float32's mantissa that is not stored."""


class Quantised(NamedTuple):
    """A vector's codes, the scales of its blocks (uint16, or none), its largest magnitude, and what rounding took of it."""

    codes: Array
    scales: Array | None
    largest: Array
    residue: Array | None

    def on_host(self, form: Format, elements: int) -> Encoded:
        """Return the vector on the host.

        Raises `FrameRejected`: `not_finite`; a vector that would not arrive finite is not sent.
        """
        codes, scales, largest = jax.device_get((self.codes, self.scales, self.largest))
        form.check(float(np.asarray(largest, dtype=np.int32).view(np.float32)))
        wide = np.zeros(0, np.uint32) if scales is None else scales.astype(np.uint32) << 16
        return Encoded(form, elements, codes.view(np.uint8), wide.view(np.float32))


def jit(*static: str) -> Callable[[F], F]:
    """Compile a function, once for each set of shapes and of its `static` arguments."""
    return functools.partial(jax.jit, static_argnames=static)  # type: ignore[return-value]


@jit("form", "feedback")
def quantise(form: Format, vector: Array, zero: int, *, feedback: bool) -> Quantised:
    """Return what `atoll.codec.kernels.Kernels.quantise` writes, of a flat float32 vector."""
    largest = jnp.max(lax.bitcast_convert_type(vector, jnp.int32) & 0x7FFFFFFF, initial=0)
    if form.levels is None:
        codes, sent = form.jax(vector, vector)
        return Quantised(codes.astype(form.code), None, largest, vector - sent if feedback else None)
    blocks = jnp.pad(vector, (0, -vector.size % BLOCK)).reshape(-1, BLOCK)
    scales = _scales(jnp.max(lax.bitcast_convert_type(blocks, jnp.int32) & 0x7FFFFFFF, axis=1), form.levels)
    codes, numbers = form.jax(blocks, alone(blocks * _inverses(scales)[:, None], zero))
    residue = None
    if feedback:
        units = lax.bitcast_convert_type(scales, jnp.float32) * form.unit
        sent = units[:, None] * numbers  # exact: 8 bits times 7
        residue = (blocks - sent).reshape(-1)[: vector.size]
    return Quantised(store_codes(form, codes).reshape(-1), (scales >> 16).astype(jnp.uint16), largest, residue)


def alone(product: Array, zero: int) -> Array:
    """Return a product, rounded: the compiler cannot fuse it with any later operation."""
    return lax.bitcast_convert_type(lax.bitcast_convert_type(product, jnp.int32) ^ zero, jnp.float32)


def _nearest(dividend: Array, divisor: Array | int) -> Array:
    """Return the quotient of two uint32, rounded to nearest, ties to even; the divisor must have two bits to spare."""
    divisor = jnp.asarray(divisor, jnp.uint32)
    quotient = lax.div(dividend, jnp.broadcast_to(divisor, dividend.shape))
    twice = 2 * (dividend - quotient * divisor)
    return quotient + ((twice > divisor) | (twice == divisor) & (quotient & 1 == 1)).astype(jnp.uint32)


def _scales(largest: Array, levels: int) -> Array:
    """Return the bits of the scales of blocks, int32, from those of their largest magnitudes: m / levels, rounded up."""
    mantissa = (largest & (HIDDEN - 1) | HIDDEN).astype(jnp.uint32)
    width = levels.bit_length()
    shift = width - (mantissa << width >= jnp.uint32(levels << 24)).astype(jnp.int32)
    quotient = _nearest(mantissa << shift.astype(jnp.uint32), levels).astype(jnp.int32)  # 24 bits
    exponent = (largest >> 23) - shift
    share = (exponent << 23) + (quotient - HIDDEN)
    return jnp.where(exponent > 0, share + 0xFFFF & -65536, 0)


def _inverses(scales: Array) -> Array:
    significand = (scales >> 16 & 0x7F | 0x80).astype(jnp.uint32)
    quotient = _nearest(jnp.full_like(significand, 1 << 31), significand).astype(jnp.int32)
    inverse = (253 - (scales >> 23) << 23) + (quotient - HIDDEN)
    return lax.bitcast_convert_type(jnp.where(scales > 0, inverse, 0), jnp.float32)


@dataclass(frozen=True, slots=True)
class EncodingPlan:
    """The key of a compiled program: the format, whether the residue of rounding is wanted, and the elements of each slice.

    `corners` are where each of several parts begins in a slice's rows; none for a single part.
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
    """Return `anchor - theta + kept` of a fragment, quantised; everything is on one device, and `zero` is 0 (`alone`).

    `anchor` are the rows of each slice, float32, and `parts` the pieces of theta's rows, per slice; a single part may have
    more rows than are wanted, from `starts` on. `kept` is what rounding took from the fragment's last pseudo-gradient, flat
    float32, if it is to be sent now.
    """
    flat = [jnp.zeros(size, jnp.float32) for size in plan.sizes]
    for at, rows in enumerate(anchor):
        if rows.size:
            theta = _rows(rows.shape, parts[at], starts[at], plan.corners[at])
            flat[at] = (rows - theta.astype(jnp.float32)).reshape(-1)
    vector = jnp.concatenate(flat)
    return quantise(plan.form, vector if kept is None else vector + kept, zero, feedback=plan.feedback)


@jit("rows")
def cut(leaf: Array, start: int, *, rows: int) -> Array:
    """Return `rows` rows of an array, from `start` on."""
    return lax.dynamic_slice_in_dim(leaf, start, rows, axis=0)


@jit()
def overwrite(leaf: Array, rows: Array | np.ndarray[Any, Any], start: int) -> Array:
    """Return `leaf` with `rows` in place of its own from `start` on, rounded to its dtype."""
    return _with(leaf, rows, start)


@jit()
def blend(leaf: Array, rows: Array, start: int, keep: np.float32, take: np.float32, zero: int) -> Array:
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
