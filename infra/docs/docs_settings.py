"""`reference/settings.md`: every setting with its default, what is allowed, what it means and what its default follows from.

Names, types and bounds come from the settings classes, descriptions from their `Attributes:` sections. What a default
follows from is written by hand in `docs/reference/defaults-follow-from.toml`: a page and half a sentence for a setting, or
for a whole section.
"""

from __future__ import annotations

import ast
import inspect
import json
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import msgspec
from docs_docstrings import attributes, summary
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from atoll.protocol import settings as protocol_settings
from atoll.protocol.settings import ProtocolSettings
from atoll.settings import Settings, load
from atoll_learner.model_settings import ModelSettings
from atoll_learner.train_settings import TrainSettings
from atoll_simulator.scenario import Scenario

ORIGINS = Path("docs/reference/defaults-follow-from.toml")
CARRIED: dict[str, type[BaseModel]] = {"model": ModelSettings, "train": TrainSettings, "sim": Scenario}
"""Sections that the shared package only carries, by the class of the service that reads them."""
FROM_DATA = "model.vocab"
SIZE_ALLOWED = "xs, s, m, l, or a depth from 1 to 64"
SIZE_MEANING = (
    "The one dial of the model, from which width, heads, ffn and context follow; each can also be given by itself."
)


@dataclass(frozen=True)
class Setting:
    """One setting: its dotted name, and its default, bounds and meaning as texts."""

    name: str
    default: str
    allowed: str
    meaning: str

    @property
    def section(self) -> str:
        """Return the table that holds it; the top of the file is the empty one."""
        return self.name.rpartition(".")[0]


def every_setting() -> list[Setting]:
    """Return every setting there is, in the order of the classes."""
    effective = load(environment={}).settings
    told = attributes(Settings.__doc__)
    found: list[Setting] = []
    for name, field in Settings.model_fields.items():
        if name in CARRIED:
            found += _of_model(name, CARRIED[name], dict(getattr(effective, name)))
        elif isinstance(field.default, ProtocolSettings):
            found += _of_protocol(name)
        elif isinstance(field.default, BaseModel):
            found += _of_model(name, type(field.default), {})
        else:
            found.append(Setting(name, _value(field.default), _bounds(field), told.get(name, "")))
    return [setting for setting in found if setting.name != FROM_DATA]


def _of_model(section: str, kind: type[BaseModel], values: dict[str, Any]) -> Iterator[Setting]:
    """Yield the settings of one pydantic table, and of the tables inside it."""
    told = attributes(kind.__doc__)
    if "size" in values:
        yield Setting(f"{section}.size", _value(values["size"]), SIZE_ALLOWED, SIZE_MEANING)
    for name, field in kind.model_fields.items():
        if isinstance(field.default, BaseModel):
            yield from _of_model(f"{section}.{name}", type(field.default), {})
            continue
        default = values.get(name, None if field.is_required() else field.get_default(call_default_factory=True))
        yield Setting(f"{section}.{name}", _value(default), _bounds(field), told.get(name, ""))


def _of_protocol(section: str) -> Iterator[Setting]:
    """Yield what a run agrees on; its bounds are those that `ProtocolSettings.check` enforces."""
    told, bounds = attributes(ProtocolSettings.__doc__), _enforced()
    for field in msgspec.structs.fields(ProtocolSettings):
        allowed = bounds.get(field.name) or _choices(field.type)
        yield Setting(f"{section}.{field.name}", _value(field.default), allowed, told.get(field.name, ""))


def _enforced() -> dict[str, str]:
    """Return the bounds in the calls `_within(name, value, low, high)` of the protocol settings."""
    names = vars(protocol_settings)
    found = {}
    for node in ast.walk(ast.parse(inspect.getsource(protocol_settings))):
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "_within":
            name, _, low, high, *_ = node.args
            if isinstance(name, ast.Constant):
                found[str(name.value)] = f"{_bound(low, names)} to {_bound(high, names)}"
    return found


def _bound(node: ast.expr, names: dict[str, Any]) -> str:
    """Return a bound as a person reads it: a number, or the setting that it is."""
    if isinstance(node, ast.Name):
        return _number(names[node.id]) if node.id in names else "the number of learners"
    if isinstance(node, ast.Constant):
        return _number(node.value)
    if isinstance(node, ast.BinOp):
        return ast.unparse(node).replace("1 << ", "2^")
    return "`protocol." + ast.unparse(node).removeprefix("float(").removesuffix(")").removeprefix("self.") + "`"


