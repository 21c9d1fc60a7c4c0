"""What a locked door costs a round: `make bench-doors`.

One learner and one shard merge through an open broker and through a locked one with TLS, permissions and signatures, in turns.

**Training**: each step works, on one core, and an interval leaves room for its rounds, as in any run worth having. **Without a
pause**: steps do next to nothing, and a round follows on another, so nearly all that is measured is moving and merging bytes.
That is the worst that doors can cost, and no run should be there. A round's time is that of one commit of one fragment; its
processor time is what server, shard and learner use together.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import statistics
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import psutil

from atoll.bus.open import open_bus
from atoll.bus.options import BusOptions
from atoll.bus.server import EmbeddedBroker
from atoll.client.join import join
from atoll.client.options import JoinOptions
from atoll.keys.identity import read_identity
from atoll.protocol.settings import ProtocolSettings
from atoll.run.heads import read_heads
from atoll.run.record import read_run
from atoll.wire.subjects import Subjects
from benchmarks.lib.harness import Figure, at_most, fact, run_benchmark
from benchmarks.lib.runs import cpu_s, shard_process
from support.locked_brokers import LockedBroker

RUN = "doors"
TURNS = 3
ROWS, COLUMNS = 4096, 2048
FRAGMENTS = 8
COST_MAX = 1.10
WARM_S = 3.0
PAUSE_S = 0.002
WORK = bytes(2 << 20)
TRAINING, WITHOUT_PAUSE = "training", "without a pause"
INTERVAL_STEPS = {TRAINING: 60 * FRAGMENTS, WITHOUT_PAUSE: FRAGMENTS}


@dataclass(frozen=True, slots=True)
class DoorsTurn:
    """One measurement: commits, seconds and processor seconds."""

    commits: int
    wall_s: float
    cpu_s: float


@dataclass(frozen=True, slots=True)
class DoorsPlace:
    """A broker: where it is, who is who, and its process."""

    url: str
    learner: Path | None
    shard: Path | None
    server: int

    def options(self) -> BusOptions:
        return BusOptions(credentials=None if self.shard is None else read_identity(self.shard).credentials())


@contextlib.contextmanager
def place(folder: Path, *, locked: bool) -> Iterator[DoorsPlace]:
    if not locked:
        with EmbeddedBroker(folder / "store") as broker:
            yield DoorsPlace(broker.url, None, None, _server())
        return
    with LockedBroker(folder) as door:
        learner = door.add(RUN, "learner", founds=True)
        shard = door.add(RUN, "shard", "synchronizer")
        yield DoorsPlace(door.url, learner, shard, _server())


def _server() -> int:
    return next(child.pid for child in psutil.Process().children() if "nats-server" in child.name())


def turn(pace: str, *, locked: bool, seconds: float, seed: int) -> DoorsTurn:
    with (
        tempfile.TemporaryDirectory() as folder,
        place(Path(folder), locked=locked) as there,
        shard_process(there.url, RUN, broker__identity=there.shard) as shard,
    ):
        return rounds(there, pace, shard.pid, seconds, seed)


def rounds(there: DoorsPlace, pace: str, shard: int, seconds: float, seed: int) -> DoorsTurn:
    """Step until the time is over; what comes before the first commits have settled does not count."""
    params = {"w": np.random.default_rng(seed).normal(size=(ROWS, COLUMNS)).astype(np.float32)}
    protocol = ProtocolSettings(fragments=FRAGMENTS, shards=1, interval_steps=INTERVAL_STEPS[pace])
    options = JoinOptions(identity=None if there.learner is None else there.learner)
    processes = [psutil.Process(pid) for pid in (os.getpid(), shard, there.server)]
    with join(there.url, run=RUN, learner="learner", params=params, protocol=protocol, options=options) as island:
        params = steps(island, island.params, pace, WARM_S)
        began, began_s, began_cpu_s = asyncio.run(commits(there)), time.perf_counter(), cpu_s(processes)
        steps(island, params, pace, seconds)
        ended_cpu_s, wall_s = cpu_s(processes), time.perf_counter() - began_s
        done = asyncio.run(commits(there)) - began
    return DoorsTurn(done, wall_s, ended_cpu_s - began_cpu_s)


def steps(island, params, pace: str, seconds: float):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN201  (a handle, arrays)
    """Take steps that change one row each, for so long, and return the parameters."""
    until_s, number = time.perf_counter() + seconds, 0
    while time.perf_counter() < until_s:
        params["w"][number % ROWS] += 0.01
        number += 1
        if pace == TRAINING:
            hashlib.blake2b(WORK)  # two milliseconds of one core, and the interpreter is free meanwhile
        else:
            time.sleep(PAUSE_S)
        params = island.step(params, tokens=16)
    return params


async def commits(there: DoorsPlace) -> int:
    bus = await open_bus(there.url, RUN, name="eye", options=there.options())
    try:
        record = await read_run(bus, Subjects(RUN))
        if record is None:
            raise SystemExit("no run was founded")
        return sum(head.version for head in (await read_heads(bus, record)).values())
    finally:
        await bus.close()


def main(*, minutes: float = 4.0, seed: int = 0) -> list[Figure]:
    seconds = minutes * 60.0 / (4 * TURNS)
    told: list[Figure] = []
    for pace in (TRAINING, WITHOUT_PAUSE):
        found: dict[bool, list[DoorsTurn]] = {False: [], True: []}
        for number in range(2 * TURNS):
            locked = number % 4 in (1, 2)
            found[locked].append(turn(pace, locked=locked, seconds=seconds, seed=seed))
            print(
                f"{pace}, turn {number + 1} of {2 * TURNS}, {'locked' if locked else 'open'}: {found[locked][-1]}",
                flush=True,
            )
        told += figures(found, pace, seconds)
    return told


def figures(found: dict[bool, list[DoorsTurn]], pace: str, seconds: float) -> list[Figure]:
    """Return time and processor time of a round, open and locked, and their ratios."""
    how = f"median of {TURNS} turns of {seconds:.0f} s each; {ROWS * COLUMNS * 4 >> 20} MiB in {FRAGMENTS} fragments"
    wall, cpu = (
        {door: statistics.median(getattr(one, name) / one.commits for one in turns) for door, turns in found.items()}
        for name in ("wall_s", "cpu_s")
    )
    told = []
    for name, values in (("a round", wall), ("processor time of a round", cpu)):
        ratio = values[True] / values[False]
        most = COST_MAX if pace == TRAINING else None
        told.append(at_most(f"{pace}: {name}, locked over open", ratio, "ratio", most, how))
        told.append(fact(f"{pace}: {name}, open", values[False] * 1e3, "ms", how))
        told.append(fact(f"{pace}: {name}, with all doors", values[True] * 1e3, "ms", how))
    return told


if __name__ == "__main__":
    run_benchmark("bench-doors", main)
