"""e3m0: half a byte a number and a scale per block: a sign, and one of 0, 2^-6 ... 2^0 (arXiv 2501.18512).

A code is the sign in its highest bit and a power p below it: 0 for zero, else 2^(p - 7). Its value is an integer
multiple of 2^-6, 64 of them at most, and everything is computed in these units. The scale is the block's largest
magnitude. The format comes from Streaming DiLoCo.

Rounding is to the nearest of the two powers. A number from the upper third of an interval reaches the next power of two
if multiplied by 4/3, and the exponent of a float32 is that power. Below 2^-6 the nearest is zero, up to half of it.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from atoll.codec.formats.interface import SCALED_MAX, CompiledForm, Format, NumpyForm, Rows


def _codes(rows: Rows, inverse: Rows) -> Rows:
    magnitude = np.abs(rows) * inverse
    nearest = np.minimum(((magnitude * np.float32(4.0 / 3.0)).view(np.int32) >> 23) - 120, 7)
    power = np.maximum(nearest, (magnitude >= np.float32(2.0**-7)).astype(np.int32))
    codes: Rows = power | (rows.view(np.int32) >> 28) & 8
    return codes


def _numbers(codes: Rows) -> Rows:
    size = np.left_shift(np.int16(1), (codes & 7).astype(np.int16)) >> 1
    return np.where(codes & 8, -size, size).astype(np.float32)


def _code(number: np.float32, inverse: np.float32) -> np.int32:
    magnitude = np.float32(np.float32(abs(number)) * inverse)
    exponent = np.int32(np.float32(magnitude * np.float32(4.0 / 3.0)).view(np.int32) >> np.int32(23))
    nearest = min(np.int32(exponent - np.int32(120)), np.int32(7))
    power = max(nearest, np.int32(magnitude >= np.float32(2.0**-7)))
    sign = np.int32(np.int32(np.float32(number).view(np.int32) >> np.int32(28)) & np.int32(8))
    return np.int32(power | sign)


def _number(code: np.uint8) -> np.float32:
    # The power is the exponent of a float32 2^126 times too small, which is zero for p = 0. Adding zero makes -0 a 0.
    bits = np.int32(np.int32(np.int32(code) & np.int32(7)) << np.int32(23))
    sign = np.int32(np.int32(np.int32(code) & np.int32(8)) << np.int32(28))
    return np.float32(np.float32(np.int32(bits | sign).view(np.float32) * np.float32(2.0**126)) + np.float32(0.0))


def _magnitude(code: np.uint8) -> np.int16:
    return np.int16(np.int16(np.int16(1) << np.int16(code & np.uint8(7))) >> np.int16(1))


def _on_device(rows: Any, shares: Any) -> tuple[Any, Any]:  # noqa: ANN401  (arrays of JAX)
    import jax.numpy as jnp  # noqa: PLC0415  (loaded where parameters are JAX arrays)
    from jax import lax  # noqa: PLC0415

    magnitude = jnp.abs(shares)
    exponent = lax.bitcast_convert_type(magnitude * jnp.float32(4.0 / 3.0), np.int32) >> 23
    power = jnp.maximum(jnp.minimum(exponent - 120, 7), (magnitude >= 2.0**-7).astype(np.int32))
    sign = lax.bitcast_convert_type(rows, np.int32) >> 28 & 8
    size = jnp.left_shift(1, power) >> 1
    return power | sign, jnp.where(sign > 0, -size, size).astype(np.float32)


E3M0 = Format(
    name="e3m0",
    number=6,
    code=np.uint8,
    bits=4,
    levels=1,
    unit=2.0**-6,
    largest=SCALED_MAX,
    zstd_level=1,
    numpy=NumpyForm(_codes, _numbers),
    compiled=CompiledForm(_code, _number, _magnitude),
    jax=_on_device,
)
