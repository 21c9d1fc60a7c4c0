"""The bandwidth figures that others have published, and the assumptions under which our model is asked for them.

Sources: "paper" is arXiv 2604.21428 (Decoupled DiLoCo), "scaling" arXiv 2503.09799 (Table 6), "streaming" arXiv 2501.18512,
"MaxText" its documentation. [T] was read in the source's own words, [S] second-hand, [L] in a lineage paper.

Their bandwidths are points of the grid 10^(-1 + 4 k / 49) Gbit/s (inferred: all of Table 6, 104.8 and 1.7 lie on it), so a
published figure says that the need lies between that point and the one below, a factor of 1.21. We ask our model for the
first point of the grid that reaches the utilisation, and give the error in steps of the grid.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from atoll_simulator.planner import timeline, utilisation
from atoll_simulator.planner.timeline import GraphStep, Stream

GRID = tuple(10.0 ** (-1.0 + 4.0 * k / 49.0) for k in range(50))
GIGA = 1e9
FRAGMENTS = 24
OVERLAP = 2


@dataclass(frozen=True, slots=True)
class Assumptions:
    """How much a site sends and what hides.

    Attributes:
        name: how the table calls them.
        bits: bits per parameter that one site sends in one reduction.
        layers: layers of a model, by its parameters.
        backward_share: of a step.
    """

    name: str
    bits: float
    layers: dict[float, int]
    backward_share: float = 2.0 / 3.0

    def step(self, parameters: float, step_s: float) -> GraphStep:
        """Return a step of the model with `parameters`."""
        return GraphStep(step_s, self.layers[parameters], self.backward_share)


ONE_LEG = Assumptions("one leg", 16.0, {10e9: 48, 5e9: 48})
"""bf16, each site sends the model once per reduction whatever the number of sites; 48 layers are a guess. For the 5B model two
choices were fitted on 1.7: that 90 % was meant, and that fragments in flight do not share the link (`_stream`)."""
TWO_THIRDS = Assumptions(
    "two thirds",
    16.0 * utilisation.PUBLISHED_SHARE,
    {10e9: utilisation.PUBLISHED_LAYERS, 5e9: utilisation.PUBLISHED_LAYERS},
)
"""Two thirds of bf16 and 36 layers, as in the table of `atoll plan`: what two cells of Table 6 lead to (H=100 at 50 %,
data-parallel at 99 %)."""
SETS = (ONE_LEG, TWO_THIRDS)
LAYERS_FITTED_198 = 20
"""Layers of the 5B model with which data-parallel at 99 % and a step of 2 s needs 198 Gbit/s: fitted on that figure; step and
utilisation were chosen so that 0.84 follows."""


@dataclass(frozen=True, slots=True)
class PublishedRow:
    """A published need: Gbit/s at a utilisation; `way` is dp, h100 or decoupled; `fitted_by` names the set fitted on it."""

    way: str
    parameters: float
    step_s: float
    wanted: float
    published: float
    source: str
    fitted_by: str = ""

    @property
    def name(self) -> str:
        """Return what is asked."""
        who = {"dp": "data-parallel", "h100": "DiLoCo H=100", "decoupled": "Decoupled, P=H=24, tau=2"}[self.way]
        return f"{self.parameters / 1e9:g}B, {self.step_s:g} s, {100 * self.wanted:g} %: {who}"


_UTILISATIONS = (0.50, 0.80, 0.90, 0.95, 0.99)
_TABLE_6_DP = (104.8, 184.2, 222.3, 222.3, 390.7)
_TABLE_6_H100 = (1.4, 6.2, 13.3, 23.3, 86.8)
TABLE_6 = (
    *(
        PublishedRow("dp", 10e9, 0.8, wanted, published, "scaling Table 6 [L]", "two thirds" if wanted == 0.99 else "")
        for wanted, published in zip(_UTILISATIONS, _TABLE_6_DP, strict=True)
    ),
    *(
        PublishedRow(
            "h100", 10e9, 0.8, wanted, published, "scaling Table 6 [L]", "two thirds" if wanted == 0.50 else ""
        )
        for wanted, published in zip(_UTILISATIONS, _TABLE_6_H100, strict=True)
    ),
)
FIVE_B = (
    PublishedRow("dp", 5e9, 1.0, 0.90, 104.8, "paper, model table [S], utilisation not said"),
    PublishedRow("decoupled", 5e9, 1.0, 0.90, 1.7, "paper, model table [S], utilisation not said", "one leg"),
)


def closed(row: PublishedRow, assumed: Assumptions) -> Callable[[float], float]:
    """Return the closed form of the row's utilisation by bits per second."""
    step, volume = assumed.step(row.parameters, row.step_s), row.parameters * assumed.bits
    if row.way == "dp":
        return lambda rate: utilisation.data_parallel(step, volume / rate)
    if row.way == "h100":
        return lambda rate: utilisation.diloco(step, volume / rate, 100)
    return lambda rate: utilisation.streaming(row.step_s, _stream(volume / rate))


def graph(row: PublishedRow, assumed: Assumptions) -> Callable[[float], float]:
    """Return the same from the graph of compute and communication."""
    step, volume = assumed.step(row.parameters, row.step_s), row.parameters * assumed.bits
    if row.way == "dp":
        return lambda rate: timeline.data_parallel(step, volume / rate)
    if row.way == "h100":
        return lambda rate: timeline.diloco(step, volume / rate, 100)
    return lambda rate: timeline.streaming(row.step_s, _stream(volume / rate))


def _stream(volume_s: float) -> Stream:
    """Return fragments that each have the whole link while they travel: chosen, because it makes 1.7 of 5B at 1 s."""
    return Stream(FRAGMENTS, FRAGMENTS, OVERLAP, volume_s / FRAGMENTS, shared=False)


@dataclass(frozen=True, slots=True)
class Streamed:
    """Streaming DiLoCo: fragments of three layers, H steps, tau steps overlapped, a link that carries one at a time."""

    parameters: float
    step_s: float
    interval: int
    overlap: int
    bits: float
    fragments: int = 16

    @property
    def name(self) -> str:
        """Return what is asked."""
        size = f"{self.parameters / 1e9:g}B, {self.step_s:g} s"
        return f"{size}: Streaming H={self.interval}, P={self.fragments}, tau={self.overlap}, {self.bits:g} bits"

    def graph(self) -> Callable[[float], float]:
        """Return its utilisation by bits per second."""
        volume = self.parameters * self.bits / self.fragments
        return lambda rate: timeline.streaming(
            self.step_s, Stream(self.fragments, self.interval, self.overlap, volume / rate)
        )


def need(row: PublishedRow, assumed: Assumptions) -> float:
    """Return the Gbit/s that the row needs, between points of the grid."""
    return (utilisation.required_rate(closed(row, assumed), row.wanted) or math.inf) / GIGA


def first_point(reached: Callable[[float], float], wanted: float) -> int:
    """Return the number of the first point of the grid at which `reached` is `wanted` or more; 50 if none is."""
    return next((k for k, point in enumerate(GRID) if reached(point * GIGA) >= wanted - 1e-9), len(GRID))


def nearest_point(published: float) -> int:
    """Return the number of the point that was printed as `published`."""
    return min(range(len(GRID)), key=lambda k: abs(math.log(GRID[k] / published)))


def steps_off(row: PublishedRow, assumed: Assumptions) -> int:
    """Return how many points of the grid ours lies above what was published."""
    return first_point(graph(row, assumed), row.wanted) - nearest_point(row.published)
