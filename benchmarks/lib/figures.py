"""Figures of `docs/results` as SVG text, drawn by matplotlib. The same data make the same text, so a page can be checked."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from io import StringIO
from typing import TYPE_CHECKING, Any, Final

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure as Canvas

if TYPE_CHECKING:
    from matplotlib.typing import RcKeyType

STYLE: Final[dict[RcKeyType, Any]] = {
    "axes.grid": True,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "font.size": 9,
    "grid.alpha": 0.25,
    "legend.frameon": False,
    "lines.linewidth": 1.6,
    "lines.markersize": 3,
    "svg.fonttype": "none",
    "svg.hashsalt": "atoll",
}
COLOURS: Final = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#d55e00", "#56b4e9", "#f0e442", "#999999")
"""Those of Okabe and Ito, which colour-blind people can tell apart."""


@dataclass(frozen=True, slots=True)
class ShareLine:
    """Shares of 1 by x, each with half the width of its interval; `rings` are shares by x of another source."""

    points: Sequence[tuple[float, float, float]]
    rings: Sequence[tuple[float, float]] = field(default=())


def line_figure(lines: Mapping[str, Sequence[tuple[float, float]]], x_label: str, y_label: str) -> str:
    """Return the SVG of lines by name, each of (x, y) in order of x."""
    with _svg(x_label, y_label) as (text, axes):
        for name, points in lines.items():
            if points:
                axes.plot(*zip(*points, strict=True), marker="o" if len(points) < 2 else "", label=name)
        if any(lines.values()):
            axes.legend()
        else:
            axes.text(0.5, 0.5, "nothing was measured", ha="center", transform=axes.transAxes)
    return text.getvalue()


def share_figure(lines: Mapping[str, ShareLine], columns: Mapping[float, str], x_label: str, y_label: str) -> str:
    """Return the SVG of shares in per cent over `columns` (x to its name), which stand at logarithms."""
    with _svg(x_label, f"{y_label}, %") as (text, axes):
        axes.set_xscale("log")
        axes.set_xticks(list(columns), list(columns.values()))
        axes.minorticks_off()
        axes.set_ylim(0, 101)
        for (name, line), colour in zip(lines.items(), COLOURS * len(lines), strict=False):
            xs, shares, halves = zip(*line.points, strict=True)
            heights = [100 * share for share in shares]
            axes.errorbar(xs, heights, [100 * half for half in halves], color=colour, marker="o", label=name)
            for x, share in line.rings:
                axes.plot(x, 100 * share, "o", markersize=9, fillstyle="none", color=colour)
        axes.legend(loc="center left", bbox_to_anchor=(1, 0.5))
    return text.getvalue()


@contextmanager
def _svg(x_label: str, y_label: str) -> Iterator[tuple[StringIO, Axes]]:
    text = StringIO()
    with mpl.rc_context(STYLE):
        canvas = Canvas(figsize=(7.6, 3), layout="constrained")
        axes = canvas.add_subplot(xlabel=x_label, ylabel=y_label)
        axes.set_prop_cycle(color=COLOURS)
        yield text, axes
        canvas.savefig(text, format="svg", metadata={"Date": None})
