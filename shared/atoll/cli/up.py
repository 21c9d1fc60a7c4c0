"""`atoll up`: a whole run on this machine. This module only reads the flags; `atoll.local` does the work."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from atoll.base.errors import SettingsError
from atoll.base.extras import require
from atoll.cli.options import (
    Assignments,
    Broker,
    Config,
    Corpus,
    Learners,
    Like,
    Shards,
    Standbys,
    Throttle,
    Via,
    run_flags,
)
from atoll.local.options import UpRequest, plan
from atoll.local.supervisor import run_up

Again = Annotated[
    bool,
    typer.Option("--again", help="Begin anew, as set now, where --out holds a finished run, which is moved aside."),
]
Brokers = Annotated[
    int | None,
    typer.Option(help="Nodes of the run's own broker: 3 bear the loss of one, 5 of two.  [default: 1]"),
]
Dashboard = Annotated[
    bool | None,
    typer.Option("--dashboard", help="Serve the live page of the run beside it, and open it where there is a screen."),
]
Locked = Annotated[
    bool | None,
    typer.Option(
        "--locked/--open",
        help="Whether only identities of the run's folder may enter the run's own broker.  [default: locked]",
        show_default=False,
    ),
]
Out = Annotated[
    Path | None, typer.Option(help="Folder of the run; one that holds a run continues it.  [default: runs/<run id>]")
]
Resume = Annotated[
    bool, typer.Option("--resume", help="Rebuild the run of --out from its archive if the broker has lost it.")
]


def up(  # noqa: PLR0913  (one option each)
    file: Annotated[Path | None, typer.Argument(help="A TOML file of settings, as for --config.")] = None,
    *,
    learners: Learners = None,
    shards: Shards = None,
    standbys: Standbys = None,
    seed: Annotated[int | None, typer.Option(help="Seed of model, data order and sampling.")] = None,
    out: Out = None,
    broker: Broker = None,
    brokers: Brokers = None,
    locked: Locked = None,
    port: Annotated[
        int | None, typer.Option(min=1, max=65535, help="Port of the run's own broker.  [default: a free one]")
    ] = None,
    minutes: Annotated[float | None, typer.Option(help="Train for this long at most.")] = None,
    tokens: Annotated[
        int | None, typer.Option(help="Train this many tokens in all; 0 goes on until told.  [default: 2500000]")
    ] = None,
    corpus: Corpus = None,
    throttle: Throttle = None,
    via: Via = None,
    config: Config = None,
    like: Like = None,
    assignments: Assignments = None,
    dashboard: Dashboard = None,
    again: Again = False,
    resume: Resume = False,
) -> None:
    """Prepare data, start a broker, shards, learners and the evaluator; drain, export and report at the end.

    `atoll up run.toml` takes everything from one file, these options from its section [up]; what is given here goes before.

    Ctrl-C once drains and leaves a run that `atoll up --out DIR` continues; twice kills everything at once. Of a run
    that is continued, id, seed, text, brokers, model.* and protocol.* (but --tokens) are fixed; the rest may change.
    """
    require("flax", "learner", "`atoll up`")
    if dashboard:
        require("starlette", "monitor", "`atoll up --dashboard`")

    if file is not None and config is not None:
        got = f"{file} and --config {config}"
        raise SettingsError("two files of settings", got=got, allowed="one of them", todo="leave one away")
    flags = run_flags(
        assignments,
        corpus,
        throttle,
        via,
        seed=seed,
        broker__url=broker,
        protocol__shards=shards,
        protocol__tokens_target=tokens,
        up__learners=learners,
        up__standbys=standbys,
        up__brokers=brokers,
        up__locked=locked,
        up__port=port,
        up__minutes=minutes,
        up__out=out,
        up__dashboard=dashboard,
    )
    request = UpRequest(config=file or config, assignments=flags, again=again, resume=resume, like=like)
    if code := run_up(plan(request)):
        raise typer.Exit(code)
