"""The grid of an experiment, and the cells that answer it.

A **cell** is one run that can be made and kept alone: method, learners, tokens, seed and settings. A **row** is a point of the
grid of all axes with its cells, one per seed, and the cells of its rivals: the same point with the baseline's settings over
it. A method reads only some of the settings; the others are left out of its cells, so that equal work has equal names
(`GridCell.digest`) and is done once, within an experiment and between experiments.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import itertools
import json
import math
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

import msgspec

from atoll.base.errors import SettingsError
from atoll.base.parsing import parsed_toml
from atoll.local import run_settings
from atoll.local.options import shard_names
from atoll.local.run_settings import flat
from atoll.settings import Settings, load
from atoll.settings.sections import UP_LEARNERS_MAX
from atoll_simulator.scenario import scenario_of

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
    """The rival of every row: its own settings with these over them; of several values of `best` the best one."""

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
    return value if isinstance(value, str) else json.dumps(value)


def matches(labels: Labels, where: Mapping[str, Value]) -> bool:
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


METHODS: Final = ("atoll", "data-parallel", "diloco")
OPERATIONS: Final[dict[type[ast.operator], Callable[[float, float], float]]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
}
_OURS: Final = {"method": "atoll", "learners": 4, "tokens": 0, "tokens_per_learner": 0, "warm": 0.0}
STEP: Final = {"sim.step_s": 1.0}
"""A step takes one virtual second unless an experiment says otherwise: news take a few steps, not dozens."""
_FOLLOWS: Final = ("train.sequence", "train.rate", "train.warmup")
"""Settings of `_standing`'s sections that follow from model or optimizer where nobody says them; others from the learners."""
FORMER_STANDING: Final[dict[str, Value]] = {
    "protocol.interval_steps": 16,
    "protocol.merge": "rda",
    "protocol.codec_up": "bf16",
    "protocol.codec_down": "f32",
    "protocol.keyframe_versions": 48,
    "train.rate": 2e-3,
    "train.warmup": 0.03,
    "train.schedule": "cosine",
    "train.rate_min_ratio": 0.1,
    "train.optimizer": "adamw",
}
"""What stood before ADR 56 to 63, where raw files do not say it: cells of theirs are named by it.

A question with `standing = "former"` asks for it, so that its file still makes the runs of its page."""
_LOCKSTEP: Final = ("model.", "train.", "data.lease_blocks", "protocol.average_versions")
_MERGING: Final = (
    *("fragments", "interval_steps", "merge", "outer", "outer_lr", "outer_momentum", "codec_up"),
    "correction",
)
_READS: Final[dict[str, tuple[str, ...]]] = {
    "data-parallel": _LOCKSTEP,
    "diloco": (*_LOCKSTEP, *(f"protocol.{name}" for name in _MERGING)),
}


@dataclass(frozen=True, slots=True)
class GridCell:
    """One run. `settings` are (dotted name, value as JSON), `warm` is the share of tokens trained data-parallel first."""

    method: str
    learners: int
    tokens: int
    seed: int
    warm: float
    settings: tuple[tuple[str, str], ...]

    @property
    def digest(self) -> str:
        return hashlib.sha256(json.dumps(self.describe(), sort_keys=True).encode()).hexdigest()[:16]

    def describe(self) -> dict[str, Any]:
        return {
            "method": self.method,
            "learners": self.learners,
            "tokens": self.tokens,
            "seed": self.seed,
            "warm": self.warm,
            "settings": {name: json.loads(value) for name, value in self.settings},
        }


@dataclass(frozen=True, slots=True)
class GridRow:
    """A point of the grid: its labels by axis, its cells by seed, and its rivals' cells by value of `best`, by seed."""

    labels: Labels
    cells: tuple[GridCell, ...]
    rivals: tuple[tuple[GridCell, ...], ...] = ()


