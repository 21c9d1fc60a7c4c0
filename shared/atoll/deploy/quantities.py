"""Amounts of memory and processors as Kubernetes writes them, in the words of those that write them otherwise."""

from __future__ import annotations

import re
from typing import Final

PATTERN: Final = r"([0-9]+(?:\.[0-9]+)?)(m|Ki|Mi|Gi|Ti|k|M|G|T)?"
PROCESSORS: Final = r"[0-9]+(\.[0-9]+)?m?"
_SIZES: Final = {
    **dict(zip(("", "k", "M", "G", "T"), (1000.0**power for power in range(5)), strict=True)),
    **dict(zip(("Ki", "Mi", "Gi", "Ti"), (1024.0**power for power in range(1, 5)), strict=True)),
    "m": 0.001,
}
GO_SHARE: Final = 0.75
"""Of a container's memory, what a program in Go may use before it collects garbage: else the limit ends it first."""


def amount(quantity: str) -> float:
    """Return a quantity as a number, of bytes or of processors.

    Examples:
        >>> amount("2Gi"), amount("500m")
        (2147483648.0, 0.5)
    """
    found = re.fullmatch(PATTERN, quantity)
    if found is None:
        raise ValueError(f"no quantity: {quantity!r}")
    return float(found[1]) * _SIZES[found[2] or ""]


def go_memory(quantity: str) -> str:
    """Return the GOMEMLIMIT of a container with so much memory.

    Examples:
        >>> go_memory("2Gi")
        '1536MiB'
    """
    return f"{max(1, int(GO_SHARE * amount(quantity)) >> 20)}MiB"


def processors(quantity: str) -> str:
    """Return processors as a decimal number, which is all that compose takes.

    Examples:
        >>> processors("500m"), processors("4")
        ('0.5', '4')
    """
    return f"{amount(quantity):g}"
