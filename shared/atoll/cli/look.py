"""Verbs that look and change nothing: `version`, `health`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from atoll.cli.options import Assignments, Config, with_flags


def register(app: typer.Typer) -> None:
    """Add the verbs."""
    app.command(name="version", help="Print the version, and which wire versions it speaks.")(version_verb)
    app.command(name="health", help="Leave with 0 while a service's health file is fresh, else with 1.")(health_verb)


def say(line: str) -> None:
    """Print a line of the answer, at once: whoever reads a pipe waits for it."""
    print(line, flush=True)  # noqa: T201  (this is the verb's output)


def version_verb() -> None:
    """Print the version, and the wire versions of the runs that it can join."""
    from atoll import __version__  # noqa: PLC0415  (a verb loads what it needs when it runs)
    from atoll.wire.version import SCHEMA_NEWEST, SCHEMA_OLDEST  # noqa: PLC0415

    say(f"atoll {__version__}, wire {SCHEMA_OLDEST} to {SCHEMA_NEWEST}")


def health_verb(
    file: Annotated[Path | None, typer.Option(help="The health file; default: health_file.")] = None,
    age_s: Annotated[float, typer.Option("--age", min=0.0, help="Seconds after which it is stale.")] = 15.0,
    config: Config = None,
    assignments: Assignments = None,
) -> None:
    """Leave with 0 if the file was touched within `--age` seconds, else with 1."""
    from atoll.base.clock import SystemClock  # noqa: PLC0415
    from atoll.base.errors import SettingsError  # noqa: PLC0415
    from atoll.base.health import silent_s  # noqa: PLC0415
    from atoll.settings import load  # noqa: PLC0415

    path = file if file is not None else load(config, with_flags(assignments)).settings.health_file
    if path is None:
        raise SettingsError(
            "no health file is configured", todo="set health_file for the service and here, or give --file"
        )
    try:
        since_s = silent_s(path, SystemClock())
    except OSError as error:
        say(f"unhealthy: {path}: {error.strerror}")
        raise typer.Exit(1) from None
    if since_s > age_s:
        say(f"unhealthy: last sign of life {since_s:.1f} s ago, allowed {age_s:g} s")
        raise typer.Exit(1)
    say(f"healthy: last sign of life {since_s:.1f} s ago")
