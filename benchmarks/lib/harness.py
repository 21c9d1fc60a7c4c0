"""What every benchmark is made with: its flags, its figures as data, its exit code.

A benchmark is a module with its question as docstring and a `main`, whose keywords are its flags and which returns figures:

    def main(*, minutes: float = 4.0, seed: int = 0) -> list[Figure]: ...

    if __name__ == "__main__":
        run_benchmark("bench-example", main)

`run_benchmark` writes `build/results/<target>.json` and leaves with 1 when a goal is missed, with 3 where nothing can be
measured here (`Unfit`). It takes the broker of the environment away. `docs/results/history.jsonl` has a line for every
published measurement, a newer one of the same commit and machine in the place of the older; `write` prints each figure beside
the last one from a machine of that kind.
"""

from __future__ import annotations

import argparse
import inspect
import json
import math
import os
import subprocess
import sys
import typing
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import NoneType
from typing import Any, Final, NoReturn

import atoll
from atoll.base.files import write_whole
from atoll.base.machine import commit, machine

HISTORY: Final = Path("docs/results/history.jsonl")
COMMIT_DIGITS: Final = 12
RESULTS: Final = Path("build/results")
UNFIT: Final = 3
"""The exit code of a benchmark that could measure nothing here."""


class Unfit(Exception):
    """This machine cannot be measured on, for the reason that is given."""


# -- figures ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Figure:
    """One measured figure: `goal` in words, `holds` whether it is met (None: there is no goal), `how` it was measured."""

    name: str
    value: float
    unit: str
    goal: str
    holds: bool | None
    how: str


def fact(name: str, value: float, unit: str, how: str) -> Figure:
    return Figure(name, value, unit, "", None, how)


def at_most(name: str, value: float, unit: str, most: float | None, how: str) -> Figure:
    """Return a figure whose goal is an upper bound, where there is one."""
    return (
        fact(name, value, unit, how)
        if most is None
        else Figure(name, value, unit, f"<= {most:.4g}", value <= most, how)
    )


def at_least(name: str, value: float, unit: str, least: float | None, how: str) -> Figure:
    """Return a figure whose goal is a lower bound, where there is one."""
    if least is None:
        return fact(name, value, unit, how)
    return Figure(name, value, unit, f">= {least:.4g}", value >= least, how)


def zero(name: str, count: float, unit: str, how: str) -> Figure:
    return Figure(name, float(count), unit, "0", count == 0, how)


def above_zero(name: str, count: float, unit: str, how: str) -> Figure:
    return Figure(name, float(count), unit, "> 0", count > 0, how)


def exactly(name: str, count: int, unit: str, wanted: int, how: str) -> Figure:
    return Figure(name, float(count), unit, f"{wanted}", count == wanted, how)


def true(name: str, holds: bool, how: str, unit: str = "") -> Figure:  # noqa: FBT001  (what the figure says)
    """Return a figure that must hold: 1 where it does, else 0."""
    return Figure(name, float(holds), unit, "1", bool(holds), how)


@dataclass(frozen=True, slots=True)
class BenchmarkResult:
    """Figures with the files from which they can be computed again; `target` where it is not the usual one."""

    figures: Iterable[Figure]
    raw: Sequence[Path] = ()
    target: str = ""


def write(target: str, seed: int, figures: list[Figure], raw: Sequence[Path] = ()) -> int:
    """Write the figures of `target`, print them, and return the exit code: 1 if any goal is missed.

    Each is printed with how far it is from the one that was published last (`history`).
    `raw` are files from which the figures can be computed again; `make results` keeps them with the tables.
    """
    RESULTS.mkdir(parents=True, exist_ok=True)
    document = {
        "machine": machine(),
        "commit": commit(),
        "atoll": atoll.__version__,
        "seed": seed,
        "figures": [asdict(figure) for figure in figures],
        **({"raw": [str(path) for path in raw]} if raw else {}),
    }
    path = RESULTS / f"{target}.json"
    # Runners with other build folders may write the same result at the same time.
    write_whole(path, (json.dumps(document, indent=2) + "\n").encode(), path.with_suffix(f".{os.getpid()}"))
    published = before(target, machine(), commit())
    for figure in figures:
        verdict = {True: "holds", False: "MISSED", None: "-"}[figure.holds]
        former = published.get(figure.name)
        change = f"{figure.value / former - 1.0:+.1%}" if former else ""
        print(f"{figure.name:<64} {figure.value:>10.4g} {figure.unit:<12} {change:>9}  {figure.goal:<28} {verdict}")
    print(f"written to {path}")
    return int(any(figure.holds is False for figure in figures))


# -- flags ------------------------------------------------------------------------------------------------------------


def positive(text: str) -> float:
    """Return a finite number above 0."""
    if not 0.0 < (number := float(text)) < math.inf:
        raise argparse.ArgumentTypeError(f"must be above 0 and finite, got {text}")
    return number


