"""A plan as text: the question, its meaning, its assumptions, and what cannot work."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from atoll.base.units import as_bytes, as_count, as_rate, as_share, as_time
from atoll.base.wording import counted
from atoll_simulator.planner.answer import PlanAnswer
from atoll_simulator.planner.question import WANTED
from atoll_simulator.planner.sweep import CODECS, PAGE, STUDY, SweepRow, best
from atoll_simulator.planner.utilisation import PUBLISHED_SHARE


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
    yield from (f"  {_limited(system.name)}, -: {system.limit}" for system in found.systems[:3] if system.limit)
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
    yield f"  most at equal loss: --interval-steps {chosen.interval_steps} {_codec_flags(chosen)}"
    yield "  loss: above data-parallel training's at equal tokens; at equal loss: the tokens/s with which that would get as far"
    yield "  these are gaps of short runs of a small model; in longer runs long intervals cost less"
    yield ""


def _codec_flags(row: SweepRow) -> str:
    up, down = CODECS[row.sent]
    return f"--up {up} --down {down}"


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


def _limited(name: str) -> str:
    return name if name == "Atoll" else f"{name}, by a ring"


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
