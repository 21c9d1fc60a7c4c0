"""Published bandwidth figures beside ours, from the graph of compute and communication: `make bench-bandwidth`.

Nothing is measured and nothing is random: a figure follows from its assumptions, which stand in its last column. Two sets of
assumptions are asked for every row; what was fitted is said where it was fitted. See docs/explanation/planning.md.

Sources: "paper" is arXiv 2604.21428 (Decoupled DiLoCo), "scaling" arXiv 2503.09799 (Table 6), "streaming" arXiv 2501.18512,
"MaxText" its documentation. [T] was read in the source's own words, [S] second-hand, [L] in a lineage paper. Their bandwidths
are points of the grid 10^(-1 + 4 k / 49) Gbit/s (inferred), so a published figure says that the need lies between that point
and the one below, a factor of 1.21. Ours is the first point that reaches the utilisation; errors are in steps of the grid.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Protocol

from atoll.base.wording import as_rate
from atoll.protocol.settings import ProtocolSettings
from atoll_simulator.planner import PlanLinks, Question, answer, timeline, utilisation
from atoll_simulator.planner.links import utilisation_at
from atoll_simulator.planner.question import WANTED
from atoll_simulator.planner.timeline import GraphStep, Stream
from atoll_simulator.planner.traffic import bits_per_number, traffic
from benchmarks.lib.harness import Figure, at_most, fact, run_benchmark

GRID = tuple(10.0 ** (-1.0 + 4.0 * k / 49.0) for k in range(50))
GIGA = 1e9
FRAGMENTS = 24
OVERLAP = 2


@dataclass(frozen=True, slots=True)
class Assumptions:
    """Assumptions about what a site sends and what hides.

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


class UtilisationModel(Protocol):
    """A model of utilisation: the closed form (`utilisation`) or the graph of compute and communication (`timeline`)."""

    def data_parallel(self, step: GraphStep, reduce_s: float) -> float:
        """Return the utilisation when every step reduces everything."""

    def diloco(self, step: GraphStep, reduce_s: float, interval: int) -> float:
        """Return the utilisation when every `interval` steps reduce everything."""

    def streaming(self, step_s: float, stream: Stream) -> float:
        """Return the utilisation when a step waits for fragments."""


def by_rate(model: UtilisationModel, row: PublishedRow, assumed: Assumptions) -> Callable[[float], float]:
    """Return what a model says of the row's utilisation, by bits per second."""
    step, volume = assumed.step(row.parameters, row.step_s), row.parameters * assumed.bits
    if row.way == "dp":
        return lambda rate: model.data_parallel(step, volume / rate)
    if row.way == "h100":
        return lambda rate: model.diloco(step, volume / rate, 100)
    return lambda rate: model.streaming(row.step_s, _stream(volume / rate))


def closed(row: PublishedRow, assumed: Assumptions) -> Callable[[float], float]:
    """Return the closed form of the row's utilisation by bits per second."""
    return by_rate(utilisation, row, assumed)


def graph(row: PublishedRow, assumed: Assumptions) -> Callable[[float], float]:
    return by_rate(timeline, row, assumed)


def _stream(volume_s: float) -> Stream:
    """Return fragments that each have the whole link while they travel: chosen, because it makes 1.7 of 5B at 1 s."""
    return Stream(FRAGMENTS, FRAGMENTS, OVERLAP, volume_s / FRAGMENTS, shared=False)


def need(row: PublishedRow, assumed: Assumptions) -> float:
    return (utilisation.required_rate(closed(row, assumed), row.wanted) or math.inf) / GIGA


def first_point(reached: Callable[[float], float], wanted: float) -> int:
    """Return the number of the first point of the grid at which `reached` is `wanted` or more; 50 if none is."""
    return next((k for k, point in enumerate(GRID) if reached(point * GIGA) >= wanted - 1e-9), len(GRID))


def nearest_point(published: float) -> int:
    return min(range(len(GRID)), key=lambda k: abs(math.log(GRID[k] / published)))


def steps_off(row: PublishedRow, assumed: Assumptions) -> int:
    """Return how many points of the grid ours lies above what was published."""
    return first_point(graph(row, assumed), row.wanted) - nearest_point(row.published)


UNIT = "Gbit/s"
STEPS_ALLOWED = 1
SPEED_UP_PUBLISHED = 20.0
REGIONS = 4
SUSTAINED = 0.99
NO_WINDOW_BYTES = 1 << 40
STEP_S_MIN, STEP_S_MAX, HALVINGS = 0.01, 1000.0, 40


