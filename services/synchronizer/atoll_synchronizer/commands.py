"""`atoll synchronizer`: serve one shard, a share of all, or a region, until the run is over."""

from __future__ import annotations

from typing import Annotated

import typer

from atoll.cli.options import Assignments, Broker, Config, Run, with_flags


def register(app: typer.Typer) -> None:
    """Add this service's verbs to the command line."""
    app.command(
        name="synchronizer",
        help="Serve a run's shards: merge their fragments until the run is over.",
        rich_help_panel="run",
    )(serve)


def serve(  # noqa: PLR0913  (one option each)
    shard: Annotated[
        int | None, typer.Option(help="The only shard to serve, from 0.  [default: a fair share of all]")
    ] = None,
    *,
    region: Annotated[
        str | None,
        typer.Option(help="Own no shard: fold the contributions of this region's learners for those who do."),
    ] = None,
    run: Run = None,
    broker: Broker = None,
    restore: Annotated[
        str | None,
        typer.Option(
            help="Archive (folder, file://, s3://) to rebuild the run from where the broker does not have it."
        ),
    ] = None,
    config: Config = None,
    assignments: Assignments = None,
) -> None:
    """Serve a run's shards until it is over or this process is told to leave (SIGTERM)."""
    from atoll.settings import load  # noqa: PLC0415  (a verb loads what it needs when it runs)
    from atoll_synchronizer.process import serve_shards  # noqa: PLC0415

    flags = with_flags(
        assignments,
        synchronizer__shard=shard,
        synchronizer__region=region,
        synchronizer__restore=restore,
        run=run,
        broker__url=broker,
    )
    serve_shards(load(config, flags).settings)
