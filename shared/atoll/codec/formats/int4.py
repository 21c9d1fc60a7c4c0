"""int4: half a byte a number and a scale per block, q = round(x / s) from -7 to 7.

The scale s is a seventh of the block's largest magnitude.

A code is q + 8, so that it is never negative, and cutting off the fraction rounds to nearest.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from atoll.codec.formats.interface import SCALED_MAX, CompiledForm, Format, NumpyForm, Rows


def _codes(rows: Rows, inverse: Rows) -> Rows:
    return (rows * inverse + np.float32(8.5)).astype(np.int32)


def _numbers(codes: Rows) -> Rows:
    return codes.astype(np.float32) - np.float32(8.0)


def _code(number: np.float32, inverse: np.float32) -> np.int32:
    return np.int32(number * inverse + np.float32(8.5))


def _number(code: np.uint8) -> np.int8:
    return np.int8(np.int8(code) - np.int8(8))


def _on_device(_: Any, shares: Any) -> tuple[Any, Any]:  # noqa: ANN401  (arrays of JAX)
    codes = (shares + 8.5).astype(np.int32)
    return codes, (codes - 8).astype(np.float32)


INT4 = Format(
    name="int4",
    number=5,
    code=np.uint8,
    bits=4,
    levels=7,
    largest=SCALED_MAX,
    zstd_level=1,
    numpy=NumpyForm(_codes, _numbers),
    compiled=CompiledForm(_code, _number),
    jax=_on_device,
)
