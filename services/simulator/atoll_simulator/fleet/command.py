"""`atoll sim goodput`, `rounds`, `scavenge` and `join`: fleets of chips in virtual time. See docs/explanation/goodput.md.

Every number of a fleet and of its links that a verb depends on is a flag of it. The flags are made from the fields that
declare the numbers, so the help of a verb cannot tell another default.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from dataclasses import Field, fields
from itertools import chain
from pathlib import Path
from typing import Annotated, Any

import typer

from atoll.base.units import within
from atoll.base.wording import counted
from atoll_simulator.fleet.parameters import Exchange, FleetParameters

Rows = Annotated[str, typer.Option(help="Systems: rigid, elastic, or a number of learners; comma between.")]
Columns = Annotated[str, typer.Option(help="Fleet sizes in chips, as 150k or 1.2M; comma between.")]
Chips = Annotated[str, typer.Option(help="Chips of the whole fleet, as 150k or 1.2M.")]
Learners = Annotated[int, typer.Option(help="M, learners.")]
Steps = Annotated[int, typer.Option(help="Length of the window, in nominal steps.")]
Seed = Annotated[int, typer.Option(help="The seed: the same one, the same output.")]
Out = Annotated[str | None, typer.Option(help="Write JSON (and plots) into this folder.")]
Days = Annotated[float, typer.Option(help="Virtual days per cell and seed.")]
Seeds = Annotated[int, typer.Option(help="Seeds per cell, counted from --seed.")]
Workers = Annotated[int, typer.Option(min=0, help="Processes; 0: one per core. Results do not depend on it.")]

EXCHANGE = fields(Exchange)
STEPS = tuple(each for each in fields(FleetParameters) if each.name in {"step_s", "slice_cv"})
GOODPUT = tuple(each for each in fields(FleetParameters) if each.name not in {"step_s", "learner_cv"})
ROUNDS = tuple(each for each in fields(FleetParameters) if each.name not in {"restart_s", "checkpoint_s"})
"""The numbers that a verb depends on: it offers no flag that would do nothing."""


def register(group: typer.Typer) -> None:
    """Add the verbs."""
    group.command(name="goodput", help="Goodput and uptime under failures, by learners and chips.")(
        _with_flags(goodput, GOODPUT)
    )
    group.command(
        name="rounds", help="Rounds of the production machines on a fleet: who takes part, every token's fate."
    )(_with_flags(rounds, ROUNDS, EXCHANGE))
    group.command(
        name="scavenge", help="Time to a token budget with extra learners for half of it, and as elastic DP."
    )(_with_flags(scavenge, STEPS, EXCHANGE))
    group.command(
        name="join", help="What a learner that joins costs itself and the others, by how long its copy takes."
    )(_with_flags(join, STEPS, EXCHANGE))


def goodput(  # noqa: PLR0913  (one option each)
    *,
    rows: Rows = "rigid,elastic,2,4,8,16",
    chips: Columns = "150k,300k,600k,1.2M,2.4M",
    days: Days = 3.0,
    seeds: Seeds = 10,
    seed: Seed = 0,
    workers: Workers = 0,
    out: Out = None,
    **numbers: float,
) -> None:
    """Simulate the table and print it."""
    from atoll_simulator.fleet import cells, report_text  # noqa: PLC0415  (a verb loads what it needs when it runs)

    (fleet,) = _chosen(numbers, FleetParameters)
    within("--seeds", seeds, 1, cells.SEEDS_MAX)
    systems, sizes = cells.systems_in(rows), cells.sizes_in(chips)
    folder = report_text.folder_for(out, "goodput.json")
    cells.check(fleet, systems, sizes, range(seeds), days)
    count = len(systems) * len(sizes) * seeds
    processes = counted(cells.workers_for(count, workers), "process", "processes")
    _remark(f"{counted(count, 'simulation')} of {days:g} days on {processes}")
    found = cells.table(fleet, systems, sizes, seeds=range(seed, seed + seeds), days=days, workers=workers)
    _say(report_text.goodput_tables(found))
    if folder is not None:
        asked = {"days": days, "seeds": seeds, "seed": seed}
        _wrote(report_text.write_answer(folder, "goodput", fleet=fleet, **asked, cells=found))


def rounds(
    *,
    chips: Chips = "1.2M",
    learners: Learners = 8,
    steps: Steps = 2000,
    seed: Seed = 0,
    out: Out = None,
    **numbers: float,
) -> None:
    """Simulate one window and print what happened in it."""
    from atoll_simulator.fleet import cells, report_text  # noqa: PLC0415  (a verb loads what it needs when it runs)
    from atoll_simulator.fleet.rounds import StepWindow  # noqa: PLC0415
    from atoll_simulator.fleet.rounds import rounds as simulate  # noqa: PLC0415

    fleet, exchange = _chosen(numbers, FleetParameters, Exchange)
    folder = report_text.folder_for(out, "rounds.json")
    told = simulate(fleet, exchange, StepWindow(cells.size_in(chips), learners, steps), seed)
    _say(report_text.window_table(told))
    if folder is not None:
        asked = {"chips": chips, "learners": learners, "steps": steps, "seed": seed}
        _wrote(report_text.write_answer(folder, "rounds", fleet=fleet, exchange=exchange, **asked, told=told))


def scavenge(  # noqa: PLR0913  (one option each)
    *,
    extra: Annotated[str, typer.Option(help="Extra capacity in per cent; comma between.")] = "0,25,50,100,300",
    learners: Learners = 4,
    steps: Annotated[int, typer.Option(help="The budget: nominal steps that it takes without help.")] = 4000,
    waves: Annotated[int, typer.Option(help="How often help comes and goes.")] = 1,
    stall_s: Annotated[float, typer.Option(help="Stall of the elastic job when its size changes, s.")] = 14.0,
    seed: Seed = 0,
    out: Out = None,
    **numbers: float,
) -> None:
    """Simulate every amount of help and print the times."""
    from atoll_simulator.fleet import report_text, scavenging  # noqa: PLC0415  (a verb loads what it needs when it runs)

    fleet, exchange = _chosen(numbers, FleetParameters, Exchange)
    budget = scavenging.Budget(learners, steps, waves, stall_s)
    folder = report_text.folder_for(out, "scavenge.json")
    rows = scavenging.scavenge(fleet, exchange, budget, scavenging.extras_in(extra), seed)
    _say(report_text.scavenging_table(rows))
    if folder is not None:
        _wrote(
            report_text.write_answer(
                folder, "scavenge", fleet=fleet, exchange=exchange, budget=budget, seed=seed, rows=rows
            )
        )


def join(
    *,
    copy_steps: Annotated[
        str, typer.Option(help="How long the copy of the state takes, in steps.")
    ] = "1,6,12,24,48,96",
    learners: Learners = 4,
    seed: Seed = 0,
    out: Out = None,
    **numbers: float,
) -> None:
    """Let a learner join, once for every copy time, and print what it cost."""
    from atoll_simulator.fleet import report_text, scavenging  # noqa: PLC0415  (a verb loads what it needs when it runs)

    fleet, exchange = _chosen(numbers, FleetParameters, Exchange)
    folder = report_text.folder_for(out, "join.json")
    rows = scavenging.join(fleet, exchange, learners, scavenging.copies_in(copy_steps), seed)
    _say(report_text.join_table(rows))
    if folder is not None:
        asked = {"learners": learners, "seed": seed}
        _wrote(report_text.write_answer(folder, "join", fleet=fleet, exchange=exchange, **asked, rows=rows))


def _with_flags(verb: Callable[..., None], *groups: tuple[Field[Any], ...]) -> Callable[..., None]:
    """Give a verb, in place of its `**numbers`, one flag for every field in `groups`."""
    signature = inspect.signature(verb, eval_str=True)
    options = [option for option in signature.parameters.values() if option.kind is not option.VAR_KEYWORD]
    for each in chain(*groups):
        kind: Any = int if each.type == "int" else float
        said = f"{each.metadata['help']}. [{each.metadata['origin']}]"
        annotation = Annotated[kind, typer.Option(help=said[0].upper() + said[1:])]
        options.append(
            inspect.Parameter(each.name, inspect.Parameter.KEYWORD_ONLY, default=each.default, annotation=annotation)
        )

    def flagged(**values: Any) -> None:  # noqa: ANN401  (typer has checked them)
        verb(**values)

    flagged.__signature__ = signature.replace(parameters=options)  # type: ignore[attr-defined]
    flagged.__annotations__ = {option.name: option.annotation for option in options}
    return flagged


def _chosen(numbers: dict[str, float], *groups: type[Any]) -> list[Any]:
    """Return each of `groups` with the numbers that are its own, checked."""
    return [
        group(**{each.name: numbers[each.name] for each in fields(group) if each.name in numbers}).check()
        for group in groups
    ]


def _remark(text: str) -> None:
    sys.stderr.write(f"atoll: {text}\n")
    sys.stderr.flush()


def _say(text: str) -> None:
    sys.stdout.write(text + "\n")


def _wrote(paths: list[Path]) -> None:
    _say("\n" + "\n".join(f"written to {path}" for path in paths))
