"""A sweep over interval and codec: what each needs, how fast it is, and what it costs in quality by our own experiments.

Quality is that of docs/results/experiment-interval.md: how far the loss of a run ends above that of data-parallel training at
equal tokens (`GAPS`). A higher loss is made good by more tokens. The loss of data-parallel training of that model falls with
tokens^-TOKENS_EXPONENT (the larger budgets of docs/results/experiment-parity.md). So a gap g takes
(1 + g)^(1 / TOKENS_EXPONENT) times the tokens, and a pace divided by that is what it is worth: tokens/s at equal loss.

Known limitation: the gaps are those of short runs of a small model. They fall with the length of a run, so in longer runs long
intervals cost less than here. The order of rows says more than their distance.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

import msgspec

from atoll_simulator.planner.links import average, regions
from atoll_simulator.planner.question import Question
from atoll_simulator.planner.systems import systems
from atoll_simulator.planner.traffic import traffic

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
