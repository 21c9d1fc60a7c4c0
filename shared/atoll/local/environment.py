"""Settings as `ATOLL_…` variables: how `up` configures its children.

Children get the whole resolved configuration and none of the parent's own `ATOLL_…` variables, so a child runs with exactly
what `run.json` holds. Secrets in a broker's URL reach children only; `redacted` removes them for display.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import msgspec

from atoll.settings import PREFIX, Settings, variable


def flat(settings: Settings) -> dict[str, Any]:
    """Return every setting by its dotted name, as JSON values, in the order of the sections."""
    tree = settings.model_dump(mode="json", exclude={"protocol"})
    tree["protocol"] = msgspec.to_builtins(settings.protocol)
    leaves: dict[str, Any] = {}
    for section in Settings.model_fields:
        _collect(tree[section], section, leaves)
    return leaves


def _collect(value: object, name: str, leaves: dict[str, Any]) -> None:
    """Put the leaves of `value` under `name` into `leaves`; an empty table has none."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            _collect(inner, f"{name}.{key}", leaves)
    else:
        leaves[name] = value


def as_text(value: object) -> str:
    """Return a setting as an environment variable or a `--set` writes it; None is empty."""
    if value is None:
        return ""
    return value if isinstance(value, str) else json.dumps(value)


def variables(values: Mapping[str, Any]) -> dict[str, str]:
    """Return dotted settings as environment variables; those without a value are left to their default."""
    return {variable(name): text for name, value in values.items() if (text := as_text(value))}


def without_settings(environment: Mapping[str, str]) -> dict[str, str]:
    """Return `environment` less every variable that is a setting."""
    return {name: text for name, text in environment.items() if not name.startswith(PREFIX)}