def rows() -> Iterator[Figure]:
    """Yield every published row under both sets, and how many points each set is off in all."""
    for row in (*TABLE_6, *FIVE_B):
        for assumed in SETS:
            off, point = steps_off(row, assumed), first_point(graph(row, assumed), row.wanted)
            fitted = "; fitted on this" if row.fitted_by == assumed.name else ""
            how = f"{off:+d} grid steps; {assumed.name}, {need(row, assumed):.4g} between points{fitted}; {row.source}"
            yield Figure(f"{row.name} ({assumed.name})", GRID[point], UNIT, f"published {row.published:g}", None, how)
    for assumed in SETS:
        off_table = [abs(steps_off(row, assumed)) for row in TABLE_6]
        words = f"{sum(off_table)} steps in all over ten cells, {sum(not off for off in off_table)} cells exact"
        claim = assumed is TWO_THIRDS
        words += "; fitted on two cells, having seen all ten" if claim else "; nothing fitted on these"
        most = STEPS_ALLOWED if claim else None
        yield at_most(f"Table 6, largest error ({assumed.name})", max(off_table), "grid steps", most, words)
    apart = [
        abs(closed(row, assumed)(point * GIGA) - graph(row, assumed)(point * GIGA))
        for row in (*TABLE_6, *FIVE_B)
        for assumed in SETS
        for point in GRID[::7]
    ]
    name = "closed form against graph, largest difference of utilisation"
    yield at_most(name, max(apart), "", 0.005, f"{len(apart)} points")


def eight_sites() -> Iterator[Figure]:
    """Yield what can be said of 198 and 0.84 Gbit/s, whose step time, utilisation and model are not published."""
    fitted = replace(ONE_LEG, layers={5e9: LAYERS_FITTED_198})
    parallel = need(PublishedRow("dp", 5e9, 2.0, 0.99, 198.0, ""), fitted)
    decoupled = need(PublishedRow("decoupled", 5e9, 2.0, 0.99, 0.84, ""), fitted)
    words = f"one leg, 5B, step 2 s, 99 %, {LAYERS_FITTED_198} layers"
    yield Figure("8 data centres: data-parallel", parallel, UNIT, "published 198 [T]", None, f"{words}: fitted on this")
    yield Figure(
        "8 data centres: Decoupled",
        decoupled,
        UNIT,
        "published 0.84 [T]",
        None,
        f"{words}: step and 99 % chosen for it",
    )
    ratios = [
        need(PublishedRow("dp", 5e9, 1.0, share, 1.0, ""), fitted)
        / need(PublishedRow("decoupled", 5e9, 1.0, share, 1.0, ""), fitted)
        for share in WANTED
    ]
    span = "over 50, 80, 90, 95, 99 %, one leg, 20 layers; does not depend on step time"
    yield Figure("times lower, least", min(ratios), "x", "published 60 [S]", None, f"{span}; 104.8 / 1.7 itself is 62")
    yield Figure("times lower, most", max(ratios), "x", "published 242 [S]", None, span)
    ring = Assumptions("ring of 8", 16.0 * 2.0 * 7.0 / 8.0, {5e9: 48})
    yield Figure(
        "8 data centres: data-parallel, another way",
        need(PublishedRow("dp", 5e9, 1.0, 0.95, 198.0, ""), ring),
        UNIT,
        "published 198 [T]",
        None,
        f"a ring of 8 (28 bits), 5B, 1 s, 95 %: hits 198 too, but then Decoupled needs "
        f"{need(PublishedRow('decoupled', 5e9, 1.0, 0.95, 0.84, ''), ring):.3g}, not 0.84; so 198 does not say how it was made",
    )
    int4 = bits_per_number("int4")
    low = decoupled * int4 / 16.0
    yield fact("4 bits both ways: 0.84 becomes", 0.84 * int4 / 16.0, UNIT, f"0.84 x {int4:.4g} / 16 bits")
    yield Figure(
        "4 bits against data-parallel",
        parallel / low,
        "x lower",
        "published about 1000 [S]",
        None,
        f"{int4:.4g} bits with block scales; 198 / (0.84 / 4) = 943",
    )


