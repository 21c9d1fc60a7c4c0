"""The JSON schema of the settings: pydantic's own, with the protocol's table (a msgspec struct) and descriptions."""

from __future__ import annotations

from typing import Any

import msgspec
from pydantic.json_schema import GenerateJsonSchema, JsonSchemaValue
from pydantic_core import core_schema

from atoll.protocol.settings import ProtocolSettings
from atoll.settings import Settings
from atoll.settings.described import every_setting


class _WithStructs(GenerateJsonSchema):
    """Knows msgspec structs, which pydantic takes for opaque instances."""

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
        _place(schema, setting.name)["description"] = (
            f"{setting.meaning} Allowed: {setting.allowed}. {setting.variable}"
        )
    return {"$schema": _WithStructs.schema_dialect, **schema}


def _place(schema: dict[str, Any], name: str) -> dict[str, Any]:
    """Return the schema of the setting with this dotted name; of a section that the kernel only carries it is made here."""
    here = schema
    for key in name.split("."):
        here = here.setdefault("properties", {}).setdefault(key, {})
        if "$ref" in here:
            here = schema["$defs"][here["$ref"].rpartition("/")[2]]
    return here
