"""The quantiser as a JAX program, for pseudo-gradients made where the parameters lie: to the bit what `plain` has.

XLA computes what it is told in its own way: it multiplies and adds in one rounding where it can, divides by multiplying
with an inverse, and lets GPUs divide with an error of two units in the last place. None of this may happen here, so

- a product that is added to something, and is not exact, passes through `_alone`: its bits, as an integer, exclusive-or a
  zero that is an argument of the program. No compiler can know that this changes nothing, so none can join the two;
- there is no division of floats. A block's scale is the quotient of an integer of 24 bits and 127, 7 or 1, the inverse of
  a scale that of 2^31 and its 8 bits: integers, rounded to nearest even as IEEE 754 says.

What is left are numbers below 2^-126, which XLA takes for zero on some devices, the CPU among them, and so do we: a
pseudo-gradient as small as that, what rounding took of it, and a block whose scale would be, is zero. No weight trains there.

Codes are returned as their own type (float32 numbers as they are, uint16, int8, pairs of nibbles as uint8), scales as the
upper 16 bits of a float32, and the largest magnitude as the bits of a float32: as integers magnitudes are in order, infinity
and what is not a number above all others.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from atoll.codec.kernels import BF16, BLOCK, E3M0, E3M0_UNIT, F32, INT4, INT8

F = TypeVar("F", bound=Callable[..., Any])
Array = jax.Array

LEVELS = {INT8: 127, INT4: 7, E3M0: 1}
HIDDEN = 1 << 23
"""The bit of a float32's mantissa that is not stored."""


class Quantised(NamedTuple):
    """A vector's codes, the scales of its blocks (uint16, or none), its largest magnitude, and what rounding took of it."""

    codes: Array
    scales: Array | None
    largest: Array
    residue: Array | None


def _jit(*static: str) -> Callable[[F], F]:
    """Compile a function, once for each set of shapes and of its `static` arguments."""
    return functools.partial(jax.jit, static_argnames=static)  # type: ignore[return-value]


@_jit("sizes", "corners", "kind", "feedback")
def encoded(
    anchor: Sequence[Array | None],
    parts: Sequence[Sequence[Array]],
    starts: Sequence[int],
    kept: Array | None,
    zero: int,
    *,
    sizes: tuple[int, ...],
    corners: tuple[tuple[tuple[int, ...], ...], ...],
    kind: int,
    feedback: bool,
) -> Quantised:
    """Return `anchor - theta + kept` of a fragment, quantised; everything lies on one device.

    Args:
        anchor: the rows of each span, float32; None for one that is not floating, which is zero in the pseudo-gradient.
        parts: what theta's rows are put together from, per span; a single part may have more rows than are wanted.
        starts: the first row wanted of a single part.
        kept: what rounding took from the fragment's last pseudo-gradient, flat float32, if it is to be sent now.
        zero: 0, see above.
        sizes: elements of each span.
        corners: where each of several parts begins in the span's rows; none for a single part.
        kind: the encoding's number.
        feedback: whether what rounding takes is wanted.
    """
    flat = [jnp.zeros(size, jnp.float32) for size in sizes]
    for at, rows in enumerate(anchor):
        if rows is not None and rows.size:
            theta = _rows(rows.shape, parts[at], starts[at], corners[at])
            flat[at] = (rows - theta.astype(jnp.float32)).reshape(-1)
    vector = jnp.concatenate(flat)
    return quantised(kind, vector if kept is None else vector + kept, zero, feedback=feedback)


@_jit("rows")
def cut(leaf: Array, start: int, *, rows: int) -> Array:
    """Return `rows` rows of an array, from `start` on."""
    return lax.dynamic_slice_in_dim(leaf, start, rows, axis=0)


@_jit()
def overwritten(leaf: Array, rows: Array | np.ndarray[Any, Any], start: int) -> Array:
    """Return `leaf` with `rows` in place of its own from `start` on, rounded to its dtype."""
    return _with(leaf, rows, start)


@_jit()
def blended(leaf: Array, rows: Array, start: int, keep: np.float32, take: np.float32, zero: int) -> Array:
    """Return `leaf` with `keep own + take rows` in place of its own rows from `start` on."""
    own = _rows(rows.shape, [leaf], start, ()).astype(jnp.float32)
    return _with(leaf, _alone(keep * own, zero) + _alone(take * rows, zero), start)


