"""Errors of settings, as a person reads them: in the words of the place where a value was given.

A value may come from a flag, and then the person has never seen the setting's name: the message begins with the flag, and tells
the name for a file. For any other place the message keeps the setting's name and says where the value came from. It also says
what the setting allows, from the pydantic field that enforces it; descriptions of settings say the same.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final, Literal, get_args, get_origin, get_type_hints

import msgspec
from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from atoll.base.errors import SettingsError
from atoll.protocol.settings import BOUNDS, ProtocolSettings
from atoll.settings.sections import NamesPlace

_SHOWS: Final = "`atoll config` shows every value and where it comes from"
_LISTS: Final = "`atoll config` lists what exists"
_NO_CHOICE: Final = "there is no such choice"
_OUT_OF_RANGE: Final = ("greater_than", "greater_than_equal", "less_than", "less_than_equal")
_OF_KIND: Final = ("_parsing", "_parsing_size", "_type", "_from_float", "finite_number")
"""Ends of pydantic's names for a value that is not of a setting's kind."""
_WORDS: Final = {bool: "true or false", int: "an integer", float: "a number", str: "text", Path: "a path"}
_BOUNDS: Final = {"ge": "at least", "gt": "above", "le": "at most", "lt": "below"}


def with_origin(error: SettingsError, origins: Mapping[str, str]) -> SettingsError:
    """Return the error of one setting (`SettingsError.setting`) with the place that its value came from; any other as it is."""
    name, origin = error.setting, origins.get(error.setting)
    if origin is None:
        return error
    got = origin if error.got is None else f"{error.got} from {origin}"
    what, todo = error.what, error.todo
    if origin.startswith("--") and " " not in origin:  # a flag with a name of its own, and not `--set a.b`
        for known in (f"setting {name}", name, name.rpartition(".")[2]):
            if what.startswith(f"{known} "):
                what = f"{origin} {what.removeprefix(f'{known} ')}"
                break
        todo = f"correct {origin}" if origin == f"--{name}" else f"correct {origin}, which sets {name}"
    return SettingsError(what, got=got, allowed=error.allowed, todo=todo, setting=name)


def section_error(
    error: ValidationError, section: str, kind: type[BaseModel], more_names: Sequence[str] = ()
) -> SettingsError:
    """Return the first validation error of a service's own section of this kind, which has `more_names` beside its fields."""
    first = error.errors(include_url=False)[0]
    name = ".".join((section, *(str(part) for part in first["loc"])))
    if first["type"] == "extra_forbidden":
        return SettingsError.unknown(name, [*more_names, *kind.model_fields], todo=_LISTS)
    return _value_error(name, first, _describe_value(first["input"], str), field_at(kind, first["loc"]))


def validation_error(error: ValidationError, origins: Mapping[str, str], kind: type[BaseModel]) -> SettingsError:
    """Return the first validation error of all settings as one message that names where the value came from."""
    first = error.errors(include_url=False)[0]
    name = ".".join(str(part) for part in first["loc"])
    near = (one for one in origins if one.startswith(f"{name}.") or name.startswith(f"{one}."))
    origin = origins.get(name) or origins.get(next(near, ""), "a default")
    if first["type"] == "extra_forbidden":
        above = field_at(kind, first["loc"][:-1])
        table = kind if above is None else above.annotation
        names = list(table.model_fields) if isinstance(table, type) and issubclass(table, BaseModel) else []
        return with_origin(SettingsError.unknown(name, names, todo=_LISTS), {name: origin})
    wrong = _value_error(name, first, _describe_value(first["input"]), field_at(kind, first["loc"]))
    return with_origin(wrong, {name: origin})


def _describe_value(value: object, written: Callable[[object], str] = repr) -> str:
    """Return a refused value as a person may read it: of a table the names, of a list how many. The rest may be a secret."""
    if isinstance(value, Mapping):
        return f"a table of {', '.join(map(str, value))}" if value else "an empty table"
    if isinstance(value, list | tuple):
        return f"a list of {len(value)}"
    if isinstance(value, str) and value.lstrip().startswith(("[", "{")):
        return "a list or a table, as text"
    return written(value)


