"""What hostile messages cost a run: `make bench-hostile`.

One `atoll up` (three paced learners, two shards) on a broker of the bench's own. A connection that has no part in the run
sends every attack of `support.attacks`, one after the other, and then a flood of junk manifests. Commits are counted by the
versions in the heads, which are records, before, during and after each attack; memory is sampled once a second. The same run
once more, with nobody hostile, gives the loss to compare with.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import shutil
import subprocess
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from atoll.base.errors import AtollError
from atoll.bus.interface import Bus
from atoll.bus.open import open_bus
from atoll.bus.options import DEFAULTS, BusOptions
from atoll.bus.server import EmbeddedBroker
from atoll.run.heads import read_heads
from atoll.run.record import read_run
from atoll.wire.messages import RunRecord
from atoll.wire.subjects import Subjects
from benchmarks.faults.chaos import FOLDER, LEARNERS
from benchmarks.faults.up_in_storm import BEGIN_MAX_S, END_MAX_S, PACE, SETTINGS, SHARDS, child_name
from benchmarks.lib.harness import Figure, at_most, fact, run_benchmark, true, zero
from benchmarks.lib.runs import (
    Polled,
    end_in_order,
    learner_names,
    loss_at,
    prepare,
    read_report,
    up_command,
    wait_until,
)
from support.attacks import ATTACKS, HostileConnection, HostileMessage, junk_manifests

MINUTES = 14.0
FLOOD_PARTS = 7
"""The flood lasts for so many parts: a minute, where nothing is shortened."""
RATE = 200.0
FLOOD_PER_S = 10_000.0
PACE_MIN = 0.8
MEMORY_MAX = 1.3
LOSS_MAX = 0.02
SAMPLE_S = 1.0


@dataclass(slots=True)
class Seen:
    """Samples of one run: versions in all heads at moments, memory of each process, and how often each had ended."""

    versions: list[tuple[float, int]] = field(default_factory=list)
    memory: dict[str, list[tuple[float, int]]] = field(default_factory=lambda: defaultdict(list))
    pids: dict[str, set[int]] = field(default_factory=lambda: defaultdict(set))

    def commits_per_minute(self, start_s: float, stop_s: float) -> float:
        """Return the commits in a window, by interpolation between the moments around its ends."""
        times, counts = zip(*self.versions, strict=True)
        first, last = np.interp([start_s, stop_s], times, counts)
        return 60.0 * float(last - first) / (stop_s - start_s)

    def growth(self, start_s: float) -> dict[str, float]:
        """Return by how much the most memory after a moment exceeds the most before it, for each process."""
        found = {}
        for name, rows in self.memory.items():
            before = [size for at_s, size in rows if at_s <= start_s]
            after = [size for at_s, size in rows if at_s > start_s]
            if before and after:
                found[name] = max(after) / max(before)
        return found


class Spectator(threading.Thread):
    """Samples one run until it is told to stop."""

    def __init__(
        self,
        run: str,
        url: str,
        up: psutil.Process,
        options: BusOptions = DEFAULTS,
        name_of: Callable[[psutil.Process], str] = child_name,
    ) -> None:
        super().__init__(name="spectator", daemon=True)
        self.seen = Seen()
        self.founded: RunRecord | None = None
        self._run, self._url, self._up, self._options = run, url, up, options
        self._name_of = name_of
        self._over = threading.Event()

    def run(self) -> None:
        asyncio.run(self._watch())

    def stop(self) -> None:
        self._over.set()
        self.join()

    async def _watch(self) -> None:
        bus = await open_bus(self._url, self._run, name="spectator", options=self._options)
        while not self._over.is_set():
            with contextlib.suppress(AtollError):
                await self._look(bus)
            self._weigh()
            await asyncio.sleep(SAMPLE_S)
        await bus.close()

    async def _look(self, bus: Bus) -> None:
        self.founded = self.founded or await read_run(bus, Subjects(self._run))
        if self.founded is not None:
            heads = await read_heads(bus, self.founded)
            self.seen.versions.append((time.monotonic(), sum(head.version for head in heads.values())))

    def _weigh(self) -> None:
        try:
            children = self._up.children()
        except psutil.NoSuchProcess:  # what trained has ended, and the last look came later
            return
        for child in children:
            try:
                name = self._name_of(child)
                if name.startswith(("learner-", "shard-", "synchronizer-")):
                    self.seen.memory[name].append((time.monotonic(), child.memory_info().rss))
                    self.seen.pids[name].add(child.pid)
            except psutil.Error:
                continue


@dataclass(slots=True)
class Window:
    """An attack, when it began and ended, and how many messages it sent."""

    name: str
    began_s: float
    ended_s: float
    sent: int


def main(*, minutes: float = MINUTES, seed: int = 0) -> list[Figure]:
    part_s = 60.0 * minutes / (2 * (2 + parts()))
    corpus = prepare()
    attacked, windows, report = play("hostile", corpus, seed, part_s, hostile=True)
    _, _, calm = play("calm", corpus, seed, part_s, hostile=False)
    return figures(attacked, windows, part_s, report, calm)


def play(
    name: str, corpus: Path, seed: int, part_s: float, *, hostile: bool
) -> tuple[Seen, list[Window], dict[str, Any]]:
    """Play one run of `part_s` per part; return what was seen of it, the attacks, and its report."""
    out = FOLDER / name
    shutil.rmtree(out, ignore_errors=True)
    with tempfile.TemporaryDirectory() as store, EmbeddedBroker(Path(store)) as broker:
        up = subprocess.Popen(command(name, corpus, out, broker.url, seed))
        spectator = Spectator(name, broker.url, psutil.Process(up.pid))
        windows: list[Window] = []
        try:
            spectator.start()
            run = begun(spectator, up)
            time.sleep(2 * part_s)
            if hostile:
                windows = list(assaults(run, broker.url, part_s))
            else:
                time.sleep(parts() * part_s)
            end_in_order(up, out, END_MAX_S)
        finally:
            spectator.stop()
            up.kill()
            up.wait()
    return spectator.seen, windows, read_report(out)


def begun(spectator: Spectator, up: Polled) -> RunRecord:
    """Return the run record once every fragment has been committed."""
    seen = spectator.seen
    wait_until("first commits", lambda: seen.versions and seen.versions[-1][1] >= SHARDS, BEGIN_MAX_S, up)
    if spectator.founded is None:
        raise SystemExit("there is no run")
    return spectator.founded


def assaults(run: RunRecord, url: str, part_s: float) -> Iterator[Window]:
    """Do each attack for one part, the flood for several, and rest for one after each."""
    for name, messages, rate, for_s in (
        *((name, again(name, run), RATE, part_s) for name in ATTACKS),
        ("flood of junk", junk_manifests(run), FLOOD_PER_S, FLOOD_PARTS * part_s),
    ):
        hostile, began_s = HostileConnection(url), time.monotonic()
        hostile.send(messages, rate, for_s)
        yield Window(name, began_s, time.monotonic(), hostile.sent)
        hostile.close()
        time.sleep(part_s)


def parts() -> int:
    """Return how many parts the attacks take, with a rest of one after each."""
    return 2 * len(ATTACKS) + FLOOD_PARTS + 1


def again(name: str, run: RunRecord) -> Iterator[HostileMessage]:
    return itertools.chain.from_iterable(ATTACKS[name](run) for _ in itertools.count())


def command(name: str, corpus: Path, out: Path, url: str | None, seed: int) -> list[str]:
    settings, paces = (*SETTINGS, f"run={name}", f"data.dir={corpus}"), dict.fromkeys(learner_names(LEARNERS), PACE)
    flags = {"learners": LEARNERS, "shards": SHARDS, "tokens": 0, "seed": seed, "broker": url}
    return up_command(out, flags, settings=settings, throttle=paces)


def figures(
    seen: Seen, windows: list[Window], part_s: float, report: dict[str, Any], calm: dict[str, Any]
) -> list[Figure]:
    first_s = windows[0].began_s
    before = seen.commits_per_minute(first_s - part_s, first_s)
    found = [fact("commits per minute before", before, "1/min", f"{part_s:.0f} s")]
    for window in windows:
        share = seen.commits_per_minute(window.began_s, window.ended_s) / before
        after = seen.commits_per_minute(window.ended_s, window.ended_s + part_s) / before
        how = f"{window.sent} messages in {window.ended_s - window.began_s:.0f} s; {after:.2f} of the pace after them"
        holds = min(share, after) >= PACE_MIN
        found.append(Figure(f"pace under {window.name}", share, "ratio", f">= {PACE_MIN}", holds, how))
    growth = seen.growth(first_s)
    most = max(growth, key=growth.__getitem__)
    found.append(at_most("memory after over before", growth[most], "ratio", MEMORY_MAX, most))
    ended = sum(len(pids) - 1 for pids in seen.pids.values())
    found.append(zero("processes that ended", ended, "processes", "learners and shards"))
    loss, how = loss_apart(report, calm)
    found.append(at_most("loss beside a calm run", loss, "ratio", LOSS_MAX, how))
    found.append(true("fates exact", report["fates_exact"], "its report"))
    return found


def loss_apart(report: dict[str, Any], calm: dict[str, Any]) -> tuple[float, str]:
    """Return by how much the loss is above the calm run's, relative, at the last tokens that both were measured at."""
    at = min(each["validation"]["curve"][-1]["run_tokens"] for each in (report, calm))
    ours, theirs = (loss_at(each, at, by="run_tokens") for each in (report, calm))
    return ours / theirs - 1.0, f"{ours:.4f} and {theirs:.4f} bits per byte at {at:,.0f} tokens"


if __name__ == "__main__":
    run_benchmark("bench-hostile", main)
