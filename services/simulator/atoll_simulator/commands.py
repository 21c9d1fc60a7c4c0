"""Verbs of the simulator: `atoll plan`, `atoll what-if` and the group `atoll sim`. They load what they need when they run.

Every number of a fleet and of its links that a verb depends on is a flag of it, made from the field that declares the number.
"""

from __future__ import annotations

import inspect
import json
import sys
from collections.abc import Callable
from dataclasses import Field, fields
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from atoll.base.wording import DAY_S, check_within, counted
from atoll.cli.options import (
    Assignments,
    Broker,
    Config,
    Corpus,
    Learners,
    Out,
    Run,
    Shards,
    Standbys,
    Throttle,
    run_flags,
)
from atoll.codec import FORMATS
from atoll_simulator import one_thread_for_algebra
from atoll_simulator.fleet.parameters import Exchange, FleetParameters

if TYPE_CHECKING:
    from atoll.settings import Settings
    from atoll_simulator.planner import Failures, PlanLinks, Question


def register(app: typer.Typer) -> None:
    """Add the verbs, and the group with every simulation."""
    app.command(
        name="plan", help="Plan a run: bytes, bandwidth, utilisation, goodput, time and cost.", rich_help_panel="plan"
    )(plan)
    app.command(
        name="what-if",
        help="Simulate a run from its event log: as it was, and with another quorum, grace, codec or link.",
        rich_help_panel="plan",
    )(what_if)
    group = typer.Typer(no_args_is_help=True, rich_markup_mode=None)
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
    group.command(name="train", help="Train a whole run in virtual time: real gradients, one process, one seed.")(train)
    app.add_typer(group, name="sim", help="Simulate runs in virtual time, from one seed.", rich_help_panel="plan")


# -- atoll sim train ---------------------------------------------------------------------------------------------------


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


# -- atoll sim goodput, rounds, scavenge, join: see docs/explanation/goodput.md ------------------------------------------


Rows = Annotated[str, typer.Option(help="Systems: rigid, elastic, or a number of learners; comma between.")]
Columns = Annotated[str, typer.Option(help="Fleet sizes in chips, as 150k or 1.2M; comma between.")]
Chips = Annotated[str, typer.Option(help="Chips of the whole fleet, as 150k or 1.2M.")]
FleetSize = Annotated[int, typer.Option(help="M, learners.")]
Steps = Annotated[int, typer.Option(help="Length of the window, in nominal steps.")]
FleetSeed = Annotated[int, typer.Option(help="The seed: the same one, the same output.")]
JsonFolder = Annotated[str | None, typer.Option(help="Write JSON (and plots) into this folder.")]
Days = Annotated[float, typer.Option(help="Virtual days per cell and seed.")]
Seeds = Annotated[int, typer.Option(help="Seeds per cell, counted from --seed.")]
Workers = Annotated[int, typer.Option(min=0, help="Processes; 0: one per core. Results do not depend on it.")]

EXCHANGE = fields(Exchange)
STEPS = tuple(each for each in fields(FleetParameters) if each.name in {"step_s", "slice_cv"})
GOODPUT = tuple(each for each in fields(FleetParameters) if each.name not in {"step_s", "learner_cv"})
ROUNDS = tuple(each for each in fields(FleetParameters) if each.name not in {"restart_s", "checkpoint_s"})
"""The numbers that a verb depends on: it offers no flag that would do nothing."""


def goodput(  # noqa: PLR0913  (one option each)
    *,
    rows: Rows = "rigid,elastic,2,4,8,16",
    chips: Columns = "150k,300k,600k,1.2M,2.4M",
    days: Days = 3.0,
    seeds: Seeds = 10,
    seed: FleetSeed = 0,
    workers: Workers = 0,
    out: JsonFolder = None,
    **numbers: float,
) -> None:
    """Simulate the table and print it."""
    from atoll_simulator.fleet import cells  # noqa: PLC0415  (a verb loads what it needs when it runs)

    (fleet,) = _chosen(numbers, FleetParameters)
    check_within("--seeds", seeds, 1, cells.SEEDS_MAX)
    systems, sizes = cells.systems_in(rows), cells.sizes_in(chips)
    folder = cells.folder_for(out, "goodput.json")
    cells.check(fleet, systems, sizes, range(seeds), days)
    count = len(systems) * len(sizes) * seeds
    processes = counted(cells.workers_for(count, workers), "process", "processes")
    _remark(f"{counted(count, 'simulation')} of {days:g} days on {processes}")
    found = cells.table(fleet, systems, sizes, seeds=range(seed, seed + seeds), days=days, workers=workers)
    _say(cells.goodput_tables(found))
    if folder is not None:
        asked = {"days": days, "seeds": seeds, "seed": seed}
        _wrote(cells.write_answer(folder, "goodput", fleet=fleet, **asked, cells=found))