def others() -> Iterator[Figure]:
    """Yield the sizing rule, and the figure of the 5B model where fragments share the link."""
    protocol = ProtocolSettings(fragments=37, interval_steps=37, codec_up="bf16", codec_down="bf16")
    link = PlanLinks(up=(GIGA,), down=(GIGA,))
    sized = Question(8_000_000_000, 0.5, link, protocol=protocol)
    moved = traffic(sized)
    both = 8.0 * (moved.up + moved.down) / sized.round_every_s / GIGA
    yield Figure("8B, H=37, 0.5 s, both legs in the mean", both, UNIT, "MaxText says 14", None, "our planner's bytes")
    frame = GIGA * 5 * 16 / FRAGMENTS
    shared = Stream(FRAGMENTS, FRAGMENTS, OVERLAP, 1.0)
    rate = utilisation.required_rate(lambda bits: utilisation.streaming(1.0, replace(shared, send_s=frame / bits)), 0.9)
    yield Figure(
        "5B, 1 s, 90 %, if fragments in flight share the link",
        (rate or 0.0) / GIGA,
        UNIT,
        "published 1.7 [S]",
        None,
        "one leg; 1.7 follows only where two fragments in flight do not share it, which we chose; a real link divides itself",
    )


def twelve_b() -> Iterator[Figure]:
    """Yield the speed-up over synchronous training for 12B over four regions, at the shortest step the link sustains."""
    for gigabits in (2.0, 5.0):
        for up, down, note in (
            ("bf16", "bf16", "as in the paper"),
            ("bf16", "f32", "Atoll today"),
            ("int4", "int4", "4 bits both ways"),
        ):
            windowed = note != "as in the paper"
            question = _twelve(gigabits, 1.0, up, down, windowed=windowed)
            step_s = _shortest_step(question)
            atoll, _, parallel, _ = answer(replace(question, step_s=step_s)).systems
            window = f"; a blob goes up at {as_rate(question.links.window_bits_per_s)} at most" if windowed else ""
            yield fact(
                f"12B, 4 regions at {gigabits:g} Gbit/s, {up} up, {down} down: speed-up at the shortest step",
                atoll.tokens_per_s / parallel.tokens_per_s,
                "x",
                f"{note}; step {step_s:.3g} s, the shortest with {100 * SUSTAINED:g} % (P=H=24, tau=2, 50 ms), "
                f"{100 * atoll.merged:.1f} % merged; over data-parallel by a ring, 16 bits, beside its backward pass; longer "
                f"steps: less{window}",
            )
        yield _longest_step(gigabits)


def _longest_step(gigabits: float) -> Figure:
    """Return the step time up to which the published speed-up holds, which says something: the link is not full there."""
    low, high = _shortest_step(_twelve(gigabits, 1.0, "bf16", "bf16", windowed=False)), STEP_S_MAX
    for _ in range(HALVINGS):
        middle = (low + high) / 2.0
        atoll, _, parallel, _ = answer(_twelve(gigabits, middle, "bf16", "bf16", windowed=False)).systems
        fast = atoll.tokens_per_s > SPEED_UP_PUBLISHED * parallel.tokens_per_s
        low, high = (middle, high) if fast else (low, middle)
    return fact(
        f"12B, 4 regions at {gigabits:g} Gbit/s: step up to which it is 20 times as fast",
        low,
        "s",
        f"bf16 both ways, superseded steps not counted; published > {SPEED_UP_PUBLISHED:g} [T], step time not known",
    )


def _twelve(gigabits: float, step_s: float, up: str, down: str, *, windowed: bool) -> Question:
    """Return the plan of 12B; without `windowed` a blob goes up as fast as the link, whatever Atoll's window."""
    rates = (gigabits * GIGA,)
    links = PlanLinks(rates, rates) if windowed else PlanLinks(rates, rates, window_bytes=NO_WINDOW_BYTES)
    return Question(
        12_000_000_000,
        step_s,
        links,
        learners=REGIONS,
        protocol=ProtocolSettings(codec_up=up, codec_down=down),
        layers=48,
    )


def _shortest_step(question: Question) -> float:
    moved, rate = traffic(question), question.links.up[0]
    low, high = STEP_S_MIN, STEP_S_MAX
    for _ in range(HALVINGS):
        middle = (low + high) / 2.0
        holds = utilisation_at(replace(question, step_s=middle), moved, rate) >= SUSTAINED
        low, high = (low, middle) if holds else (middle, high)
    return high


def main() -> list[Figure]:
    return [*rows(), *eight_sites(), *others(), *twelve_b()]


if __name__ == "__main__":
    run_benchmark("bench-bandwidth", main)
