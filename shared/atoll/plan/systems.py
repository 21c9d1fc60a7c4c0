"""The same machines and links under three ways to train: Atoll, synchronous DiLoCo, synchronous data-parallel.

The synchronous ones reduce by a ring over all M sites: each sends 2 (M-1)/M of the whole volume, at the pace of the
slowest link, and a round of the ring costs 2 (M-1) half round trips. Data-parallel reduces every step, beside its
backward pass if asked; DiLoCo every H steps, with training stopped. Both stop all when one fails (`failures`).
Atoll's learners do not wait: its pace is that of its steps, and a slow link costs freshness instead (`links`).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from atoll.plan import utilisation
from atoll.plan.failures import HOUR_S, goodput
from atoll.plan.links import Region, required
from atoll.plan.question import WANTED, Question
from atoll.plan.timeline import Step
from atoll.plan.traffic import Traffic


@dataclass(frozen=True, slots=True)
class System:
    """One way to train.

    Attributes:
        name: which.
        utilisation: share of time in which chips compute while nothing fails.
        goodput: share of that which is useful under failures.
        required: bits per second each way by wanted utilisation.
        site_bytes_per_step: bytes one site sends per step, in the mean.
        wide_bytes_per_step: bytes that cross between sites per step, all together.
        tokens_per_s: useful tokens.
        time_s: to the budget; infinite without a budget's end in sight, 0 without a budget.
        chip_hours: in that time.
        cost: of chips and egress, in dollars.
        cost_egress: of egress alone.
    """

    name: str
    utilisation: float
    goodput: float
    required: dict[float, float | None]
    site_bytes_per_step: float
    wide_bytes_per_step: float
    tokens_per_s: float
    time_s: float
    chip_hours: float
    cost: float
    cost_egress: float


def ring_bits(question: Question) -> float:
    """Return the bits that each site sends in one reduction of the whole model."""
    return 2.0 * (question.learners - 1) / question.learners * question.parameters * question.reduce_bits


def systems(question: Question, moved: Traffic, regions: tuple[Region, ...]) -> tuple[System, ...]:
    """Return Atoll, synchronous DiLoCo and data-parallel, elastic and rigid, in this order."""
    protocol = question.protocol
    per_step = protocol.fragments / max(region.interval for region in regions)
    unmerged_s = protocol.interval_steps * question.step_s / 2.0
    useful = goodput(question.failures, question.learners, question.chips, unmerged_s)
    slowest = min(min(region.up, region.down) for region in regions)
    step = Step(question.step_s, question.layers)

    def reduce_s(rate: float) -> float:
        return ring_bits(question) / rate + (question.learners - 1) * question.links.rtt_s

    def diloco(rate: float) -> float:
        return utilisation.diloco(step, reduce_s(rate), protocol.interval_steps, overlap=False)

    def parallel(rate: float) -> float:
        return utilisation.diloco(step, reduce_s(rate), 1, overlap=question.backward_overlap)

    site = ring_bits(question) / 8.0
    wide = question.learners * site
    atoll_site, atoll_wide = moved.up * per_step, (moved.hub_in + moved.hub_out) * per_step
    every = protocol.interval_steps
    return (
        _system(question, "Atoll", 1.0, useful.atoll, required(question, moved), (atoll_site, atoll_wide)),
        _system(
            question,
            "synchronous DiLoCo",
            diloco(slowest),
            useful.synchronous_elastic,
            _needs(diloco),
            (site / every, wide / every),
        ),
        _system(
            question, "data-parallel", parallel(slowest), useful.synchronous_elastic, _needs(parallel), (site, wide)
        ),
        _system(
            question,
            "data-parallel, rigid",
            parallel(slowest),
            useful.synchronous_rigid,
            _needs(parallel),
            (site, wide),
        ),
    )


def _needs(reached: Callable[[float], float]) -> dict[float, float | None]:
    return {wanted: utilisation.required(reached, wanted) for wanted in WANTED}


def _system(
    question: Question,
    name: str,
    used: float,
    useful: float,
    needs: dict[float, float | None],
    per_step: tuple[float, float],
) -> System:
    """Return a system with the time and money that its pace means."""
    site, wide = per_step
    steps_per_s = used / question.step_s
    pace = question.learners * question.step_tokens * steps_per_s * useful
    time_s = (question.tokens / pace if pace else math.inf) if question.tokens else 0.0
    chip_hours = question.learners * question.chips * time_s / HOUR_S
    egress = wide * steps_per_s * time_s / 1e9 * question.prices.egress_gb
    return System(
        name=name,
        utilisation=used,
        goodput=useful,
        required=needs,
        site_bytes_per_step=site,
        wide_bytes_per_step=wide,
        tokens_per_s=pace,
        time_s=time_s,
        chip_hours=chip_hours,
        cost=chip_hours * question.prices.chip_hour + egress,
        cost_egress=egress,
    )
