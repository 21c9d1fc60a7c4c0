"""The same machines and links under three ways to train: Atoll, synchronous DiLoCo, synchronous data-parallel.

The synchronous ones reduce by a ring over all M sites: each sends 2 (M-1)/M of the whole volume, at the pace of the slowest
link, and a round of the ring costs 2 (M-1) half round trips; every step or every H steps, beside the backward pass or with
training stopped. Both stop all sites when one fails. The bandwidth that they need is told twice: as published tables count
(`utilisation.PUBLISHED_SHARE`), and by the ring. Atoll's learners do not wait: its pace is that of its steps, times the share
of them that is ever merged (`links`); the rest is paid for all the same, with chips and bytes.

**A sweep** over interval and codec prices quality by docs/results/experiment-interval.md: how far the loss of a run ends above
data-parallel training's at equal tokens (`GAPS`). That training's loss falls with tokens^-TOKENS_EXPONENT
(docs/results/experiment-parity.md), so a gap g takes (1 + g)^(1 / TOKENS_EXPONENT) times the tokens, and a pace divided by that
is what it is worth. Known limitation: the gaps are those of short runs of a small model; in longer runs long intervals cost
less. The order of rows says more than their distance.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Final

import msgspec

from atoll.wire.traffic import ring_bits
from atoll_simulator.planner import utilisation
from atoll_simulator.planner.failures import HOUR_S, goodput
from atoll_simulator.planner.links import Region, average, explain_unreachable, regions, required_rates
from atoll_simulator.planner.question import WANTED, Question
from atoll_simulator.planner.timeline import GraphStep
from atoll_simulator.planner.traffic import Traffic, traffic
from atoll_simulator.planner.utilisation import PUBLISHED_SHARE

PAGE: Final = "docs/results/experiment-interval.md"
STUDY: Final = "4 learners, 600 steps, size xs"
CODECS: Final = {"int4 both ways": ("int4", "int4"), "bf16 up, f32 down": ("bf16", "f32")}
GAPS: Final = {
    (4, "int4 both ways"): 0.0188,
    (4, "bf16 up, f32 down"): 0.0228,
    (8, "int4 both ways"): 0.0340,
    (8, "bf16 up, f32 down"): 0.0329,
    (24, "int4 both ways"): 0.0746,
    (24, "bf16 up, f32 down"): 0.0765,
    (48, "int4 both ways"): 0.1439,
    (48, "bf16 up, f32 down"): 0.1392,
}
"""Loss above data-parallel training's at equal tokens, by H and what is sent: the page's column, held to it by a test."""
TOKENS_EXPONENT: Final = 0.0948
"""Of the loss of data-parallel training by tokens; a test takes it from the raw file of experiment-parity."""


@dataclass(frozen=True, slots=True)
class SweepRow:
    """One pair of H and codec in a plan.

    Attributes:
        interval_steps: H.
        sent: the codecs up and down.
        link_average: bits per second of the busier way of a learner's link, in the mean.
        busy: share of the time that the busiest region's link is busy; above 1 it does not keep up.
        merged: share of what is trained that is merged.
        tokens_per_s: useful tokens.
        gap: loss above data-parallel training's at equal tokens, as a share.
        worth: tokens per second of data-parallel training that reach the same loss in the same time.
    """

    interval_steps: int
    sent: str
    link_average: float
    busy: float
    merged: float
    tokens_per_s: float
    gap: float
    worth: float


def sweep(question: Question) -> tuple[SweepRow, ...]:
    """Return every pair of the study for a checked question, whose other settings stay; overlap is at most H."""
    return tuple(_row(question, interval, sent, gap) for (interval, sent), gap in GAPS.items())


def best(rows: tuple[SweepRow, ...]) -> SweepRow:
    """Return the row that is worth most; of equals the one that needs the least of its link."""
    return max(rows, key=lambda row: (row.worth, -row.link_average))


def tokens_for(gap: float) -> float:
    """Return how many times the tokens make a gap good."""
    return float((1.0 + gap) ** (1.0 / TOKENS_EXPONENT))


def _row(question: Question, interval: int, sent: str, gap: float) -> SweepRow:
    up, down = CODECS[sent]
    overlap = min(question.protocol.overlap_steps, interval)
    protocol = msgspec.structs.replace(
        question.protocol, interval_steps=interval, overlap_steps=overlap, codec_up=up, codec_down=down
    )
    asked = replace(question, protocol=protocol)
    moved = traffic(asked)
    links = regions(asked, moved)
    atoll = systems(asked, moved, links)[0]
    return SweepRow(
        interval_steps=interval,
        sent=sent,
        link_average=average(asked, max(moved.up, moved.down)),
        busy=max(region.busy for region in links),
        merged=atoll.merged,
        tokens_per_s=atoll.tokens_per_s,
        gap=gap,
        worth=atoll.tokens_per_s / tokens_for(gap),
    )


@dataclass(frozen=True, slots=True)
class System:
    """One way to train.

    Attributes:
        name: which.
        utilisation: share of time in which chips compute while nothing fails.
        goodput: share of that which is useful under failures.
        merged: share of that which ever enters the model.
        required: bits per second each way by wanted utilisation; of the synchronous ones as published tables count.
        required_ring: the same by a ring over these sites; empty for Atoll.
        limit: why no bandwidth is enough for the least utilisation that none reaches; empty if every one is reached.
        site_bytes_per_step: bytes one site sends per step, in the mean.
        wide_bytes_per_step: bytes that cross between sites per step, all together.
        tokens_per_s: useful tokens.
        time_s: to the budget; infinite if the run never gets there, 0 without a budget.
        chip_hours: in that time.
        cost: of chips and egress, in dollars.
        cost_egress: of egress alone.
    """

    name: str
    utilisation: float
    goodput: float
    merged: float
    required: dict[float, float | None]
    required_ring: dict[float, float | None]
    limit: str
    site_bytes_per_step: float
    wide_bytes_per_step: float
    tokens_per_s: float
    time_s: float
    chip_hours: float
    cost: float
    cost_egress: float


def systems(question: Question, moved: Traffic, regions: tuple[Region, ...]) -> tuple[System, ...]:
    """Return Atoll, synchronous DiLoCo and data-parallel, elastic and rigid, in this order."""
    protocol = question.protocol
    homes = [regions[number % len(regions)] for number in range(question.learners)]
    per_step = sum(protocol.fragments / home.interval for home in homes) / len(homes)
    unmerged_s = question.step_s / 2.0 * sum(_reached(question, home) for home in homes) / len(homes)
    merged = sum(home.merged for home in homes) / len(homes)
    useful = goodput(question.failures, question.learners, question.chips, unmerged_s)
    slowest = min(min(region.up_usable, region.down_usable) for region in regions)
    step = GraphStep(question.step_s, question.layers)

    reduced_bits = ring_bits(question.learners, question.parameters, question.reduce_bits)

    published_bits = published_reduce_bits(question)

    def ring_s(rate: float) -> float:
        return reduced_bits / rate + (question.learners - 1) * question.links.rtt_s

    def published_s(rate: float) -> float:
        return published_bits / rate

    def every(interval: int, reduce_s: Callable[[float], float]) -> Callable[[float], float]:
        return lambda rate: utilisation.diloco(step, reduce_s(rate), interval, overlap=question.backward_overlap)

    in_turns = _ring_needs(question, *(every(protocol.interval_steps, how) for how in (published_s, ring_s)))
    theirs = _ring_needs(question, *(every(1, how) for how in (published_s, ring_s)))
    site = reduced_bits / 8.0
    wide = question.learners * site
    atoll_site, atoll_wide = moved.up * per_step, (moved.hub_in + moved.hub_out) * per_step
    together, rigid = useful.synchronous_elastic, useful.synchronous_rigid
    ring, in_turn = (site, wide), (site / protocol.interval_steps, wide / protocol.interval_steps)
    used, used_in_turn = every(1, ring_s)(slowest), every(protocol.interval_steps, ring_s)(slowest)
    ours = Needs(required_rates(question, moved), {}, explain_unreachable(question, moved))
    return (
        _system(question, "Atoll", (1.0, useful.atoll, merged), ours, (atoll_site, atoll_wide)),
        _system(question, "synchronous DiLoCo", (used_in_turn, together, 1.0), in_turns, in_turn),
        _system(question, "data-parallel", (used, together, 1.0), theirs, ring),
        _system(question, "data-parallel, rigid", (used, rigid, 1.0), theirs, ring),
    )


def _reached(question: Question, home: Region) -> float:
    return home.interval if math.isfinite(home.interval) else float(question.protocol.interval_steps)


def published_reduce_bits(question: Question) -> float:
    """Return the bits that a site sends in one reduction as the published tables count; one site sends none."""
    return 0.0 if question.learners == 1 else PUBLISHED_SHARE * question.reduce_bits * question.parameters


@dataclass(frozen=True, slots=True)
class Needs:
    """Bits per second by wanted utilisation, as published and by a ring, and the reason for each that has none."""

    required: dict[float, float | None]
    required_ring: dict[float, float | None]
    limit: str


def _ring_needs(question: Question, published: Callable[[float], float], ring: Callable[[float], float]) -> Needs:
    """Return what synchronous training needs; only a ring's round trips can be too long for any bandwidth."""
    counted, found = (
        {wanted: utilisation.required_rate(how, wanted) for wanted in WANTED} for how in (published, ring)
    )
    trips = (
        f"a ring of {question.learners} takes {question.learners - 1} round trips of {1000 * question.links.rtt_s:g} ms"
    )
    return Needs(counted, found, f"{trips}, whatever the bandwidth" if None in found.values() else "")


