"""`python -m benchmarks.baselines`: train data-parallel or by synchronous DiLoCo, to compare runs with."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from atoll.cli.main import run_verb
from atoll.cli.options import Assignments, Config, with_flags


def baseline(  # noqa: PLR0913  (one option each)
    *,
    method: Annotated[str, typer.Option(help="data-parallel or diloco.")],
    out: Annotated[Path, typer.Option(help="Folder for report.json and model.safetensors.")],
    learners: Annotated[int, typer.Option(help="How many learners' batches make a step.")] = 1,
    tokens: Annotated[int | None, typer.Option(help="Train this many tokens in all.  [default: 2500000]")] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of model and data order.")] = None,
    stop: Annotated[int, typer.Option(help="Stop after so many tokens, on the schedule of all; 0: at the end.")] = 0,
    evaluations: Annotated[int, typer.Option(min=1, max=1000, help="Points of the validation curve.")] = 16,
    config: Config = None,
    assignments: Assignments = None,
) -> None:
    """Train in this process, in lock-step, and write a report whose validation curve has the shape of a run's."""
    from benchmarks.baselines.run import Request, run_baseline  # noqa: PLC0415  (a verb loads what it needs)

    flags = tuple(with_flags(assignments, seed=seed, protocol__tokens_target=tokens))
    run_baseline(Request(method, learners, stop, evaluations, out, config, flags))


if __name__ == "__main__":
    run_verb(baseline)
