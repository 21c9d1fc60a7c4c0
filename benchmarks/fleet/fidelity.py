"""One scenario by real processes and by the simulator, side by side: `make bench-fidelity`.

`atoll up` trains three paced learners, one of them at half the speed, over two shards. Each learner's step time, joining and
first step, how long a program took to start, and what a message takes is all that the simulator is told. It runs the same
settings and seed in virtual time, and training time, commits, contributors, fates, goodput, events and final loss are compared
within the bounds below. Steps are stretched by a throttle, so that learners hardly wait for each other's processor.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any, Final

import msgspec

from atoll.bus.server import EmbeddedBroker
from benchmarks.lib.harness import Figure, run_benchmark
from benchmarks.lib.runs import prepare, read_report, stored_events, up_command

FOLDER = Path("build/fidelity")
RUN: Final = "fidelity"
LEARNERS: Final = ("learner-1", "learner-2", "learner-3")
SETTINGS: Final[dict[str, Any]] = {
    "run": RUN,
    "model.size": "xs",
    "train.batch": 4,
    "train.sequence": 64,
    "protocol.fragments": 8,
    "protocol.interval_steps": 16,
    "protocol.silence_s": 3,
}
THROTTLES: Final = {"learner-1": 8.0, "learner-2": 8.0, "learner-3": 16.0}
TOKENS_PER_MINUTE: Final = 120_000
MINUTES: Final = 2.0
LEGS_OF_A_COMMIT: Final = 10
"""Frame, state and ledgers together, then the head, then three purges: five requests, each there and back."""
KINDS: Final = ("joined", "left", "recovered", "ledger")

RATIOS: Final = {
    "training, s": 0.10,
    "commits": 0.10,
    "interval of a fragment, s": 0.10,
    "final loss, bits per byte": 0.03,
}
"""Bounds on simulated over real, less one."""
SHARES: Final = {
    "contributors per round": 0.35,
    "late share of contributions": 0.15,
    "merged share of tokens": 0.03,
    "superseded share of tokens": 0.03,
    "share of the slow learner": 0.03,
    "goodput": 0.08,
}
"""Bounds on simulated minus real."""


@dataclass(frozen=True, slots=True)
class MeasuredPace:
    """Times of a real run: by learner its mean step, when it joined after the first, and its compiling.

    `start_s` is how long their programs had been starting before they joined, in the mean. `leg_s` is what a message takes
    one way: a commit waits for `LEGS_OF_A_COMMIT`, one after the other.
    """

    step_s: dict[str, float]
    joined_s: dict[str, float]
    compile_s: dict[str, float]
    start_s: float
    leg_s: float


@dataclass(frozen=True, slots=True)
class Pair:
    """One figure of both runs, and whether it agrees within `bound`."""

    name: str
    real: float
    simulated: float
    bound: str
    agrees: bool


def main(*, minutes: Annotated[float, "about this long for both runs"] = MINUTES, seed: int = 0) -> list[Figure]:
    tokens = int(TOKENS_PER_MINUTE * minutes / MINUTES)
    shutil.rmtree(FOLDER, ignore_errors=True)
    settings = SETTINGS | {"data.dir": prepare(), "learner.compile_cache": (FOLDER / "cache").absolute()}
    words = ["--tokens", str(tokens), "--seed", str(seed)]
    real = run_real(FOLDER / "real", words, settings)
    pace = pace_of(FOLDER / "real", real)
    simulated = run_simulated(FOLDER / "simulated", words, settings, pace)
    steps = ", ".join(f"{name} {step_s:.4f} s a step" for name, step_s in pace.step_s.items())
    how = f"{steps}, {1000 * pace.leg_s:.2f} ms a message"
    return as_figures(compare(real, simulated), how)


@dataclass(frozen=True, slots=True)
class FidelityReport:
    """A run's report and the events of its event log."""

    report: dict[str, Any]
    events: list[dict[str, Any]]


def run_real(out: Path, words: Sequence[str], settings: dict[str, Any]) -> FidelityReport:
    """Train with real processes on a broker of our own, whose event log outlives them."""
    with tempfile.TemporaryDirectory() as store, EmbeddedBroker(Path(store)) as broker:
        command = up_command(out, {"learners": len(LEARNERS), "broker": broker.url}, throttle=THROTTLES)
        command += [*words, *_set(settings)]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        return FidelityReport(
            read_report(out), [msgspec.json.decode(data) for data in asyncio.run(stored_events(broker.url, RUN))]
        )


def run_simulated(out: Path, words: Sequence[str], settings: dict[str, Any], pace: MeasuredPace) -> FidelityReport:
    base_s = min(pace.step_s.values())
    scenario: dict[str, Any] = {"sim.step_s": base_s, "sim.start_s": pace.start_s, "sim.link.latency_s": pace.leg_s}
    for name, step_s in pace.step_s.items():
        scenario[f"sim.speed.{name}"] = base_s / step_s
        scenario[f"sim.joins.{name}"] = pace.joined_s[name]
        scenario[f"sim.compile_s.{name}"] = pace.compile_s[name]
    command = [sys.executable, "-m", "atoll.cli", "sim", "train", "--learners", str(len(LEARNERS)), "--out", str(out)]
    subprocess.run([*command, *words, *_set(settings | scenario)], check=True, capture_output=True)
    lines = (out / "events.jsonl").read_bytes().splitlines()
    return FidelityReport(read_report(out), [json.loads(line)["event"] for line in lines])


