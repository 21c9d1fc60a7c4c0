"""Verbs of the simulator: `atoll plan`, `atoll what-if` and the group `atoll sim`. It loads nothing before a verb runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from atoll.cli.options import Assignments, Config, Corpus, Learners, Shards, Standbys, Throttle, run_flags
from atoll_simulator import plan_command
from atoll_simulator.fleet import command as fleet_command
from atoll_simulator.what_if import command as what_if_command


def register(app: typer.Typer) -> None:
    """Add the verbs, and the group with every simulation."""
    plan_command.register(app)
    what_if_command.register(app)
    group = typer.Typer(no_args_is_help=True, rich_markup_mode=None)
    fleet_command.register(group)
    group.command(name="train", help="Train a whole run in virtual time: real gradients, one process, one seed.")(train)
    app.add_typer(group, name="sim", help="Simulate runs in virtual time, from one seed.", rich_help_panel="plan")


def train(  # noqa: PLR0913  (one option each)
    *,
    learners: Learners = None,
    shards: Shards = None,
    standbys: Standbys = None,
    seed: Annotated[int | None, typer.Option(help="Seed of everything: model, data order, chance.")] = None,
    out: Annotated[Path | None, typer.Option(help="Folder of the run.  [default: runs/sim-<seed>]")] = None,
    tokens: Annotated[int | None, typer.Option(help="Train this many tokens in all.  [default: 2500000]")] = None,
    corpus: Corpus = None,
    throttle: Throttle = None,
    config: Config = None,
    assignments: Assignments = None,
    again: Annotated[bool, typer.Option("--again", help="Move a run that is in --out aside and begin anew.")] = False,
) -> None:
    """Simulate the run that `atoll up` would start with the same settings, and report it in the same form.

    Steps take virtual seconds, gradients are computed for real. What happens to whom is the [sim] table of the settings;
    docs/explanation/virtual-time.md describes it. The same seed on the same machine gives the same event log, byte by
    byte. Ctrl-C once drains the run and reports; twice ends everything at once. Either way the exit code is 130.
    """
    from atoll.base.extras import require  # noqa: PLC0415  (a verb loads what it needs when it runs)

    require("flax", "simulator", "`atoll sim train`")
    from atoll_simulator.process_setup import one_thread_for_algebra  # noqa: PLC0415

    one_thread_for_algebra()
    from atoll.local.options import UpRequest  # noqa: PLC0415
    from atoll_simulator.workshop import run_sim  # noqa: PLC0415

    flags = run_flags(
        assignments,
        corpus,
        throttle,
        seed=seed,
        protocol__shards=shards,
        protocol__tokens_target=tokens,
        up__learners=learners,
        up__standbys=standbys,
        up__out=out,
    )
    ran = run_sim(UpRequest(config=config, assignments=flags), again=again)
    if ran.code:
        raise typer.Exit(ran.code)
