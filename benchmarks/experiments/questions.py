"""An experiment as its TOML file asks it (docs/how-to/experiments.md); `grid` makes the cells that answer it.

Refuses an experiment that could be run and would not answer: found out afterwards, it has cost hours.

`questions.parse` refuses what no experiment says, and pages that were published are read by it again. What is here concerns
only those who are about to run one: values of axes that do not exist or are there twice, goals that nothing can miss.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final, Literal

import msgspec

from atoll.base.errors import SettingsError
from atoll.base.parsing import parsed_toml
from atoll.settings import Settings

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


FOLDER: Final = Path("benchmarks/experiments")
MEASURES: Final = {
    "final": "held-out loss at the end, bits per byte",
    "gap": "loss above the baseline's at equal merged tokens",
    "average": "held-out loss of the average of the global values, bits per byte",
    "average_gap": "that loss above the baseline's (its average's, where it keeps one) at equal merged tokens",
    "time": "seconds of virtual time",
    "time_ratio": "virtual time over the baseline's",
    "loss_time": "bits per byte times seconds of virtual time",
    "goodput": "learner-seconds stepping over learner-seconds present",
    "merged": "share of the trained tokens that was merged",
    "late": "share of the trained tokens that was merged late",
    "contributors": "contributions per round",
    "bytes": "bytes sent up per trained token",
}
Value = Any
Labels = dict[str, Any]


class Baseline(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Whom every row is compared with: its own settings with these over them; of several values of `best` the best one."""

    name: str
    settings: dict[str, Any] = {}
    best: dict[str, list[Any]] = {}


class Plot(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One plot: a measure against an axis of numbers, a line per combination of the other axes, or loss against `merged`."""

    x: str
    y: str = "gap"
    where: dict[str, Any] = {}


class Goal(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A statement about one row that can fail: a bound on a measure's mean, or that it is below other rows'."""

    says: str
    measure: str
    where: dict[str, Any] = {}
    at_most: float | None = None
    at_least: float | None = None
    near: float | None = None
    within: float = 0.0
    below: list[dict[str, Any]] = []


class Experiment(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The file. `axes` maps a setting to its values, or a name to bundles of settings; `skip` names points left out.

    Settings that nobody names are `atoll up`'s of today, or with `standing = "former"` those of before ADR 56, with which the
    pages of older questions were made (`benchmarks.experiments.grid.FORMER_STANDING`).
    """

    question: str
    about: str = ""
    standing: Literal["today", "former"] = "today"
    seeds: int = 3
    settings: dict[str, Any] = {}
    axes: dict[str, Any] = {}
    skip: list[dict[str, Any]] = []
    baseline: Baseline | None = None
    measures: tuple[str, ...] = ("final",)
    plots: list[Plot] = []
    goals: list[Goal] = []


def read(path: Path) -> tuple[Experiment, str]:
    """Return the checked experiment of a file, and its text as it was then.

    Raises:
        SettingsError: the file is missing, no TOML, or says what no experiment says.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise SettingsError(
            "this is no experiment", got=f"{path}: {error}", todo="see docs/how-to/experiments.md"
        ) from error
    except OSError as error:
        known = ", ".join(sorted(found.stem for found in path.parent.glob("*.toml"))) or "none here"
        raise SettingsError(
            "there is no such experiment", got=path.stem, allowed=known, todo="see docs/how-to/experiments.md"
        ) from error
    return parse(text, str(path)), text


def parse(text: str, origin: str) -> Experiment:
    """Return the checked experiment of a TOML text that came from `origin`."""
    try:
        table = parsed_toml(text)
        experiment = msgspec.convert(table, Experiment)
    except (ValueError, msgspec.ValidationError) as error:
        raise SettingsError(
            "this is no experiment", got=f"{origin}: {error}", todo="see docs/how-to/experiments.md"
        ) from error
    for name in [*experiment.measures, *(p.y for p in experiment.plots), *(g.measure for g in experiment.goals)]:
        if name not in MEASURES:
            raise SettingsError("unknown measure", got=f"{name} in {origin}", allowed=", ".join(MEASURES))
    axes = axes_of(experiment)
    for axis in {name for where in wheres(experiment) for name in where}:
        if axis not in axes:
            raise SettingsError("no such axis", got=f"{axis} in {origin}", allowed=", ".join(axes) or "there are none")
    if experiment.baseline is None and {"gap", "time_ratio"} & {*experiment.measures}:
        raise SettingsError("a gap needs a [baseline]", got=origin, todo="name one, or measure something else")
    return experiment


def wheres(experiment: Experiment) -> Iterator[Mapping[str, Any]]:
    """Yield whatever picks rows by the values of their axes."""
    yield from experiment.skip
    yield from (plot.where for plot in experiment.plots)
    for goal in experiment.goals:
        yield goal.where
        yield from goal.below


def axes_of(experiment: Experiment) -> dict[str, dict[str, dict[str, Value]]]:
    """Return, by axis, the settings of each of its values by the value's label."""
    axes: dict[str, dict[str, dict[str, Value]]] = {}
    for key, value in experiment.axes.items():
        if isinstance(value, Mapping) and key not in Settings.model_fields:
            axes[key] = {label: dict(flattened(bundle, key)) for label, bundle in value.items()}
            continue
        for name, values in flattened({key: value}, "axes"):
            if not isinstance(values, list) or not values:
                raise SettingsError("an axis is a list of values", got=f"{name} = {values!r}", todo="write [a, b, …]")
            if name in axes:
                raise SettingsError("an axis is there twice", got=name, todo="write it once, with a dot or as a table")
            axes[name] = {label(item): {name: item} for item in values}
    return axes


def label(value: Value) -> str:
    """Return a value as tables show it and `where` names it."""
    return value if isinstance(value, str) else json.dumps(value)


def matches(labels: Labels, where: Mapping[str, Value]) -> bool:
    """Return whether a row's labels are those that `where` names."""
    return all(labels.get(axis) == label(value) for axis, value in where.items())


def flattened(table: Mapping[str, Value], where: str) -> Iterator[tuple[str, Value]]:
    """Yield the leaves of nested tables by dotted name; an empty table is a leaf."""
    if not isinstance(table, Mapping):
        raise SettingsError("a table of settings was expected", got=f"{where} = {table!r}")
    for key, value in table.items():
        if isinstance(value, Mapping) and value:
            for name, leaf in flattened(value, key):
                yield f"{key}.{name}", leaf
        else:
            yield key, value
