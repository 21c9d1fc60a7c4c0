"""Numbers with their nouns, and lists cut short, in sentences for people: `1 round`, `3 rounds`, `a, b and 3 more`.

Findings, log lines and errors say how many of something there are, and name some of it. All of them are worded here, so that
one round is never told as `1 rounds`, and what a list leaves out is always counted.
"""

from __future__ import annotations

from collections.abc import Iterable


def counted(number: int, noun: str, plural: str = "") -> str:
    """Return a number with its noun.

    Args:
        number: how many.
        noun: the word for one, which a verb may follow.
        plural: the words for any other number, if they are not `noun` with an "s".

    Examples:
        >>> counted(1, "round"), counted(1200, "round")
        ('1 round', '1,200 rounds')
        >>> counted(1, "more finding stands", "more findings stand")
        '1 more finding stands'
    """
    return f"{number:,} {noun if number == 1 else plural or f'{noun}s'}"


def few(names: Iterable[str], most: int, sep: str = ", ", *, of: int | None = None) -> str:
    """Return the first names of a list in one line, and how many more there are.

    Args:
        names: the list, or its first names.
        most: how many are named.
        sep: what is between two of them.
        of: how many there are, if `names` are only the first ones.

    Examples:
        >>> few(["a", "b", "c"], 2), few(["a", "b"], 2)
        ('a, b and 1 more', 'a, b')
    """
    there = list(names)
    named = there[:most]
    left_out = (len(there) if of is None else of) - len(named)
    return sep.join(named) + (f" and {left_out:,} more" if left_out > 0 else "")
