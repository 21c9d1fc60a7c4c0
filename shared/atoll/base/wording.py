"""Text for people: numbers with their nouns, lists cut short, addresses without secrets.

Findings, log lines and errors say how many of something there are, and name some of it: `1 round`, `3 rounds`, `a, b and 3
more`. So one round is never told as `1 rounds`, and what a list leaves out is always counted. The user part of a URL, where a
password may stand, is struck out.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any, Final

# A password may hold a slash, or an @ itself: so all goes to the last @ before white space or a comma and the next address.
# Rather a name too many than a password.
_ADDRESSES: Final = re.compile(r"//\S*")
_WITHOUT_SCHEME: Final = re.compile(r"""(?<![^\s'",(\[=])[^\s/:@'"]+:(?!//)[^\s'"]*@""")
"""What somebody typed who forgot the scheme."""
_ADDRESSES_IN_JSON: Final = re.compile(rb'//(?:\\.|[^\s"\\])*')
_NEXT_ADDRESS: Final = re.compile(r"""(?<=,)(?=['"]?\w[\w+.-]*://)""")


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


def redact(value: Any) -> Any:  # noqa: ANN401  (whatever a setting holds)
    """Return `value` with the user part of any URL struck out, in each text of a list; what is neither as it is."""
    if isinstance(value, (list, tuple)):
        return type(value)(redact(each) for each in value)
    if not isinstance(value, str):
        return value
    return _WITHOUT_SCHEME.sub("***@", _ADDRESSES.sub(lambda found: _strike(found[0]), value))


def redact_json(encoded: bytes) -> bytes:
    """Return JSON with the user part of any URL in its texts struck out; no text ends elsewhere for it."""
    return _ADDRESSES_IN_JSON.sub(lambda found: _strike(found[0].decode("latin-1")).encode("latin-1"), encoded)


def _strike(addresses: str) -> str:
    return "".join(_strike_one(each) for each in _NEXT_ADDRESS.split(addresses))


def _strike_one(address: str) -> str:
    scheme, slashes, rest = address.partition("//")
    _, at, host = rest.rpartition("@")
    return f"{scheme}{slashes}***@{host}" if at else address
