"""Small charts as SVG text: lines, a timeline, a stacked bar. No script, no font, no colour that needs a legend file.

Coordinates are in a fixed view box that the page scales. Colours follow the page by `currentColor` and a short palette
that stays apart in print and for the colour-blind (Okabe and Ito). Every mark carries its numbers as a `<title>`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Final

WIDTH: Final = 760.0
HEIGHT: Final = 220.0
PALETTE: Final = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#d55e00", "#56b4e9", "#f0e442", "#999999")
STYLE: Final = (
    "<style>svg{color:#555;background:#fff;font:11px sans-serif}text{fill:#555}"
    ".grid{stroke:currentColor;opacity:.15}</style>"
)
"""What a chart brings along that is a file of its own, with no page around it."""
_LEFT, _RIGHT, _TOP, _BOTTOM = 62.0, 12.0, 10.0, 34.0
_TICKS: Final = 5


@dataclass(frozen=True, slots=True)
class Series:
    """One line: its name and (x, y) points in order of x."""

    name: str
    points: Sequence[tuple[float, float]]


@dataclass(frozen=True, slots=True)
class TimelineBar:
    """One bar of a timeline: from `start` to `stop` in lane `lane`, with what it says when pointed at."""

    lane: int
    start: float
    stop: float
    title: str


@dataclass(frozen=True, slots=True)
class _Axis:
    """Maps values to coordinates, linearly."""

    low: float
    high: float
    start: float
    stop: float

    def at(self, value: float) -> float:
        """Return the coordinate of `value`."""
        return self.start + (value - self.low) / (self.high - self.low) * (self.stop - self.start)


def ticks(low: float, high: float) -> list[float]:
    """Return about five round numbers within `low..high` (steps of 1, 2 or 5 times a power of ten)."""
    if not high > low:
        return [low]
    rough = (high - low) / _TICKS
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough * 0.999)
    return [i * step for i in range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)]


def label(value: float) -> str:
    """Return a number for an axis, with k, M, G for thousands."""
    for bound, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= bound:
            return f"{value / bound:g}{unit}"
    return f"{value:.4g}"


def lines(series: Sequence[Series], x_label: str, y_label: str) -> str:
    """Return a line chart; a chart without points says so."""
    drawn = [line for line in series if line.points]
    if not drawn:
        return '<p class="none">nothing was measured</p>'
    xs = [x for line in drawn for x, _ in line.points]
    ys = [y for line in drawn for _, y in line.points]
    across = _axis(min(xs), max(xs), _LEFT, WIDTH - _RIGHT)
    up = _axis(min(ys), max(ys), HEIGHT - _BOTTOM, _TOP)
    marks = []
    for number, line in enumerate(drawn):
        colour = PALETTE[number % len(PALETTE)]
        path = " ".join(f"{across.at(x):.1f},{up.at(y):.1f}" for x, y in line.points)
        title = f"<title>{escape(line.name)}: {label(line.points[0][1])} to {label(line.points[-1][1])}</title>"
        if len(line.points) == 1:
            x, y = path.split(",")
            marks.append(f'<circle cx="{x}" cy="{y}" r="3" fill="{colour}">{title}</circle>')
        else:
            marks.append(
                f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.6">{title}</polyline>'
            )
    return _svg(HEIGHT, _grid(across, up, x_label, y_label) + "".join(marks)) + _legend([line.name for line in drawn])


def timeline(spans: Sequence[TimelineBar], lanes: int, x_label: str) -> str:
    """Return spans as bars, one lane below the other, lane 0 on top."""
    if not spans:
        return '<p class="none">there were no rounds</p>'
    step = max(3.0, min(16.0, 320.0 / max(1, lanes)))
    height = _TOP + step * lanes + _BOTTOM
    across = _axis(min(span.start for span in spans), max(span.stop for span in spans), _LEFT, WIDTH - _RIGHT)
    marks = [
        f'<text x="{_LEFT - 6}" y="{_TOP + step * (lane + 0.5) + 3:.1f}" text-anchor="end">p{lane}</text>'
        for lane in range(0, lanes, max(1, math.ceil(12.0 / step)))
    ]
    for span in spans:
        x = across.at(span.start)
        width = max(1.0, across.at(span.stop) - x)
        marks.append(
            f'<rect x="{x:.1f}" y="{_TOP + step * span.lane + 1:.1f}" width="{width:.1f}" height="{step - 1:.1f}"'
            f' fill="{PALETTE[span.lane % len(PALETTE)]}"><title>{escape(span.title)}</title></rect>'
        )
    return _svg(height, _x_axis(across, height - _BOTTOM, x_label) + "".join(marks))


def stack(parts: Mapping[str, int]) -> str:
    """Return the parts of a whole as one bar with a legend; parts that are not positive have no width."""
    shown = {name: count for name, count in parts.items() if count > 0}
    whole = sum(shown.values())
    if not whole:
        return '<p class="none">no token was trained</p>'
    x, marks = 0.0, []
    for number, (name, count) in enumerate(shown.items()):
        width = WIDTH * count / whole
        title = escape(f"{name}: {count:,} ({100 * count / whole:.2f}%)")
        colour = PALETTE[number % len(PALETTE)]
        marks.append(
            f'<rect x="{x:.2f}" y="0" width="{width:.2f}" height="26" fill="{colour}"><title>{title}</title></rect>'
        )
        x += width
    return _svg(26.0, "".join(marks)) + _legend(
        [f"{name} {count:,} ({100 * count / whole:.2f}%)" for name, count in shown.items()]
    )


def _axis(low: float, high: float, start: float, stop: float) -> _Axis:
    """Return an axis with some air; a single value gets a unit around it."""
    air = 0.04 * (high - low) if high > low else 0.5
    return _Axis(low - air, high + air, start, stop)


def _grid(across: _Axis, up: _Axis, x_label: str, y_label: str) -> str:
    """Return both axes with ticks and names."""
    marks = [_x_axis(across, HEIGHT - _BOTTOM, x_label)]
    for value in ticks(up.low, up.high):
        y = up.at(value)
        marks.append(f'<line class="grid" x1="{_LEFT}" x2="{WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        marks.append(f'<text x="{_LEFT - 6}" y="{y + 3:.1f}" text-anchor="end">{label(value)}</text>')
    middle = (_TOP + HEIGHT - _BOTTOM) / 2
    marks.append(
        f'<text x="14" y="{middle}" text-anchor="middle" transform="rotate(-90 14 {middle})">{escape(y_label)}</text>'
    )
    return "".join(marks)


def _x_axis(across: _Axis, y: float, x_label: str) -> str:
    marks = [f'<line x1="{_LEFT}" x2="{WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}" stroke="currentColor"/>']
    marks += [
        f'<text x="{across.at(value):.1f}" y="{y + 13:.1f}" text-anchor="middle">{label(value)}</text>'
        for value in ticks(across.low, across.high)
    ]
    marks.append(f'<text x="{(_LEFT + WIDTH) / 2}" y="{y + 28:.1f}" text-anchor="middle">{escape(x_label)}</text>')
    return "".join(marks)


def _svg(height: float, body: str) -> str:
    return f'<svg viewBox="0 0 {WIDTH:g} {height:g}" role="img">{body}</svg>'


def _legend(names: Sequence[str]) -> str:
    items = "".join(
        f'<li><b style="background:{PALETTE[i % len(PALETTE)]}"></b>{escape(name)}</li>' for i, name in enumerate(names)
    )
    return f'<ul class="legend">{items}</ul>'
