"""The answer to a question: everything computed, the assumptions it rests on, and what cannot work; and all of it as text."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from atoll.base.wording import as_bytes, as_count, as_rate, as_share, as_time, counted
from atoll.merge.outer import derivable
from atoll.merge.partial import partial_codec
from atoll.story.goodput import DEFINITION
from atoll_simulator.planner.cautions import Caution, Findings, cautions
from atoll_simulator.planner.failures import YEAR_S, site_mtbf_s, spares
from atoll_simulator.planner.links import ROUND_TRIPS, UNSURE, Region, average, burst, explain_too_late, regions
from atoll_simulator.planner.question import WANTED, Question
from atoll_simulator.planner.systems import CODECS, PAGE, STUDY, SweepRow, System, best, sweep, systems
from atoll_simulator.planner.traffic import Room, Traffic, bits_per_number, room, traffic
from atoll_simulator.planner.utilisation import PUBLISHED_SHARE


@dataclass(frozen=True, slots=True)
class PlanAnswer:
    """A plan.

    Attributes:
        question: what was asked.
        traffic: bytes of one round.
        burst: bits per second each way with which a round ends within tau steps; None if no bandwidth does it.
        late: why no bandwidth does it; empty if one does.
        hub_in_average, hub_out_average: bits per second over the hub's link in the mean.
        broker_in_average, broker_out_average: the same at the broker's network card.
        regions: the effect of the plan on each link.
        systems: Atoll and the synchronous ones.
        room: memory and streams.
        sweep: other intervals and codecs; empty where nobody asks.
        assumptions: sentences, with numbers.
        cautions: what cannot work.
    """

    question: Question
    traffic: Traffic
    burst: float | None
    late: str
    hub_in_average: float
    hub_out_average: float
    broker_in_average: float
    broker_out_average: float
    regions: tuple[Region, ...]
    systems: tuple[System, ...]
    room: Room
    sweep: tuple[SweepRow, ...]
    assumptions: tuple[str, ...]
    cautions: tuple[Caution, ...]

    @property
    def works(self) -> bool:
        """Return whether no caution says that the plan cannot work."""
        return not any(caution.grave for caution in self.cautions)

    @property
    def speed_up(self) -> float | None:
        """Return the speed over data-parallel on the same links; failures and unmerged work count.

        None for a plan that cannot work, and if data-parallel stands still.
        """
        other = self.systems[2].tokens_per_s
        return self.systems[0].tokens_per_s / other if self.works and other else None


def answer(question: Question, *, sweeps: bool = False) -> PlanAnswer:
    """Return the plan of a checked question, with a sweep over interval and codec if that `sweeps`.

    Raises:
        SettingsError: the question is not valid.
    """
    question.check()
    moved = traffic(question)
    links = regions(question, moved)
    trained = systems(question, moved, links)
    space = room(question, moved, max(region.journey_s for region in links))
    return PlanAnswer(
        question=question,
        traffic=moved,
        burst=burst(question, moved),
        late=explain_too_late(question, moved),
        hub_in_average=average(question, moved.hub_in),
        hub_out_average=average(question, moved.hub_out),
        broker_in_average=average(question, moved.broker_in),
        broker_out_average=average(question, moved.broker_out),
        regions=links,
        systems=trained,
        room=space,
        sweep=sweep(question) if sweeps else (),
        assumptions=assumptions(question),
        cautions=cautions(Findings(question, moved, links, trained[0].goodput, space)),
    )


def assumptions(question: Question) -> tuple[str, ...]:
    """Return the assumptions behind the figures, each in a sentence with its number."""
    protocol = question.protocol
    return (
        *_describe_sending(question),
        *_regional(question),
        *_timing(question),
        (
            f"what a learner trains between push and adoption is {_fate(question)} (adoption {protocol.adoption}); "
            f"where the link is too slow, the share that is merged is an estimate within {UNSURE:.0f} points"
        ),
        *_synchronous(question),
        f"{DEFINITION}; steps that a failure undoes do not count",
        (
            f"the outer optimizer ({protocol.outer}) keeps {question.state_numbers:g} float32 numbers per parameter, and "
            f"stores {'its momentum with every keyframe' if derivable(protocol) else 'them with every commit'}"
        ),
        f"a step of one learner trains {question.step_tokens} tokens; equal tokens are taken to be worth the same",
    )


def _describe_sending(question: Question) -> tuple[str, ...]:
    protocol, hub_in = question.protocol, question.links.hub_in
    up, down = bits_per_number(protocol.codec_up), bits_per_number(protocol.codec_down)
    every = "the learner contributes to every round and reads"
    if question.learners > 1:
        every = f"all {counted(question.learners, 'learner')} contribute to every round and read"
    hub = "the hub's link is as wide as needed" if hub_in is None else f"the hub has {as_rate(hub_in)} in"
    return (
        (
            f"a number is {up:.3g} bits up ({protocol.codec_up}) and {down:.3g} bits down ({protocol.codec_down}), block "
            "scales counted; no zstd; headers of NATS, heartbeats and events are not counted (below 0.1 % of a large model)"
        ),
        f"{every} every frame, through one broker (a star); {hub}",
    )


def _timing(question: Question) -> tuple[str, ...]:
    protocol, links = question.protocol, question.links
    steps = f"{protocol.interval_steps / protocol.fragments:.3g}"
    pause = "step" if steps == "1" else f"{steps} steps"
    return (
        (
            f"links are full duplex and carry nothing else; a round costs {ROUND_TRIPS:g} round trips of "
            f"{1000 * links.rtt_s:g} ms and {links.merge_s:g} s of merging and disk; a blob goes up with "
            f"{as_bytes(links.window_bytes)} in flight, so at {as_rate(links.window_bits_per_s)} at most"
        ),
        (
            f"fragments are equal, and one leaves every {pause} of "
            f"{question.step_s:g} s; the time of a step is given, what the protocol costs it (`make bench`) is not counted"
        ),
        (
            "utilisation is the literature's: a step waits for a fragment that is not back within tau steps. Atoll's learners "
            "do not wait; their interval grows instead"
        ),
    )


def _synchronous(question: Question) -> tuple[str, ...]:
    broken = question.failures
    overlap = "both hidden in the backward pass" if question.backward_overlap else "both with nothing beside it"
    waits = " and waits for who is away" if broken.loss_per_hour else f"; {_spares(question)}"
    return (
        (
            f"synchronous training reduces {question.reduce_bits:g} bits a parameter by a ring over "
            f"{counted(question.learners, 'site')} "
            f"at the pace of the slowest link, hub and connection counted: data-parallel every step, DiLoCo every "
            f"{question.protocol.interval_steps}, {overlap} ({question.layers} layers, backward 2/3 of a step)"
        ),
        (
            f"{_failures(question)}; synchronous training is one job of all chips; a rigid one loses {broken.restart_s:g} s "
            f"per failure and what it did since it kept its progress, every {broken.checkpoint_s:g} s{waits}"
        ),
    )


def _failures(question: Question) -> str:
    broken = question.failures
    between = as_time(site_mtbf_s(broken, question.chips))
    if broken.loss_per_hour:
        return (
            f"{as_share(broken.loss_per_hour)} of the learners are lost per hour and are away for {as_time(broken.return_s)}, "
            f"so a site fails every {between}; a lost learner loses half the interval that is reached of its work"
        )
    return (
        f"a chip fails every {broken.mtbi_s / YEAR_S:.3g} years, so a site of {question.chips} fails every {between}; "
        f"{counted(min(broken.slice_chips, question.chips), 'chip goes', 'chips go together')} for "
        f"{as_time(broken.return_s)}; a learner stops {broken.downscale_s:g} s to lose a slice, {broken.upscale_s:g} s to "
        f"take slices in, at most every {broken.admission_s:g} s"
    )


def _regional(question: Question) -> tuple[str, ...]:
    if question.per_region == 1:
        return ()
    sums = f"its synchronizer sends their sum ({partial_codec(question.protocol)}) {question.added_up_s:.3g} s later"
    frames = "its broker reads each frame once; what they move within the region is not counted"
    return (f"{question.per_region} learners share a region and its link: {sums}, {frames}",)


def _spares(question: Question) -> str:
    held = spares(question.failures, question.learners, question.chips)
    return (
        f"of the same machines it holds {held.slices} of {held.of} slices back as spares, which its goodput counts as idle, "
        "and waits while more are away"
    )


def _fate(question: Question) -> str:
    if question.protocol.adoption == "carry":
        return "carried into the next round"
    return "superseded, and paid for like the rest"


def as_document(found: PlanAnswer) -> dict[str, Any]:
    """Return the answer as plain data: rates in bits/s, sizes in bytes, times in s; None for what never ends."""
    protocol = found.question.protocol
    document = asdict(found) | {"speed_up": found.speed_up, "works": found.works}
    document["question"]["protocol"] = {name: getattr(protocol, name) for name in protocol.__struct_fields__}
    plain: dict[str, Any] = _plain(document)
    return plain


def _plain(value: Any) -> Any:  # noqa: ANN401  (any JSON)
    if isinstance(value, dict):
        return {str(key): _plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def text(found: PlanAnswer) -> str:
    """Return the plan for a person to read."""
    return "\n".join(
        line
        for part in (_question(found), _traffic(found), _links(found), _systems(found), _sweep(found), _ends(found))
        for line in part
    )


def _question(found: PlanAnswer) -> Iterator[str]:
    question, protocol = found.question, found.question.protocol
    learners = counted(question.learners, "learner")
    yield (
        f"{as_count(question.parameters)} parameters, {learners} of {counted(question.chips, 'chip')}, "
        f"{question.step_s:g} s a step; P={protocol.fragments} H={protocol.interval_steps} tau={protocol.overlap_steps} "
        f"K={protocol.quorum}, {counted(protocol.shards, 'shard')}; {protocol.codec_up} up, {protocol.codec_down} down"
    )
    yield ""


def _traffic(found: PlanAnswer) -> Iterator[str]:
    question, moved = found.question, found.traffic
    shards = question.protocol.shards
    shard = "the shard" if shards == 1 else f"one of {shards} shards"
    per_step = question.protocol.fragments / question.protocol.interval_steps
    yield f"A round: one fragment of {as_count(question.fragment_elements)} numbers, every {as_time(question.round_every_s)}"
    yield from _table(
        ("", "per round", "per step", "in the mean"),
        [
            (name, as_bytes(size), as_bytes(size * per_step), as_rate(8.0 * size / question.round_every_s))
            for name, size in (
                (f"{_whose(found)} link, up", moved.up),
                (f"{_whose(found)} link, down", moved.down),
                ("the hub's link, in", moved.hub_in),
                ("the hub's link, out", moved.hub_out),
                ("the broker's card, in", moved.broker_in),
                ("the broker's card, out", moved.broker_out),
                (f"{shard}, in (mean)", moved.shard_in / shards),
                (f"{shard}, out (mean)", moved.shard_out / shards),
            )
        ],
    )
    wide = f"{as_rate(found.burst)} each way, {as_rate(_times(found.burst, question.senders))} at the hub"
    yield (
        f"  within tau steps ({as_time(question.hidden_s)}), so that nothing waits: "
        f"{f'no bandwidth is enough, since {found.late}' if found.late else wide}; "
        f"{moved.chunks_up} chunks up, {moved.chunks_down} down"
    )
    yield (
        f"  a shard's memory {as_bytes(found.room.shard)}; the broker keeps {as_bytes(found.room.frames)} of frames, "
        f"{as_bytes(found.room.states)} of states, {as_bytes(found.room.contributions)} of contributions"
    )
    yield ""


def _links(found: PlanAnswer) -> Iterator[str]:
    atoll, senders = found.systems[0], found.question.senders
    yield "Links"
    yield from _table(
        ("region", "up / down", "usable, bound by", "busy", "a round", "hidden", "utilisation", "H reached", "merged"),
        [
            (
                str(number),
                f"{as_rate(region.up)} / {as_rate(region.down)}",
                f"{as_rate(region.up_usable)} / {as_rate(region.down_usable)}, {region.bound_by}",
                as_share(region.busy),
                as_time(region.journey_s),
                as_time(region.hidden_s),
                as_share(region.utilisation),
                f"{region.interval:.4g}",
                as_share(region.merged),
            )
            for number, region in enumerate(found.regions, 1)
        ],
    )
    yield ""
    yield "Bandwidth required, each way, for a utilisation of (-: no bandwidth is enough)"
    synchronous = found.systems[1:3]
    rows = [(system.name, system.required) for system in found.systems[:3]]
    rows += [(f"{system.name}, by a ring", system.required_ring) for system in synchronous]
    rows += [("Atoll, at the hub", {wanted: _times(atoll.required[wanted], senders) for wanted in WANTED})]
    yield from _table(
        ("", *(as_share(wanted) for wanted in WANTED)),
        [(name, *(as_rate(needs[wanted]) for wanted in WANTED)) for name, needs in rows],
    )
    if found.question.learners > 1:
        yield (
            f"  synchronous DiLoCo and data-parallel: as published tables count, {PUBLISHED_SHARE:.2g} of "
            f"{found.question.reduce_bits:g} bits a parameter and reduction, no round trips; by a ring: what these "
            f"{found.question.learners} sites need"
        )
    yield from (
        f"  {system.name}{'' if system.name == 'Atoll' else ', by a ring'}, -: {system.limit}"
        for system in found.systems[:3]
        if system.limit
    )
    yield ""


def _systems(found: PlanAnswer) -> Iterator[str]:
    question = found.question
    yield "The same machines and links" + (f", to {as_count(question.tokens)} tokens" if question.tokens else "")
    rows = []
    for system in found.systems:
        row = (
            system.name,
            as_share(system.utilisation),
            as_share(system.goodput),
            as_share(system.merged),
            as_bytes(system.site_bytes_per_step),
        )
        pace = f"{as_count(system.tokens_per_s)}/s"
        ending = (
            (as_time(system.time_s), f"{system.cost:,.0f}", f"{system.cost_egress:,.0f}") if question.tokens else ()
        )
        rows.append((*row, pace, *ending))
    budget = ("time", "cost $", "of it egress $") if question.tokens else ()
    yield from _table(("", "computing", "goodput", "merged", "sent per site and step", "tokens", *budget), rows)
    if found.speed_up is not None:
        yield f"  Atoll is {found.speed_up:.3g} times as fast as data-parallel here"
    elif not found.works:
        yield "  how much faster is not said: this plan cannot work as it is (below)"
    yield ""


def _sweep(found: PlanAnswer) -> Iterator[str]:
    if not found.sweep:
        return
    yield f"Other intervals and codecs, priced by {PAGE} ({STUDY})"
    yield from _table(
        ("H, sent", "a link, in the mean", "busy", "merged", "tokens", "loss", "at equal loss"),
        [
            (
                f"{row.interval_steps}, {row.sent}",
                as_rate(row.link_average),
                as_share(row.busy),
                as_share(row.merged),
                f"{as_count(row.tokens_per_s)}/s",
                f"{100 * row.gap:+.2f} %",
                f"{as_count(row.worth)}/s",
            )
            for row in found.sweep
        ],
    )
    chosen = best(found.sweep)
    up, down = CODECS[chosen.sent]
    yield f"  most at equal loss: --interval-steps {chosen.interval_steps} --up {up} --down {down}"
    yield "  loss: above data-parallel training's at equal tokens; at equal loss: the tokens/s with which that would get as far"
    yield "  these are gaps of short runs of a small model; in longer runs long intervals cost less"
    yield ""


def _ends(found: PlanAnswer) -> Iterator[str]:
    yield "Assumed"
    yield from (f"  - {sentence}" for sentence in found.assumptions)
    if found.cautions:
        yield ""
        yield "This plan works, but" if found.works else "This plan cannot work as it is"
    for caution in found.cautions:
        yield f"  {'!' if caution.grave else '-'} {caution.what}"
        yield f"    change: {caution.change}"
        yield f"    to:     {caution.to}"


def _times(rate: float | None, senders: int) -> float | None:
    return None if rate is None else rate * senders


def _whose(found: PlanAnswer) -> str:
    return "a learner's" if found.question.per_region == 1 else "a region's"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    widths = [max(len(row[column]) for row in (head, *rows)) for column in range(len(head))]
    for row in (head, *rows):
        first = row[0].ljust(widths[0])
        rest = "  ".join(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))
        yield f"  {first}  {rest}".rstrip()
