"""Every process of a run is replaced while it trains, one by one: `make bench-upgrade`.

A broker, two synchronizers that share two shards, and three paced learners. Each is told to leave (SIGTERM) and started again,
as for an upgrade. The next one follows when the last one is back at work: synchronizers, then learners, then the broker; over
and over until the time is up. A pause is the time between two commits of the run, whatever fragment they are of. A round is the
time between two commits of one fragment. A learner that starts yields the processors to the others until its first step, as
if it were on a machine of its own.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import statistics
import subprocess
import tempfile
import time
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from atoll.bus.server import EmbeddedBroker
from atoll.protocol.ledger import Settlement
from atoll.wire.messages import Event
from benchmarks.lib.harness import Figure, fact, run_benchmark, true, zero
from benchmarks.lib.runs import prepare
from support.islands import DEADLINE_S, IslandProcess

MINUTES = 4.0
LEARNERS = ("a", "b", "c")
SYNCHRONIZERS = ("east", "west")
QUIET_S = 20.0
BETWEEN_S = 2.0
THROTTLE = "12"
LOW = 19
SETTINGS = {
    "ATOLL_PROTOCOL__SHARDS": "2",
    "ATOLL_PROTOCOL__INTERVAL_STEPS": "128",
    "ATOLL_LEARNER__THROTTLE": THROTTLE,
}


@dataclass(slots=True)
class Upgrades:
    """Replacements: kind and times of its end and of its return, in seconds of the wall clock."""

    began_s: float = 0.0
    done: list[tuple[str, float, float]] = field(default_factory=list)

    def note(self, kind: str, ended_s: float) -> None:
        self.done.append((kind, ended_s, time.time()))
        print(f"{kind} replaced in {time.time() - ended_s:.1f} s", flush=True)


def main(*, minutes: float = MINUTES) -> list[Figure]:
    corpus = prepare()
    with tempfile.TemporaryDirectory() as folder, EmbeddedBroker(Path(folder) / "store") as broker:
        island = IslandProcess(Path(folder), broker.url, corpus)
        island.environment |= SETTINGS
        try:
            upgrades = play(island, broker, 60.0 * minutes)
            rounds = asyncio.run(island.events("round"))
            settled = asyncio.run(island.settlement())
        finally:
            island.stop()
    return figures(upgrades, rounds, settled)


def play(island: IslandProcess, broker: EmbeddedBroker, seconds: float) -> Upgrades:
    """Replace everything in turn until the time is up, at least once, and let the run end in good order."""
    begin(island)
    found = Upgrades(began_s=time.time())
    time.sleep(QUIET_S)
    while not found.done or time.time() < found.began_s + seconds:
        for name in SYNCHRONIZERS:
            replace(island, found, "synchronizer", name, "shard.serving", "synchronizer")
        for name in LEARNERS:
            replace(island, found, "learner", name, "learner.first_step", "learner", "--id", name)
        ended_s = time.time()
        broker.stop()
        broker.start()
        found.note("broker", ended_s)
        time.sleep(BETWEEN_S)
    leave(island, *LEARNERS, *SYNCHRONIZERS)
    return found


def begin(island: IslandProcess) -> None:
    for name in SYNCHRONIZERS:
        island.start(name, "synchronizer")
    for name in LEARNERS:
        island.start(name, "learner", "--id", name)
    for name in LEARNERS:
        island.wait_for(name, "learner.first_step")


def leave(island: IslandProcess, *names: str) -> None:
    """Have processes leave in good order, one after the other."""
    for name in names:
        process = island.process(name)
        process.terminate()
        if process.wait(DEADLINE_S):
            raise SystemExit(f"{name} left with {process.returncode}: {island.log(name).read_text()[-2000:]}")


def replace(island: IslandProcess, found: Upgrades, kind: str, name: str, back: str, *words: str) -> None:
    """Have one process leave, start it again and wait until it works."""
    ended_s = time.time()
    leave(island, name)
    process = island.start(name, *words)
    if kind == "learner":
        yields(process, LOW)
    island.wait_for(name, back)
    yields(process, 0)
    found.note(kind, ended_s)
    time.sleep(BETWEEN_S)


def yields(process: subprocess.Popen[bytes], niceness: int) -> None:
    """Say how readily a process leaves the processors to the others, with all of its threads."""
    for thread in Path(f"/proc/{process.pid}/task").iterdir():
        os.setpriority(os.PRIO_PROCESS, int(thread.name), niceness)


def figures(upgrades: Upgrades, rounds: list[Event], settled: Settlement) -> list[Figure]:
    """Return the longest pause for each kind beside a round of quiet time, and the fates."""
    commits = sorted(event.at_s for event in rounds)
    first_s = upgrades.done[0][1]
    one_s = round_s([event for event in rounds if upgrades.began_s <= event.at_s < first_s])
    told = [fact("a round", one_s, "s", f"median over fragments in {QUIET_S:g} s before the first upgrade")]
    for kind in ("synchronizer", "learner", "broker"):
        spans = [(ended, back) for each, ended, back in upgrades.done if each == kind]
        longest = [pause(commits, ended, back) for ended, back in spans]
        holds = max(longest) <= one_s
        how = f"{len(longest)} replaced; median {statistics.median(longest):.2f} s; goal: one round"
        told.append(Figure(f"longest pause, {kind}", max(longest), "s", f"<= {one_s:.2f}", holds, how))
        away = statistics.median(back - ended for ended, back in spans)
        told.append(fact(f"away, {kind}", away, "s", "median, from SIGTERM until it works again"))
    lost, exact = settled.fates["lost"], settled.exact
    return [
        *told,
        zero("acknowledged contributions lost", lost, "token-fragments", "closing ledgers"),
        true("fates exact", exact, "every token has one fate; " + "; ".join(settled.errors)),
    ]


def round_s(rounds: list[Event]) -> float:
    """Return the median time between two commits of one fragment."""
    times: dict[int, list[float]] = defaultdict(list)
    for event in rounds:
        times[msgspec.json.decode(event.fields["fragment"])].append(event.at_s)
    return statistics.median(b - a for found in times.values() for a, b in itertools.pairwise(sorted(found)))


def pause(commits: list[float], ended_s: float, back_s: float) -> float:
    """Return the longest time between two commits that reaches into a span, or ends soon after it."""
    near = [pair for pair in itertools.pairwise(commits) if pair[1] > ended_s and pair[0] < back_s + BETWEEN_S]
    return max(b - a for a, b in near)


if __name__ == "__main__":
    run_benchmark("bench-upgrade", main)
