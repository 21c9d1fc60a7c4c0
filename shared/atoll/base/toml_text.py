"""TOML as people write it, and nothing that Python or whoever walks its tables cannot hold."""

from __future__ import annotations

import re
import tomllib
from typing import Any, Final

DEPTH_MAX: Final = 32
"""No file of ours has tables or lists in one another so deep; dotted keys make them without any sign of depth."""

INTEGER_MAX: Final = 1 << 63
"""TOML's whole numbers have 64 bits; Python reads longer ones, and does not write those of more than 4,300 digits."""

_QUOTED: Final = re.compile(
    r'''"""(?:[^"\\]|\\.|"(?!""))*+(?:""")?|"(?:[^"\\\n]|\\.)*+"?'''
    r"""|'''(?:[^']|'(?!''))*+(?:''')?|'[^'\n]*+'?|\#[^\n]*""",
    re.DOTALL,
)
"""Texts and comments, also one that never ends; each alternative matches wherever it begins, so a search is linear."""
_BETWEEN_KEYS: Final = re.compile(r"[=,\n\[\]{}]")


def parsed_toml(text: str) -> dict[str, Any]:
    """Return the table of a TOML text.

    Raises:
        ValueError: it is not TOML, has a whole number of more than 64 bits, or is deeper than `DEPTH_MAX`.
    """
    # tomllib takes a time that grows with the square of the parts of one key.
    if any(part.count(".") >= DEPTH_MAX for part in _BETWEEN_KEYS.split(_QUOTED.sub("", text))):
        raise _too_deep()
    try:
        table = tomllib.loads(text)
    except RecursionError:
        raise ValueError("lists in lists, deeper than Python reads") from None
    level: list[Any] = [table]
    for _ in range(DEPTH_MAX):
        inside = [value for one in level for value in (one.values() if isinstance(one, dict) else one)]
        if any(isinstance(value, int) and not -INTEGER_MAX <= value < INTEGER_MAX for value in inside):
            raise ValueError("a whole number of more than 64 bits")
        level = [value for value in inside if isinstance(value, dict | list)]
        if not level:
            return table
    raise _too_deep()


def _too_deep() -> ValueError:
    return ValueError(f"tables in tables, more than {DEPTH_MAX} deep")
