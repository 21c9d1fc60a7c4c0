"""What a slow learner and a killed learner cost the others: `make bench-faults`.

Three runs of `atoll up` with four learners and two shards, real processes, same seed and token target:

    undisturbed
    slow          learner-4 at a fifth of the others' speed
    killed        learner-2 gets SIGKILL at 40 % of the tokens and is started again under its id

So that the machine's cores do not decide (four learners share two, and a learner that rests gives its core to the
others), the model is small and every learner is paced: a step takes twelve times its own computing, as if its device were
elsewhere. Step rates come from heartbeats, the fates and the held-out loss from `report.json`. Losses are compared at
equal merged tokens: at the smaller of the two totals, on the curve of either run.
"""

from __future__ import annotations

import itertools
import json
import os
import shutil
import signal
import statistics
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import psutil

from atoll.base.loop_thread import LoopThread
from atoll.bus.open import open_bus
from atoll.wire.messages import Beat, decode
from atoll.wire.subjects import Subjects
from benchmarks.lib.harness import Figure, at_least, at_most, fact, run_benchmark, true
from benchmarks.lib.runs import as_operator, learner_names, loss_beside, read_report, up_command

FOLDER = Path("build/faults")
LEARNERS = tuple(learner_names(4))
SLOW, KILLED = "learner-4", "learner-2"
PACE, SLOWER = 12.0, 5.0
SETTINGS = ("model.size=xs", "protocol.interval_steps=16")
TOKENS = 1_500_000
TOKENS_PER_MINUTE = 700_000
KILL_AT = 0.4
WINDOW_S = 10.0
POLL_S = 0.2
RETURN_MAX_S = 10.0
LOSS_MAX = 0.01
RATE_LOSS_MAX = 0.03
INSIDE_MAX = 0.01


@dataclass(slots=True)
class Run:
    """What was seen of a run: heartbeats as (monotonic s, learner, incarnation, step), tokens per life, report, a kill."""

    report: dict[str, Any] = field(default_factory=dict)
    beats: list[tuple[float, str, int, int]] = field(default_factory=list)
    tokens: dict[tuple[str, int], int] = field(default_factory=dict)
    killed_s: float = 0.0
    started_again_s: float = 0.0
    stepped_again_s: float = 0.0

    def rate(self, learner: str, start_s: float, stop_s: float) -> float:
        """Return a learner's steps per second between two times, from its first and last heartbeat there."""
        seen = [(at_s, step) for at_s, who, _, step in self.beats if who == learner and start_s <= at_s <= stop_s]
        (first_s, first), (last_s, last) = seen[0], seen[-1]
        return (last - first) / (last_s - first_s)

    def rates(self, learners: Sequence[str]) -> float:
        """Return the mean steps per second of some learners over the middle of the run, when all of them train."""
        starts = [min(at_s for at_s, who, _, step in self.beats if who == name and step > 0) for name in LEARNERS]
        start_s, stop_s = max(starts) + 2.0, max(at_s for at_s, *_ in self.beats) - 2.0
        return statistics.fmean(self.rate(name, start_s, stop_s) for name in learners)


def main(
    *, minutes: Annotated[float, "shorten: about this long for all three runs"] = 0.0, seed: int = 0
) -> list[Figure]:
    tokens = int(minutes / 3 * TOKENS_PER_MINUTE) if minutes else TOKENS
    even = dict.fromkeys(LEARNERS, PACE)
    plain = run("undisturbed", even, tokens, seed)
    slow = run("slow", even | {SLOW: PACE * SLOWER}, tokens, seed)
    killed = run("killed", even, tokens, seed, kill)
    return [*slow_figures(plain, slow), *kill_figures(plain, killed)]


def slow_figures(plain: Run, slow: Run) -> list[Figure]:
    """Return what the slow learner cost, and what became of its tokens."""
    others = [name for name in LEARNERS if name != SLOW]
    rate = slow.rates(others) / plain.rates(others)
    noise = window_noise(plain, others)
    beside = f"over that of the undisturbed run, whose windows differ by {noise:.1%} (one sigma)"
    waiting = max(life["overhead"] or 0.0 for name in others for life in lives_of(slow, name))
    speed = slow.rates([SLOW]) / slow.rates(others)
    fates = fates_of(slow, SLOW)
    merged = fates["merged"] + fates["merged_late"]
    loss, losses = loss_beside(slow.report, plain.report)
    table = ", ".join(f"{fate} {count}" for fate, count in fates.items() if count)
    return [
        fact("speed of the slow learner", speed, "of others", "steps per second, by heartbeats"),
        at_least(
            "step rate of the others beside a slow one", rate, "ratio", 1.0 - max(2 * noise, RATE_LOSS_MAX), beside
        ),
        at_most(
            "share of their time inside island.step", waiting, "ratio", INSIDE_MAX, "the largest, by their own clocks"
        ),
        at_least("merged share of its tokens", merged / sum(fates.values()), "ratio", 0.5, table),
        at_most("held-out loss beside a slow one", loss, "ratio", LOSS_MAX, losses),
        exactness("fates of the run with a slow one", slow),
    ]


def kill_figures(plain: Run, killed: Run) -> list[Figure]:
    """Return what the kill cost, and how long its learner was away."""
    others = [name for name in LEARNERS if name != KILLED]
    at_s = killed.killed_s
    before = [killed.rate(name, at_s - WINDOW_S, at_s) for name in others]
    after = [killed.rate(name, at_s, at_s + WINDOW_S) for name in others]
    noise = window_noise(plain, others)
    change = statistics.fmean(after) / statistics.fmean(before)
    how = f"{WINDOW_S:g} s after over {WINDOW_S:g} s before; undisturbed windows differ by {noise:.1%} (one sigma)"
    away = killed.stepped_again_s - killed.started_again_s
    loss, losses = loss_beside(killed.report, plain.report)
    return [
        at_least("step rate of the others after a kill", change, "ratio", 1.0 - max(2 * noise, RATE_LOSS_MAX), how),
        at_most("from its new process to its first step", away, "s", RETURN_MAX_S, "process start to its log line"),
        at_most("held-out loss with a kill", loss, "ratio", LOSS_MAX, losses),
        exactness("fates of the run with a kill", killed),
    ]


