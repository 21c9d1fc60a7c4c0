"""int8: 1 byte a number and a scale per block, q = round(x / s) from -127 to 127.

The scale s is a 127th of the block's largest magnitude. Adding 128.5 makes every quotient positive, so that cutting off
the fraction rounds to nearest. Number 3 on the wire was int8 with float32 scales; no new format may use it.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from atoll.codec.formats.interface import SCALED_MAX, CompiledForm, Format, NumpyForm, Rows


def _codes(rows: Rows, inverse: Rows) -> Rows:
    return (rows * inverse + np.float32(128.5)).astype(np.int32) - 128


def _numbers(codes: Rows) -> Rows:
    return codes.astype(np.float32)


def _code(number: np.float32, inverse: np.float32) -> np.int32:
    return np.int32(np.int32(number * inverse + np.float32(128.5)) - np.int32(128))


def _number(code: np.int8) -> np.int32:
    return np.int32(code)


def _on_device(_: Any, shares: Any) -> tuple[Any, Any]:  # noqa: ANN401  (arrays of JAX)
    numbers = (shares + 128.5).astype(np.int32) - 128
    return numbers, numbers.astype(np.float32)


INT8 = Format(
    name="int8",
    number=4,
    code=np.int8,
    bits=8,
    levels=127,
    largest=SCALED_MAX,
    numpy=NumpyForm(_codes, _numbers),
    compiled=CompiledForm(_code, _number),
    jax=_on_device,
)
