"""The taps as an AsyncAPI 3 document and as JSON Schemas, from the code that reads and writes the messages.

A reader in another language takes these in place of our classes. The document is complete in itself: its schemas are under
`components/schemas`, in the dialect that AsyncAPI 3 prescribes (a superset of JSON Schema draft 7). `json_schemas` has one
document for each kind of message, in draft 2020-12, for readers that know which kind they have.

What a schema cannot say: a message of a locked run has its signature behind it, after a line break (`SIGNATURE_NOTE`).
"""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from typing import Any, Final

import msgspec

from atoll.base.quantities import UNSEEN_BEYOND
from atoll.bus.addresses import PORT
from atoll.run.taps import TAPS, TAPS_VERSION, TapKind
from atoll.wire.version import SCHEMA_NEWEST, SCHEMA_OLDEST

DRAFT: Final = "https://json-schema.org/draft/2020-12/schema"
SIGNATURE_NOTE: Final = (
    "In a locked run every message but events ends in a line break and `signed:` with a signature. "
    "Take off what follows the last line break; the rest is the JSON."
)
_COMPONENTS: Final = "#/components/schemas/{name}"
_LEVELS: Final = {
    "run": "The id of the run.",
    "fragment": "The number of a fragment, from 0.",
    "shard": "The number of a synchronizer shard, from 0.",
    "learner": "The id of a learner.",
    "process": "The name of a synchronizer process.",
    "who": "Who wrote the event: a learner, `shard-<number>`, a synchronizer process, or `evaluator`.",
}
_HEADERS: Final = {
    "Nats-Stream": "The stream that stored the message.",
    "Nats-Subject": "The subject on which it was stored.",
    "Nats-Sequence": "Its number in the stream.",
    "Nats-Time-Stamp": "When the broker stored it (RFC 3339, UTC).",
    "Nats-Msg-Id": "The id by which the broker knows it again.",
    "Atoll-Info": "A few numbers and short texts of the message, as a JSON object of at most 4,096 bytes.",
}


def asyncapi() -> dict[str, Any]:
    """Return the AsyncAPI 3 document of the taps of a run."""
    return {
        "asyncapi": "3.0.0",
        "info": {
            "title": "Taps of an Atoll run",
            "version": f"{TAPS_VERSION}.0.0",
            "description": (
                "What a run of Atoll stores, as it happens: read-only, without tensors. Fields and kinds may be added in any "
                f"release, so pass over those that you do not know. Wire versions {SCHEMA_OLDEST} to {SCHEMA_NEWEST} (`schema` "
                f"of each message). {SIGNATURE_NOTE}"
            ),
            "license": {"name": "Apache 2.0", "url": "https://www.apache.org/licenses/LICENSE-2.0"},
        },
        "defaultContentType": "application/json",
        "servers": {
            "broker": {
                "host": "{host}:{port}",
                "protocol": "nats",
                "description": "The home broker of the run. A further broker (`bulk`) has the heads of its own fragments.",
                "variables": {"host": {"default": "127.0.0.1"}, "port": {"default": str(PORT)}},
            }
        },
        "channels": {tap.kind: _channel(tap) for tap in TAPS},
        "operations": {
            f"read_{tap.kind}": {
                "action": "receive",
                "channel": {"$ref": f"#/channels/{tap.kind}"},
                "summary": tap.about,
            }
            for tap in TAPS
        },
        "components": {
            "messages": {tap.kind: _message(tap) for tap in TAPS},
            "schemas": {name: _draft_7(schema) for name, schema in schemas(_COMPONENTS).items()},
        },
    }


def json_schemas() -> dict[str, dict[str, Any]]:
    """Return a JSON Schema of each kind of message, by kind."""
    all_of_them = schemas("#/$defs/{name}")
    return {
        tap.kind: {
            "$schema": DRAFT,
            "title": tap.kind,
            "description": tap.about,
            "$ref": f"#/$defs/{schema_name(tap)}",
            "$defs": {name: all_of_them[name] for name in sorted(_needed(schema_name(tap), all_of_them))},
        }
        for tap in TAPS
    }


