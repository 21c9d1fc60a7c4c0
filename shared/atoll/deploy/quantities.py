"""Amounts of memory and processors as Kubernetes writes them, in the words of those that write them otherwise."""

from __future__ import annotations

import re
from decimal import Decimal
from typing import Final

SIZE: Final = r"([1-9][0-9]{0,14}(?:\.[0-9]{1,3})?)(Ki|Mi|Gi|Ti|k|M|G|T)?"
PROCESSORS: Final = r"[1-9][0-9]{0,6}m|[1-9][0-9]{0,3}(\.[0-9]{1,3})?|0\.[0-9]{0,2}[1-9]"
MEMORY_MIN: Final = 64 << 20
"""Less is a slip of the pen: a program would not start in it."""
_SIZES: Final = {
    **dict(zip(("", "k", "M", "G", "T"), (1000.0**power for power in range(5)), strict=True)),
    **dict(zip(("Ki", "Mi", "Gi", "Ti"), (1024.0**power for power in range(1, 5)), strict=True)),
}
GO_SHARE: Final = 0.75
"""Of a container's memory, what a program in Go may use before it collects garbage: else the limit ends it first."""


def size_bytes(quantity: str) -> int:
    """Return a size in bytes.

    Examples:
        >>> size_bytes("2Gi"), size_bytes("1.5G")
        (2147483648, 1500000000)
    """
    found = re.fullmatch(SIZE, quantity)
    if found is None:
        raise ValueError(f"no size: {quantity!r}")
    return round(float(found[1]) * _SIZES[found[2] or ""])


def go_memory(quantity: str) -> str:
    """Return the GOMEMLIMIT of a container with so much memory.

    Examples:
        >>> go_memory("2Gi")
        '1536MiB'
    """
    return f"{max(1, int(GO_SHARE * size_bytes(quantity)) >> 20)}MiB"


def processors(quantity: str) -> str:
    """Return processors as a decimal number, which is all that compose takes.

    Examples:
        >>> processors("500m"), processors("4"), processors("1000")
        ('0.5', '4', '1000')
    """
    return f"{(Decimal(quantity.removesuffix('m')) / (1000 if quantity.endswith('m') else 1)).normalize():f}"
