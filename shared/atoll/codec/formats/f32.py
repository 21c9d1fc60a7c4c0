"""f32: 4 bytes a number, exact. Keyframes, and all values that must come back bit for bit, travel in it."""

from __future__ import annotations

from typing import Any

import numpy as np

from atoll.codec.formats.interface import CompiledForm, Format, NumpyForm


def _number(number: np.float32, _: Any = None) -> np.float32:  # noqa: ANN401
    return number


def _on_device(rows: Any, _: Any) -> tuple[Any, Any]:  # noqa: ANN401  (arrays of JAX)
    return rows, rows


F32 = Format(
    name="f32",
    number=1,
    code=np.float32,
    bits=32,
    largest=float(np.finfo(np.float32).max),
    numpy=NumpyForm(encode=lambda rows, _: rows, decode=lambda rows: rows),
    compiled=CompiledForm(_number, _number),
    jax=_on_device,
)
