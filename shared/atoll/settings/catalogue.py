"""The catalogue of settings: name, default, what is allowed, what it means; read from the classes that enforce it.

Meanings are those of the classes' `Attributes:` sections. The classes of the sections that the kernel only carries come
from the installed services, by the entry-point group `atoll.sections`; of a service that cannot be loaded here nothing is
told. The JSON schema is pydantic's own, with the protocol's table (a msgspec struct) and these descriptions.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, Final, get_origin

import msgspec
from pydantic import BaseModel
from pydantic.json_schema import GenerateJsonSchema, JsonSchemaValue
from pydantic_core import core_schema

from atoll.base.docstrings import attributes
from atoll.codec import FORMATS
from atoll.protocol.settings import OUTER_ALLOWED, ProtocolSettings
from atoll.settings import Settings, load, variable
from atoll.settings.errors import describe_allowed, describe_choices, protocol_range

SECTIONS: Final = "atoll.sections"
_FORMATS: Final = ", ".join(FORMATS)
_NAMED: Final = {"codec_up": _FORMATS, "codec_down": _FORMATS, "outer": OUTER_ALLOWED}
"""The values allowed for names that other rooms give a meaning to: the type in the protocol room is a text."""


@dataclass(frozen=True)
class Setting:
    """One setting: its dotted name, and its default (as JSON), what is allowed, and its meaning."""

    name: str
    default: str
    allowed: str
    meaning: str

    @property
    def section(self) -> str:
        """Return the table that holds it; the top of the file is the empty one."""
        return self.name.rpartition(".")[0]

    @property
    def variable(self) -> str:
        """Return its environment variable."""
        return variable(self.name)


def carried_sections() -> dict[str, type[BaseModel]]:
    """Return the sections that the kernel only carries, by the class of the service that reads them."""
    found: dict[str, type[BaseModel]] = {}
    for point in sorted(entry_points(group=SECTIONS), key=lambda one: one.name):
        try:
            found[point.name] = point.load()
        except ImportError:  # its extra is not installed, so nobody here can use the section
            continue
    return found


def every_setting() -> list[Setting]:
    """Return every setting there is, in the order of the classes."""
    effective = load(environment={}).settings
    told, services = attributes(Settings.__doc__), carried_sections()
    found: list[Setting] = []
    for name, field in Settings.model_fields.items():
        if name in services:
            found += _model_settings(name, services[name], dict(getattr(effective, name)))
        elif isinstance(field.default, ProtocolSettings):
            found += _protocol_settings(name)
        elif isinstance(field.default, BaseModel):
            found += _model_settings(name, type(field.default), {})
        elif get_origin(field.annotation) is not dict:
            found.append(Setting(name, as_json(field.default), describe_allowed(field), told.get(name, "")))
    return found


def as_json(value: object) -> str:
    """Return a value as JSON, "none" for None."""
    return "none" if value is None else json.dumps(value, default=_as_builtin, ensure_ascii=False)


def _model_settings(section: str, kind: type[BaseModel], values: Mapping[str, Any]) -> Iterator[Setting]:
    """Yield the settings of one pydantic table, and of the tables inside it.

    `values` are those that its service completes the empty table to, in their order; a field that is not among them is no
    setting, because it follows from something else.
    """
    told = {name: text for one in reversed(kind.__mro__) for name, text in attributes(one.__doc__).items()}
    for name in values or kind.model_fields:
        field = kind.model_fields[name]
        if isinstance(field.default, BaseModel):
            yield from _model_settings(f"{section}.{name}", type(field.default), {})
            continue
        default = values.get(name)
        if name not in values and not field.is_required():
            default = field.get_default(call_default_factory=True)
        yield Setting(f"{section}.{name}", as_json(default), describe_allowed(field), told.get(name, ""))


def _protocol_settings(section: str) -> Iterator[Setting]:
    told = attributes(ProtocolSettings.__doc__)
    for field in msgspec.structs.fields(ProtocolSettings):
        taken = protocol_range(field.name) or _NAMED.get(field.name) or describe_choices(field.type)
        yield Setting(f"{section}.{field.name}", as_json(field.default), taken, told.get(field.name, ""))


def _as_builtin(value: object) -> object:
    return str(value) if isinstance(value, Path) else list(value)  # type: ignore[call-overload]


class _WithStructs(GenerateJsonSchema):
    def is_instance_schema(self, schema: core_schema.IsInstanceSchema) -> JsonSchemaValue:
        """Return msgspec's schema for a struct."""
        if schema["cls"] is ProtocolSettings:
            (_,), definitions = msgspec.json.schema_components([ProtocolSettings])
            return dict(definitions[ProtocolSettings.__name__])
        return super().is_instance_schema(schema)

    def encode_default(self, dft: object) -> Any:  # noqa: ANN401  (any JSON value)
        """Return a struct's default as the table that it is."""
        return msgspec.to_builtins(dft) if isinstance(dft, ProtocolSettings) else super().encode_default(dft)


def settings_schema() -> dict[str, Any]:
    """Return the JSON schema (draft 2020-12) of everything a process of Atoll can be told."""
    schema = Settings.model_json_schema(schema_generator=_WithStructs)
    for setting in every_setting():
        _schema_at(schema, setting.name)["description"] = (
            f"{setting.meaning} Allowed: {setting.allowed}. {setting.variable}"
        )
    return {"$schema": _WithStructs.schema_dialect, **schema}


def _schema_at(schema: dict[str, Any], name: str) -> dict[str, Any]:
    here = schema
    for key in name.split("."):
        here = here.setdefault("properties", {}).setdefault(key, {})
        if "$ref" in here:
            here = schema["$defs"][here["$ref"].rpartition("/")[2]]
    return here
