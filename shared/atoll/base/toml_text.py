"""TOML as people write it, and nothing that Python or whoever walks its tables cannot hold."""

from __future__ import annotations

import tomllib
from typing import Any, Final

DEPTH_MAX: Final = 32
"""No file of ours has tables or lists in one another so deep; dotted keys make them without any sign of depth."""


def parsed_toml(text: str) -> dict[str, Any]:
    """Return the table of a TOML text.

    Raises:
        ValueError: it is not TOML, has a number of more digits than Python reads, or is deeper than `DEPTH_MAX`.
    """
    try:
        table = tomllib.loads(text)
    except RecursionError:
        raise ValueError("lists in lists, deeper than Python reads") from None
    level: list[Any] = [table]
    for _ in range(DEPTH_MAX):
        inside = (one.values() if isinstance(one, dict) else one for one in level)
        level = [value for values in inside for value in values if isinstance(value, dict | list)]
        if not level:
            return table
    raise ValueError(f"tables in tables, more than {DEPTH_MAX} deep")