def rows(
    experiment: Experiment,
    seeds: Sequence[int],
    *,
    scale: float = 1.0,
    over: Mapping[str, Value] | None = None,
    standing: Mapping[str, Value] | None = None,
) -> list[GridRow]:
    """Return the rows of an experiment for `seeds`, with token budgets times `scale` and `over` put over all settings.

    `standing` is what `atoll up` did when the cells were named, today's if it is None (`standing_settings`).

    Raises:
        SettingsError: a setting is unknown or out of range, in any of the cells.
    """
    axes, over = axes_of(experiment), dict(over or {})
    standing = _standing() if standing is None else standing
    former = FORMER_STANDING if experiment.standing == "former" else {}
    base = {**_OURS, **STEP, **former, **dict(flattened(experiment.settings, "settings"))}
    rival = experiment.baseline
    found = []
    for point in itertools.product(*(choices.items() for choices in axes.values())):
        labels = {axis: name for axis, (name, _) in zip(axes, point, strict=True)}
        if any(matches(labels, where) for where in experiment.skip):
            continue
        settings = layered(base, *(chosen for _, chosen in point))
        cells = tuple(_cell(layered(settings, over), seed, scale, standing) for seed in seeds)
        rivals: tuple[tuple[GridCell, ...], ...] = ()
        if rival is not None:
            theirs = dict(flattened(rival.settings, "baseline"))
            beside = [layered(settings, theirs, best, over) for best in choices(rival)]
            rivals = tuple(tuple(_cell(one, seed, scale, standing) for seed in seeds) for one in beside)
        found.append(GridRow(labels, cells, rivals))
    for cell in {cell: None for row in found for group in (row.cells, *row.rivals) for cell in group[:1]}:
        _check(cell)
    return found


def layered(*layers: Mapping[str, Value]) -> dict[str, Value]:
    """Return dotted settings, later ones over earlier ones; an empty table takes away all that is below its name."""
    settings: dict[str, Value] = {}
    for name, value in (item for layer in layers for item in layer.items()):
        if value == {}:
            settings = {other: kept for other, kept in settings.items() if not other.startswith(f"{name}.")}
        else:
            settings[name] = value
    return settings


def choices(baseline: Baseline) -> Iterator[dict[str, Value]]:
    """Yield the combinations of the values that the best of is taken of; one empty one without any."""
    best = dict(flattened(baseline.best, "baseline.best"))
    for values in itertools.product(*best.values()):
        yield dict(zip(best, values, strict=True))


def _cell(settings: Mapping[str, Value], seed: int, scale: float, standing: Mapping[str, Value]) -> GridCell:
    """Return the cell of one point and seed; its method decides which settings it keeps."""
    own = {name: settings.get(name) for name in _OURS}  # an empty table takes even these away
    method, learners = own["method"], own["learners"]
    if method not in METHODS:
        raise SettingsError("unknown method", got=method, allowed=", ".join(METHODS))
    most = UP_LEARNERS_MAX if method == "atoll" else math.inf
    if type(learners) is not int or not 1 <= learners <= most:
        raise SettingsError(
            "learners is wrong", got=learners, allowed=f"a number from 1, for atoll to {UP_LEARNERS_MAX}"
        )
    each = own["tokens_per_learner"]
    tokens = own["tokens"] or (each * learners if isinstance(each, int) else 0)
    if not isinstance(tokens, int) or tokens < 1 or (own["tokens"] and each):
        raise SettingsError(
            "a cell needs a budget",
            got=f"tokens = {own['tokens']}, tokens_per_learner = {own['tokens_per_learner']}",
            allowed="one of the two",
        )
    if not isinstance(own["warm"], int | float) or not 0.0 <= own["warm"] < 1.0:
        raise SettingsError("warm is a share of the tokens", got=own["warm"], allowed="0 (none), below 1")
    budget = max(1, round(tokens * scale))
    warm = float(own["warm"]) if method != "data-parallel" else 0.0
    facts = {"learners": learners, "tokens": budget, "warm_tokens": round(warm * budget)}
    kept = {
        name: _filled(value, facts) for name, value in settings.items() if name not in _OURS and _reads(method, name)
    }
    said = sorted(name for name, value in kept.items() if name not in standing or value != standing[name])
    ordered = tuple((name, json.dumps(kept[name], sort_keys=True)) for name in said)
    return GridCell(method, learners, budget, seed, warm, ordered)


@functools.cache
def _standing() -> dict[str, Value]:
    """Return what `atoll up` does where nobody says anything: said or not, it is the same cell.

    Only of settings that depend on no other one; defaults are part of the sources that a cell is kept under.
    """
    texts = [f"{name}={value}" for name, value in run_settings.DEFAULTS.items()]
    known = flat(load(None, texts, {}).settings)
    alone = (name for name in known if name.startswith(("protocol.", "train.")))
    return {name: known[name] for name in alone if name not in (*_FOLLOWS, *run_settings.FOLLOWING)}


