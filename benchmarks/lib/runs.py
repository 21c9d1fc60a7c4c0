"""Runs of `atoll up` that benchmarks begin: their text, their command, who may listen at their broker, and their report."""

from __future__ import annotations

import fcntl
import subprocess
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np

from atoll.bus.options import BusOptions
from atoll.keys.identity import read_identity
from atoll.local.own_brokers import RunKeys, keys_of

CORPUS: Final = Path("build/corpus")


def prepare(corpus: Path = CORPUS) -> Path:
    """Make the token shards of the standard library once, and return their folder; who comes second waits."""
    corpus.parent.mkdir(parents=True, exist_ok=True)
    with corpus.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (corpus / "meta.json").exists():
            words = [sys.executable, "-m", "atoll.cli", "data", "prepare", "--stdlib", "--out", str(corpus)]
            subprocess.run(words, check=True)
    return corpus


def up_command(
    out: Path,
    flags: Mapping[str, object],
    *,
    settings: Iterable[str] = (),
    throttle: Mapping[str, float] | None = None,
    via: Mapping[str, str] | None = None,
) -> list[str]:
    """Return the command of a run in `out`: `flags` by name (True has no value, None is left out), then `settings` (a.b=c).

    `throttle` says how many times longer than its own computing a step of a learner takes, `via` through which relay a
    process reaches the broker.
    """
    words = [sys.executable, "-m", "atoll.cli", "up", "--out", str(out)]
    for name, value in flags.items():
        if value is not None:
            words += [f"--{name}"] if value is True else [f"--{name}", str(value)]
    words += [word for setting in settings for word in ("--set", setting)]
    words += [word for name, factor in (throttle or {}).items() for word in ("--throttle", f"{name}={factor:g}")]
    return words + [word for name, url in (via or {}).items() for word in ("--via", f"{name}={url}")]


def learner_names(count: int) -> list[str]:
    """Return what `atoll up` calls its learners."""
    return [f"learner-{number}" for number in range(1, count + 1)]


def as_operator(out: Path, run: str) -> BusOptions:
    """Return what lets us in at the broker of the run in `out`, once its address is there; an open one asks for nothing."""
    keys = keys_of(out)
    if keys is None:
        return BusOptions()
    return BusOptions(credentials=read_identity(RunKeys(keys, run).operator).credentials())


def read_report(out: Path) -> dict[str, Any]:
    """Return the report of a run that has ended."""
    report: dict[str, Any] = read_report(out)
    return report


def merged_tokens(report: dict[str, Any]) -> int:
    """Return the tokens that were merged, in time or late."""
    return sum(report["tokens_by_fate"][fate] for fate in ("merged", "merged_late"))


def loss_at(report: dict[str, Any], tokens: int, by: str = "tokens_merged") -> float:
    """Return the held-out bits per byte when so many tokens were merged, between two points of the curve."""
    curve = report["validation"]["curve"]
    return float(np.interp(tokens, [point[by] for point in curve], [point["bits_per_byte"] for point in curve]))


def loss_beside(report: dict[str, Any], plain: dict[str, Any]) -> tuple[float, str]:
    """Return by which share a run's held-out loss is above the plain run's at equal merged tokens, and both in words."""
    equal = min(merged_tokens(plain), merged_tokens(report))
    ours, theirs = loss_at(report, equal), loss_at(plain, equal)
    return ours / theirs - 1.0, f"{ours:.4f} and {theirs:.4f} bits per byte at {equal} merged tokens"