def _value_error(name: str, first: ErrorDetails, got: str, field: FieldInfo | None) -> SettingsError:
    kind, what, taken = first["type"], first["msg"].removeprefix("Value error, "), None
    if kind == "literal_error":
        what, taken = f"is wrong: {_NO_CHOICE}", first["ctx"]["expected"].replace(" or ", ", ").replace("'", "")
    elif kind in _OUT_OF_RANGE and field is not None:
        what, taken = "is out of range", describe_allowed(field)
    elif kind.endswith(_OF_KIND) and field is not None:
        word, bounds = describe_choices(field.annotation), describe_bounds(field)
        own = describe_allowed(field)  # words of its own say more than its kind
        what = f"is wrong: not {word}"
        taken = own if own not in (word, bounds) else ", ".join(filter(None, (word, bounds)))
    else:
        what, taken = f"is wrong: {what}", None if field is None else field.description
    return SettingsError(f"setting {name} {what}", got=got, allowed=taken, todo=_SHOWS, setting=name)


def protocol_error(error: msgspec.ValidationError, value: object) -> SettingsError:
    """Return what is wrong in the table `protocol`."""
    said = str(error)
    if "unknown field" in said:
        name = f"protocol.{said.rpartition('field `')[2].rstrip('`')}"
        return SettingsError.unknown(name, ProtocolSettings.__struct_fields__, todo=_LISTS)
    if not isinstance(value, Mapping):
        return SettingsError(
            "setting protocol is wrong: not a table", allowed="a table", todo=_SHOWS, setting="protocol"
        )
    name = said.rpartition("$.")[2].rstrip("`")
    kind = get_type_hints(ProtocolSettings).get(name)
    is_choice = get_origin(kind) is Literal
    word = describe_choices(kind)
    return SettingsError(
        f"setting protocol.{name} is wrong: {_NO_CHOICE if is_choice else f'not {word}'}",
        got=_describe_value(value.get(name)),
        allowed=", ".join(filter(None, (word, protocol_range(name)))),
        todo=_SHOWS,
        setting=f"protocol.{name}",
    )


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


def describe_allowed(field: FieldInfo) -> str:
    """Return what a field allows: its own words, its bounds, its choices, or its kind."""
    if any(isinstance(mark, NamesPlace) for mark in field.metadata):
        return "a folder or a URL"
    return field.description or describe_bounds(field) or describe_choices(field.annotation)


def describe_bounds(field: FieldInfo) -> str:
    """Return the bounds of a field, empty where it has none."""
    return ", ".join(
        f"{word} {format_bound(getattr(rule, name))}"
        for rule in field.metadata
        for name, word in _BOUNDS.items()
        if hasattr(rule, name)
    )


def protocol_range(name: str) -> str:
    """Return the range of a setting of the protocol, as `ProtocolSettings.check` enforces it; empty where it has none."""
    within = BOUNDS.get(name)
    if within is None:
        return ""
    high = f"protocol.{within.high}" if isinstance(within.high, str) else format_bound(within.high)
    return f"{format_bound(within.low)} to {high}"


def describe_choices(kind: object) -> str:
    """Return the members of a literal type, or a word for any other."""
    parts = get_args(kind)
    if get_origin(kind) is Literal:
        return ", ".join(str(choice) for choice in parts)
    if get_origin(kind) is dict:
        return "a table"
    if get_origin(kind) is tuple:
        inner = describe_choices(parts[0])
        lists = {"a path": "a list of paths", "text": "a list of texts", "a table": "a list of tables"}
        return lists.get(inner, f"a list of {inner}")
    if isinstance(kind, type):
        return _WORDS.get(kind, "a table")
    return next((describe_choices(part) for part in parts if part is not type(None)), "a table")


def format_bound(value: float) -> str:
    """Return a bound in digits, a large power of two as one."""
    if isinstance(value, int) and value >= 1 << 20 and value & (value - 1) == 0:
        return f"2^{value.bit_length() - 1}"
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:g}" if 0.0 < value < 1e-3 or value >= 1e6 else f"{value:,.10g}"