def rounds(
    *,
    chips: Chips = "1.2M",
    learners: FleetSize = 8,
    steps: Steps = 2000,
    seed: FleetSeed = 0,
    out: JsonFolder = None,
    **numbers: float,
) -> None:
    """Simulate one window and print what happened in it."""
    from atoll_simulator.fleet import cells  # noqa: PLC0415  (a verb loads what it needs when it runs)
    from atoll_simulator.fleet.rounds import StepWindow, window_table  # noqa: PLC0415
    from atoll_simulator.fleet.rounds import rounds as simulate  # noqa: PLC0415

    fleet, exchange = _chosen(numbers, FleetParameters, Exchange)
    folder = cells.folder_for(out, "rounds.json")
    told = simulate(fleet, exchange, StepWindow(cells.size_in(chips), learners, steps), seed)
    _say(window_table(told))
    if folder is not None:
        asked = {"chips": chips, "learners": learners, "steps": steps, "seed": seed}
        _wrote(cells.write_answer(folder, "rounds", fleet=fleet, exchange=exchange, **asked, told=told))


def scavenge(  # noqa: PLR0913  (one option each)
    *,
    extra: Annotated[str, typer.Option(help="Extra capacity in per cent; comma between.")] = "0,25,50,100,300",
    learners: FleetSize = 4,
    steps: Annotated[int, typer.Option(help="The budget: nominal steps that it takes without help.")] = 4000,
    waves: Annotated[int, typer.Option(help="How often help comes and goes.")] = 1,
    stall_s: Annotated[float, typer.Option(help="Stall of the elastic job when its size changes, s.")] = 14.0,
    seed: FleetSeed = 0,
    out: JsonFolder = None,
    **numbers: float,
) -> None:
    """Simulate every amount of help and print the times."""
    from atoll_simulator.fleet import cells, scavenging  # noqa: PLC0415  (a verb loads what it needs when it runs)

    fleet, exchange = _chosen(numbers, FleetParameters, Exchange)
    budget = scavenging.Budget(learners, steps, waves, stall_s)
    folder = cells.folder_for(out, "scavenge.json")
    rows = scavenging.scavenge(fleet, exchange, budget, scavenging.extras_in(extra), seed)
    _say(scavenging.scavenging_table(rows))
    if folder is not None:
        _wrote(
            cells.write_answer(folder, "scavenge", fleet=fleet, exchange=exchange, budget=budget, seed=seed, rows=rows)
        )


def join(
    *,
    copy_steps: Annotated[
        str, typer.Option(help="How long the copy of the state takes, in steps.")
    ] = "1,6,12,24,48,96",
    learners: FleetSize = 4,
    seed: FleetSeed = 0,
    out: JsonFolder = None,
    **numbers: float,
) -> None:
    """Let a learner join, once for every copy time, and print what it cost."""
    from atoll_simulator.fleet import cells, scavenging  # noqa: PLC0415  (a verb loads what it needs when it runs)

    fleet, exchange = _chosen(numbers, FleetParameters, Exchange)
    folder = cells.folder_for(out, "join.json")
    rows = scavenging.join(fleet, exchange, learners, scavenging.copies_in(copy_steps), seed)
    _say(scavenging.join_table(rows))
    if folder is not None:
        asked = {"learners": learners, "seed": seed}
        _wrote(cells.write_answer(folder, "join", fleet=fleet, exchange=exchange, **asked, rows=rows))


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
    return [
        group(**{each.name: numbers[each.name] for each in fields(group) if each.name in numbers}).check()
        for group in groups
    ]


def _remark(text: str) -> None:
    sys.stderr.write(f"atoll: {text}\n")
    sys.stderr.flush()


def _say(text: str) -> None:
    sys.stdout.write(text + "\n")


def _wrote(path: Path) -> None:
    _say(f"\nwritten to {path}")


# -- atoll plan ---------------------------------------------------------------------------------------------------------


_FLEET = FleetParameters()
LEARNERS = 8
"""Where neither a flag nor a run says how many."""

