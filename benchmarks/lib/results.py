"""Figures as data: every benchmark writes `build/results/<target>.json` and leaves with 1 when a goal is missed."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import atoll
from atoll.base.atomic_files import write_whole
from atoll.base.provenance import commit, machine
from benchmarks.lib.history import before

RESULTS = Path("build/results")


@dataclass(frozen=True, slots=True)
class Figure:
    """One measured figure: `goal` in words, `holds` whether it is met (None: there is no goal), `how` it was measured."""

    name: str
    value: float
    unit: str
    goal: str
    holds: bool | None
    how: str


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
        changed = change(figure.value, published.get(figure.name))
        print(f"{figure.name:<64} {figure.value:>10.4g} {figure.unit:<12} {changed:>9}  {figure.goal:<28} {verdict}")
    print(f"written to {path}")
    return int(any(figure.holds is False for figure in figures))


def change(value: float, former: float | None) -> str:
    """Return how far a figure is from a former one, as a person reads it; nothing where there is none to compare with."""
    return f"{value / former - 1.0:+.1%}" if former else ""


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
