"""JSON and TOML from outside become values that we can hold, or one kind of error.

msgspec raises errors of other kinds for bytes that are no text and for brackets that nest deeper than the interpreter's stack.
So every reader of JSON that a peer, a disk or an older process may have written parses it here.

msgspec describes a type to itself when it meets it first. Two threads that meet one type at once end the process by a
segmentation fault (msgspec 0.22). So a type is met first under a lock.
"""

from __future__ import annotations

import contextlib
import functools
import re
import threading
from collections.abc import Iterator
from typing import Any, Final, TypeVar, cast

import msgspec
import msgspec.inspect

from atoll.base.errors import for_a_terminal, on_one_line
from atoll.base.quantities import COUNTED_SHARE

FAULT_CHARS_MAX: Final = 256
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
T = TypeVar("T")

_met: Final[set[Any]] = set()
_meeting: Final = threading.Lock()
_NOTHING: Final = object()


def parsed(data: bytes | bytearray | memoryview | str, kind: type[T]) -> T:
    """Return JSON `data` as a `kind`; raise `msgspec.MsgspecError` for anything else."""
    _meet(kind)
    try:
        return msgspec.json.decode(data, type=kind)
    except (UnicodeDecodeError, RecursionError) as error:
        raise msgspec.DecodeError(str(error)) from error


def exhausted_counter(message: msgspec.Struct) -> str:
    """Return which counter of a message leaves too little room to count on from it, or the empty string."""
    return next(_exhausted(message), "")


def _exhausted(value: msgspec.Struct) -> Iterator[str]:
    for name, bound in _counters(type(value)):
        found = getattr(value, name)
        if bound is None:
            for each in found:
                yield from _exhausted(each)
        elif found > bound // COUNTED_SHARE:
            yield f"{name} {found}, above {bound // COUNTED_SHARE}"


# Every record that is read passes here, and msgspec takes milliseconds to describe its type.
@functools.cache
def _counters(kind: type[msgspec.Struct]) -> list[tuple[str, int | None]]:
    """Return the fields of a struct that count, with their bounds, and with None those that list structs which count."""
    found: list[tuple[str, int | None]] = []
    for field in cast("msgspec.inspect.StructType", msgspec.inspect.type_info(kind)).fields:
        if isinstance(field.type, msgspec.inspect.Metadata) and (field.type.extra or {}).get("counted"):
            found.append((field.name, cast("msgspec.inspect.IntType", field.type.type).le))
        elif isinstance(field.type, msgspec.inspect.VarTupleType):
            item = field.type.item_type
            if isinstance(item, msgspec.inspect.StructType) and _counters(item.cls):
                found.append((field.name, None))
    return found


def fault_of(error: msgspec.MsgspecError) -> str:
    """Return what was wrong, for people: msgspec quotes a word that is none of the allowed ones, whatever is in it."""
    return for_a_terminal(on_one_line(str(error)[:FAULT_CHARS_MAX]))


def convert(value: object, kind: type[T]) -> T:
    """Return plain values (of JSON, say) as a `kind`; raise `msgspec.ValidationError` if they are none."""
    _meet(kind)
    return msgspec.convert(value, kind)


def _meet(kind: Any) -> None:  # noqa: ANN401  (a type, or a union of some)
    """Have msgspec describe a type, and those in it, before anybody uses it."""
    if kind in _met:
        return
    with _meeting:
        with contextlib.suppress(msgspec.ValidationError):
            msgspec.convert(_NOTHING, kind)
        _met.add(kind)


def parsed_toml(text: str) -> dict[str, Any]:
    """Return the table of a TOML text.

    Raises:
        ValueError: it is not TOML, has a whole number of more than 64 bits, or is deeper than `DEPTH_MAX`.
    """
    import tomllib  # noqa: PLC0415  (most processes read no TOML)

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