_Parameters = Annotated[str, typer.Argument(help="Parameters of the model, as 12B or 350M.")]
_StepS = Annotated[float, typer.Option(help="Seconds of one inner step of one learner.")]
_Bandwidth = Annotated[str, typer.Option(help="A learner's link, as 2Gbit; one per region: 2Gbit,5Gbit.")]
_Down = Annotated[str | None, typer.Option(help="The same, down.  [default: as up]")]
_HubIn = Annotated[str | None, typer.Option(help="The hub's link, in.  [default: as much as needed]")]
_HubOut = Annotated[str | None, typer.Option(help="The hub's link, out.  [default: as --hub-in]")]
_RttMs = Annotated[float, typer.Option(help="Round-trip time between learner and hub.")]
_Loss = Annotated[float, typer.Option(help="Share of packets lost.")]
_MergeS = Annotated[float, typer.Option(help="Seconds of a round that are merging and disk.")]
_Learners = Annotated[
    int | None,
    typer.Option(help="M.  [default: 8; with --config those that `atoll up` would begin with]", show_default=False),
]
_PerRegion = Annotated[
    int,
    typer.Option(help="Learners of a region whose synchronizer adds up what they send; --bandwidth is the region's."),
]
_Chips = Annotated[str, typer.Option(help="Chips of one learner.")]
_Fragments = Annotated[int | None, typer.Option(help="P.  [default: 24]")]
_Interval = Annotated[int | None, typer.Option(help="H, steps between two rounds of a fragment.  [default: 24]")]
_Overlap = Annotated[int | None, typer.Option(help="tau, steps a round may take.  [default: 2]")]
_Quorum = Annotated[int | None, typer.Option(help="K.  [default: 1]")]
_Shards = Annotated[int | None, typer.Option(help="Synchronizer shards.  [default: 2]")]
_UpCodec = Annotated[
    str | None, typer.Option(help=f"Codec of pseudo-gradients: {', '.join(FORMATS)}.  [default: int4]")
]
_DownCodec = Annotated[str | None, typer.Option(help="Codec of global frames.  [default: int4]")]
_StepTokens = Annotated[str, typer.Option(help="Tokens of one step of one learner.")]
_Tokens = Annotated[str | None, typer.Option(help="Tokens to reach, as 1T.")]
_Layers = Annotated[
    int | None,
    typer.Option(help="Layers, for what synchronous training hides.  [default: 36, as in published tables]"),
]
_ReduceBits = Annotated[float, typer.Option(help="Bits per parameter that synchronous training reduces.")]
_Backward = Annotated[
    bool, typer.Option("--backward-overlap/--no-backward-overlap", help="Whether it reduces beside its backward pass.")
]
_MtbiDays = Annotated[
    float | None, typer.Option(help=f"Days between failures of one chip.  [default: {_FLEET.mtbi_days:g}]")
]
_LossPerHour = Annotated[float | None, typer.Option(help="Share of whole learners lost per hour, instead.")]
_ReturnS = Annotated[
    float | None, typer.Option(help=f"How long what failed stays away.  [default: {_FLEET.return_s:g}]")
]
_SliceChips = Annotated[int | None, typer.Option(help=f"Chips that fail together.  [default: {_FLEET.slice_chips:g}]")]
_DownscaleS = Annotated[
    float | None, typer.Option(help=f"A learner's stop to lose a slice.  [default: {_FLEET.downscale_s:g}]")
]
_UpscaleS = Annotated[float | None, typer.Option(help=f"Its stop to take slices in.  [default: {_FLEET.upscale_s:g}]")]
_AdmissionS = Annotated[
    float | None, typer.Option(help=f"Least time between two of those.  [default: {_FLEET.admission_s:g}]")
]
_RestartS = Annotated[
    float | None, typer.Option(help=f"A rigid job's stop at a failure.  [default: {_FLEET.restart_s:g}]")
]
_CheckpointS = Annotated[
    float | None, typer.Option(help=f"How often it keeps its progress.  [default: {_FLEET.checkpoint_s:g}]")
]
_NoticeS = Annotated[
    float | None, typer.Option(help=f"How long steps go on after a failure.  [default: {_FLEET.notice_s:g}]")
]
_StallAgain = Annotated[
    float | None,
    typer.Option(help=f"Share of failures during a stop that begin it anew.  [default: {_FLEET.stall_again:g}]"),
]
_ChipHour = Annotated[float, typer.Option(help="Dollars per chip and hour.")]
_EgressGb = Annotated[float, typer.Option(help="Dollars per GB that leaves a region or the hub.")]
_MemoryGb = Annotated[float, typer.Option(help="Memory of the machine of one shard.")]
_Sweep = Annotated[
    bool,
    typer.Option("--sweep", help="Add other intervals and codecs, with what they cost in quality by our experiments."),
]
_Json = Annotated[bool, typer.Option("--json", help="Print the plan as JSON: bits/s, bytes, seconds.")]


