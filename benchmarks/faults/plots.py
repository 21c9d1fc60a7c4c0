"""The plots of `docs/results/chaos.md` as SVG files: what a fault rate costs Atoll and the synchronous baseline.

Drawn by the charts of the report, which leave style and legend to their page; a file of its own brings both along.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from html import escape

from atoll.report.charts import HEIGHT, PALETTE, STYLE, WIDTH, Series, lines
from benchmarks.faults.extracts import Extract
from benchmarks.faults.goodput import participation, useful_share
from benchmarks.faults.metrics import last_loss, plains

LEGEND_HEIGHT = 24.0
LEGEND_COLUMNS = 3
NAMES = {"atoll": "Atoll", "synchronous": "synchronous baseline"}
Measure = Callable[[Extract, Extract | None], float | None]


def plots(extracts: Sequence[Extract]) -> dict[str, str]:
    """Return SVG texts by file name."""

    def stepping(extract: Extract, _: Extract | None) -> float | None:
        return participation(extract)

    def share(extract: Extract, plain: Extract | None) -> float | None:
        return None if plain is None else useful_share(extract, plain)

    def loss(extract: Extract, _: Extract | None) -> float | None:
        return last_loss(extract.report)

    return {
        "chaos-useful.svg": plot(extracts, share, "useful-step share"),
        "chaos-participation.svg": plot(extracts, stepping, "participation"),
        "chaos-loss.svg": plot(extracts, loss, "held-out bits per byte"),
    }


def plot(extracts: Sequence[Extract], measure: Measure, name: str) -> str:
    """Return one plot against the fault rate, one line per system; several seeds are averaged."""
    undisturbed = plains(extracts)
    found: dict[str, dict[float, list[float]]] = defaultdict(lambda: defaultdict(list))
    for extract in extracts:
        course = extract.course
        if course.kills_min:
            # A gauntlet has a length of its own.
            continue
        value = measure(extract, undisturbed.get((course.system, course.seed)))
        if value is not None:
            found[course.system][course.per_minute].append(value)
    series = [
        Series(NAMES[system], [(rate, sum(values) / len(values)) for rate, values in sorted(found[system].items())])
        for system in NAMES
    ]
    return standalone(lines(series, "faults per minute", name), [line.name for line in series if line.points])


def standalone(chart: str, names: Sequence[str]) -> str:
    """Return a chart of the report as a file of its own; one without points as a file that says so."""
    _, svg, rest = chart.partition('role="img">')
    body = rest.partition("</svg>")[0] if svg else f'<text x="{WIDTH / 2}" y="{HEIGHT / 2}">nothing was measured</text>'
    height = LEGEND_HEIGHT * max(1, -(-len(names) // LEGEND_COLUMNS))
    legend = ""
    for i, name in enumerate(names):
        row, column = divmod(i, LEGEND_COLUMNS)
        x, y, colour = 70 + 200 * column, LEGEND_HEIGHT * row - height, PALETTE[i % len(PALETTE)]
        legend += f'<rect x="{x}" y="{y + 6}" width="10" height="10" fill="{colour}"/>'
        legend += f'<text x="{x + 16}" y="{y + 15}">{escape(name)}</text>'
    box = f"0 {-height:g} {WIDTH:g} {HEIGHT + height:g}"
    return f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="{box}" role="img">{STYLE}{legend}{body}</svg>\n'
