"""What every format and every kernel share: arrays, the block, and the limits of sums.

A vector is cut into blocks of `BLOCK` elements, counted from its first one. A format with scales has one scale per
block. Sums run in `BLOCK` lanes, so that their order does not depend on the vector length of a machine.

These constants are compiled into machine code that numba keeps on disk. The stamp of that code covers this file
(`atoll.codec.kernels.compiling`), so a change here compiles everything anew.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import numpy.typing as npt

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


def blocks(elements: int) -> int:
    """Return the number of blocks that hold so many elements."""
    return -(-elements // BLOCK)
