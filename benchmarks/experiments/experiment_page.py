"""The page of an experiment: its question, a table of rows with spreads, plots, goals, and every seed's own figure.

A page is a pure function of one raw file, `docs/results/raw/experiment-NAME.json.zst` (the experiment's TOML text, the seeds,
the records of its cells), so `make results-check` makes it again and compares.

The gap of a cell to its rival (the baseline of the same seed) is taken at equal merged tokens t = min of both: the end is
moved along the curve, loss(t) = end * curve(t) / curve(end), because in older records the points between the ends were measured
on less text. Who merged fewer tokens is not moved, nor who merged hardly more (`ALIKE`): a run ends with the round its target
falls into, and what so few tokens teach is less than one version differs from the next.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np
import zstandard

from atoll.base.files import write_whole
from atoll_simulator.confidence import Spread, paired, spread
from benchmarks.experiments.cells import Record, duration
from benchmarks.experiments.grid import (
    FORMER_STANDING,
    MEASURES,
    Baseline,
    Experiment,
    Goal,
    GridRow,
    Labels,
    Plot,
    choices,
    flattened,
    matches,
    parse,
    rows,
    standing_settings,
)
from benchmarks.lib.figures import line_figure
from benchmarks.lib.harness import Figure

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


PREFIX: Final = "experiment-"
Lines = dict[str, list[tuple[float, float]]]
RAW_BYTES_MAX: Final = 256 << 20
LEVEL: Final = 19
_PERCENT: Final = {"gap", "average_gap", "goodput", "merged", "late"}


class Raw(msgspec.Struct, kw_only=True):
    """The kept file of an experiment; `over` and `scale` are those of a quick look, which is never published.

    `standing` is what `atoll up` did where nobody said anything when the cells were named: defaults change, published
    pages do not.
    """

    name: str
    text: str
    seeds: list[int]
    records: dict[str, dict[str, Any]]
    scale: float = 1.0
    over: dict[str, Any] = {}
    standing: dict[str, Any] | None = None

    @property
    def experiment(self) -> Experiment:
        return parse(self.text, self.name)

    @property
    def defaults(self) -> dict[str, Any]:
        return standing_settings() | FORMER_STANDING if self.standing is None else self.standing

    @property
    def rows(self) -> list[GridRow]:
        return rows(self.experiment, self.seeds, scale=self.scale, over=self.over, standing=self.defaults)


def save(raw: Raw, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, zstandard.compress(msgspec.json.encode(raw, order="deterministic"), LEVEL))


def load(path: Path) -> Raw:
    data = zstandard.ZstdDecompressor().decompress(path.read_bytes(), max_output_size=RAW_BYTES_MAX)
    return msgspec.json.decode(data, type=Raw)


def page(raw: Raw) -> str:
    experiment, found = raw.experiment, answers(raw.rows, raw.records)
    quick = f"**A quick look: token budgets times {raw.scale:g}, no result.** " if raw.scale != 1.0 or raw.over else ""
    parts = [
        f"# {PREFIX}{raw.name}",
        f"Generated by `make results` from [`raw/`](raw); `make experiment NAME={raw.name}` measures it. {quick}{_origin(raw)}",
        *_former_defaults(raw),
        f"**{experiment.question}**",
        *([experiment.about.strip()] if experiment.about else []),
        _table(experiment, found),
        _legend(experiment, raw),
        *(f"![{plot.y} against {plot.x}]({name})" for name, plot in _named(raw.name, experiment.plots)),
        *_goals(experiment, found),
        *_by_seed(experiment, found, raw.seeds),
    ]
    # Kept cells hold the question as it was asked, in the words of that day.
    return "\n\n".join(parts).replace("displacement", "pseudo-gradient") + "\n"


def svgs(raw: Raw) -> dict[str, str]:
    experiment, found = raw.experiment, answers(raw.rows, raw.records)
    drawn = {}
    for name, plot in _named(raw.name, experiment.plots):
        lines = _curves(plot, raw.rows, raw.records) if plot.x == "merged" else _lines(plot, found)
        drawn[name] = line_figure(lines, plot.x, MEASURES[plot.y])
    return drawn


def _named(name: str, plots: Sequence[Plot]) -> list[tuple[str, Plot]]:
    return [(f"{PREFIX}{name}-{number}.svg", plot) for number, plot in enumerate(plots, 1)]


def _origin(raw: Raw) -> str:
    records = list(raw.records.values())
    machines = sorted({record["machine"] for record in records})
    commits = sorted({record["commit"][:12] + ("+changes" if "+" in record["commit"] else "") for record in records})
    sources = sorted({record["sources"] for record in records})
    took = duration(math.fsum(record["took_s"] for record in records))
    named = ", ".join(f"`{commit}`" for commit in commits)
    return (
        f"{'; '.join(machines)}; commit {named}; sources {', '.join(sources)}; "
        f"{len(records)} cells, {took} of training; seeds {', '.join(map(str, raw.seeds))}."
    )


def _former_defaults(raw: Raw) -> list[str]:
    """Return a sentence on the defaults that are not today's, where there are any that the question does not set itself."""
    today, asked = standing_settings(), dict(flattened(raw.experiment.settings, "settings"))
    former = [
        f"`{name} = {value}`" + (f" (today {today[name]})" if name in today else "")
        for name, value in raw.defaults.items()
        if name not in asked and (name not in today or today[name] != value)
    ]
    if not former:
        return []
    differences = f"where a row names nothing else, they stand on former defaults, {', '.join(former)}"
    warning = "With today's defaults the figures differ, and an answer may, too"
    return [f"**These runs are old**: {differences}. {warning} ([defaults](../explanation/defaults.md))."]


