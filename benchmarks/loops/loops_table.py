"""The figures of `make bench-loops` as a table with a row for each loop, for the page of results."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

COLUMNS = {
    "own lines": "own lines",
    "first loss": "first loss",
    "last loss": "last loss",
    "merged measure": "merged model",
    "step": "step, ms",
    "in the island": "of it in the island, ms",
    "overhead": "of the time",
    "one killed, tokens lost": "one killed: tokens lost",
    "one killed, merged measure": "merged model after it",
    "all killed, tokens lost": "all killed: tokens lost",
    "all killed, merged measure": "merged model after it",
}
"""Figures by what their names say behind the loop's, and the headings of their columns."""


def loops_table(figures: Sequence[dict[str, Any]]) -> list[str]:
    """Return the lines of the table; a missed goal is bold."""
    by_loop: dict[str, dict[str, dict[str, Any]]] = {}
    for figure in figures:
        loop, _, what = figure["name"].partition(": ")
        if what in COLUMNS:
            by_loop.setdefault(loop, {})[what] = figure
    rows = [" | ".join([f"`{loop}`", *(_cell(found.get(what)) for what in COLUMNS)]) for loop, found in by_loop.items()]
    head = " | ".join(["loop", *COLUMNS.values()])
    return [f"| {head} |", "|---" * (len(COLUMNS) + 1) + "|", *(f"| {row} |" for row in rows), ""]


def _cell(figure: dict[str, Any] | None) -> str:
    if figure is None:
        return ""
    value = float(figure["value"])
    said = f"{100 * value:.2g} %" if figure["unit"] == "ratio" else f"{value:,.0f}" if value >= 1000 else f"{value:.4g}"
    return f"**{said}**" if figure["holds"] is False else said
