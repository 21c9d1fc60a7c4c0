"""What the cells of an experiment say: a spread per row and measure, gaps to the baseline, and whether goals are met.

Everything here is a pure function of the experiment and of the cells' records, so that the published pages can be made again
from what is kept in the repository.

The gap of a cell to its rival (the baseline of the same seed) is taken at equal merged tokens t = min of both: the end is
moved along the curve, loss(t) = end * curve(t) / curve(end). (Before November 2026 the points between the ends were measured
on a smaller part of the held-out text.) Who merged fewer tokens is not moved at all, nor who merged hardly more (`ALIKE`): a
run ends with the round its target falls into, and what so few tokens teach is less than one version differs from the next.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from atoll_simulator.confidence import Spread, paired, spread
from benchmarks.experiments.cells import Record
from benchmarks.experiments.grid import GridRow
from benchmarks.experiments.questions import Experiment, Goal, Labels, matches
from benchmarks.lib.results import Figure

Records = Mapping[str, Record]
ALIKE: Final = 0.99
"""Share of the merged tokens of the one who merged more, from which on both have merged the same."""


@dataclass(frozen=True, slots=True)
class ExperimentAnswer:
    """A row as measured: by measure and seed, what its cells came to; which rivals it is beside; what is missing."""

    labels: Labels
    values: dict[str, dict[int, float]]
    rival: int | None
    missing: int
    diverged: int

    def spread(self, measure: str) -> Spread | None:
        """Return the spread of a measure over the seeds it is known of, None of none."""
        values = self.values.get(measure, {})
        return spread(list(values.values())) if values else None


def answers(rows: Sequence[GridRow], records: Records) -> list[ExperimentAnswer]:
    """Return what is known of every row, in order."""
    return [_answer(row, records) for row in rows]


def _answer(row: GridRow, records: Records) -> ExperimentAnswer:
    best = _best([[records.get(cell.digest) for cell in group] for group in row.rivals])
    rivals = row.rivals[best] if best is not None else ()
    values: dict[str, dict[int, float]] = {}
    missing = diverged = 0
    for number, cell in enumerate(row.cells):
        record = records.get(cell.digest)
        rival = records.get(rivals[number].digest) if rivals else None
        missing += record is None
        if record is None:
            continue
        diverged += record["final"] is None
        for measure, value in _measured(record, rival).items():
            if value is not None and math.isfinite(value):
                values.setdefault(measure, {})[cell.seed] = value
    return ExperimentAnswer(row.labels, values, best, missing, diverged)


def _best(groups: Sequence[Sequence[Record | None]]) -> int | None:
    """Return which group of rivals has the lowest mean loss; one that diverged in any seed is none, None without any."""

    def mean(group: Sequence[Record | None]) -> float:
        finals = [record["final"] for record in group if record is not None]
        return math.fsum(finals) / len(finals) if finals and None not in finals else math.inf

    means = [mean(group) for group in groups]
    return means.index(min(means)) if means and min(means) < math.inf else None


def _measured(record: Record, rival: Record | None) -> dict[str, float | None]:
    """Return every measure of one cell; None where it has none."""
    tokens, merged, final, time_s = record["tokens"], all_merged(record), record["final"], record["time_s"]
    theirs_s = None if rival is None else rival["time_s"]
    return {
        "final": final,
        "gap": None if rival is None else gap(record, rival),
        "average": record.get("average"),
        "average_gap": None if rival is None else gap(_averaged(record), _averaged(rival, rival["final"])),
        "time": time_s,
        "time_ratio": time_s / theirs_s if time_s and theirs_s else None,
        "loss_time": final * time_s if final is not None and time_s else None,
        "goodput": record["goodput"],
        "merged": merged / tokens if tokens else None,
        "late": record["merged_late"] / tokens if tokens else None,
        "contributors": record["contributors"],
        "bytes": record["bytes_up"] / tokens if record["bytes_up"] is not None and tokens else None,
    }


def _averaged(record: Record, without: float | None = None) -> Record:
    """Return a record whose end is that of its average, `without` where it keeps none."""
    return {**record, "final": record.get("average") or without}


def all_merged(record: Record) -> int:
    """Return the tokens that were merged, in time or late."""
    merged: int = record["merged"] + record["merged_late"]
    return merged


def gap(record: Record, rival: Record) -> float | None:
    """Return by which share a cell's loss is above its rival's at equal merged tokens; None if either diverged."""
    ours, theirs = record["final"], rival["final"]
    if ours is None or theirs is None:
        return None
    equal = min(all_merged(record), all_merged(rival))
    return float(ours * _moved(record, equal) / (theirs * _moved(rival, equal)) - 1.0)


def _moved(record: Record, tokens: int) -> float:
    """Return by which factor the loss at `tokens` differs from that at the end, by the curve."""
    end = all_merged(record)
    if tokens >= ALIKE * end or not record["curve"]:
        return 1.0
    then = [point[0] for point in record["curve"]]
    bits = [point[1] for point in record["curve"]]
    return float(np.interp(tokens, then, bits) / np.interp(end, then, bits))


def figures(experiment: Experiment, found: Sequence[ExperimentAnswer]) -> list[Figure]:
    """Return one figure per goal and row that it speaks of; none where nothing was measured yet."""
    made = []
    for goal in experiment.goals:
        for answer in (answer for answer in found if matches(answer.labels, goal.where)):
            bounds = [_bound(goal, answer)] if not goal.below else _comparisons(goal, answer, found)
            made += [figure for figure in bounds if figure is not None]
    return made


def _bound(goal: Goal, answer: ExperimentAnswer) -> Figure | None:
    """Return whether the mean of a measure keeps the goal's bounds."""
    measured = answer.spread(goal.measure)
    if measured is None:
        return None
    value = measured.mean
    rules: list[tuple[str, Callable[[float], bool]]] = []
    if goal.at_most is not None:
        rules.append((f"<= {goal.at_most:g}", lambda v, most=goal.at_most: v <= most))  # type: ignore[misc]
    if goal.at_least is not None:
        rules.append((f">= {goal.at_least:g}", lambda v, least=goal.at_least: v >= least))  # type: ignore[misc]
    if goal.near is not None:
        rules.append((f"{goal.near:g} within {goal.within:.0%}", lambda v, n=goal.near: abs(v / n - 1) <= goal.within))  # type: ignore[misc]
    words = ", ".join(words for words, _ in rules)
    name = f"{goal.says} ({_where(answer.labels)})" if answer.labels else goal.says
    return Figure(name, value, goal.measure, words, all(keeps(value) for _, keeps in rules), _how(measured))


def _comparisons(goal: Goal, answer: ExperimentAnswer, found: Sequence[ExperimentAnswer]) -> list[Figure | None]:
    """Return whether a row is below each of the others that the goal names, seed by seed."""
    made: list[Figure | None] = []
    for other_where in goal.below:
        wanted = {**answer.labels, **other_where}
        for other in (other for other in found if matches(other.labels, wanted)):
            ours, theirs = answer.values.get(goal.measure, {}), other.values.get(goal.measure, {})
            seeds = sorted(ours.keys() & theirs.keys())
            if not seeds:
                continue
            apart = paired([ours[seed] for seed in seeds], [theirs[seed] for seed in seeds])
            name = f"{goal.says} ({_where(answer.labels)} against {_where(other.labels)})"
            made.append(Figure(name, apart.mean, goal.measure, "below 0", apart.mean < 0.0, f"paired; {_how(apart)}"))
    return made


def _how(measured: Spread) -> str:
    if measured.count == 1:
        return "one seed"
    return f"{measured.count} seeds, ± {measured.half:.2g} (95 %), standard error {measured.error:.2g}"


def _where(labels: Labels) -> str:
    return ", ".join(f"{axis} {value}" for axis, value in labels.items())
