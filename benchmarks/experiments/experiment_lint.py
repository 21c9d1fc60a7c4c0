"""Refuses an experiment that could be run and would not answer: found out afterwards, it has cost hours.

`questions.parse` refuses what no experiment says, and pages that were published are read by it again. What is here concerns
only those who are about to run one: values of axes that do not exist or are there twice, goals that nothing can miss.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from atoll.base.errors import SettingsError
from benchmarks.experiments.questions import Experiment, Goal, axes_of, label, wheres

_NEEDS_BASELINE = ("gap", "average_gap", "time_ratio")


def sensible(experiment: Experiment, origin: str) -> None:
    """Raise `SettingsError` for the first thing in an experiment that would be silently of no effect."""
    axes = axes_of(experiment)
    for name, said in _values(experiment.axes):
        twice = {value for value in said if said.count(value) > 1}
        if twice:
            raise SettingsError(
                "an axis has a value twice", got=f"{name} = {sorted(twice)} in {origin}", todo="leave one out"
            )
    for axis, labels in axes.items():
        if not labels:
            raise SettingsError("an axis has no value", got=f"{axis} in {origin}", todo="give it one, or leave it out")
    _names_rows(experiment, axes, origin)
    if experiment.seeds < 1 or not experiment.measures:
        got = f"seeds = {experiment.seeds}, measures = {list(experiment.measures)} in {origin}"
        raise SettingsError("a table needs a seed and a measure", got=got, allowed="at least one of each")
    for name, values in (experiment.baseline.best if experiment.baseline is not None else {}).items():
        if not values:
            raise SettingsError(
                "a baseline is the best of nothing", got=f"best.{name} = [] in {origin}", todo="name its values"
            )
    for goal in experiment.goals:
        _can_be_missed(goal, experiment, origin)


def _names_rows(experiment: Experiment, axes: Mapping[str, Mapping[str, Any]], origin: str) -> None:
    """Refuse whatever picks rows by a value that no axis has, and a plot against no axis."""
    for axis, value in (item for where in wheres(experiment) for item in where.items()):
        if label(value) not in axes[axis]:
            allowed = ", ".join(axes[axis])
            raise SettingsError("no row has this value", got=f"{axis} = {value!r} in {origin}", allowed=allowed)
    for plot in experiment.plots:
        if plot.x not in (*axes, "merged"):
            raise SettingsError("no such axis", got=f"{plot.x} in {origin}", allowed=", ".join((*axes, "merged")))


def _values(axes: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, list[str]]]:
    """Yield the labels of every axis that is a list, by its name."""
    for key, value in axes.items():
        if isinstance(value, Mapping):
            yield from _values(value, f"{above}{key}.")
        elif isinstance(value, list):
            yield f"{above}{key}", [label(item) for item in value]


def _can_be_missed(goal: Goal, experiment: Experiment, origin: str) -> None:
    """Refuse a goal that says nothing, or that can never be judged."""
    bounds = [bound for bound in (goal.at_most, goal.at_least, goal.near) if bound is not None]
    if not (bounds or goal.below) or not all(map(math.isfinite, (*bounds, goal.within))) or goal.near == 0.0:
        allowed = "at_most, at_least, near (not 0) with within, all finite; or below other rows"
        raise SettingsError("a goal has no bound", got=f"{goal.says!r} in {origin}", allowed=allowed)
    if goal.measure in _NEEDS_BASELINE and experiment.baseline is None:
        raise SettingsError("a goal needs a [baseline]", got=f"{goal.measure} in {origin}", todo="name one")
