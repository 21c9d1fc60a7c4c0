"""What a format is: its facts, and its arithmetic in three forms.

A number becomes a *code* of `bits` bits. A format with scales first divides a block of 128 numbers by its scale: the
largest magnitude of the block over `levels`, rounded up to bfloat16, so that nothing is clipped. A code decodes to a
whole number; that number times `unit` times the scale is the value. Codes of four bits are stored as pairs, the first
half of a block in the low nibbles of its 64 bytes and the second half in the high ones: so vector instructions read
each half without a shuffle.

The three forms do the same arithmetic, to the bit. Each one is written in the format's own file; pairs, scales and the
loops over vectors are the same for every format (`atoll.codec.kernels`):

    NumPy      whole arrays; for short vectors, for tests, and where numba is not installed
    compiled   one number at a time, as plain Python that numba compiles into each loop; no format's file imports numba
    JAX        whole arrays, on the device of the parameters (`atoll.codec.on_device`)

The number of elements alone determines the size of a payload, so a reader can check it before it allocates. A payload
is the scales, then the codes, all little-endian.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from atoll.base.errors import FrameRejected, ProtocolMisuse
from atoll.codec.blocks import BLOCK, HALF, SCALE_BYTES, Rows, blocks

STEPS_MAX: Final = 4095
"""The largest decoded number: `BLOCK` squares of it fit into 32 bits with their sign (128 * 4095^2 < 2^31)."""


@dataclass(frozen=True, slots=True)
class NumpyForm:
    """The arithmetic on whole blocks as rows.

    encode(rows, inverse) -> codes
        Return the codes of float32 rows; `inverse` is one over each row's scale, a column, and zero for a zero.

    decode(codes) -> rows
        Return the decoded codes, as float32.
    """

    encode: Callable[[Rows, Rows], Rows]
    decode: Callable[[Rows], Rows]


@dataclass(frozen=True, slots=True)
class CompiledForm:
    """The arithmetic on one number; every integer states its width, because numba would make it 64 bits wide.

    encode(number, inverse) -> code
        Return the code of a float32.

    decode(code) -> number
        Return the decoded code, of any type; with scales, a whole number of magnitude `levels`/`unit` at most.

    `helpers` are functions that these call.
    """

    encode: Callable[..., Any]
    decode: Callable[..., Any]
    helpers: tuple[Callable[..., Any], ...] = ()


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Format:
    """One format of float32 vectors.

    Attributes:
        name: its name in the settings.
        number: its number on the wire; never used again for another format.
        code: the type that codes are stored as; of four bits, a byte that holds two.
        bits: of a code.
        largest: every number up to this magnitude comes back finite, and no scale is larger.
        levels: decoded magnitude, times `unit`, of the largest number of a block; None for a format without scales.
            `levels`/`unit` is at most `STEPS_MAX`, because the squares of a block are added in 32 bits.
        unit: the value of a decoded 1, before the scale.
        zstd_level: the level of compression that pays for itself, None if none does (docs/lab/LOG.md).
        numpy, compiled: see there.
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

    def __post_init__(self) -> None:
        """Refuse a format whose squares the kernels could not add: they would overflow without a word."""
        if self.levels is not None and self.levels / self.unit > STEPS_MAX:
            raise ProtocolMisuse(
                f"format {self.name} has too many steps",
                got=f"levels / unit = {self.levels / self.unit:g}",
                allowed=f"up to {STEPS_MAX}",
                todo="scale a block to fewer steps",
            )

    @property
    def items(self) -> int:
        """Return the number of stored codes in a block."""
        return BLOCK * self.bits // (8 * np.dtype(self.code).itemsize)

    @property
    def block_bytes(self) -> int:
        """Return the bytes of the codes of a block."""
        return BLOCK * self.bits // 8

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


def stored(form: Format, codes: Any) -> Any:  # noqa: ANN401  (arrays of NumPy or JAX)
    """Return rows of codes in their stored form."""
    if form.items == BLOCK:
        return codes.astype(form.code)
    return (codes[..., :HALF] | codes[..., HALF:] << 4).astype(form.code)


def loaded(form: Format, items: Rows) -> Rows:
    """Return rows of codes from their stored form."""
    return items if form.items == BLOCK else np.concatenate([items & 15, items >> 4], axis=-1)