def plan(  # noqa: PLR0913  (one option each)
    *,
    parameters: _Parameters,
    step_s: _StepS,
    bandwidth: _Bandwidth,
    bandwidth_down: _Down = None,
    hub_in: _HubIn = None,
    hub_out: _HubOut = None,
    rtt_ms: _RttMs = 50.0,
    loss: _Loss = 0.0,
    merge_s: _MergeS = 0.0,
    learners: _Learners = None,
    per_region: _PerRegion = 1,
    chips: _Chips = "1",
    fragments: _Fragments = None,
    interval_steps: _Interval = None,
    overlap_steps: _Overlap = None,
    quorum: _Quorum = None,
    shards: _Shards = None,
    up: _UpCodec = None,
    down: _DownCodec = None,
    step_tokens: _StepTokens = "262144",
    tokens: _Tokens = None,
    layers: _Layers = None,
    reduce_bits: _ReduceBits = 16.0,
    backward_overlap: _Backward = True,
    mtbi_days: _MtbiDays = None,
    loss_per_hour: _LossPerHour = None,
    return_s: _ReturnS = None,
    slice_chips: _SliceChips = None,
    downscale_s: _DownscaleS = None,
    upscale_s: _UpscaleS = None,
    admission_s: _AdmissionS = None,
    restart_s: _RestartS = None,
    checkpoint_s: _CheckpointS = None,
    notice_s: _NoticeS = None,
    stall_again: _StallAgain = None,
    chip_hour: _ChipHour = 0.0,
    egress_gb: _EgressGb = 0.0,
    shard_memory_gb: _MemoryGb = 16.0,
    config: Config = None,
    assignments: Assignments = None,
    sweep: _Sweep = False,
    as_json: _Json = False,
) -> None:
    """Print a plan. With --config, protocol settings are those of the run that `atoll up` would start from that file."""
    options = dict(locals())  # the options by name, and nothing else yet
    from atoll_simulator.planner import answer, as_document, text  # noqa: PLC0415  (a verb loads what it needs when it runs)

    found = answer(_question(options), sweeps=sweep)
    typer.echo(json.dumps(as_document(found), indent=2) if as_json else text(found))


def _question(options: dict[str, Any]) -> Question:
    from atoll.base.wording import count  # noqa: PLC0415
    from atoll_simulator.planner import Prices, Question  # noqa: PLC0415

    names = {
        "fragments": "fragments",
        "interval_steps": "interval_steps",
        "overlap_steps": "overlap_steps",
        "quorum": "quorum",
        "shards": "shards",
        "up": "codec_up",
        "down": "codec_down",
    }
    flags = {name: options[flag] for flag, name in names.items() if options[flag] is not None}
    learners = _learners(options)
    run = _run(options["config"], options["assignments"] or [], learners, flags)
    tokens = options["tokens"]
    fields = ("step_s", "per_region", "layers", "reduce_bits", "backward_overlap")
    plain = {name: options[name] for name in fields if options[name] is not None}
    return Question(
        parameters=count(options["parameters"], "PARAMETERS"),
        learners=learners,
        links=_links(options),
        protocol=run.protocol,
        step_tokens=count(options["step_tokens"], "--step-tokens"),
        tokens=count(tokens, "--tokens") if tokens is not None else run.protocol.tokens_target,
        chips=count(options["chips"], "--chips"),
        failures=_failures(options),
        prices=Prices(options["chip_hour"], options["egress_gb"]),
        stream_bytes_max=run.broker.stream_bytes_max,
        shard_memory_bytes=options["shard_memory_gb"] * 1e9,
        **plain,
    )


def _links(options: dict[str, Any]) -> PlanLinks:
    from atoll.base.wording import rate, rates  # noqa: PLC0415
    from atoll_simulator.planner import PlanLinks  # noqa: PLC0415

    up, down, hub_in, hub_out = (options[name] for name in ("bandwidth", "bandwidth_down", "hub_in", "hub_out"))
    inward = rate(hub_in, "--hub-in") if hub_in is not None else None
    ups = rates(up, "--bandwidth")
    downs = rates(down, "--bandwidth-down") if down is not None else ups
    return PlanLinks(
        up=ups * len(downs) if len(ups) == 1 else ups,
        down=downs * len(ups) if len(downs) == 1 else downs,
        hub_in=inward,
        hub_out=rate(hub_out, "--hub-out") if hub_out is not None else inward,
        rtt_s=options["rtt_ms"] / 1000.0,
        loss=options["loss"],
        merge_s=options["merge_s"],
    )


