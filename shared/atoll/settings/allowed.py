"""What a setting allows, in words, from the pydantic field that enforces it: for descriptions and for refusals."""

from __future__ import annotations

from pathlib import Path
from typing import Final, Literal, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from atoll.protocol.settings import BOUNDS
from atoll.settings.sections import NamesPlace

_WORDS: Final = {bool: "true or false", int: "an integer", float: "a number", str: "text", Path: "a path"}
_BOUNDS: Final = {"ge": "at least", "gt": "above", "le": "at most", "lt": "below"}


def field_at(kind: type[BaseModel], place: tuple[int | str, ...]) -> FieldInfo | None:
    """Return the field of a table, or of the tables inside it, that stands at `place`; None where no field does."""
    field: FieldInfo | None = None
    for name in place:
        field = kind.model_fields.get(str(name))
        if field is None:
            return None
        inner = field.annotation
        kind = inner if isinstance(inner, type) and issubclass(inner, BaseModel) else BaseModel
    return field


def allowed(field: FieldInfo) -> str:
    """Return what a field allows: its own words, its bounds, its choices, or its kind."""
    if any(isinstance(mark, NamesPlace) for mark in field.metadata):
        return "a folder or a URL"
    return field.description or bounds(field) or choices(field.annotation)


def bounds(field: FieldInfo) -> str:
    """Return the bounds of a field, empty where it has none."""
    found = [
        f"{word} {number(getattr(rule, name))}"
        for rule in field.metadata
        for name, word in _BOUNDS.items()
        if hasattr(rule, name)
    ]
    return ", ".join(found)


def protocol_range(name: str) -> str:
    """Return the range of a setting of the protocol, as `ProtocolSettings.check` enforces it; empty where it has none."""
    within = BOUNDS.get(name)
    if within is None:
        return ""
    high = f"protocol.{within.high}" if isinstance(within.high, str) else number(within.high)
    return f"{number(within.low)} to {high}"


def choices(kind: object) -> str:
    """Return the members of a literal type, or a word for any other."""
    parts = get_args(kind)
    if get_origin(kind) is Literal:
        return ", ".join(str(choice) for choice in parts)
    if get_origin(kind) is dict:
        return "a table"
    if get_origin(kind) is tuple:
        inner = choices(parts[0])
        lists = {"a path": "a list of paths", "text": "a list of texts", "a table": "a list of tables"}
        return lists.get(inner, f"a list of {inner}")
    if isinstance(kind, type):
        return _WORDS.get(kind, "a table")
    return next((choices(part) for part in parts if part is not type(None)), "a table")


def number(value: float) -> str:
    """Return a bound in digits, a large power of two as one."""
    if isinstance(value, int) and value >= 1 << 20 and value & (value - 1) == 0:
        return f"2^{value.bit_length() - 1}"
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:g}" if 0.0 < value < 1e-3 or value >= 1e6 else f"{value:,.10g}"
