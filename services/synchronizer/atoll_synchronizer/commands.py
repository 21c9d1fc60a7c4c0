"""`atoll synchronizer`: serve one shard until the run is over."""

from __future__ import annotations

from typing import Annotated

import typer

from atoll.cli.options import Assignments, Broker, Config, Run, with_flags


def register(app: typer.Typer) -> None:
    """Add this service's verbs to the command line."""
    app.command(name="synchronizer", help="Serve one shard of a run: merge its fragments until the run is over.")(serve)


def serve(
    shard: Annotated[int | None, typer.Option(help="Which shard to serve, from 0.")] = None,
    run: Run = None,
    broker: Broker = None,
    config: Config = None,
    assignments: Assignments = None,
) -> None:
    """Serve one shard of a run until it is finished, stood down or told to leave (SIGTERM)."""
    from atoll.settings import load  # noqa: PLC0415  (a verb loads what it needs when it runs)
    from atoll_synchronizer.process import serve_shard  # noqa: PLC0415

    serve_shard(load(config, with_flags(assignments, synchronizer__shard=shard, run=run, broker__url=broker)).settings)
