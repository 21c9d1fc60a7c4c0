"""Kernels compiled before anything is measured: figures are those of a process that has merged for a while."""

from __future__ import annotations

from collections.abc import Iterable

from atoll.codec import FORMATS
from atoll.codec.kernels import fast_kernels
from atoll.merge.outer import compile_steps


def compile_kernels(codecs: Iterable[str] = FORMATS) -> None:
    """Compile or load the kernels of these formats, and the outer steps; `make bench-start` measures what that takes."""
    for codec in codecs:
        fast_kernels(FORMATS[codec])
    compile_steps()
