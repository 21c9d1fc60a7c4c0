"""The same machines and links under three ways to train: Atoll, synchronous DiLoCo, synchronous data-parallel.

The bandwidth that the synchronous ones need is told twice: as published tables count (`utilisation.PUBLISHED_SHARE`), to be
held against those, and by the ring below, which is what these sites would need and what pace and bytes follow from.

The synchronous ones reduce by a ring over all M sites: each sends 2 (M-1)/M of the whole volume, at the pace of the
slowest link, and a round of the ring costs 2 (M-1) half round trips. Data-parallel reduces every step, DiLoCo every H
steps; both beside the backward pass of that step, or with training stopped if asked. Both stop all sites when one fails
(`failures`). The ring uses the same links as Atoll's rounds: each site's one connection, and its share of the hub.

Atoll's learners do not wait: its pace is that of its steps, times the share of them that is ever merged (`merging`).
The user pays for the rest all the same, with chips and with bytes.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from atoll.wire.traffic import ring_bits
from atoll_simulator.planner import utilisation
from atoll_simulator.planner.failures import HOUR_S, goodput
from atoll_simulator.planner.links import Region, explain_unreachable, required_rates
from atoll_simulator.planner.question import WANTED, Question
from atoll_simulator.planner.timeline import GraphStep
from atoll_simulator.planner.traffic import Traffic
from atoll_simulator.planner.utilisation import PUBLISHED_SHARE


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
    """Return the steps between two rounds of a fragment, or the requested ones if there never is a round."""
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
