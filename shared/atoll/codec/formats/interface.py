"""A format: its facts, and its arithmetic in three forms.

A vector is cut into blocks of 128 elements, counted from its first one. Sums run in as many lanes, so that their order does
not depend on the vector length of a machine. A number becomes a *code* of `bits` bits. A format with scales first divides a
block by its scale: its largest magnitude over `levels`, rounded up to bfloat16, so that nothing is clipped. A code decodes to
a number; that number times `unit` times the scale is the value. Codes of 8 bits and more are stored as they are. Of codes of 4
bits, the first half of a block is in the low nibbles and the second half in the high ones, so vector instructions read each
half without a shuffle.

The three forms do the same arithmetic, to the bit; each is written in the format's own file:

    NumPy      whole arrays; for short vectors, for tests, and where numba is not installed
    compiled   one number at a time, as plain Python that numba compiles into each loop; no format's file imports numba
    JAX        whole arrays, on the device of the parameters (`atoll.codec.on_device`)

A payload is the scales, then the codes, all little-endian; the number of elements alone determines its size.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from atoll.base.errors import FrameRejected, ProtocolMisuse

Bytes = npt.NDArray[np.uint8]
Lanes = npt.NDArray[np.float64]
Halves = npt.NDArray[np.uint16]
"""Bits of bfloat16 numbers."""
Rows = npt.NDArray[Any]
"""One row for each block: float32 numbers, or codes as they are stored."""

BLOCK: Final = 128
"""Elements that share a scale."""
TILE: Final = 8 * BLOCK
"""Elements whose squares are added up in float32, eight to a lane, before float64 takes over."""
SQUARES_MIN: Final = 2.0**-60
"""A lane below it may have lost squares to underflow: then all of them are added up in float64."""
SCALE_MIN: Final = np.float32(1e-38)
"""A scale that is not above it is sent as zero, and so is its block."""
SCALED_MAX: Final = 2.0**120
"""The largest magnitude that a format with scales holds."""
SCALE_BYTES: Final = 2
"""A scale travels as a bfloat16."""
NO_SCALES: Final = np.empty(0, dtype=np.float32)
STEPS_MAX: Final = 4095
"""The largest decoded whole number: `BLOCK` squares of it fit into 32 bits with their sign (128 * 4095^2 < 2^31)."""
LEVELS_MAX: Final = 255
"""A device divides integers of 24 bits, shifted by the width of `levels`, in 32 bits (`atoll.codec.on_device`)."""


def blocks(elements: int) -> int:
    """Return the number of blocks that hold so many elements."""
    return -(-elements // BLOCK)


@dataclass(frozen=True, slots=True)
class NumpyForm:
    """The arithmetic on whole blocks as rows.

    `encode(rows, inverse)` returns the codes of float32 rows; `inverse` is one over each row's scale, a column, and zero for a
    zero. A number times `inverse` lies between -`levels` and `levels`. `decode(codes)` returns float32 rows. Every code of
    `bits` bits decodes to a finite number, also one that no encoder makes.
    """

    encode: Callable[[Rows, Rows], Rows]
    decode: Callable[[Rows], Rows]


@dataclass(frozen=True, slots=True)
class CompiledForm:
    """The arithmetic on one number, without branches, so that LLVM can vectorise it.

    So there is no `if`, no conditional expression and no `max` in it: numba refuses the first two with a warning, and the
    third made loops 3 to 9 times slower. Every integer states its width, because numba would make it 64 bits wide.
    `encode(number, inverse)` returns a code, `decode(code)` a number of any type, and `magnitude(code)` that of a decoded
    number as an integer, from which squares are summed: give it where `decode` returns floats.
    """

    encode: Callable[..., Any]
    decode: Callable[..., Any]
    magnitude: Callable[..., Any] | None = None


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Format:
    """One format of float32 vectors.

    Attributes:
        name: its name in the settings.
        number: its number on the wire; never used again for another format.
        code: the type that codes are stored as; of four bits, a byte that holds two.
        bits: of a code: 4, 8, 16 or 32.
        largest: every number up to this magnitude comes back finite, and no scale is larger.
        levels: what the largest number of a block is after its division by the scale, a whole number up to `LEVELS_MAX`; its
            code decodes to `levels` / `unit`, at most `STEPS_MAX`, and every code to a whole number, because the squares of a
            block are added in 32 bits. None for a format without scales.
        unit: the value of a decoded 1, before the scale: a power of two.
        zstd_level: the level of compression that pays for itself, None if none does (docs/lab/speed.md).
        numpy, compiled: see there.
        block_bytes: of the codes of a block; `items` of the type `code`.
        packed: whether a byte holds two codes.
        part: codes of a block that lie one after the other.
        jax: (rows, shares) -> (codes, numbers): of float32 rows and their quotients by the scale, return the codes and the
            decoded codes, as float32. Without scales the two arguments are the same.
    """

    name: str
    number: int
    code: type[np.generic]
    bits: int
    largest: float
    numpy: NumpyForm
    compiled: CompiledForm
    jax: Callable[[Any, Any], tuple[Any, Any]]
    levels: int | None = None
    unit: float = 1.0
    zstd_level: int | None = None
    items: int = field(init=False)
    part: int = field(init=False)
    block_bytes: int = field(init=False)
    packed: bool = field(init=False)

    def __post_init__(self) -> None:
        """Lay out a block; refuse a format whose numbers the kernels could not compute: they would overflow without a word."""
        levels, steps = self.levels or 1, (self.levels or 1) / self.unit
        if levels > LEVELS_MAX or steps > STEPS_MAX:
            raise ProtocolMisuse(
                f"format {self.name} has too many steps",
                got=f"levels = {levels}, levels / unit = {steps:g}",
                allowed=f"up to {LEVELS_MAX}, and up to {STEPS_MAX}",
                todo="scale a block to fewer steps",
            )
        if self.bits not in (4, 8, 16, 32):
            raise ProtocolMisuse(
                f"format {self.name} has codes of a width of its own", got=self.bits, allowed="4 to 32"
            )
        block_bytes = BLOCK * self.bits // 8
        object.__setattr__(self, "block_bytes", block_bytes)
        object.__setattr__(self, "items", block_bytes // np.dtype(self.code).itemsize)
        object.__setattr__(self, "packed", self.bits == 4)
        object.__setattr__(self, "part", BLOCK // 2 if self.packed else BLOCK)

    def scales_count(self, elements: int) -> int:
        """Return the number of scales for so many elements."""
        return blocks(elements) if self.levels else 0

    def codes_bytes(self, elements: int) -> int:
        """Return the bytes of the codes of so many elements; with scales, blocks are stored whole."""
        return blocks(elements) * self.block_bytes if self.levels else elements * self.block_bytes // BLOCK

    def size(self, elements: int) -> int:
        """Return the bytes of the payload of so many elements."""
        return SCALE_BYTES * self.scales_count(elements) + self.codes_bytes(elements)

    def check(self, largest: float) -> None:
        """Raise `FrameRejected` `not_finite` unless numbers up to this magnitude arrive finite."""
        if not largest <= self.largest:
            raise FrameRejected("not_finite", f"{self.name} cannot hold it", got=largest, allowed=self.largest)


def store_codes(form: Format, codes: Any) -> Any:  # noqa: ANN401  (arrays of NumPy or JAX)
    """Return rows of codes in their stored form."""
    half = BLOCK // 2
    return (codes[..., :half] & 15 | codes[..., half:] << 4 if form.packed else codes).astype(form.code)


def load_codes(form: Format, items: Rows) -> Rows:
    """Return rows of codes from their stored form."""
    return np.concatenate([items & 15, items >> 4], axis=-1) if form.packed else items
