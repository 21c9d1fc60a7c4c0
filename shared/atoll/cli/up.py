"""`atoll up`: a whole run on this machine. This module only reads the flags; `atoll.local` does the work."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from atoll.cli.options import Assignments, Broker, Config, with_flags


def register(app: typer.Typer) -> None:
    """Add the verb."""
    app.command(name="up", help="Start a whole run on this machine, watch it, and write a report.")(up)


def up(  # noqa: PLR0913  (one option each)
    *,
    learners: Annotated[int | None, typer.Option(help="How many learners.  [default: 3]")] = None,
    shards: Annotated[int | None, typer.Option(help="How many synchronizer shards.  [default: 2]")] = None,
    standbys: Annotated[int, typer.Option(help="How many more processes stand by for each shard.")] = 0,
    seed: Annotated[int | None, typer.Option(help="Seed of model, data order and sampling.")] = None,
    out: Annotated[
        Path | None,
        typer.Option(help="Folder of the run; one that holds a run continues it.  [default: runs/<run id>]"),
    ] = None,
    broker: Broker = None,
    port: Annotated[
        int | None, typer.Option(min=1, max=65535, help="Port of the run's own broker; default: a free one.")
    ] = None,
    minutes: Annotated[float | None, typer.Option(help="Train for this long at most.")] = None,
    tokens: Annotated[
        int | None, typer.Option(help="Train this many tokens in all; 0 goes on until told.  [default: 2500000]")
    ] = None,
    corpus: Annotated[
        list[Path] | None, typer.Option(help="Text to train on; repeatable.  [default: Python's own source]")
    ] = None,
    throttle: Annotated[list[str] | None, typer.Option(help="Slow a learner down, as learner-3=5; repeatable.")] = None,
    via: Annotated[
        list[str] | None,
        typer.Option(
            help="Let one process reach the broker through a relay of yours, as learner-1=nats://host:port; repeatable."
        ),
    ] = None,
    config: Config = None,
    assignments: Assignments = None,
    again: Annotated[
        bool,
        typer.Option("--again", help="Begin anew, as set now, where --out holds a finished run, which is moved aside."),
    ] = False,
    resume: Annotated[
        bool, typer.Option("--resume", help="Rebuild the run of --out from its archive if the broker has lost it.")
    ] = False,
) -> None:
    """Prepare data, start a broker, shards, learners and the evaluator; drain, export and report at the end.

    Ctrl-C once drains and leaves a run that `atoll up --out DIR` continues; twice kills everything at once. Of a run
    that is continued, learners, --tokens, --minutes, --throttle, --via, train.* and log.* may change; the rest is fixed.
    """
    from atoll.local.options import UpRequest, plan  # noqa: PLC0415  (a verb loads what it needs when it runs)
    from atoll.local.supervisor import run_up  # noqa: PLC0415

    flags = with_flags(
        assignments, protocol__shards=shards, seed=seed, broker__url=broker, protocol__tokens_target=tokens
    )
    request = UpRequest(
        learners=learners,
        out=out,
        port=port,
        minutes=minutes,
        corpus=tuple(corpus or ()),
        throttle=tuple(throttle or ()),
        via=tuple(via or ()),
        config=config,
        assignments=tuple(flags),
        again=again,
        resume=resume,
        standbys=standbys,
    )
    code = run_up(plan(request))
    if code:
        raise typer.Exit(code)
