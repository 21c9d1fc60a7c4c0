"""`atoll plan`: reads the flags and asks `atoll_simulator.planner` what a run would need and cost."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from atoll.base.units import DAY_S
from atoll.cli.options import Assignments, Config
from atoll.codec import FORMATS
from atoll_simulator.fleet.parameters import FleetParameters

if TYPE_CHECKING:
    from atoll.settings import Settings
    from atoll_simulator.planner import Failures, PlanLinks, Question

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


def register(app: typer.Typer) -> None:
    """Add the verb."""
    app.command(
        name="plan", help="Plan a run: bytes, bandwidth, utilisation, goodput, time and cost.", rich_help_panel="plan"
    )(plan)


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
    from atoll.base.units import count  # noqa: PLC0415
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
    from atoll.base.units import rate, rates  # noqa: PLC0415
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
    """Return the learners of the flag, else those of a run that is described, else eight."""
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
    names = (
        "return_s",
        "slice_chips",
        "downscale_s",
        "upscale_s",
        "admission_s",
        "restart_s",
        "checkpoint_s",
        "notice_s",
        "stall_again",
        "loss_per_hour",
    )
    given = {name: options[name] for name in names if options[name] is not None}
    if options["mtbi_days"] is not None:
        given["mtbi_s"] = options["mtbi_days"] * DAY_S
    return Failures(**given)