def pace_of(out: Path, real: FidelityReport) -> MeasuredPace:
    """Return what the learners' logs and the event log say of time."""
    joins = [event for event in real.events if event["kind"] == "joined"]
    joined = {event["who"]: float(event["at_s"]) for event in joins}
    start_s = statistics.fmean(float(event["fields"]["start_s"]) for event in joins)
    left = {event["who"]: event for event in real.events if event["kind"] == "left"}
    first_s = min(joined.values())
    pace = MeasuredPace({}, {}, {}, start_s, real.report["rounds"]["commit_s_mean"] / LEGS_OF_A_COMMIT)
    for name in LEARNERS:
        lines = [json.loads(line) for line in _log(out, name) if line.startswith("{")]
        begun = next(line for line in lines if line["event"] == "learner.first_step")
        # Leaving takes a few hundredths of a second of the tens that the steps took.
        pace.step_s[name] = (float(left[name]["at_s"]) - _at_s(begun)) / (left[name]["fields"]["steps"] - 1)
        pace.compile_s[name] = max(0.0, _at_s(begun) - joined[name] - pace.step_s[name])
        pace.joined_s[name] = joined[name] - first_s
    return pace


def figures_of(told: FidelityReport) -> dict[str, float]:
    """Return the figures of one run that are compared.

    Commits are counted until a learner leaves: one more step of the last to leave is one more round of each fragment.
    """
    report, fates = told.report, told.report["tokens_by_fate"]
    rounds = [(float(event["at_s"]), event["fields"]) for event in told.events if event["kind"] == "round"]
    first_left_s = min(float(event["at_s"]) for event in told.events if event["kind"] == "left")
    by_fragment: dict[int, list[float]] = defaultdict(list)
    for at_s, line in rounds:
        by_fragment[line["fragment"]].append(at_s)
    between = [later - at_s for times in by_fragment.values() for at_s, later in itertools.pairwise(times)]
    ages = [one["age"] for _, line in rounds for one in line["contributors"]]
    trained = report["tokens_trained"]
    tokens = {learner["learner"]: learner["tokens"] for learner in report["learners"]}
    kinds = Counter(event["kind"] for event in told.events)
    return {
        "training, s": rounds[-1][0] - min(float(e["at_s"]) for e in told.events if e["kind"] == "joined"),
        "commits": sum(at_s < first_left_s for at_s, _ in rounds),
        "interval of a fragment, s": statistics.median(between),
        "final loss, bits per byte": report["validation"]["final_bits_per_byte"],
        "contributors per round": report["rounds"]["contributors_mean"],
        "late share of contributions": sum(age > 0 for age in ages) / len(ages),
        "merged share of tokens": (fates["merged"] + fates["merged_late"]) / trained,
        "superseded share of tokens": fates["superseded"] / trained,
        # A short simulation at a wrong pace may end before the slow learner joins.
        "share of the slow learner": tokens.get("learner-3", 0) / trained,
        "goodput": report["goodput"],
        **{f"events of the event log: {kind}": kinds[kind] for kind in KINDS},
        "every token has one exact fate": float(report["fates_exact"]),
    }


def compare(real: FidelityReport, simulated: FidelityReport, slack: float = 1.0) -> list[Pair]:
    """Return every figure of both, with its verdict; `slack` widens all bounds."""
    ours, theirs = figures_of(simulated), figures_of(real)
    pairs = []
    for name, was in theirs.items():
        now = ours[name]
        if name in RATIOS:
            bound = slack * RATIOS[name]
            pairs.append(Pair(name, was, now, f"within {100 * bound:g} %", abs(now / was - 1.0) <= bound))
        elif name in SHARES:
            bound = slack * SHARES[name]
            pairs.append(Pair(name, was, now, f"within {bound:g}", abs(now - was) <= bound))
        else:
            pairs.append(Pair(name, was, now, "equal", now == was))
    return pairs


def as_figures(pairs: list[Pair], how: str) -> list[Figure]:
    return [
        Figure(pair.name, pair.simulated, "", f"{pair.real:.4g} {pair.bound}", pair.agrees, f"real processes: {how}")
        for pair in pairs
    ]


def _set(settings: dict[str, Any]) -> list[str]:
    return [word for name, value in settings.items() for word in ("--set", f"{name}={value}")]


def _log(out: Path, name: str) -> list[str]:
    return (out / "logs" / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()


def _at_s(line: dict[str, Any]) -> float:
    return datetime.fromisoformat(line["timestamp"]).timestamp()


if __name__ == "__main__":
    run_benchmark("bench-fidelity", main)