def _system(
    question: Question,
    name: str,
    shares: tuple[float, float, float],
    needs: Needs,
    per_step: tuple[float, float],
) -> System:
    """Return a system with the time and money that its pace means; `shares` are utilisation, goodput, merged.

    Bytes go with the steps that are taken, whether they are merged or not; a machine that stands still sends nothing.
    """
    used, useful, merged = shares
    site, wide = per_step
    at_best = question.learners * question.step_tokens / question.step_s
    pace = at_best * used * useful * merged
    time_s = (question.tokens / pace if pace else math.inf) if question.tokens else 0.0
    chip_hours = question.learners * question.chips * time_s / HOUR_S
    steps = 0.0 if not question.tokens else math.inf
    if question.tokens and merged:
        steps = question.tokens / (question.learners * question.step_tokens * merged)
    sent_gb = wide * steps / 1e9 if wide else 0.0
    return System(
        name=name,
        utilisation=used,
        goodput=useful,
        merged=merged,
        required=needs.required,
        required_ring=needs.required_ring,
        limit=needs.limit,
        site_bytes_per_step=site,
        wide_bytes_per_step=wide,
        tokens_per_s=pace,
        time_s=time_s,
        chip_hours=chip_hours,
        cost=_price(chip_hours, question.prices.chip_hour) + _price(sent_gb, question.prices.egress_gb),
        cost_egress=_price(sent_gb, question.prices.egress_gb),
    )


def _price(amount: float, dollars: float) -> float:
    """Return the price of an amount: 0 if it is free, even for an infinite amount."""
    return amount * dollars if dollars else 0.0
