"""Reads docstrings as this project writes them: a sentence, prose, and sections such as `Attributes:` and `Raises:`.

A class's words on its attributes are the one description of a setting: `atoll config` shows it, and so does the reference.
"""

from __future__ import annotations

import inspect
import re
from typing import Final

SECTIONS: Final = (
    *("Args", "Attributes", "Returns", "Yields", "Raises", "Examples", "Example", "References", "Note", "Notes"),
)
_HEADING: Final = re.compile(rf"^({'|'.join(SECTIONS)}):\s*$")
_ITEM: Final = re.compile(r"^(?:    )?(\*{0,2}[\w.]+)(?: \([^)]*\))?: +(.*)$")


def attributes(docstring: str | None) -> dict[str, str]:
    """Return what the `Attributes:` section says of each name, on one line."""
    return dict(items(sections(docstring or "").get("Attributes", [])))


def summary(docstring: str | None) -> str:
    """Return the first paragraph on one line."""
    lines: list[str] = []
    for line in inspect.cleandoc(docstring or "").split("\n"):
        if not line.strip():
            break
        lines.append(line.strip())
    return " ".join(lines)


def sections(docstring: str) -> dict[str, list[str]]:
    """Return the lines under each heading; those before the first one under the empty text."""
    found: dict[str, list[str]] = {"": []}
    here = ""
    for line in inspect.cleandoc(docstring).split("\n"):
        heading = _HEADING.match(line)
        if heading:
            here = heading[1]
            found[here] = []
        else:
            found[here].append(line)
    return found


def items(lines: list[str]) -> list[tuple[str, str]]:
    """Return (name, text) of a section's entries; lines that are indented further belong to the entry above."""
    found: list[tuple[str, str]] = []
    for line in lines:
        indented_more = line.startswith("     ")
        item = None if indented_more else _ITEM.match(line)
        if item:
            found.append((item[1], item[2]))
        elif found and line.strip():
            name, text = found[-1]
            found[-1] = (name, f"{text} {line.strip()}")
    return found
