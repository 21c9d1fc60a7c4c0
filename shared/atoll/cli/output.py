"""Lines of an answer on standard output."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable


def say(line: str) -> None:
    """Print a line of the answer, at once: a reader of a pipe waits for it."""
    print(line, flush=True)  # noqa: T201  (this is the verb's output)


def say_lines(lines: Iterable[str]) -> None:
    """Print lines that hold words of the run's processes: what cannot be printed is a question mark."""
    for line in lines:
        say(printable(line))


def printable(text: str) -> str:
    """Return a text of peers or files as a terminal may get it: nothing in it moves the cursor."""
    return "".join(c if c.isprintable() else "?" for c in text)
