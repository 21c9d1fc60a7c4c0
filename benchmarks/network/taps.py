"""What taps with bodies cost a broker: `make bench-taps`.

In turns one process stores heads, and says heartbeats, at a broker whose taps have headers only, as in releases before, and
at one whose taps have bodies and whose stream `LV` keeps the last heartbeat of each learner. Watchers listen to all taps, or
nobody does. What is measured is how long a head takes to be stored, and the server's processor time for a head and for a
heartbeat. The sizes are those of messages in a small run, and of heads that list more than a hundred contributions.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import psutil

from atoll.base.errors import RunReplaced
from atoll.bus.nats.bus import JetStreamBus
from atoll.bus.options import BusOptions
from atoll.bus.server import EmbeddedBroker
from atoll.bus.streams import GIB
from benchmarks.lib.arguments import natural
from benchmarks.lib.results import Figure, write

RUN: Final = "taps"
TURNS: Final = 5
HEAD_BYTES: Final = (900, 16_000)
BEAT_BYTES: Final = 465
HEADS, BEATS, FRAGMENTS, LEARNERS = 400, 4000, 16, 64
WATCHERS: Final = (0, 4)
BEATS_AT_ONCE: Final = 50
ANSWER_S: Final = 10.0


@dataclass(frozen=True, slots=True)
class TapsTurn:
    """One measurement: milliseconds until a head is stored (median), processor microseconds of a head and of a heartbeat."""

    head_ms: float
    head_cpu_us: float
    beat_cpu_us: float


async def turn(head_bytes: int, watchers: int, *, bodies: bool) -> TapsTurn:
    """Measure one kind of taps at a broker of its own."""
    with tempfile.TemporaryDirectory() as folder, EmbeddedBroker(Path(folder) / "store") as broker:
        server = next(psutil.Process(one.pid) for one in psutil.Process().children() if "nats-server" in one.name())
        options = BusOptions(taps="bodies" if bodies else "headers")
        bus = await JetStreamBus.open(broker.url, RUN, name="writer", options=options)
        await bus.provision(GIB)
        if bodies:
            await bus.consume(bus.subjects.contributions_of(0), durable="shard-0")
            await kept(bus)
        buses = [await JetStreamBus.open(broker.url, RUN, name=f"watcher-{number}") for number in range(watchers)]
        for one in buses:
            await one.listen(bus.subjects.tap())
        await heads(bus, head_bytes, HEADS // 8)
        began_s = cpu_s(server)
        took_s = await heads(bus, head_bytes, HEADS)
        between_s = cpu_s(server)
        await beats(bus)
        ended_s = cpu_s(server)
        for one in (*buses, bus):
            await one.close()
    told = (statistics.median(took_s) * 1e3, (between_s - began_s) / HEADS * 1e6, (ended_s - between_s) / BEATS * 1e6)
    return TapsTurn(*told)


async def kept(bus: JetStreamBus) -> None:
    """Return when the stream of what was heard last is there."""
    async with asyncio.timeout(ANSWER_S):
        while True:
            try:
                await bus.get_records(bus.subjects.beat("*"))
            except RunReplaced:
                await asyncio.sleep(0.05)
            else:
                return


async def heads(bus: JetStreamBus, size: int, count: int) -> list[float]:
    """Store so many heads, one after the other, and return how long each took, seconds."""
    took_s = []
    for number in range(count):
        began_s = time.perf_counter()
        info = {"fragment": number % FRAGMENTS, "version": number}
        await bus.put_record(bus.subjects.head(number % FRAGMENTS), bytes(size), expected=None, info=info)
        took_s.append(time.perf_counter() - began_s)
    return took_s


async def beats(bus: JetStreamBus) -> None:
    """Say heartbeats of many learners, and return when the broker has taken them."""
    for number in range(BEATS):
        await bus.tell(bus.subjects.beat(f"learner-{number % LEARNERS}"), bytes(BEAT_BYTES))
        if number % BEATS_AT_ONCE == 0:
            await bus.reach(ANSWER_S)
    await bus.reach(ANSWER_S)


def cpu_s(process: psutil.Process) -> float:
    """Return the processor seconds of a process."""
    return float(sum(process.cpu_times()[:2]))


def main() -> int:
    """Measure, and write `build/results/bench-taps.json`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=natural, default=0)
    options = parser.parse_args()
    told: list[Figure] = []
    for size in HEAD_BYTES:
        for watchers in WATCHERS:
            found: dict[bool, list[TapsTurn]] = {False: [], True: []}
            for number in range(2 * TURNS):
                bodies = number % 4 in (1, 2)
                found[bodies].append(asyncio.run(turn(size, watchers, bodies=bodies)))
                print(f"{size} B, {watchers} watchers, bodies {bodies}: {found[bodies][-1]}", flush=True)
            told += figures(found, size, watchers)
    return write("bench-taps", options.seed, told)


def figures(found: dict[bool, list[TapsTurn]], size: int, watchers: int) -> list[Figure]:
    """Return the medians with headers only and with bodies."""
    told = []
    for bodies, turns in found.items():
        which = f"heads of {size} B, {watchers} watchers, {'bodies' if bodies else 'headers'}"
        how = f"median of {len(turns)} turns of {HEADS} heads and {BEATS} heartbeats"
        for name, unit in (("head_ms", "ms"), ("head_cpu_us", "us"), ("beat_cpu_us", "us")):
            values = [getattr(one, name) for one in turns]
            told.append(Figure(f"{which}: {name}", statistics.median(values), unit, "", None, how))
    return told


if __name__ == "__main__":
    sys.exit(main())