def _table(experiment: Experiment, found: Sequence[ExperimentAnswer]) -> str:
    axes = list(dict.fromkeys(axis for answer in found for axis in answer.labels))
    best = ["baseline"] if experiment.baseline is not None and experiment.baseline.best else []
    head = [*axes, "seeds", *experiment.measures, *best]
    made = [_line(head), "|" + "---|" * len(head)]
    for answer in found:
        cells = [str(answer.labels[axis]) for axis in axes]
        counted = max((len(values) for values in answer.values.values()), default=0)
        cells.append(f"{counted}" + (f" of {counted + answer.missing}" if answer.missing else ""))
        cells += [_shown(answer.spread(measure), measure) for measure in experiment.measures]
        if answer.diverged:
            cells[len(axes)] += f", {answer.diverged} diverged"
        cells += [_rival(experiment.baseline, answer.rival)] if best else []
        made.append(_line(cells))
    return "\n".join(made)


def _rival(baseline: Baseline | None, number: int | None) -> str:
    if baseline is None or number is None:
        return ""
    return ", ".join(f"{name} {value}" for name, value in list(choices(baseline))[number].items())


def _legend(experiment: Experiment, raw: Raw) -> str:
    words = [f"*{measure}*: {MEASURES[measure]}" for measure in experiment.measures]
    if experiment.baseline is not None:
        words.append(f"baseline: {experiment.baseline.name}")
    if len(raw.seeds) > 1:
        words.append("± is half of the 95 % interval of the mean over seeds (Student's t); a gap is taken seed by seed")
    return "; ".join(words) + "."


def _shown(measured: Spread | None, measure: str) -> str:
    """Return a spread as the table shows it; a dash where nothing is known."""
    if measured is None:
        return "-"
    if measure in _PERCENT:
        half = f" ± {100 * measured.half:.2f}" if math.isfinite(measured.half) else ""
        return f"{100 * measured.mean:{'+' if measure.endswith('gap') else ''}.2f}{half} %"
    half = f" ± {measured.half:.2g}" if math.isfinite(measured.half) else ""
    return f"{measured.mean:.5g}{half}"


def _goals(experiment: Experiment, found: Sequence[ExperimentAnswer]) -> list[str]:
    if not experiment.goals:
        return []
    made = ["| goal | measured | wanted | holds | how |", "|---|---|---|---|---|"]
    for figure in map(asdict, figures(experiment, found)):
        holds = "yes" if figure["holds"] else "**no**"
        made.append(_line([figure["name"], f"{figure['value']:.4g}", figure["goal"], holds, figure["how"]]))
    return ["\n".join(made)] if len(made) > 2 else ["No goal can be judged yet."]


def _by_seed(experiment: Experiment, found: Sequence[ExperimentAnswer], seeds: Sequence[int]) -> list[str]:
    """Return the main measure of every cell: the gap where there is one, else the first that is measured."""
    measure = "gap" if "gap" in experiment.measures else experiment.measures[0]
    if len(seeds) < 2:
        return []
    axes = list(dict.fromkeys(axis for answer in found for axis in answer.labels))
    made = [_line([*axes, *(f"seed {seed}" for seed in seeds)]), "|" + "---|" * (len(axes) + len(seeds))]
    for answer in found:
        values = answer.values.get(measure, {})
        scale, unit = (100.0, " %") if measure in _PERCENT else (1.0, "")
        shown = [f"{scale * values[seed]:.5g}{unit}" if seed in values else "-" for seed in seeds]
        made.append(_line([*(str(answer.labels[axis]) for axis in axes), *shown]))
    return [f"Seed by seed, *{measure}*:", "\n".join(made)]


def _lines(plot: Plot, found: Sequence[ExperimentAnswer]) -> Lines:
    """Return a line per combination of the axes other than x, of rows whose x is a number."""
    points: dict[str, list[tuple[float, float]]] = {}
    for answer in (answer for answer in found if matches(answer.labels, plot.where)):
        x, measured = _number(answer.labels.get(plot.x)), answer.spread(plot.y)
        if x is not None and measured is not None:
            points.setdefault(_line_name(answer.labels, plot), []).append((x, measured.mean))
    return {name: sorted(line) for name, line in points.items()}


def _curves(plot: Plot, asked: Sequence[GridRow], records: Records) -> Lines:
    lines: Lines = {}
    for row in (row for row in asked if matches(row.labels, plot.where)):
        record = next((records[cell.digest] for cell in row.cells if cell.digest in records), None)
        if record is not None:
            lines[_line_name(row.labels, plot)] = [(x, y) for x, y in record["curve"] if x > 0]
    return lines


def _line_name(labels: dict[str, Any], plot: Plot) -> str:
    return (
        ", ".join(
            f"{axis.rpartition('.')[2]} {value}"
            for axis, value in labels.items()
            if axis != plot.x and axis not in plot.where
        )
        or plot.y
    )


def _number(label: object) -> float | None:
    try:
        return float(str(label))
    except ValueError:
        return None


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in cells) + " |"
