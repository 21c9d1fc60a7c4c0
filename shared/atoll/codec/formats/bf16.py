"""bf16: 2 bytes a number, the upper half of a float32, rounded to nearest, ties to even (the paper sends it).

The range is that of float32, so no scale is needed. 8 bits of the mantissa remain, so the error is at most a part in
256 of the number. Deltas carry their rounding residue in bf16 (`atoll.merge.global_update`), and scales of other formats
travel in it.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from atoll.codec.formats.interface import CompiledForm, Format, Halves, NumpyForm, Rows


def to_halves(rows: Rows, _: Any = None) -> Halves:  # noqa: ANN401
    """Return the bits of the nearest bfloat16 of each number, the even one of two."""
    bits = rows.view(np.uint32)
    return ((bits + np.uint32(0x7FFF) + (bits >> np.uint32(16) & np.uint32(1))) >> np.uint32(16)).astype(np.uint16)


def widen(halves: Halves) -> Rows:
    """Return the bfloat16 numbers that have these bits, as float32."""
    return (halves.astype(np.uint32) << np.uint32(16)).view(np.float32)


def half_of(number: np.float32, _: Any = None) -> np.uint16:  # noqa: ANN401
    """Return the bits of the nearest bfloat16, the even one of two; compiled."""
    bits = np.float32(number).view(np.uint32)
    even = np.uint32(np.uint32(bits >> np.uint32(16)) & np.uint32(1))
    return np.uint16(np.uint32(np.uint32(bits + np.uint32(0x7FFF)) + even) >> np.uint32(16))


def number_of(half: np.uint16) -> np.float32:
    """Return the bfloat16 that has these bits; compiled."""
    return np.uint32(np.uint32(half) << np.uint32(16)).view(np.float32)


def _on_device(rows: Any, _: Any) -> tuple[Any, Any]:  # noqa: ANN401  (arrays of JAX)
    from jax import lax  # noqa: PLC0415  (loaded where parameters are JAX arrays)

    bits = lax.bitcast_convert_type(rows, np.uint32)
    rounded = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16
    return rounded, lax.bitcast_convert_type(rounded << 16, np.float32)


BF16 = Format(
    name="bf16",
    number=2,
    code=np.uint16,
    bits=16,
    largest=2.0**127 * (2 - 2.0**-7),
    numpy=NumpyForm(to_halves, widen),
    compiled=CompiledForm(half_of, number_of),
    jax=_on_device,
)
