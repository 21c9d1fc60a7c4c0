"""What the monitor costs beside a large run: `make bench-monitor`.

A real broker and a real `atoll monitor`, its journal on; learners and shards are a script that writes what they would write.

    at its pace   `LEARNERS` learners beat once a second and contribute to each of `FRAGMENTS` fragments every `ROUND_S`
                  seconds, while a scrape asks for the metrics every `SCRAPE_S`: processor time and resident memory
    a day         all commits of a day come as fast as the monitor takes them, heartbeats among them. Its memory must not grow
                  over the second half; this is also what a monitor reads that is started anew after a day
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import msgspec
import psutil

from atoll.base.clock import SystemClock
from atoll.base.wording import DAY_S
from atoll.bus.interface import Bus
from atoll.bus.server import EmbeddedBroker
from atoll.client.membership import claim
from atoll.wire.events import Contributor, RoundEvent, log_entry
from atoll.wire.messages import RunRecord, encode
from benchmarks.faults.crowd import FRAGMENTS, beat_for, found_run, in_batches, sampled_rss, spent_s
from benchmarks.lib.harness import Figure, at_most, fact, run_benchmark

MINUTES = 4.0
LEARNERS = 64
ROUND_S = 24.0
SCRAPE_S = 15.0
CORE_MAX = 0.25
GROWTH_MAX = 1.1
FILES_MAX = 18  # what is being written, 16 compressed ones and a lock
PAGE = 256
TOKENS = 6400
WAIT_S = 120.0
SETTLE_S = 10.0


def main(*, minutes: Annotated[float, "with less than 4 the day is shorter, too"] = MINUTES) -> list[Figure]:
    part_s, day = 60.0 * minutes / 2.0, min(1.0, minutes / MINUTES)
    return asyncio.run(measure(part_s, int(day * DAY_S / ROUND_S)))


async def measure(part_s: float, day_rounds: int) -> list[Figure]:
    with tempfile.TemporaryDirectory() as folder, EmbeddedBroker(Path(folder) / "store") as broker:
        bus, run = await found_run(broker.url, "monitored", {"interval_steps": 100, "overlap_steps": 10, "quorum": 1})
        names = [f"l{number}" for number in range(LEARNERS)]
        await in_batches([claim(bus, run.subjects, name, SystemClock()) for name in names])
        rounds = LoggedCommits(bus, run, names)
        try:
            async with monitoring(broker.url, run.run, Path(folder)) as monitor:
                with sampled_rss(monitor.process) as memory:
                    figures = await at_its_pace(monitor, rounds, part_s)
                    memory.clear()
                    return figures + await a_day(monitor, rounds, day_rounds, memory)
        finally:
            await bus.close()


# --- the two parts --------------------------------------------------------------------------------------------------------


async def at_its_pace(monitor: WatchingProcess, rounds: LoggedCommits, part_s: float) -> list[Figure]:
    await beat_for(rounds.bus, rounds.run, rounds.names, SETTLE_S)
    scrapes: list[float] = []

    async def everything() -> None:
        work = [asyncio.create_task(rounds.at_pace()), asyncio.create_task(monitor.scrape(scrapes))]
        await beat_for(rounds.bus, rounds.run, rounds.names, part_s)
        for one in work:
            one.cancel()
        await asyncio.gather(*work, return_exceptions=True)

    began_s = time.monotonic()
    spent = await spent_s(monitor.process, everything())
    share = spent / (time.monotonic() - began_s)
    how = f"{LEARNERS} learners at a beat a second, {FRAGMENTS} fragments every {ROUND_S:g} s, {part_s:.0f} s: {spent:.1f} s"
    size = f"{monitor.text_bytes / 1e3:.0f} kB"
    return [
        Figure("core for the monitor", share, "cores", f"< {CORE_MAX}", share < CORE_MAX, how),
        fact("a scrape", max(scrapes, default=0.0), "s", f"the longest of {len(scrapes)}, {size}"),
        fact("memory at its pace", monitor.process.memory_info().rss / 1e6, "MB", "resident"),
    ]


async def a_day(monitor: WatchingProcess, rounds: LoggedCommits, count: int, memory: list[int]) -> list[Figure]:
    beating = asyncio.create_task(beat_for(rounds.bus, rounds.run, rounds.names, 1e9))
    began_s, total, half = time.monotonic(), count * FRAGMENTS, 0
    try:
        for number in range(0, total, PAGE):
            await rounds.commit(min(PAGE, total - number))
            if number // PAGE % 16 == 0:
                await monitor.caught_up(rounds.committed)
                print(f"{number} of {total} commits, {memory[-1] / 1e6:.0f} MB", flush=True)
            if number <= total // 2 < number + PAGE:
                await monitor.caught_up(rounds.committed)
                half = max(memory)
        await monitor.caught_up(rounds.committed)
    finally:
        beating.cancel()
        await asyncio.gather(beating, return_exceptions=True)
    took_s, most = time.monotonic() - began_s, max(memory)
    how = f"{total} commits of {LEARNERS} learners, {rounds.event_bytes / 1e3:.1f} kB each, in {took_s:.0f} s"
    kept = len(list(monitor.folder.iterdir()))
    return [
        at_most("memory after a day over half a day", most / half, "ratio", GROWTH_MAX, how),
        fact("memory after a day", most / 1e6, "MB", "the most, resident"),
        fact("commits read in a second", total / took_s, "1/s", "as the script writes them, and the broker keeps them"),
        at_most("files of the journal after a day", float(kept), "files", FILES_MAX, how),
    ]


# --- the run and its monitor ----------------------------------------------------------------------------------------------


def contributor(name: str, count: int) -> Contributor:
    """Return all that a shard notes of a contribution to a commit of `count` learners."""
    moments = dict.fromkeys(("arrived_s", "read_s", "loss", "adopted_at_s", "step_s", "upload_s", "full_s"), 0.125)
    shares = ("staleness_weight", "norm", "corrected_norm", "aligned", "aligned_with_others")
    counts = {"push": 7, "steps": 100, "bytes": 1_000_000, "corrected": 3, "incarnation": 1, "age": 0, "tokens": TOKENS}
    named = {"learner": name, "cause_id": f"{name}-1-7", "weight": 1.0 / count}
    return msgspec.convert(named | moments | dict.fromkeys(shares, 0.123456789) | counts, Contributor)


@dataclass
class LoggedCommits:
    """Commits, as a shard would write them to the event log."""

    bus: Bus
    run: RunRecord
    names: list[str]
    committed: int = 0
    event_bytes: int = 0

    def __post_init__(self) -> None:
        """Have what all commits say of their contributions ready: making it would take longer than reading it."""
        self._contributors = [msgspec.to_builtins(contributor(name, len(self.names))) for name in self.names]

    async def at_pace(self) -> None:
        """Commit each fragment every `ROUND_S` until cancelled."""
        began_s, first = time.monotonic(), self.committed
        while True:
            await self.commit(1)
            due_s = began_s + (self.committed - first) * ROUND_S / FRAGMENTS
            await asyncio.sleep(max(0.0, due_s - time.monotonic()))

    async def commit(self, count: int) -> None:
        await in_batches([self._commit(self.committed + number) for number in range(count)])
        self.committed += count

    async def _commit(self, number: int) -> None:
        fragment, version = number % FRAGMENTS, number // FRAGMENTS + 1
        fields = {
            "fragment": fragment,
            "version": version,
            "contributors": self._contributors,
            "tokens": TOKENS * len(self.names),
            "waited_s": 1.5,
            "quorum_wait_s": 1.0,
            "merge_s": 0.1,
            "commit_s": 0.2,
            "end": "all answered",
            "live": len(self.names),
            "run_tokens": number * TOKENS,
        }
        line = encode(log_entry(msgspec.convert(fields, RoundEvent), "shard-0", time.time()))
        self.event_bytes = len(line)
        await self.bus.publish(self.run.subjects.event("round", "shard-0"), line, msg_id=f"round-{number}")


@dataclass
class WatchingProcess:
    """The monitor's process, and what it answers."""

    process: psutil.Process
    url: str
    folder: Path
    text_bytes: int = 0

    async def scrape(self, took: list[float]) -> None:
        """Ask for the metrics as a Prometheus does, until cancelled; note how long each answer took, in seconds."""
        while True:
            began_s = time.monotonic()
            self.text_bytes = len(await asyncio.to_thread(self._metrics))
            took.append(time.monotonic() - began_s)
            await asyncio.sleep(SCRAPE_S)

    async def caught_up(self, commits: int) -> None:
        """Return once the monitor has read so many commits; ends the benchmark if it does not."""
        deadline_s = time.monotonic() + WAIT_S
        wanted = f'atoll_commits_total{{run="monitored"}} {float(commits)}'
        while wanted not in await asyncio.to_thread(self._metrics):
            if time.monotonic() > deadline_s:
                raise SystemExit(f"the monitor has not read {commits} commits within {WAIT_S:g} s")
            await asyncio.sleep(0.2)

    def _metrics(self) -> str:
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=WAIT_S) as answer:  # noqa: S310  (ours)
            return str(answer.read().decode())


@asynccontextmanager
async def monitoring(broker: str, run: str, folder: Path) -> AsyncIterator[WatchingProcess]:
    records, log = folder / "records", folder / "monitor.log"
    given = [f"run={run}", f"broker.url={broker}", "monitor.port=0", f"monitor.folder={records}", "log.format=json"]
    words = [sys.executable, "-m", "atoll_monitor", *(part for each in given for part in ("--set", each))]
    with log.open("wb") as written:
        process = subprocess.Popen(words, stdout=written, stderr=written)  # noqa: ASYNC220  (psutil is to watch it)
    try:
        deadline_s = time.monotonic() + WAIT_S
        while not (lines := [one for one in log.read_text().splitlines() if '"monitor.serving"' in one]):
            if time.monotonic() > deadline_s or process.poll() is not None:
                raise SystemExit(f"the monitor does not serve: {log.read_text()}")
            await asyncio.sleep(0.1)
        yield WatchingProcess(psutil.Process(process.pid), str(json.loads(lines[0])["url"]), records)
    finally:
        process.kill()
        process.wait()


if __name__ == "__main__":
    run_benchmark("bench-monitor", main)