def exactness(name: str, run: Run) -> Figure:
    exact = run.report["fates_exact"] and sum(run.report["tokens_by_fate"].values()) == run.report["tokens_trained"]
    return true(name, exact, json.dumps(run.report["tokens_by_fate"]), "exact")


def lives_of(run: Run, learner: str) -> list[dict[str, Any]]:
    """Return what the report says of each incarnation of a learner."""
    lives: list[dict[str, Any]] = next(e for e in run.report["learners"] if e["learner"] == learner)["incarnations"]
    return lives


def fates_of(run: Run, learner: str) -> dict[str, int]:
    """Return what became of one learner's tokens, over its incarnations."""
    lives = lives_of(run, learner)
    names = {fate for life in lives for fate in life["tokens_by_fate"]}
    return {fate: sum(life["tokens_by_fate"].get(fate, 0) for life in lives) for fate in sorted(names)}


def window_noise(run: Run, learners: Sequence[str]) -> float:
    """Return the standard deviation of the ratio of neighbouring windows of a run in which nothing happens."""
    stop_s = max(at_s for at_s, *_ in run.beats) - 2.0
    start_s = max(min(at_s for at_s, who, _, step in run.beats if who == name and step > 0) for name in LEARNERS) + 2.0
    edges = list(np.arange(start_s, stop_s, WINDOW_S))
    rates = [statistics.fmean(run.rate(name, a, b) for name in learners) for a, b in itertools.pairwise(edges)]
    ratios = [b / a for a, b in itertools.pairwise(rates)]
    return statistics.stdev(ratios) if len(ratios) > 1 else 0.0


# --- running ----------------------------------------------------------------------------------------------------------


def run(
    name: str,
    paces: dict[str, float],
    tokens: int,
    seed: int,
    disturb: Callable[[Run, Path, int], None] | None = None,
) -> Run:
    """Run `atoll up` to its end, hear its heartbeats, and give `disturb` its chance every now and then."""
    out = FOLDER / name
    flags = {"learners": len(LEARNERS), "shards": 2, "tokens": tokens, "seed": seed}
    command = up_command(out, flags, settings=(*SETTINGS, f"run={name}"), throttle=paces)
    shutil.rmtree(out, ignore_errors=True)
    print(f"run {name}: {tokens} tokens", flush=True)
    seen, url_file = Run(), out / "nats" / "url"
    home, hearing, over = LoopThread("faults"), None, threading.Event()
    with subprocess.Popen(command) as process:
        while process.poll() is None:
            time.sleep(POLL_S)
            if hearing is None and url_file.exists():
                hearing = home.submit(hear(seen, name, out, over))
            elif disturb is not None:
                disturb(seen, out, tokens)
    over.set()
    if hearing is not None:
        hearing.result()
    home.stop()
    if process.returncode:
        raise SystemExit(f"atoll up left with {process.returncode}")
    seen.report = read_report(out)
    return seen


async def hear(seen: Run, name: str, out: Path, over: threading.Event) -> None:
    url = (out / "nats" / "url").read_text(encoding="utf-8")
    bus = await open_bus(url, name, name="faults", options=as_operator(out, name))
    beats = await bus.listen(Subjects(name).beat("*"))
    try:
        while not over.is_set():
            core_message = await beats.next(POLL_S)
            if core_message is None:
                continue
            beat = decode(Beat, core_message.data)
            seen.beats.append((time.monotonic(), beat.learner, beat.incarnation, beat.step))
            seen.tokens[beat.learner, beat.incarnation] = beat.tokens
    finally:
        await bus.close()


def kill(seen: Run, out: Path, tokens: int) -> None:
    """SIGKILL one learner when the run has trained a share of its tokens, then time its return."""
    if not seen.killed_s:
        if sum(seen.tokens.values()) >= KILL_AT * tokens:
            os.kill(learner_process(out, KILLED).pid, signal.SIGKILL)
            seen.killed_s = time.monotonic()
    elif not seen.stepped_again_s and len(again := first_steps(out, KILLED)) > 1:
        # The log's own clock and the process table's are both this machine's wall clock.
        seen.started_again_s, seen.stepped_again_s = learner_process(out, KILLED).create_time(), again[1]


def learner_process(out: Path, learner: str) -> psutil.Process:
    """Return the process that runs `learner` of the run in `out`."""
    for process in psutil.process_iter():
        try:
            told, command = process.environ(), process.cmdline()
        except psutil.Error:
            continue
        here = told.get("ATOLL_LEARNER__ID") == learner and str(out.absolute()) in str(told.get("ATOLL_DATA__DIR"))
        if here and "atoll_learner" in command:
            return process
    raise SystemExit(f"no process runs {learner}")


def first_steps(out: Path, learner: str) -> list[float]:
    """Return the wall times of the first steps of a learner's lives so far."""
    lines = (out / "logs" / f"{learner}.jsonl").read_text(encoding="utf-8").splitlines()
    found = [json.loads(line) for line in lines if '"event": "learner.first_step"' in line and line.endswith("}")]
    return [datetime.fromisoformat(line["timestamp"]).timestamp() for line in found]


if __name__ == "__main__":
    run_benchmark("bench-faults", main)
