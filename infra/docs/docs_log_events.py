"""`reference/log-events.md`: every event that a process may log, found in the source: its level, its fields and its place."""

from __future__ import annotations

import ast
from dataclasses import dataclass
from pathlib import Path

from docs_api import modules

from atoll.base.docstrings import summary

LEVELS = ("debug", "info", "warning", "error", "exception", "critical")


@dataclass(frozen=True, order=True)
class LogEvent:
    """One call of the logger: the event's name, its level, its fields, where it is, and what the function around it does."""

    event: str
    level: str
    fields: tuple[str, ...]
    module: str
    meaning: str


def every_event(root: Path) -> list[LogEvent]:
    """Return every log event of the shared package and the services, by name."""
    found: set[LogEvent] = set()
    for module, path in modules(root).items():
        tree = ast.parse(path.read_text(encoding="utf-8"))
        _visit(tree, module, summary(ast.get_docstring(tree)), found)
    return sorted(found)


def _visit(node: ast.AST, module: str, meaning: str, found: set[LogEvent]) -> None:
    for child in ast.iter_child_nodes(node):
        inner = meaning
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            inner = summary(ast.get_docstring(child)) or meaning
        if isinstance(child, ast.Call) and (event := _event(child, module, inner)):
            found.add(event)
        _visit(child, module, inner, found)


def _event(call: ast.Call, module: str, meaning: str) -> LogEvent | None:
    """Return what a call logs: a method named for a level, of something called a log, with a dotted name first."""
    function = call.func
    if (
        not isinstance(function, ast.Attribute)
        or function.attr not in LEVELS
        or "log" not in ast.unparse(function.value)
    ):
        return None
    name = call.args[0] if call.args else None
    if not isinstance(name, ast.Constant) or not isinstance(name.value, str):
        return None
    fields = tuple(keyword.arg or "…" for keyword in call.keywords)
    return LogEvent(name.value, function.attr, fields, module, meaning)


def page(root: Path) -> str:
    """Return the page."""
    rows = [
        f"| `{event.event}` | {event.level} | {_names(event.fields)} | {_cell(event.meaning)} | `{event.module}` |"
        for event in every_event(root)
    ]
    return (
        "\n\n".join(
            [
                "# Log events",
                INTRODUCTION,
                "\n".join(
                    [
                        "| event | level | fields | logged by a function that does this | module |",
                        "|---|---|---|---|---|",
                        *rows,
                    ]
                ),
            ]
        )
        + "\n"
    )


def _names(fields: tuple[str, ...]) -> str:
    return ", ".join(f"`{name}`" for name in fields)


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;")


INTRODUCTION = """\
A process logs to standard error, as JSON unless that is a terminal (`log.format`). Under `atoll up` every process has a file
in the run's folder, `logs/NAME.jsonl`. Every line has `event`, `level`, `timestamp` and what the process is (`role`, `run`,
`learner` or `shard`); the table lists what each event adds. `…` stands for fields that are put together at run time."""
