"""Every chart of the project as SVG text: lines, a timeline, a stacked bar, shares with their intervals.

A chart is made for a page (`lines`, `timeline`, `stack`), which brings style and legend, or as a file of its own (`lines_file`,
`shares_file`), which brings both along. No script, no font, no colour that needs a legend file. Coordinates are in a fixed view
box that the page scales. Colours follow the page by `currentColor` and a short palette that stays apart in print and for the
colour-blind (Okabe and Ito). Every mark carries its numbers as a `<title>`.
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
NOTHING: Final = "nothing was measured"
_LEFT, _RIGHT, _TOP, _BOTTOM = 62.0, 12.0, 10.0, 34.0
_TICKS: Final = 5
_LEGEND_HEIGHT: Final = 24.0
_LEGEND_COLUMNS: Final = 3
_SHARES_HEIGHT: Final = 320.0
_SHARES_RIGHT: Final = 130.0
_SHARES_TOP: Final = 14.0
_SHARES_BASE: Final = _SHARES_HEIGHT - 38.0
_INSET: Final = 20.0


@dataclass(frozen=True, slots=True)
class Series:
    """One line: its name and (x, y) points in order of x; None for a y is a gap in the line."""

    name: str
    points: Sequence[tuple[float, float | None]]

    def stretches(self) -> list[list[tuple[float, float]]]:
        """Return the points between the gaps."""
        found: list[list[tuple[float, float]]] = [[]]
        for x, y in self.points:
            if y is not None:
                found[-1].append((x, y))
            elif found[-1]:
                found.append([])
        return [stretch for stretch in found if stretch]


@dataclass(frozen=True, slots=True)
class TimelineBar:
    """One bar of a timeline: from `start` to `stop` in lane `lane`, with what it says when pointed at."""

    lane: int
    start: float
    stop: float
    title: str


@dataclass(frozen=True, slots=True)
class SharePoint:
    """A share of 1 at `x`, with half the width of its interval (0 where there is none) and what it says when pointed at."""

    x: float
    share: float
    half: float
    title: str


@dataclass(frozen=True, slots=True)
class ShareCurve:
    """One line of shares in order of x; `rings` are (x, share) of another source, drawn around its points."""

    name: str
    points: Sequence[SharePoint]
    rings: Sequence[tuple[float, float]] = ()


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


def lines(series: Sequence[Series], x_label: str, y_label: str, span: tuple[float, float] | None = None) -> str:
    """Return a line chart for a page; a chart without points says so. `span` makes charts of one x axis."""
    drawn = [line for line in series if line.stretches()]
    if not drawn:
        return f'<p class="none">{NOTHING}</p>'
    return _svg(HEIGHT, _lines(drawn, x_label, y_label, span)) + _legend([line.name for line in drawn])


def lines_file(series: Sequence[Series], x_label: str, y_label: str) -> str:
    """Return a line chart as a file of its own, its legend on top."""
    drawn = [line for line in series if line.stretches()]
    nothing = f'<text x="{WIDTH / 2}" y="{HEIGHT / 2}">{NOTHING}</text>'
    above = _LEGEND_HEIGHT * max(1, -(-len(drawn) // _LEGEND_COLUMNS))
    legend = ""
    for number, line in enumerate(drawn):
        row, column = divmod(number, _LEGEND_COLUMNS)
        legend += _key(70 + 200 * column, _LEGEND_HEIGHT * row - above + 6, number, line.name)
    return _file(above, HEIGHT, legend + (_lines(drawn, x_label, y_label) if drawn else nothing))


def shares_file(curves: Sequence[ShareCurve], columns: Mapping[float, str], x_label: str, y_label: str) -> str:
    """Return shares over `columns` (x to its name; a logarithmic axis) as a file of its own, its legend on the right."""
    across, up = _columns(columns), _Axis(0.0, 1.0, _SHARES_BASE, _SHARES_TOP)
    body = [_shares_grid(columns, across, up, x_label)]
    for number, curve in enumerate(curves):
        colour = PALETTE[number % len(PALETTE)]
        path = []
        for point in curve.points:
            x, title = across.at(math.log(point.x)), f"<title>{escape(point.title)}</title>"
            low, y, high = (
                up.at(_within_one(share)) for share in (point.share - point.half, point.share, point.share + point.half)
            )
            path.append(f"{x:.1f},{y:.1f}")
            body.append(
                f'<path d="M{x:.1f} {low:.1f}V{high:.1f}" stroke="{colour}" stroke-width="5" opacity=".35">{title}</path>'
                f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2.5" fill="{colour}">{title}</circle>'
            )
        body.append(f'<polyline points="{" ".join(path)}" fill="none" stroke="{colour}" stroke-width="1.6"/>')
        body.append(_key(WIDTH - _SHARES_RIGHT + 14, _SHARES_TOP + 18 * number, number, curve.name))
        body += [
            f'<circle cx="{across.at(math.log(x)):.1f}" cy="{up.at(_within_one(share)):.1f}" r="6" fill="none"'
            f' stroke="{colour}"/>'
            for x, share in curve.rings
        ]
    body.append(_y_name((_SHARES_TOP + _SHARES_BASE) / 2, y_label))
    return _file(0.0, _SHARES_HEIGHT, "".join(body))


def _lines(drawn: Sequence[Series], x_label: str, y_label: str, span: tuple[float, float] | None = None) -> str:
    """Return axes and lines of series that all have points."""
    points = [point for line in drawn for stretch in line.stretches() for point in stretch]
    xs, ys = zip(*points, strict=True)
    low, high = span or (min(xs), max(xs))
    across = _axis(low, high, _LEFT, WIDTH - _RIGHT)
    up = _axis(min(ys), max(ys), HEIGHT - _BOTTOM, _TOP)
    marks = []
    for number, line in enumerate(drawn):
        colour, stretches = PALETTE[number % len(PALETTE)], line.stretches()
        ends = f"{label(stretches[0][0][1])} to {label(stretches[-1][-1][1])}"
        title = f"<title>{escape(line.name)}: {ends}</title>"
        for stretch in stretches:
            path = " ".join(f"{across.at(x):.1f},{up.at(y):.1f}" for x, y in stretch)
            if len(stretch) == 1:
                x, y = path.split(",")
                marks.append(f'<circle cx="{x}" cy="{y}" r="3" fill="{colour}">{title}</circle>')
            else:
                marks.append(
                    f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.6">{title}</polyline>'
                )
    return _grid(across, up, x_label, y_label) + "".join(marks)


def timeline(bars: Sequence[TimelineBar], lanes: int, x_label: str) -> str:
    """Return a chart of the bars, one lane below the other, lane 0 on top."""
    if not bars:
        return '<p class="none">there were no rounds</p>'
    step = max(3.0, min(16.0, 320.0 / max(1, lanes)))
    height = _TOP + step * lanes + _BOTTOM
    across = _axis(min(bar.start for bar in bars), max(bar.stop for bar in bars), _LEFT, WIDTH - _RIGHT)
    marks = [
        f'<text x="{_LEFT - 6}" y="{_TOP + step * (lane + 0.5) + 3:.1f}" text-anchor="end">p{lane}</text>'
        for lane in range(0, lanes, max(1, math.ceil(12.0 / step)))
    ]
    for bar in bars:
        x = across.at(bar.start)
        width = max(1.0, across.at(bar.stop) - x)
        marks.append(
            f'<rect x="{x:.1f}" y="{_TOP + step * bar.lane + 1:.1f}" width="{width:.1f}" height="{step - 1:.1f}"'
            f' fill="{PALETTE[bar.lane % len(PALETTE)]}"><title>{escape(bar.title)}</title></rect>'
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
    return "".join([*marks, _y_name((_TOP + HEIGHT - _BOTTOM) / 2, y_label)])


def _y_name(middle: float, y_label: str) -> str:
    """Return the name of an upright axis around its middle."""
    return (
        f'<text x="14" y="{middle}" text-anchor="middle" transform="rotate(-90 14 {middle})">{escape(y_label)}</text>'
    )


def _columns(columns: Mapping[float, str]) -> _Axis:
    """Return an axis of logarithms with some air; one column alone stands in the middle."""
    low, high = math.log(min(columns)), math.log(max(columns))
    air = 0.5 if high == low else 0.0
    return _Axis(low - air, high + air, _LEFT + _INSET, WIDTH - _SHARES_RIGHT - _INSET)


def _within_one(share: float) -> float:
    return min(1.0, max(0.0, share))


def _shares_grid(columns: Mapping[float, str], across: _Axis, up: _Axis, x_label: str) -> str:
    """Return a line for every fifth of the whole, in per cent, and a name for every column."""
    right = WIDTH - _SHARES_RIGHT
    marks = [
        f'<line class="grid" x1="{_LEFT}" x2="{right}" y1="{up.at(tick / 100):.1f}" y2="{up.at(tick / 100):.1f}"/>'
        f'<text x="{_LEFT - 6}" y="{up.at(tick / 100) + 3:.1f}" text-anchor="end">{tick}</text>'
        for tick in range(0, 101, 20)
    ]
    base = _SHARES_BASE
    marks.append(f'<line x1="{_LEFT}" x2="{right}" y1="{base}" y2="{base}" stroke="currentColor"/>')
    marks += [
        f'<text x="{across.at(math.log(x)):.1f}" y="{base + 14}" text-anchor="middle">{escape(name)}</text>'
        for x, name in columns.items()
    ]
    marks.append(f'<text x="{(_LEFT + right) / 2}" y="{base + 30}" text-anchor="middle">{escape(x_label)}</text>')
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


def _file(above: float, height: float, body: str) -> str:
    """Return a chart that needs no page, with `above` for a legend on top."""
    box = f"0 {-above:g} {WIDTH:g} {height + above:g}" if above else f"0 0 {WIDTH:g} {height:g}"
    return f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="{box}" role="img">{STYLE}{body}</svg>\n'


def _key(x: float, y: float, number: int, name: str) -> str:
    """Return one line of a legend: a square of the colour, and the name."""
    square = f'<rect x="{x}" y="{y}" width="10" height="10" fill="{PALETTE[number % len(PALETTE)]}"/>'
    return f'{square}<text x="{x + 16}" y="{y + 9}">{escape(name)}</text>'


def _legend(names: Sequence[str]) -> str:
    items = "".join(
        f'<li><b style="background:{PALETTE[i % len(PALETTE)]}"></b>{escape(name)}</li>' for i, name in enumerate(names)
    )
    return f'<ul class="legend">{items}</ul>'
