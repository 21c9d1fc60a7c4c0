"""`atoll plan`: what a run would need and cost, before anybody starts it. Reads the flags; `atoll.plan` does the work."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from atoll.cli.options import Assignments, Config

HOUR_S = 3600.0
DAY_S = 24.0 * HOUR_S


def register(app: typer.Typer) -> None:
    """Add the verb."""
    app.command(name="plan", help="Plan a run: bytes, bandwidth, utilisation, goodput, time and cost.")(plan)


def plan(  # noqa: PLR0913  (one option each)
    *,
    parameters: Annotated[str, typer.Argument(help="Parameters of the model, as 12B or 350M.")],
    step_s: Annotated[float, typer.Option(help="Seconds of one inner step of one learner.")],
    bandwidth: Annotated[str, typer.Option(help="A learner's link, as 2Gbit; one per region: 2Gbit,5Gbit.")],
    bandwidth_down: Annotated[str | None, typer.Option(help="The same, down.  [default: as up]")] = None,
    hub_in: Annotated[str | None, typer.Option(help="The hub's link, in.  [default: as much as needed]")] = None,
    hub_out: Annotated[str | None, typer.Option(help="The hub's link, out.  [default: as --hub-in]")] = None,
    rtt_ms: Annotated[float, typer.Option(help="Round-trip time between learner and hub.")] = 50.0,
    loss: Annotated[float, typer.Option(help="Share of packets lost.")] = 0.0,
    merge_s: Annotated[float, typer.Option(help="Seconds of a round that are merging and disk.")] = 0.0,
    learners: Annotated[int, typer.Option(help="M.")] = 8,
    chips: Annotated[str, typer.Option(help="Chips of one learner.")] = "1",
    fragments: Annotated[int | None, typer.Option(help="P.  [default: 24]")] = None,
    interval: Annotated[
        int | None, typer.Option(help="H, steps between two rounds of a fragment.  [default: 24]")
    ] = None,
    overlap: Annotated[int | None, typer.Option(help="tau, steps a round may take.  [default: 2]")] = None,
    quorum: Annotated[int | None, typer.Option(help="K.  [default: 1]")] = None,
    shards: Annotated[int | None, typer.Option(help="Synchronizer shards.  [default: 2]")] = None,
    up: Annotated[
        str | None, typer.Option(help="Codec of displacements: f32, bf16, int8, int4.  [default: bf16]")
    ] = None,
    down: Annotated[str | None, typer.Option(help="Codec of global frames.  [default: f32]")] = None,
    step_tokens: Annotated[str, typer.Option(help="Tokens of one step of one learner.")] = "262144",
    tokens: Annotated[str | None, typer.Option(help="Tokens to reach, as 1T.")] = None,
    layers: Annotated[int, typer.Option(help="Layers, for what synchronous training hides.")] = 32,
    reduce_bits: Annotated[float, typer.Option(help="Bits per parameter that synchronous training reduces.")] = 16.0,
    backward_overlap: Annotated[
        bool,
        typer.Option("--backward-overlap/--no-backward-overlap", help="Whether it reduces beside its backward pass."),
    ] = True,
    mtbi_days: Annotated[float | None, typer.Option(help="Days between failures of one chip.  [default: 365]")] = None,
    loss_per_hour: Annotated[float | None, typer.Option(help="Share of whole learners lost per hour, instead.")] = None,
    return_s: Annotated[float | None, typer.Option(help="How long what failed stays away.  [default: 1200]")] = None,
    slice_chips: Annotated[int | None, typer.Option(help="Chips that fail together.  [default: 64]")] = None,
    downscale_s: Annotated[float | None, typer.Option(help="A learner's stop to lose a slice.  [default: 14]")] = None,
    upscale_s: Annotated[float | None, typer.Option(help="Its stop to take slices in.  [default: 16]")] = None,
    admission_s: Annotated[float | None, typer.Option(help="Least time between two of those.  [default: 60]")] = None,
    restart_s: Annotated[float | None, typer.Option(help="What a rigid job loses per failure.  [default: 75]")] = None,
    chip_hour: Annotated[float, typer.Option(help="Dollars per chip and hour.")] = 0.0,
    egress_gb: Annotated[float, typer.Option(help="Dollars per GB that leaves a region or the hub.")] = 0.0,
    shard_memory_gb: Annotated[float, typer.Option(help="Memory of the machine of one shard.")] = 16.0,
    config: Config = None,
    assignments: Assignments = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the plan as JSON: bits/s, bytes, seconds.")] = False,
) -> None:
    """Print a plan. With --config, protocol settings are those of the run that `atoll up` would start from that file."""
    from atoll.plan import Links, Prices, Question, answer, as_document, text  # noqa: PLC0415  (loaded when it runs)
    from atoll.plan.quantities import count, rate, rates  # noqa: PLC0415

    agreed = {
        "fragments": fragments,
        "interval_steps": interval,
        "overlap_steps": overlap,
        "quorum": quorum,
        "shards": shards,
        "codec_up": up,
    }
    run = _agreement(config, assignments or [], {name: value for name, value in agreed.items() if value is not None})
    up_rates = rates(bandwidth, "--bandwidth")
    inward = rate(hub_in, "--hub-in") if hub_in is not None else None
    question = Question(
        parameters=count(parameters, "PARAMETERS"),
        step_s=step_s,
        links=Links(
            up=up_rates,
            down=rates(bandwidth_down, "--bandwidth-down") if bandwidth_down is not None else up_rates,
            hub_in=inward,
            hub_out=rate(hub_out, "--hub-out") if hub_out is not None else inward,
            rtt_s=rtt_ms / 1000.0,
            loss=loss,
            merge_s=merge_s,
        ),
        learners=learners,
        protocol=run.protocol,
        codec_down=down or "f32",
        step_tokens=count(step_tokens, "--step-tokens"),
        layers=layers,
        reduce_bits=reduce_bits,
        backward_overlap=backward_overlap,
        tokens=count(tokens, "--tokens") if tokens is not None else run.protocol.tokens_target,
        chips=count(chips, "--chips"),
        failures=_failures(
            mtbi_s=mtbi_days * DAY_S if mtbi_days is not None else None,
            loss_per_hour=loss_per_hour,
            return_s=return_s,
            slice_chips=slice_chips,
            downscale_s=downscale_s,
            upscale_s=upscale_s,
            admission_s=admission_s,
            restart_s=restart_s,
        ),
        prices=Prices(chip_hour, egress_gb),
        stream_bytes_max=run.stream_bytes_max,
        shard_memory_bytes=shard_memory_gb * 1e9,
    )
    found = answer(question)
    typer.echo(json.dumps(as_document(found), indent=2) if as_json else text(found))


@dataclass(frozen=True, slots=True)
class _Run:
    """What a configuration says of a run: its agreement and the room of a stream."""

    protocol: Any
    stream_bytes_max: int


def _agreement(config: Path | None, assignments: list[str], flags: dict[str, Any]) -> _Run:
    """Return the agreement of the file, the environment and `--set`, then of the flags.

    What nobody said is as `atoll up` sets it when there is a file, else the protocol's own default.
    """
    import msgspec  # noqa: PLC0415

    from atoll.settings import load  # noqa: PLC0415
    from atoll.up.defaults import SETTINGS  # noqa: PLC0415

    given = load(config, assignments)
    if config is not None:
        ours = {name: value for name, value in SETTINGS.items() if name.startswith("protocol.")}
        unsaid = [f"{name}={value}" for name, value in ours.items() if name not in given.origins]
        given = load(config, [*unsaid, *assignments])
    protocol = msgspec.structs.replace(given.settings.protocol, **flags)
    return _Run(protocol, given.settings.broker.stream_bytes_max)


def _failures(**given: Any) -> Any:  # noqa: ANN401  (fields of Failures)
    from atoll.errors import SettingsError  # noqa: PLC0415
    from atoll.plan import Failures  # noqa: PLC0415

    if given["loss_per_hour"] is not None and given["mtbi_s"] is not None:
        raise SettingsError(
            "failures are given twice",
            got="--mtbi-days and --loss-per-hour",
            allowed="failures of chips or losses of whole learners",
            todo="leave one of them out",
        )
    return Failures(**{name: value for name, value in given.items() if value is not None})