def schema_name(tap: TapKind) -> str:
    """Return under which name the schema of a kind of message stands."""
    return tap.message.__name__ if tap.fields is None else f"{tap.kind.capitalize()}Event"


def schemas(ref_template: str) -> dict[str, dict[str, Any]]:
    """Return all schemas of messages and of what is in them, by name; references are made by `ref_template`."""
    kinds = [*{tap.message for tap in TAPS}, *{tap.fields for tap in TAPS if tap.fields is not None}]
    _, found = msgspec.json.schema_components(sorted(kinds, key=lambda kind: kind.__name__), ref_template=ref_template)
    # In the dialect of schemas a pattern cannot name all that ours refuses.
    components: dict[str, dict[str, Any]] = json.loads(json.dumps(found).replace(json.dumps(UNSEEN_BEYOND)[1:-1], ""))
    for schema in components.values():
        if "schema" in (properties := schema.get("properties", {})):
            properties["schema"] |= {"minimum": SCHEMA_OLDEST, "maximum": SCHEMA_NEWEST}
    envelope = components.pop("Event")
    fields_of_events = {}
    for tap in TAPS:
        if tap.fields is None:
            continue
        fields_of_events[f"{tap.kind.capitalize()}Fields"] = components.pop(tap.fields.__name__)
        event = copy.deepcopy(envelope)
        event |= {"title": schema_name(tap), "description": tap.about}
        event["properties"]["kind"] = {"const": tap.kind}
        event["properties"]["fields"] = {"$ref": ref_template.format(name=f"{tap.kind.capitalize()}Fields")}
        fields_of_events[schema_name(tap)] = event
    return dict(sorted((components | fields_of_events).items()))


def _channel(tap: TapKind) -> dict[str, Any]:
    levels = ["run", *(level[1:-1] for level in tap.subject.split(".") if level.startswith("<"))]
    return {
        "address": f"atoll.{{run}}.tap.{tap.subject}".replace("<", "{").replace(">", "}"),
        "description": tap.about,
        "parameters": {level: {"description": _LEVELS[level]} for level in levels},
        "messages": {tap.kind: {"$ref": f"#/components/messages/{tap.kind}"}},
    }


def _message(tap: TapKind) -> dict[str, Any]:
    headers = {name: {"type": "string", "description": about} for name, about in _HEADERS.items()}
    return {
        "name": tap.kind,
        "title": schema_name(tap),
        "summary": tap.about,
        "contentType": "application/json",
        "headers": {
            "type": "object",
            "properties": headers,
            "required": ["Nats-Stream", "Nats-Subject", "Nats-Sequence"],
        },
        "payload": {"$ref": _COMPONENTS.format(name=schema_name(tap))},
    }


def _needed(name: str, found: Mapping[str, dict[str, Any]]) -> set[str]:
    """Return the names of a schema and of all that it refers to."""
    needed: set[str] = set()
    waiting = [name]
    while waiting:
        if (one := waiting.pop()) not in needed:
            needed.add(one)
            waiting += [reference.rpartition("/")[2] for reference in _references(found[one])]
    return needed


def _references(node: object) -> list[str]:
    if isinstance(node, dict):
        own = [node["$ref"]] if "$ref" in node else []
        return own + [one for inner in node.values() for one in _references(inner)]
    return [one for inner in node for one in _references(inner)] if isinstance(node, list) else []


def _draft_7(node: Any) -> Any:  # noqa: ANN401  (a piece of JSON)
    """Return a schema in draft 7, where the first items of an array are written in another way."""
    if isinstance(node, list):
        return [_draft_7(inner) for inner in node]
    if not isinstance(node, dict):
        return node
    made = {key: _draft_7(inner) for key, inner in node.items() if key not in ("prefixItems", "items")}
    if "prefixItems" in node:
        made["items"] = _draft_7(node["prefixItems"])
        if "items" in node:
            made["additionalItems"] = _draft_7(node["items"])
    elif "items" in node:
        made["items"] = _draft_7(node["items"])
    return made
