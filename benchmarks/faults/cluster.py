"""Three copies beside one, and what a killed node costs: `make bench-cluster`.

**Speed.** A blob is stored and fetched and a record is written again and again, through one server and through a cluster of
three nodes with three copies, with and without a sync before each answer. All three nodes share this machine's cores and its
disk. On machines of its own a cluster has three times of both, and slower links between its nodes.

**Pause.** A writer stores a chunk and then a head by compare-and-set, as a commit does, as fast as it can. The node that leads
the stream is killed by SIGKILL, over and over, and started again a second later. The pause is the longest commit after a kill.
The same for a node that does not lead it, and for a leader that is stopped politely, as for maintenance.
"""

from __future__ import annotations

import asyncio
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import numpy as np
from rich.progress import track

from atoll.base.wording import counted
from atoll.bus.nats.bus import JetStreamBus
from atoll.bus.options import BusOptions
from atoll.bus.server import EmbeddedBroker, LocalCluster
from atoll.bus.streams import GIB
from atoll.wire.subjects import Subjects
from benchmarks.lib.harness import Figure, fact, run_benchmark

RUN = "bench"
SIZE = 64 << 20
ROUNDS = 5
RECORDS = 200
KILLS = 9
CHUNK = 1 << 20
AWAY_S = 1.0
AFTER_S = 18.0
"""Commits go on for so long after each end, and by then the node is back and has caught up."""

Rates = dict[str, list[float]]


@contextmanager
def broker_of(folder: Path, nodes: int, *, always: bool) -> Iterator[str]:
    broker = (
        EmbeddedBroker(folder, sync_always=always) if nodes == 1 else LocalCluster(folder, nodes, sync_always=always)
    )
    with broker:
        yield broker.url


async def opened(url: str, nodes: int) -> JetStreamBus:
    """Return a bus of a run that has as many copies as there are nodes."""
    options = BusOptions(replicas=nodes, patience_s=60.0, total_s=120.0)
    bus = await JetStreamBus.open(url, RUN, name="bench", options=options)
    await bus.provision(4 * GIB)
    return bus


async def speed(url: str, nodes: int, data: bytes, rounds: int) -> Rates:
    """Return MB/s of storing and fetching and records a second, one of each a round; the first round does not count."""
    bus, subjects = await opened(url, nodes), Subjects(RUN)
    rates: Rates = {"put": [], "get": [], "records": []}
    megabytes, revision = len(data) / 1e6, 0
    for number in range(rounds + 1):
        began_s = time.perf_counter()
        ref = await bus.put_blob(subjects.global_stem(0, number, "n"), data)
        stored_s = time.perf_counter()
        await bus.get_blob(ref, len(data))
        read_s = time.perf_counter()
        for _ in range(RECORDS):
            revision = await bus.put_record(subjects.head(0), b"x" * 1000, expected=revision)
        rates["put"].append(megabytes / (stored_s - began_s))
        rates["get"].append(megabytes / (read_s - stored_s))
        rates["records"].append(RECORDS / (time.perf_counter() - read_s))
        await bus.purge(subjects.global_stem(0, number, "n") + ".*")
    await bus.close()
    return {name: found[1:] for name, found in rates.items()}


async def leader(bus: JetStreamBus) -> str:
    """Return the name of the node that leads the stream of heads and their chunks."""
    answer = await bus._connection.call(bus._jetstream.api(f"STREAM.INFO.atoll_{RUN}_GL"))  # noqa: SLF001  (the bus tells nobody)
    return str(answer["cluster"]["leader"])


async def pauses(
    cluster: LocalCluster, times: int, end: Callable[[EmbeddedBroker], None], *, leads: bool
) -> list[float]:
    """Return the longest commit after each of so many ends of a node that leads what commits write, or that does not."""
    bus, subjects = await opened(cluster.url, len(cluster.nodes)), Subjects(RUN)
    record = await bus.get_record(subjects.head(1))
    revision, number, found = 0 if record is None else record.revision, 0, []
    for _ in track(range(times), description="ending nodes"):
        name = await leader(bus)
        node = next(each for each in cluster.nodes if (each.name == name) is leads)
        returning = asyncio.create_task(asyncio.to_thread(end_and_return, node, end))
        longest_s, until_s = 0.0, time.perf_counter() + AFTER_S
        while time.perf_counter() < until_s:
            began_s, number = time.perf_counter(), number + 1
            stem = subjects.global_stem(1, number, "n")
            await bus.put_blob(stem, bytes(CHUNK))
            revision = await bus.put_record(subjects.head(1), b"x" * 1000, expected=revision)
            longest_s = max(longest_s, time.perf_counter() - began_s)
            await bus.purge(f"{stem}.*")
            await asyncio.sleep(0.02)
        await returning
        found.append(longest_s)
    await bus.close()
    return found


def end_and_return(node: EmbeddedBroker, end: Callable[[EmbeddedBroker], None]) -> None:
    """End a node and start it again a second later, as its host does."""
    end(node)
    time.sleep(AWAY_S)
    node.restart()


def measured(sizes: tuple[int, int, int], seed: int) -> list[Figure]:
    """Return all figures; `sizes` are bytes of the blob, rounds and kills."""
    size, rounds, kills = sizes
    data, figures = np.random.default_rng(seed).bytes(size), []
    how = f"median of {rounds} rounds of {size >> 20} MiB and {RECORDS} records"
    for always in (False, True):
        for nodes in (1, 3):
            with tempfile.TemporaryDirectory() as folder, broker_of(Path(folder), nodes, always=always) as url:
                rates = asyncio.run(speed(url, nodes, data, rounds))
            kind = f"{counted(nodes, 'copy', 'copies')}, sync {'always' if always else 'os'}"
            for name, unit in (("put", "MB/s"), ("get", "MB/s"), ("records", "1/s")):
                figures.append(fact(f"{kind}: {name}", statistics.median(rates[name]), unit, how))
    cases = (
        ("its leader is killed", EmbeddedBroker.kill, True),
        ("another node is killed", EmbeddedBroker.kill, False),
        ("its leader is stopped politely", EmbeddedBroker.stop, True),
    )
    for name, end, leads in cases:
        with tempfile.TemporaryDirectory() as folder, LocalCluster(Path(folder), 3) as cluster:
            found = asyncio.run(pauses(cluster, kills, end, leads=leads))
        told = f"{kills} times, longest commit of each"
        figures.append(fact(f"pause when {name}", statistics.median(found), "s", f"{told}, median"))
        figures.append(fact(f"longest pause when {name}", max(found), "s", told))
    return figures


def main(
    *,
    size: Annotated[int, "bytes of the blob"] = SIZE,
    rounds: int = ROUNDS,
    kills: Annotated[int, "ends of a node, of each kind"] = KILLS,
    seed: int = 0,
) -> list[Figure]:
    return measured((size, rounds, kills), seed)


if __name__ == "__main__":
    run_benchmark("bench-cluster", main)
