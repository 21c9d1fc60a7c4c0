"""`reference/api/`, a page for each package with every public function, class and method; and `reference/log-events.md`.

The source is read, not imported: nothing is executed, and no extra needs to be installed. Public is what has no leading
underscore, in a module that has none.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from atoll.base.docstrings import items, sections, summary

SOURCE_ROOTS = ("shared", "services/learner", "services/synchronizer", "services/simulator", "services/monitor")
Function = ast.FunctionDef | ast.AsyncFunctionDef


def modules(root: Path) -> dict[str, Path]:
    """Return every public module by its dotted name."""
    found = {}
    for source in SOURCE_ROOTS:
        for path in sorted((root / source).rglob("*.py")):
            parts = path.relative_to(root / source).with_suffix("").parts
            name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
            if not any(part.startswith("_") for part in name.split(".")):
                found[name] = path
    return found


def package_of(module: str, known: dict[str, Path]) -> str:
    """Return the package whose page holds `module`: the first two levels, or one where that is a plain module."""
    first_two = ".".join(module.split(".")[:2])
    is_package = first_two in known and known[first_two].name == "__init__.py"
    return first_two if is_package else module.partition(".")[0]


def pages(root: Path) -> dict[str, str]:
    """Return the text of every page by its path under `reference/api`."""
    known = modules(root)
    packages: dict[str, list[str]] = {}
    for module in known:
        packages.setdefault(package_of(module, known), []).append(module)
    found = {f"{package}.md": _package_page(package, names, known) for package, names in packages.items()}
    lines = [f"- [`{package}`]({package}.md): {_first_line(known[package])}" for package in sorted(packages)]
    door = next(
        name
        for name, path in known.items()
        if name.endswith(".join") and "def join(" in path.read_text(encoding="utf-8")
    )
    introduction = INTRODUCTION.format(page=f"{package_of(door, known)}.md#{door}.join")
    found["README.md"] = "# Python API\n\n" + "\n".join([introduction, "", *lines]) + "\n"
    return found


INTRODUCTION = """\
`import atoll` and [`atoll.join`]({page}) are what a training loop needs, and [`atoll.keras`](atoll.keras.md) what `model.fit`
of Keras needs. Everything else is documented because the parts are meant to be read and changed; it may change between
versions."""


def _first_line(path: Path) -> str:
    return summary(ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))))


def _package_page(package: str, names: list[str], known: dict[str, Path]) -> str:
    parts = [f"# `{package}`"]
    for name in sorted(names):
        tree = ast.parse(known[name].read_text(encoding="utf-8"))
        if name != package:
            parts.append(f"## {name}")
        parts.append(_deeper(markdown(ast.get_docstring(tree))))
        for node in public(tree):
            parts += _class(name, node) if isinstance(node, ast.ClassDef) else _function(name, node)
    return "\n\n".join(part for part in parts if part) + "\n"


def public(tree: ast.Module | ast.ClassDef) -> Iterator[ast.ClassDef | Function]:
    """Yield the public classes and functions of a module, or the public methods of a class."""
    for node in tree.body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and not node.name.startswith("_"):
            yield node


def _class(module: str, node: ast.ClassDef) -> list[str]:
    bases = ", ".join(ast.unparse(base) for base in node.bases)
    parts = [_anchor(f"{module}.{node.name}", 3, f"class {node.name}" + (f"({bases})" if bases else ""))]
    parts.append(_deeper(markdown(ast.get_docstring(node))))
    fields = [
        f"- `{ast.unparse(item.target)}`: `{_one_line(item.annotation)}`"
        + (f" = `{_one_line(item.value)}`" if item.value else "")
        for item in node.body
        if isinstance(item, ast.AnnAssign) and not ast.unparse(item.target).startswith("_")
    ]
    parts.append("\n".join(fields))
    for method in public(node):
        if isinstance(method, Function):
            parts += _function(f"{module}.{node.name}", method, level=4)
    return parts


def _function(module: str, node: Function, level: int = 3) -> list[str]:
    decorators = {ast.unparse(decorator) for decorator in node.decorator_list}
    if "overload" in decorators:
        return []
    kind = "property " if decorators & {"property", "cached_property"} else ""
    heading = _anchor(f"{module}.{node.name}", level, f"{kind}{node.name}")
    keyword = "async def" if isinstance(node, ast.AsyncFunctionDef) else "def"
    returns = f" -> {ast.unparse(node.returns)}" if node.returns else ""
    signature = f"```python\n{keyword} {node.name}({_arguments(node.args)}){returns}\n```"
    return [heading, "" if kind else signature, _deeper(markdown(ast.get_docstring(node)))]


def _arguments(arguments: ast.arguments) -> str:
    text = ast.unparse(arguments)
    for own in ("self", "cls"):
        text = text.removeprefix(f"{own}, ") if text.startswith(f"{own}, ") else ("" if text == own else text)
    return text


def _anchor(name: str, level: int, title: str) -> str:
    return f"{'#' * level} `{title}` {{ #{name} }}"


def _deeper(text: str) -> str:
    """Keep headings that a docstring may hold from becoming headings of the page."""
    return "\n".join(f"\\{line}" if line.startswith("#") else line for line in text.split("\n"))


def _one_line(node: ast.expr) -> str:
    text = ast.unparse(node)
    return text if len(text) <= 100 else text[:97] + "..."


def markdown(docstring: str | None) -> str:
    """Return a docstring as Markdown: sections become lists, indented blocks stay code."""
    parts = []
    for heading, lines in sections(docstring or "").items():
        if not heading:
            parts.append("\n".join(_escaped(line) for line in lines).strip())
            continue
        entries = items(lines)
        body = (
            "\n".join(f"- `{name}`: {text}" for name, text in entries)
            if entries
            else "\n".join(line.removeprefix("    ") for line in lines).strip()
        )
        parts.append(f"**{heading}**\n\n{body}")
    return "\n\n".join(part for part in parts if part)


def _escaped(line: str) -> str:
    """Keep what Markdown would take for markup in prose; leave indented code alone."""
    return line if line.startswith("    ") else re.sub(r"(?<!`)<([A-Za-z/][^>`]*)>(?!`)", r"&lt;\1&gt;", line)


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


def log_events_page(root: Path) -> str:
    """Return the page of every event that a process may log, found in the source: its level, its fields and its place."""
    rows = [
        f"| `{event.event}` | {event.level} | {_names(event.fields)} | {_cell(event.meaning)} | `{event.module}` |"
        for event in every_event(root)
    ]
    head = "| event | level | fields | logged by a function that does this | module |\n|---|---|---|---|---|"
    return "\n\n".join(["# Log events", LOG_INTRODUCTION, "\n".join([head, *rows])]) + "\n"


def _names(fields: tuple[str, ...]) -> str:
    return ", ".join(f"`{name}`" for name in fields)


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;")


LOG_INTRODUCTION = """\
A process logs to standard error, as JSON unless that is a terminal (`log.format`). Under `atoll up` every process has a file
in the run's folder, `logs/NAME.jsonl`. Every line has `event`, `level`, `timestamp` and what the process is (`role`, `run`,
`learner` or `shard`); the table lists what each event adds. `…` stands for fields that are put together at run time."""
