"""The JSON schema of the settings: pydantic's own, with the protocol's table, which is a msgspec struct, put in."""

from __future__ import annotations

from typing import Any

import msgspec
from pydantic.json_schema import GenerateJsonSchema, JsonSchemaValue
from pydantic_core import core_schema

from atoll.protocol.settings import ProtocolSettings
from atoll.settings import Settings


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
    return {"$schema": _WithStructs.schema_dialect, **schema}
