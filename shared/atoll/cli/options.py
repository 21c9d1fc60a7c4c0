"""Options that several verbs share, spelled once."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

Config = Annotated[Path | None, typer.Option(help="A TOML file of settings.")]
Assignments = Annotated[list[str] | None, typer.Option("--set", help="One setting, as a.b=c; repeatable.")]
Run = Annotated[str | None, typer.Option(help="Run id.")]
Broker = Annotated[str | None, typer.Option(help="URL of a running broker, nats://host:port.")]


def with_flags(assignments: list[str] | None, **flags: object) -> list[str]:
    """Return the `--set` texts followed by those of `flags` that were given; `__` in a name stands for a dot.

    Flags come last and so win over `--set`, which wins over the environment and the file.
    """
    given = [f"{name.replace('__', '.')}={value}" for name, value in flags.items() if value is not None]
    return [*(assignments or []), *given]
