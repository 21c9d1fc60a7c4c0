"""Tables as TOML, and trees as YAML, for files that people read and other programs load.

Both are small on purpose: what we render has texts, numbers, truth values, lists and tables with plain keys, and nothing else.
A text of YAML is quoted unless no reader could take it for anything else ("no", 1.0 and null are not texts there).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

_BARE_KEY: Final = re.compile(r"[A-Za-z0-9_-]+")
_PLAIN: Final = re.compile(r"[A-Za-z/.][A-Za-z0-9_./-]*[A-Za-z0-9/]|[A-Za-z]")
_WORDS: Final = frozenset({"y", "n", "yes", "no", "on", "off", "true", "false", "null", "nan", "inf"})
_STEP: Final = "  "


def toml(tables: Mapping[str, Any]) -> str:
    """Return nested tables as TOML: values first, then a section for each table."""
    return "\n".join(_toml_lines(tables, ())) + "\n"


def _toml_lines(table: Mapping[str, Any], path: tuple[str, ...]) -> Iterator[str]:
    values = {key: value for key, value in table.items() if not isinstance(value, Mapping)}
    if path and (values or not table):
        yield from ("", f"[{'.'.join(_key(part) for part in path)}]")
    for key, value in values.items():
        yield f"{_key(key)} = {_toml_value(value)}"
    for key, value in table.items():
        if isinstance(value, Mapping):
            yield from _toml_lines(value, (*path, key))


def _toml_value(value: object) -> str:
    if isinstance(value, Mapping):
        return (
            f"{{ {', '.join(f'{_key(key)} = {_toml_value(each)}' for key, each in value.items())} }}" if value else "{}"
        )
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_toml_value, value))}]"
    return _text(value) if isinstance(value, str) else repr(value) if isinstance(value, float) else json.dumps(value)


def _key(key: str) -> str:
    return key if _BARE_KEY.fullmatch(key) else _text(key)


def _text(text: str) -> str:
    """Return a text between double quotes; what is not printable is written by its number, which both languages read."""
    return '"' + "".join(one if one.isprintable() and one not in '"\\' else _escape(ord(one)) for one in text) + '"'


def _escape(point: int) -> str:
    return f"\\u{point:04x}" if point <= 0xFFFF else f"\\U{point:08x}"


def yaml(*documents: Mapping[str, Any], head: str = "") -> str:
    """Return documents as YAML in blocks, after lines of comment."""
    lines = [f"# {line}" for line in head.splitlines()]
    for number, document in enumerate(documents):
        lines += ["---"] if number else []
        lines += _yaml_lines(document, "") if document else ["{}"]
    return "\n".join(lines) + "\n"


def _yaml_lines(value: Mapping[str, Any] | Sequence[Any], indent: str) -> Iterator[str]:
    pairs = (
        [(f"{_yaml_key(key)}:", one) for key, one in value.items()]
        if isinstance(value, Mapping)
        else [("-", one) for one in value]
    )
    for lead, one in pairs:
        if isinstance(one, Mapping | list | tuple) and one:
            inner = list(_yaml_lines(one, indent + _STEP))
            if lead == "-":  # the first line of an element stands beside its dash
                yield f"{indent}- {inner[0].lstrip()}"
                yield from inner[1:]
            else:
                yield f"{indent}{lead}"
                yield from inner
        elif isinstance(one, str) and "\n" in one and _is_block(one):
            yield f"{indent}{lead} |"
            yield from (f"{indent}{_STEP}{line}" if line else "" for line in one.removesuffix("\n").split("\n"))
        else:
            yield f"{indent}{lead} {_scalar(one)}"


def _is_block(text: str) -> bool:
    """Return whether a text reads the same as a block of lines: it begins with no blank and has one line end at its end."""
    return (
        text.endswith("\n")
        and not text.endswith("\n\n")
        and not text.startswith((" ", "\n"))
        and all(line == line.rstrip() for line in text.split("\n"))
        and text.replace("\n", "").isprintable()
        and text.isascii()
    )


def _yaml_key(key: str) -> str:
    return str(_scalar(key))


def _scalar(value: object) -> str:
    if value is None:
        return "null"
    if isinstance(value, str):
        return value if _PLAIN.fullmatch(value) and value.lower() not in _WORDS and value[0] != "." else _text(value)
    if isinstance(value, Mapping):
        return "{}"
    if isinstance(value, float):
        return _with_point(repr(value))
    return "[]" if isinstance(value, list | tuple) else json.dumps(value)


def _with_point(number: str) -> str:
    """Return a number with a point: without one, readers of YAML take 1e+16 for a text."""
    digits, e, power = number.partition("e")
    return number if "." in digits else f"{digits}.0{e}{power}"