@_jit("kind", "feedback")
def quantised(kind: int, vector: Array, zero: int, *, feedback: bool) -> Quantised:
    """Return what `atoll.codec.kernels.Kernels.quantise` writes, of a flat float32 vector."""
    bits = lax.bitcast_convert_type(vector, jnp.int32)
    largest = jnp.max(bits & 0x7FFFFFFF, initial=0)
    if kind == F32:
        return Quantised(vector, None, largest, jnp.zeros_like(vector) if feedback else None)
    if kind == BF16:
        unsigned = bits.astype(jnp.uint32)
        rounded = (unsigned + 0x7FFF + (unsigned >> 16 & 1)) >> 16
        residue = vector - lax.bitcast_convert_type(rounded << 16, jnp.float32) if feedback else None
        return Quantised(rounded.astype(jnp.uint16), None, largest, residue)
    blocks = jnp.pad(vector, (0, -vector.size % BLOCK)).reshape(-1, BLOCK)
    scales = _scales(jnp.max(lax.bitcast_convert_type(blocks, jnp.int32) & 0x7FFFFFFF, axis=1), LEVELS[kind])
    shares, numbers = _alone(blocks * _inverses(scales)[:, None], zero), jnp.zeros_like(blocks, jnp.int32)
    if kind == E3M0:
        codes, numbers = _exponents(blocks, shares)
        packed = _pairs(codes)
    elif kind == INT4:
        codes = (shares + 8.5).astype(jnp.int32)
        packed, numbers = _pairs(codes), codes - 8
    else:
        numbers = (shares + 128.5).astype(jnp.int32) - 128
        packed = numbers.astype(jnp.int8).reshape(-1)
    residue = None
    if feedback:
        units = lax.bitcast_convert_type(scales, jnp.float32) * (E3M0_UNIT if kind == E3M0 else 1.0)
        sent = units[:, None] * numbers.astype(jnp.float32)  # exact: 8 bits times 7
        residue = (blocks - sent).reshape(-1)[: vector.size]
    return Quantised(packed, (scales >> 16).astype(jnp.uint16), largest, residue)


def _rows(shape: tuple[int, ...], parts: Sequence[Array], start: int, corners: Sequence[tuple[int, ...]]) -> Array:
    """Return rows of this shape, cut from a single part or put together from several."""
    if not corners:
        return lax.dynamic_slice_in_dim(parts[0], start, shape[0], axis=0) if shape else parts[0]
    rows = jnp.zeros(shape, parts[0].dtype)
    for part, corner in zip(parts, corners, strict=True):
        rows = lax.dynamic_update_slice(rows, part, corner)
    return rows


def _with(leaf: Array, rows: Array | np.ndarray[Any, Any], start: int) -> Array:
    own = jnp.asarray(rows, leaf.dtype)
    return lax.dynamic_update_slice_in_dim(leaf, own, start, axis=0) if leaf.ndim else own


def _alone(product: Array, zero: int) -> Array:
    """Return a product, rounded: nothing that is done with it can become one operation with it."""
    return lax.bitcast_convert_type(lax.bitcast_convert_type(product, jnp.int32) ^ zero, jnp.float32)


def _nearest(dividend: Array, divisor: Array | int) -> Array:
    """Return the quotient of two uint32, rounded to nearest, ties to even; of the divisor there are two bits to spare."""
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
    """Return one over each scale, zero for a zero."""
    significand = (scales >> 16 & 0x7F | 0x80).astype(jnp.uint32)
    quotient = _nearest(jnp.full_like(significand, 1 << 31), significand).astype(jnp.int32)
    inverse = (253 - (scales >> 23) << 23) + (quotient - HIDDEN)
    return lax.bitcast_convert_type(jnp.where(scales > 0, inverse, 0), jnp.float32)


def _exponents(blocks: Array, shares: Array) -> tuple[Array, Array]:
    """Return codes of E3M0, and what they stand for in its units."""
    magnitude = jnp.abs(shares)
    nearest = jnp.minimum((lax.bitcast_convert_type(magnitude * jnp.float32(4.0 / 3.0), jnp.int32) >> 23) - 120, 7)
    power = jnp.maximum(nearest, (magnitude >= 2.0**-7).astype(jnp.int32))
    sign = lax.bitcast_convert_type(blocks, jnp.int32) >> 28 & 8
    size = jnp.left_shift(1, power) >> 1
    return power | sign, jnp.where(sign > 0, -size, size)


def _pairs(codes: Array) -> Array:
    """Return the codes of blocks as nibbles: the first half of a block below the second."""
    halves = codes.reshape(-1, 2, BLOCK // 2)
    return (halves[:, 0] | halves[:, 1] << 4).astype(jnp.uint8).reshape(-1)