def _learners(options: dict[str, Any]) -> int:
    from atoll.local.run_settings import stated_learners  # noqa: PLC0415
    from atoll.settings import given_values  # noqa: PLC0415

    if options["learners"] is not None:
        return int(options["learners"])
    stated = given_values(options["config"], options["assignments"] or [])
    return stated_learners(stated) if options["config"] is not None or "up.learners" in stated else LEARNERS


def _run(config: Path | None, assignments: list[str], learners: int, flags: dict[str, Any]) -> Settings:
    """Return the settings of the file, the environment and `--set`, with the agreement of the flags.

    Values that are not given are as `atoll up` sets them if there is a file, else the protocol's own defaults.
    """
    import msgspec  # noqa: PLC0415

    from atoll.local.run_settings import DEFAULT_ORIGIN, default_settings  # noqa: PLC0415
    from atoll.settings import SettingsFallback, load  # noqa: PLC0415

    ours = {name: value for name, value in default_settings(learners).items() if name.startswith("protocol.")}
    if "interval_steps" in flags:  # what the file says of the overlap is judged by it
        ours["protocol.interval_steps"] = flags["interval_steps"]
    given = load(config, assignments, fallback=SettingsFallback(DEFAULT_ORIGIN, ours) if config is not None else None)
    protocol = msgspec.structs.replace(given.settings.protocol, **flags)
    if "fragments" in flags and "shards" not in flags:
        protocol = msgspec.structs.replace(protocol, shards=min(protocol.shards, protocol.fragments))
    return given.settings.model_copy(update={"protocol": protocol})


def _failures(options: dict[str, Any]) -> Failures:
    from atoll.base.errors import SettingsError  # noqa: PLC0415
    from atoll_simulator.planner import Failures  # noqa: PLC0415

    if options["loss_per_hour"] is not None and options["mtbi_days"] is not None:
        raise SettingsError(
            "failures are given twice",
            got="--mtbi-days and --loss-per-hour",
            allowed="failures of chips or losses of whole learners",
            todo="leave one of them out",
        )
    given = {each.name: options[each.name] for each in fields(Failures) if options.get(each.name) is not None}
    if options["mtbi_days"] is not None:
        given["mtbi_s"] = options["mtbi_days"] * DAY_S
    return Failures(**given)


# -- atoll what-if ------------------------------------------------------------------------------------------------------


MISSED = 1
MISS_MAX = 0.15
SEEDS = 20
SEEDS_MAX = 1000
"""More only narrows an interval that the check's bound is wider than."""


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
    from atoll.base.wording import check_within  # noqa: PLC0415
    from atoll.cli.output import say_lines  # noqa: PLC0415
    from atoll.cli.reading import recording_of  # noqa: PLC0415
    from atoll_simulator.what_if.comparison import (  # noqa: PLC0415
        as_document,
        change_lines,
        check_lines,
        compare,
        fit_lines,
    )
    from atoll_simulator.what_if.recording import fit_recording  # noqa: PLC0415
    from atoll_simulator.what_if.replay import parse_change  # noqa: PLC0415

    check_within("--seeds", seeds, 2, SEEDS_MAX)
    check_within("--miss-max", miss_max, 0.0, 10.0)
    if folder is not None and out is not None:
        raise SettingsError("one run at a time", got=f"{folder} and --out {out}", todo="name its folder once")
    where = folder if out is None else out
    if where is None and run is None:
        raise SettingsError(
            "what if what?", got="no run", allowed="--out with the folder of a run, or --run and --broker"
        )
    recording = fit_recording(*recording_of("what-if", where, run, broker))
    change = parse_change(recording, assignments or [], links or []) if assignments or links else None
    said = typer.get_text_stream("stderr")
    total = seeds * (1 if change is None else 2)
    with typer.progressbar(length=total, label="simulating", file=said, hidden=not said.isatty()) as bar:
        found = compare(recording, change, seeds, miss_max, lambda _: bar.update(1))
    if as_json:
        typer.echo(json.dumps(as_document(recording, found, change), indent=2))
    else:
        say_lines(
            [*fit_lines(recording), *check_lines(found), *(change_lines(found, change) if change is not None else [])]
        )
    if not found.believed:
        raise typer.Exit(MISSED)