def _number(value: Any) -> str:  # noqa: ANN401  (an int or a float)
    """Return a bound in digits, a large power of two as one."""
    if isinstance(value, int) and value >= 1 << 20 and value & (value - 1) == 0:
        return f"2^{value.bit_length() - 1}"
    return (
        f"{value:,}" if isinstance(value, int) else f"{value:g}" if value < 1e-3 or value >= 1e6 else f"{value:,.10g}"
    )


def _bounds(field: FieldInfo) -> str:
    """Return what a pydantic field allows."""
    words = {"ge": "at least", "gt": "above", "le": "at most", "lt": "below"}
    told = [
        f"{words[name]} {_number(getattr(rule, name))}"
        for rule in field.metadata
        for name in words
        if hasattr(rule, name)
    ]
    return ", ".join(told) or _choices(field.annotation)


def _choices(kind: object) -> str:
    """Return the members of a literal type, or a word for any other."""
    if get_origin(kind) is Literal:
        return ", ".join(str(choice) for choice in get_args(kind))
    if get_origin(kind) in (dict, tuple):
        return "a table" if get_origin(kind) is dict else "a list of tables"
    words = {bool: "true or false", int: "an integer", float: "a number", str: "text", Path: "a path"}
    for part in (kind, *get_args(kind)):
        if isinstance(part, type) and part in words:
            return words[part]
    return "a table"


def _value(value: object) -> str:
    """Return a default as the file would have it."""
    if value is None:
        return "none"
    if isinstance(value, Path):
        return json.dumps(str(value))
    return json.dumps(value, default=list) if not isinstance(value, tuple) else json.dumps(list(value))


def origins(root: Path) -> dict[str, tuple[str, str]]:
    """Return by setting, or by `section.*`, the page its default follows from (or none) and half a sentence."""
    told = tomllib.loads((root / ORIGINS).read_text(encoding="utf-8"))
    return {name: (entry.get("page", ""), entry.get("why", "")) for name, entry in told.items()}


def origin_of(setting: str, known: dict[str, tuple[str, str]]) -> tuple[str, str]:
    """Return the origin of one setting: its own, else that of the nearest section.

    Raises:
        KeyError: nothing is written about it.
    """
    if setting in known:
        return known[setting]
    section = setting
    while section:
        section = section.rpartition(".")[0]
        if f"{section}.*" in known:
            return known[f"{section}.*"]
    return known[setting]


def page(root: Path) -> str:
    """Return the page of all settings, with links as a file in `docs/reference` has them."""
    known = origins(root)
    sections: dict[str, list[Setting]] = {}
    for setting in every_setting():
        sections.setdefault(setting.section, []).append(setting)
    parts = ["# Settings", INTRODUCTION]
    for section, settings in sections.items():
        kind = type(getattr(load(environment={}).settings, section, None)) if section else Settings
        kind = CARRIED.get(section, kind)
        parts += [
            f"## {section or 'top of the file'}",
            summary(kind.__doc__) if kind.__module__.startswith("atoll") else "",
        ]
        parts.append("\n".join([HEADER, *(_row(setting, *origin_of(setting.name, known)) for setting in settings)]))
    return "\n\n".join(part for part in parts if part) + "\n"


INTRODUCTION = """\
A value comes from the first of these that has it: `--set a.b=c`, an environment variable `ATOLL_A__B`, the TOML file given
with `--config`, the default below. `atoll up` has some defaults of its own for short runs; `atoll config` prints every value
and where it came from. *Follows from* names the table or the page that a default was chosen by.
[Change a setting](../how-to/configure.md) shows how."""
HEADER = "| setting | default | allowed | meaning | follows from |\n|---|---|---|---|---|"


def _row(setting: Setting, origin: str, why: str) -> str:
    link = f"[{why}]({origin})" if origin else why
    cells = [
        f'<span id="{setting.name}"></span>`{setting.name}`',
        f"`{setting.default}`",
        setting.allowed,
        setting.meaning,
        link,
    ]
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"
