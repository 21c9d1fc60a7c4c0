"""`atoll what-if`: reads the flags and asks `atoll_simulator.what_if` what another setting would have given a run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from atoll.cli.options import Broker, Out, Run

if TYPE_CHECKING:
    from atoll_simulator.what_if.comparison import Comparison
    from atoll_simulator.what_if.recording import Recording
    from atoll_simulator.what_if.replay import Change

MISSED = 1
MISS_MAX = 0.15
SEEDS = 20
SEEDS_MAX = 1000
"""More only narrows an interval that the check's bound is wider than."""


def register(app: typer.Typer) -> None:
    """Add the verb."""
    app.command(
        name="what-if",
        help="Simulate a run from its event log: as it was, and with another quorum, grace, codec or link.",
        rich_help_panel="plan",
    )(what_if)


def what_if(  # noqa: PLR0913  (one option each)
    folder: Annotated[
        Path | None, typer.Argument(metavar="FOLDER", help="The folder of a run, as --out; or --run and --broker.")
    ] = None,
    *,
    out: Out = None,
    assignments: Annotated[
        list[str] | None, typer.Option("--set", help="What to change, as protocol.quorum=2; repeatable.")
    ] = None,
    links: Annotated[
        list[str] | None,
        typer.Option(
            "--link", help="A learner's other link, rate and delay each way: learner-2=10Mbit/s,80ms; repeatable."
        ),
    ] = None,
    seeds: Annotated[int, typer.Option(help="How many simulations of each.")] = SEEDS,
    miss_max: Annotated[
        float, typer.Option(help="How far from its recording the run as it was may be simulated, as a share.")
    ] = MISS_MAX,
    run: Run = None,
    broker: Broker = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print everything as JSON.")] = False,
) -> None:
    """Print the check and the change; leave with 1 when the simulation misses the recording. Nothing of the run is changed."""
    from atoll.base.errors import SettingsError  # noqa: PLC0415  (a verb loads what it needs when it runs)
    from atoll.base.units import within  # noqa: PLC0415
    from atoll.cli.output import say_lines  # noqa: PLC0415
    from atoll.cli.reading import recording_of  # noqa: PLC0415
    from atoll_simulator.what_if.comparison import as_document, change_lines, check_lines, fit_lines  # noqa: PLC0415
    from atoll_simulator.what_if.recording import fit_recording  # noqa: PLC0415
    from atoll_simulator.what_if.replay import parse_change  # noqa: PLC0415

    within("--seeds", seeds, 2, SEEDS_MAX)
    within("--miss-max", miss_max, 0.0, 10.0)
    if folder is not None and out is not None:
        raise SettingsError("one run at a time", got=f"{folder} and --out {out}", todo="name its folder once")
    where = folder if out is None else out
    if where is None and run is None:
        raise SettingsError(
            "what if what?", got="no run", allowed="--out with the folder of a run, or --run and --broker"
        )
    recording = fit_recording(*recording_of("what-if", where, run, broker))
    change = parse_change(recording, assignments or [], links or []) if assignments or links else None
    found = _compare_with_bar(recording, change, seeds, miss_max)
    if as_json:
        typer.echo(json.dumps(as_document(recording, found, change), indent=2))
    else:
        say_lines(
            [*fit_lines(recording), *check_lines(found), *(change_lines(found, change) if change is not None else [])]
        )
    if not found.believed:
        raise typer.Exit(MISSED)


def _compare_with_bar(recording: Recording, change: Change | None, seeds: int, miss_max: float) -> Comparison:
    """Compare, with a bar on standard error where a person looks at it."""
    from atoll_simulator.what_if.comparison import compare  # noqa: PLC0415

    total = seeds * (1 if change is None else 2)
    with typer.progressbar(
        length=total, label="simulating", file=typer.get_text_stream("stderr"), hidden=not _is_on_terminal()
    ) as bar:
        return compare(recording, change, seeds, miss_max, lambda _: bar.update(1))


def _is_on_terminal() -> bool:
    return typer.get_text_stream("stderr").isatty()
