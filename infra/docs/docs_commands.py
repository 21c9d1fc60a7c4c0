"""`reference/commands.md`: every verb of the command line with its arguments and options, from the parser itself."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import typer

from atoll.cli.main import LazyVerb, build


def verbs() -> Iterator[tuple[str, Any]]:
    """Yield every verb with its words (`atoll sim train`) and its parsed command, groups first."""
    yield from _below("atoll", typer.main.get_command(build()))


def _below(words: str, command: Any) -> Iterator[tuple[str, Any]]:  # noqa: ANN401  (typer vendors the parser's types)
    command = command.load() if isinstance(command, LazyVerb) else command
    yield words, command
    for name, inner in sorted(getattr(command, "commands", {}).items()):
        yield from _below(f"{words} {name}", inner)


def options_of(command: Any) -> set[str]:  # noqa: ANN401  (as above)
    """Return every spelling of every option of a verb."""
    return {word for parameter in command.params for word in (*parameter.opts, *parameter.secondary_opts)}


def page() -> str:
    """Return the page."""
    parts = ["# Command line", INTRODUCTION]
    for words, command in verbs():
        parts += [f"## `{words}` {{ #{words.replace(' ', '-')} }}", _help(command.help)]
        if getattr(command, "commands", None):
            parts.append(
                "\n".join(
                    f"- [`{words} {name}`](#{words.replace(' ', '-')}-{name})" for name in sorted(command.commands)
                )
            )
        parts.append(_table(command))
    return "\n\n".join(part for part in parts if part) + "\n"


INTRODUCTION = """\
`make setup` puts the program at `.venv/bin/atoll`. Exit codes: 0 done; 1 the answer is no (`atoll health`); 2 something that
you can change (a flag, a setting, a file); 3 the machine or the network; 130 after Ctrl-C. Messages go to standard error and
say what was wrong, what was got, what is allowed and what to do."""


def _help(text: str | None) -> str:
    return (text or "").strip()


def _table(command: Any) -> str:  # noqa: ANN401  (as above)
    rows = [_row(parameter) for parameter in command.params if "--help" not in parameter.opts]
    return "\n".join(["| argument or option | default | meaning |", "|---|---|---|", *rows]) if rows else ""


def _row(parameter: Any) -> str:  # noqa: ANN401  (as above)
    names = ", ".join(f"`{word}`" for word in (*parameter.opts, *parameter.secondary_opts))
    if parameter.param_type_name == "argument":
        names = f"`{parameter.name}`"
    kind = "" if getattr(parameter, "is_flag", False) else f" *{_kind(parameter)}*"
    default = parameter.default
    shown = (
        "required" if parameter.required else "" if default in (None, (), []) or callable(default) else f"`{default}`"
    )
    told = (getattr(parameter, "help", "") or "").replace("|", "\\|")
    return f"| {names}{kind} | {shown} | {told} |"


def _kind(parameter: Any) -> str:  # noqa: ANN401  (as above)
    annotation = getattr(getattr(parameter, "type_descriptor", None), "annotation", str)
    words = {str: "text", int: "integer", float: "number", Path: "path"}
    found = [words[part] for part in (annotation, *get_args(annotation)) if isinstance(part, type) and part in words]
    return found[0] if found else "text"