def count(text: str) -> int:
    """Return a whole number from 1 on."""
    if (number := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {text}")
    return number


def natural(text: str) -> int:
    """Return a whole number from 0 on: a seed, an index."""
    if (number := int(text)) < 0:
        raise argparse.ArgumentTypeError(f"must be at least 0, got {text}")
    return number


def numbers(text: str) -> list[float]:
    return [float(part) for part in text.split(",")]


def parser_of(main: Callable[..., Any]) -> argparse.ArgumentParser:
    """Return the parser of a benchmark's flags: the keywords of `main`, by kind, with their defaults.

    A float is above 0, an int is at least 1, or at least 0 where that is its default. A tuple takes several values, a list one
    for each time that the flag is given. `Annotated` may add the help, the choices as a tuple, and what reads the value.
    """
    text = sys.modules[main.__module__].__doc__
    parser = argparse.ArgumentParser(description=text, formatter_class=argparse.RawDescriptionHelpFormatter)
    hints = typing.get_type_hints(main, include_extras=True)
    for name, parameter in inspect.signature(main).parameters.items():
        kind, *notes = typing.get_args(hints[name]) if hasattr(hints[name], "__metadata__") else (hints[name],)
        told: dict[str, Any] = {"default": parameter.default}
        told["help"] = next((note for note in notes if isinstance(note, str)), None)
        kind = typing.get_args(kind)[0] if NoneType in typing.get_args(kind) else kind
        origin, inside = typing.get_origin(kind), typing.get_args(kind)
        if kind is bool:
            told["action"] = "store_true"
        elif origin in (tuple, list):
            told |= {"nargs": "*"} if origin is tuple else {"action": "append"}
            kind = inside[0]
        if choices := next((note for note in notes if isinstance(note, tuple)), None):
            told["choices"] = choices
        elif reader := next(filter(callable, notes), None):
            told["type"] = reader
        elif kind in (int, float):
            told["type"] = positive if kind is float else natural if parameter.default == 0 else count
        parser.add_argument(f"--{name.replace('_', '-')}", **told)
    return parser


def takes_seed(main: Callable[..., Any]) -> bool:
    """Return whether a benchmark draws anything."""
    return "seed" in inspect.signature(main).parameters


def run_benchmark(target: str, main: Callable[..., Iterable[Figure] | BenchmarkResult]) -> NoReturn:
    """Do what the command line asks of a benchmark, write its result, and leave."""
    os.environ.pop("ATOLL_BROKER__URL", None)
    parser, draws = parser_of(main), takes_seed(main)
    if not draws:
        parser.add_argument("--seed", type=natural, default=0, help="nothing is drawn: it is noted in the result")
    options = vars(parser.parse_args())
    seed = options["seed"] if draws else options.pop("seed")
    try:
        found = main(**options)
    except Unfit as error:
        print(f"this cannot be measured here: {error}")
        sys.exit(UNFIT)
    outcome = found if isinstance(found, BenchmarkResult) else BenchmarkResult(found)
    sys.exit(write(outcome.target or target, seed, list(outcome.figures), outcome.raw))


# -- history ----------------------------------------------------------------------------------------------------------


def history_lines(path: Path = HISTORY) -> list[dict[str, Any]]:
    """Return all lines, oldest first; none where there is no file."""
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def history_line(target: str, document: dict[str, Any]) -> dict[str, Any]:
    figures = {figure["name"]: [float(f"{figure['value']:.4g}"), figure["unit"]] for figure in document["figures"]}
    return {
        "target": target,
        "commit": document["commit"][:COMMIT_DIGITS],
        "machine": document["machine"],
        "seed": document["seed"],
        "figures": figures,
    }


def add_history(target: str, document: dict[str, Any], path: Path = HISTORY) -> None:
    """Add the line of a result, or put it in the place of the one of the same commit and machine."""
    new, lines = history_line(target, document), history_lines(path)
    same = [number for number, line in enumerate(lines) if _key(line) == _key(new)]
    if same:
        lines[same[0]] = new
    else:
        lines.append(new)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines), encoding="utf-8")


def before(target: str, machine: str, commit: str, path: Path = HISTORY) -> dict[str, float]:
    """Return the figures that were published last of a target on a machine of that kind, those of this commit left out."""
    for line in reversed(history_lines(path)):
        if (line["target"], line["machine"]) == (target, machine) and line["commit"] != commit[:COMMIT_DIGITS]:
            return {name: float(value) for name, (value, _) in line["figures"].items()}
    return {}


def _key(line: dict[str, Any]) -> tuple[str, str, str]:
    return line["target"], line["commit"], line["machine"]


# -- sources ----------------------------------------------------------------------------------------------------------


def sources() -> str:
    """Return a name of the committed source that is measured (`services/`, `shared/`); 'changed' when it has changes."""
    trees = _git("rev-parse", "HEAD:services", "HEAD:shared")
    if trees is None or _git("status", "--porcelain", "services", "shared"):
        return "changed"
    return "-".join(tree[:8] for tree in trees.split())


def _git(*arguments: str) -> str | None:
    """Return what git prints; None outside a repository or without git."""
    try:
        done = subprocess.run(["git", *arguments], capture_output=True, text=True, check=True)  # noqa: S607
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()
