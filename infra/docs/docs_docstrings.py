"""Reads docstrings as this project writes them: a sentence, prose, and sections such as `Attributes:` and `Raises:`."""

from __future__ import annotations

import inspect
import re

SECTIONS = ("Args", "Attributes", "Returns", "Yields", "Raises", "Examples", "Example", "References", "Note", "Notes")
_HEADING = re.compile(rf"^({'|'.join(SECTIONS)}):\s*$")
_ITEM = re.compile(r"^(?:    )?(\*{0,2}[\w.]+)(?: \([^)]*\))?: +(.*)$")


def attributes(docstring: str | None) -> dict[str, str]:
    """Return what the `Attributes:` section says of each name, on one line."""
    return dict(_items(_sections(docstring or "").get("Attributes", [])))


def summary(docstring: str | None) -> str:
    """Return the first paragraph on one line."""
    lines: list[str] = []
    for line in inspect.cleandoc(docstring or "").split("\n"):
        if not line.strip():
            break
        lines.append(line.strip())
    return " ".join(lines)


def markdown(docstring: str | None) -> str:
    """Return a docstring as Markdown: sections become lists, indented blocks stay code."""
    parts = []
    for heading, lines in _sections(docstring or "").items():
        if not heading:
            parts.append("\n".join(_escaped(line) for line in lines).strip())
            continue
        items = _items(lines)
        body = (
            "\n".join(f"- `{name}`: {text}" for name, text in items)
            if items
            else "\n".join(line.removeprefix("    ") for line in lines).strip()
        )
        parts.append(f"**{heading}**\n\n{body}")
    return "\n\n".join(part for part in parts if part)


def _sections(docstring: str) -> dict[str, list[str]]:
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


def _items(lines: list[str]) -> list[tuple[str, str]]:
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


def _escaped(line: str) -> str:
    """Keep what Markdown would take for markup in prose; leave indented code alone."""
    return line if line.startswith("    ") else re.sub(r"(?<!`)<([A-Za-z/][^>`]*)>(?!`)", r"&lt;\1&gt;", line)
