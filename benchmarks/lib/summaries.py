"""The first paragraph of a page of results: what was asked and what came out, from `docs/results/summaries.toml`.

A summary may name figures of its page, so that a page which is measured again needs no new text:

    {name}           the value with its unit; {name #2} is the second figure of that name
    {name|%}         the value in per cent
    {name|number}    the value without its unit
    {name|verdict}   whether its goal is met
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

SUMMARIES = Path(__file__).parents[2] / "docs" / "results" / "summaries.toml"
_PLACE = re.compile(r"\{(?P<name>[^{}|]+?)(?: #(?P<which>\d+))?(?:\|(?P<form>[^{}]+))?\}")
_PLAIN = {"ratio", ""}


def on_top(page: str, target: str, figures: Sequence[dict[str, Any]]) -> str:
    """Return `page` with the summary of `target` below its title; a target without one keeps its page."""
    template = tomllib.loads(SUMMARIES.read_text(encoding="utf-8")).get(target)
    if template is None:
        return page
    title, _, rest = page.partition("\n\n")
    return f"{title}\n\n{filled(str(template), figures)}\n\n{rest}"


def filled(template: str, figures: Sequence[dict[str, Any]]) -> str:
    """Return a summary with its figures; one that was not measured this time is said to be so."""

    def value(place: re.Match[str]) -> str:
        named = [figure for figure in figures if figure["name"] == place["name"]]
        which = int(place["which"] or 1) - 1
        return _said(named[which], place["form"] or "") if which < len(named) else "(not measured)"

    return _PLACE.sub(value, template)


def _said(figure: dict[str, Any], form: str) -> str:
    """Return one figure as a sentence has it."""
    number = float(figure["value"])
    if form == "%":
        return f"{100.0 * number:.3g} %"
    if form == "verdict":
        return "met" if figure["holds"] else "missed"
    digits = f"{number:,.0f}" if abs(number) >= 1000 else f"{number:.3g}"
    unit = str(figure["unit"])
    return digits if unit in _PLAIN or form == "number" else f"{digits} {unit}"
