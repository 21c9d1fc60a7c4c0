"""The figures of `make bench-peers` as tables in which systems stand beside each other, for the page of results."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

SYNC: Final = {
    "sync": "sync",
    "processor time": "processor time",
    "moved": "moved",
    "training waits": "training waits",
    "memory": "memory",
}
TRAINING: Final = {"wall clock": "whole command", "processor time": "processor time", "loss": "held-out loss"}
"""Figures by what their names say behind the system's, and the headings of their columns."""
Figures = Mapping[str, Mapping[str, Any]]


def peers_tables(figures: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the lines of a table for the syncs and of one for each budget of a first model; a missed goal is bold."""
    by_name = {figure["name"]: figure for figure in figures}
    lines = [*_table(by_name, "", SYNC, "a sync of 64 MiB"), ""]
    for budget in dict.fromkeys(name.partition(": ")[0] for name in by_name if "tokens" in name.partition(": ")[0]):
        lines += [*_table(by_name, f"{budget}: ", TRAINING, budget), ""]
    return lines


def _table(by_name: Figures, before: str, columns: Mapping[str, str], heading: str) -> list[str]:
    """Return a table of the systems that have a figure for all columns; `before` is what their names begin with."""
    between = ", " if before else ": "
    ending = between + next(iter(columns))
    found = [name.removesuffix(ending) for name in by_name if name.startswith(before) and name.endswith(ending)]
    systems = [name for name in found if all(f"{name}{between}{what}" in by_name for what in columns)]
    head = [heading, *columns.values()]
    rows = [
        [name.removeprefix(before), *(_cell(by_name[f"{name}{between}{what}"]) for what in columns)] for name in systems
    ]
    return [f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *rows)]


def _cell(figure: Mapping[str, Any]) -> str:
    value = float(figure["value"])
    said = f"{value:,.0f}" if value >= 1000 else f"{value:.3f}" if figure["unit"].endswith("/byte") else f"{value:.3g}"
    return f"**{said} {figure['unit']}**" if figure["holds"] is False else f"{said} {figure['unit']}"
