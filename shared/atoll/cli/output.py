"""Answers on standard output: lines, tables and JSON."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Container, Iterable

    from rich.console import RenderableType
    from rich.table import Table

WIDTH_NO_TERMINAL: Final = 200


def say(line: str) -> None:
    """Print a line of the answer, at once: a reader of a pipe waits for it."""
    print(line, flush=True)  # noqa: T201  (this is the verb's output)


def say_lines(lines: Iterable[str]) -> None:
    """Print lines that hold words of the run's processes: what cannot be printed is a question mark."""
    for line in lines:
        say(printable(line))


def say_json(value: object) -> None:
    """Print a value as JSON; dataclasses in it are objects."""
    plain: Any = asdict
    say(json.dumps(value, indent=2, default=plain))


def plain_table(headings: Iterable[str], right: Container[str] = ()) -> Table:
    """Return a table without frames; the columns whose headings are in `right` hold numbers."""
    from rich.table import Table  # noqa: PLC0415  (most verbs print none)

    table = Table(box=None, pad_edge=False, header_style="dim")
    for heading in headings:
        table.add_column(heading, justify="right" if heading in right else "left")
    return table


def print_table(table: RenderableType, width: int = WIDTH_NO_TERMINAL) -> None:
    """Print a table; a file or a pipe gets it `width` columns of text wide."""
    from rich.console import Console  # noqa: PLC0415

    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = width
    console.print(table)


def printable(text: str) -> str:
    """Return a text of peers or files as a terminal may get it: nothing in it moves the cursor."""
    return "".join(c if c.isprintable() else "?" for c in text)
