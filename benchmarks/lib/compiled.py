"""What a measured process has ready: compiled kernels, as one that has merged for a while, and arrays as JAX has them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from atoll.codec import FORMATS
from atoll.codec.kernels import fast_kernels
from atoll.merge.outer import compile_steps


def compile_kernels(codecs: Iterable[str] = FORMATS) -> None:
    """Compile or load the kernels of these formats, and the outer steps."""
    for codec in codecs:
        fast_kernels(FORMATS[codec])
    compile_steps()


def read_only(values: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Return an array that nobody may write to, as JAX's are: an island makes no copy of it."""
    values.flags.writeable = False
    return values
