"""The plots of `docs/results/chaos.md` as SVG files: what a fault rate costs Atoll and the synchronous baseline."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence

from benchmarks.faults.extracts import Extract
from benchmarks.faults.goodput import participation, useful_share
from benchmarks.faults.metrics import last_loss, plains
from benchmarks.lib.figures import line_figure

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
    lines = {
        NAMES[system]: [(rate, sum(values) / len(values)) for rate, values in sorted(found[system].items())]
        for system in NAMES
    }
    return line_figure(lines, "faults per minute", name)
