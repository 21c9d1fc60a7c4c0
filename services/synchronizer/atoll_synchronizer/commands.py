"""`atoll synchronizer`: serve one shard until the run is over."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def register(app: typer.Typer) -> None:
    """Add this service's verbs to the command line."""
    app.command(name="synchronizer", help="Serve one shard of a run: merge its fragments until the run is over.")(serve)


def serve(
    shard: Annotated[int | None, typer.Option(help="Which shard to serve, from 0.")] = None,
    config: Annotated[Path | None, typer.Option(help="A TOML file of settings.")] = None,
    assignments: Annotated[list[str] | None, typer.Option("--set", help="One setting, as a.b=c; repeatable.")] = None,
) -> None:
    """Serve one shard of a run until it is finished, stood down or told to leave (SIGTERM)."""
    from atoll.settings import load  # noqa: PLC0415  (a verb loads what it needs when it runs)
    from atoll_synchronizer.process import run  # noqa: PLC0415

    given = [*(assignments or []), *([f"synchronizer.shard={shard}"] if shard is not None else [])]
    run(load(config, given).settings)
