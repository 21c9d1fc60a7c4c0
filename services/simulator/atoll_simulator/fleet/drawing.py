"""The plot of a table of cells, as a file of its own: shares against the number of chips, both with their intervals.

Chips double from column to column, so their axis is logarithmic. Colours and labels are those of the report's charts.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape
from typing import Final, Literal

from atoll.report.charts import PALETTE, STYLE
from atoll_simulator.fleet.cells import FleetCell, per_cent, size_text

WIDTH: Final = 760.0
HEIGHT: Final = 320.0
_LEFT, _RIGHT, _TOP, _BOTTOM = 62.0, 130.0, 14.0, 38.0


def plot(
    cells: Sequence[FleetCell], what: Literal["goodput", "uptime"], marks: Sequence[tuple[str, int, float]] = ()
) -> str:
    """Return the SVG of one share, a line per system; `marks` are (system, chips, share) of somebody else, as rings."""
    systems = list(dict.fromkeys(cell.system for cell in cells))
    sizes = sorted({cell.chips for cell in cells})
    body = [_grid(sizes)]
    for number, system in enumerate(systems):
        colour = PALETTE[number % len(PALETTE)]
        name = system if not system.isdigit() else f"{system} learners"
        line = sorted((cell for cell in cells if cell.system == system), key=lambda cell: cell.chips)
        points = []
        for cell in line:
            share = getattr(cell, what)
            x, y = _x(cell.chips, sizes), _y(share.mean)
            points.append(f"{x:.1f},{y:.1f}")
            title = f"{name}, {size_text(cell.chips)}: {per_cent(share)} %"
            half = share.half or 0.0
            body.append(
                f'<path d="M{x:.1f} {_y(share.mean - half):.1f}V{_y(share.mean + half):.1f}"'
                f' stroke="{colour}" stroke-width="5" opacity=".35"><title>{escape(title)}</title></path>'
                f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2.5" fill="{colour}"><title>{escape(title)}</title></circle>'
            )
        body.append(f'<polyline points="{" ".join(points)}" fill="none" stroke="{colour}" stroke-width="1.6"/>')
        body.append(
            f'<rect x="{WIDTH - _RIGHT + 14}" y="{_TOP + 18 * number}" width="10" height="10" fill="{colour}"/>'
            f'<text x="{WIDTH - _RIGHT + 30}" y="{_TOP + 18 * number + 9}">{escape(name)}</text>'
        )
        body += [
            f'<circle cx="{_x(chips, sizes):.1f}" cy="{_y(share):.1f}" r="6" fill="none" stroke="{colour}"/>'
            for theirs, chips, share in marks
            if theirs == system
        ]
    middle = (_TOP + HEIGHT - _BOTTOM) / 2
    body.append(f'<text x="14" y="{middle}" text-anchor="middle" transform="rotate(-90 14 {middle})">{what}, %</text>')
    box = f'viewBox="0 0 {WIDTH:g} {HEIGHT:g}" role="img"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {box}>{STYLE}{"".join(body)}</svg>\n'


def _x(chips: int, sizes: Sequence[int]) -> float:
    """Return the coordinate of a number of chips; one size alone stands in the middle."""
    low, high = math.log(sizes[0]), math.log(sizes[-1])
    inset = 20.0
    width = WIDTH - _LEFT - _RIGHT - 2 * inset
    return _LEFT + inset + width * ((math.log(chips) - low) / (high - low) if high > low else 0.5)


def _y(share: float) -> float:
    """Return the coordinate of a share of 1."""
    return HEIGHT - _BOTTOM - (HEIGHT - _BOTTOM - _TOP) * min(1.0, max(0.0, share))


def _grid(sizes: Sequence[int]) -> str:
    marks = [
        f'<line class="grid" x1="{_LEFT}" x2="{WIDTH - _RIGHT}" y1="{_y(tick / 100):.1f}" y2="{_y(tick / 100):.1f}"/>'
        f'<text x="{_LEFT - 6}" y="{_y(tick / 100) + 3:.1f}" text-anchor="end">{tick}</text>'
        for tick in range(0, 101, 20)
    ]
    base = HEIGHT - _BOTTOM
    marks.append(f'<line x1="{_LEFT}" x2="{WIDTH - _RIGHT}" y1="{base}" y2="{base}" stroke="currentColor"/>')
    marks += [
        f'<text x="{_x(size, sizes):.1f}" y="{base + 14}" text-anchor="middle">{size_text(size)}</text>'
        for size in sizes
    ]
    marks.append(f'<text x="{(_LEFT + WIDTH - _RIGHT) / 2}" y="{base + 30}" text-anchor="middle">chips</text>')
    return "".join(marks)
