"""Docstrings as Markdown, for the pages that are made of them."""

from __future__ import annotations

import re

from atoll.base.docstrings import items, sections


def markdown(docstring: str | None) -> str:
    """Return a docstring as Markdown: sections become lists, indented blocks stay code."""
    parts = []
    for heading, lines in sections(docstring or "").items():
        if not heading:
            parts.append("\n".join(_escaped(line) for line in lines).strip())
            continue
        entries = items(lines)
        body = (
            "\n".join(f"- `{name}`: {text}" for name, text in entries)
            if entries
            else "\n".join(line.removeprefix("    ") for line in lines).strip()
        )
        parts.append(f"**{heading}**\n\n{body}")
    return "\n\n".join(part for part in parts if part)


def _escaped(line: str) -> str:
    """Keep what Markdown would take for markup in prose; leave indented code alone."""
    return line if line.startswith("    ") else re.sub(r"(?<!`)<([A-Za-z/][^>`]*)>(?!`)", r"&lt;\1&gt;", line)
