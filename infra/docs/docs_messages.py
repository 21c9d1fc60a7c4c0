"""`reference/{subjects,messages,taps}.md`, `asyncapi.json` and `schemas/`: what travels, from the code that sends it."""

from __future__ import annotations

import ast
import importlib
import inspect
import json
import pkgutil
from types import ModuleType
from typing import Any

import msgspec
from docs_api import markdown
from docs_claims import ROOTS

import atoll.wire
import atoll.wire.subjects as subjects_module
from atoll.base.docstrings import summary
from atoll.run.taps import SIGNATURE_NOTE, TAPS, TAPS_VERSION, asyncapi, json_schemas, schema_name

CARRIED_BY = {root.schema.__name__: root.where for root in ROOTS if root.schema.__module__.startswith("atoll.wire.")}
"""The subject of each message; every other struct travels inside one of these."""


def messages() -> dict[str, type[msgspec.Struct]]:
    """Return every struct that is defined in `atoll.wire`, by name."""
    found: dict[str, type[msgspec.Struct]] = {}
    for module in _modules(atoll.wire):
        for name, value in vars(module).items():
            is_own = (
                inspect.isclass(value) and issubclass(value, msgspec.Struct) and value.__module__ == module.__name__
            )
            if is_own and not name.startswith("_"):
                found[name] = value
    return dict(sorted(found.items()))


def _modules(package: ModuleType) -> list[ModuleType]:
    names = [package.__name__, *(f"{package.__name__}.{info.name}" for info in pkgutil.iter_modules(package.__path__))]
    return [importlib.import_module(name) for name in names]


def schemas() -> dict[str, str]:
    """Return the JSON Schema of every message as a file's text, by file name."""
    return {
        f"{name}.json": json.dumps({"$schema": DRAFT, **msgspec.json.schema(kind)}, indent=2) + "\n"
        for name, kind in messages().items()
    }


DRAFT = "https://json-schema.org/draft/2020-12/schema"


def taps() -> dict[str, str]:
    """Return the page of the taps, their AsyncAPI document, and a JSON Schema of each kind of message, by file name."""
    schemas = {f"schemas/taps/{kind}.json": json.dumps(told, indent=2) + "\n" for kind, told in json_schemas().items()}
    rows = [
        f"| `{tap.kind}` | `{tap.subject}` | {tap.about} | [{schema_name(tap)}](schemas/taps/{tap.kind}.json) |"
        for tap in TAPS
    ]
    table = "\n".join(["| kind | subject below `atoll.<run>.tap.` | what it is | schema |", "|---|---|---|---|", *rows])
    text = f"# Taps\n\n{TAPS_INTRODUCTION}\n\n{table}\n"
    return {"taps.md": text, "asyncapi.json": json.dumps(asyncapi(), indent=2) + "\n", **schemas}


TAPS_INTRODUCTION = f"""\
Version {TAPS_VERSION}. What a run stores is said again on its taps, with its JSON and without tensors; nobody can write there.
[asyncapi.json](asyncapi.json) is the AsyncAPI 3 document of all kinds, complete in itself; `atoll tap --schema` prints it.
The schemas in the table are of one kind each. All are generated from the classes with which Atoll reads and writes.
{SIGNATURE_NOTE} [Tap a run](../how-to/tap-a-run.md) shows how."""


def page() -> str:
    """Return the page of all messages."""
    parts = ["# Messages", INTRODUCTION]
    for name, kind in messages().items():
        subject = f"On {CARRIED_BY[name]}. " if name in CARRIED_BY else ""
        parts += [f"## {name}", markdown(kind.__doc__), f"{subject}[JSON Schema](schemas/{name}.json)", _fields(kind)]
    return "\n\n".join(parts) + "\n"


INTRODUCTION = """\
Every message is a bounded JSON object, decoded strictly: an unknown type, a missing field, too long a text or another
`schema` number is refused. The schemas below are generated from the code that encodes and decodes. Times are seconds since
the Unix epoch by the sender's clock; they are for people, no rule reads them. [Subjects](subjects.md)
says where each one goes."""


def _fields(kind: type[msgspec.Struct]) -> str:
    properties = msgspec.json.schema(kind)["$defs"][kind.__name__]
    shapes = properties.get("properties") or dict(
        zip(kind.__struct_fields__, properties.get("prefixItems", ()), strict=True)
    )
    required = set(properties.get("required", shapes))
    rows = [
        f"| `{name}` | {_kind(shape)} | {'' if name in required else _default(shape)} |"
        for name, shape in shapes.items()
    ]
    return "\n".join(["| field | type | default |", "|---|---|---|", *rows])


def _default(shape: dict[str, Any]) -> str:
    return f"`{json.dumps(shape['default'])}`" if "default" in shape else "absent"


def _kind(shape: dict[str, Any]) -> str:
    if "$ref" in shape:
        name = shape["$ref"].rpartition("/")[2]
        return f"[{name}](#{name.lower()})" if name in messages() else name
    if "anyOf" in shape:
        return " or ".join(_kind(inner) for inner in shape["anyOf"])
    kind = str(shape.get("type", "any"))
    if kind == "array" and "items" in shape and shape["items"]:
        kind = f"list of {_kind(shape['items'])}"
    bounds = {"minimum": "at least", "maximum": "at most", "maxLength": "length at most", "maxItems": "length at most"}
    told = [f"{word} {shape[key]:,}" for key, word in bounds.items() if key in shape]
    return f"{kind} ({', '.join(told)})" if told else kind


def subjects_page() -> str:
    """Return the page of all subjects, in the words of the module that makes them."""
    tree = ast.parse(inspect.getsource(subjects_module))
    [kind] = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "Subjects"]
    makers = [node for node in kind.body if isinstance(node, ast.FunctionDef) and not node.name.startswith("_")]
    rows = [f"| `{node.name}` | {_pattern(node)} | {summary(ast.get_docstring(node))} |" for node in makers]
    return (
        "\n\n".join(
            [
                "# Subjects",
                markdown(subjects_module.__doc__),
                "## Made by `Subjects`",
                "\n".join(["| method | subject | what it is |", "|---|---|---|", *rows]),
            ]
        )
        + "\n"
    )


def _pattern(maker: ast.FunctionDef) -> str:
    returned = [node.value for node in ast.walk(maker) if isinstance(node, ast.Return) and node.value is not None]
    if len(returned) != 1 or not isinstance(returned[0], ast.JoinedStr):
        return "several"
    text = ast.unparse(returned[0])[2:-1].replace("{self.prefix}", "atoll.{run}").replace("{self.run}", "{run}")
    return f"`{text.replace('{', '<').replace('}', '>')}`"