def standing_settings() -> dict[str, Value]:
    """Return what `atoll up` does today where nobody says anything, for a raw file to keep: cells are named by it."""
    return dict(_standing())


def unsaid(cell: GridCell) -> str:
    """Return 16 hex digits for the defaults that a cell reads and does not name: they may be others another day."""
    said = {name for name, _ in cell.settings}
    # What follows from model, optimizer and learners is a default as well: another rule is another run.
    sources = [
        f"{name}={json.loads(value)}"
        for name, value in cell.settings
        if name.startswith("model.") or name == "train.optimizer"
    ]
    train = load(None, sources, {}).settings.train
    follows = {name: train[name.removeprefix("train.")] for name in _FOLLOWS}
    up = run_settings.default_settings(cell.learners)
    follows |= {name: up[name] for name in run_settings.FOLLOWING}
    left = {
        name: value for name, value in (_standing() | follows).items() if name not in said and _reads(cell.method, name)
    }
    return hashlib.sha256(json.dumps(left, sort_keys=True).encode()).hexdigest()[:16]


def _reads(method: str, name: str) -> bool:
    """Return whether a method reads a setting; one that is not listed reads all. A dot ends the name of a whole section."""
    listed = _READS.get(method)
    return listed is None or any(name == one or (one.endswith(".") and name.startswith(one)) for one in listed)


def _filled(value: Value, facts: Mapping[str, float]) -> Value:
    """Return a value in which texts that begin with `=` are computed, as "= learners" or "= tokens / 2048"."""
    if isinstance(value, list):
        return [_filled(item, facts) for item in value]
    if isinstance(value, Mapping):
        return {key: _filled(item, facts) for key, item in value.items()}
    if not isinstance(value, str) or not value.startswith("="):
        return value
    try:
        return computed(value[1:], facts)
    except (SyntaxError, KeyError, ArithmeticError, RecursionError) as error:
        raise SettingsError(
            "this cannot be computed", got=value, allowed=f"numbers, {', '.join(facts)}, + - * / // and brackets"
        ) from error


def computed(text: str, facts: Mapping[str, float]) -> float:
    """Return the value of an expression of numbers, the names of `facts` and the four operations; raise SyntaxError."""

    def value(node: ast.expr) -> float:
        if isinstance(node, ast.Constant) and isinstance(node.value, int | float):
            return node.value
        if isinstance(node, ast.Name):
            return facts[node.id]
        if isinstance(node, ast.BinOp) and type(node.op) in OPERATIONS:
            return OPERATIONS[type(node.op)](value(node.left), value(node.right))
        raise SyntaxError(ast.unparse(node))

    return value(ast.parse(text.strip(), mode="eval").body)


def _check(cell: GridCell) -> None:
    """Refuse a cell whose settings no run would accept, before hours are spent on the others."""
    for name, _ in cell.settings:
        if name.partition(".")[0] not in Settings.model_fields:
            allowed = ", ".join([*_OURS, *sorted(Settings.model_fields)])
            raise SettingsError("unknown setting in an experiment", got=name, allowed=allowed)
    said = [f"{name}={_plain(value)}" for name, value in cell.settings if not _simulated(name)]
    settings = load(None, said, {}, fallback=run_settings.default_fallback(cell.learners)).settings
    if cell.method == "atoll":
        settings.protocol.check(cell.learners)
        learners = [f"learner-{number}" for number in range(1, cell.learners + 1)]
        scenario_of(_nested(cell.settings, "sim"), learners, shard_names(settings.protocol.shards))


def _simulated(name: str) -> bool:
    return name.startswith("sim.")


def _nested(settings: Sequence[tuple[str, str]], section: str) -> dict[str, Value]:
    """Return the settings of one section as the nested table that a file would have."""
    table: dict[str, Value] = {}
    for name, value in settings:
        first, *path = name.split(".")
        if first == section:
            here = table
            for key in path[:-1]:
                here = here.setdefault(key, {})
            here[path[-1]] = json.loads(value)
    return table


def _plain(value: str) -> str:
    inner = json.loads(value)
    return inner if isinstance(inner, str) else value
