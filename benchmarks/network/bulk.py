"""Contributions to one broker beside the same over two: `make bench-bulk`.

Processes that act as learners store contributions of `BLOB_BYTES` for fragments in turn, as fast as they are acknowledged, and
purge each when two more are stored. The fragments lie on one nats-server, or are spread over two (`atoll.bus.spread`); rounds
alternate between the two, and figures are medians.

    as the machine allows    both servers, their files and the learners share its cores
    behind links             each server is behind a relay that lets `LINK_BYTES_S` pass each way, as a network card does
    bare sockets             the limit: as many processes send the same pieces over TCP to as many that read and forget
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import socket
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any, Final

import numpy as np
from rich.progress import track

from atoll.bus.interface import Bus
from atoll.bus.open import open_bus
from atoll.bus.options import BusOptions
from atoll.bus.server import EmbeddedBroker
from atoll.bus.streams import GIB
from atoll.model.layout import TensorSpec, plan_layout
from atoll.protocol.settings import ProtocolSettings
from atoll.wire.limits import CHUNK_BYTES
from atoll.wire.messages import RunRecord, encode
from atoll.wire.subjects import Subjects
from benchmarks.lib.harness import Figure, at_least, fact, run_benchmark

BLOB_BYTES: Final = 16 << 20
LEARNERS: Final = 2
AT_ONCE: Final = 2
KEPT: Final = 2
FRAGMENTS: Final = 4
ROUND_S: Final = 5.0
WARM_S: Final = 1.0
LINK_BYTES_S: Final = 60e6
LINKED_GOAL: Final = 1.8
_PIECE: Final = 1 << 18
_SPAWN = multiprocessing.get_context("spawn")


# -- learners ---------------------------------------------------------------------------------------------------------


def record_of(run: str, bulk: Sequence[str]) -> RunRecord:
    layout = plan_layout([TensorSpec("w", (FRAGMENTS, 8), "float32")], FRAGMENTS)
    protocol = ProtocolSettings(fragments=FRAGMENTS, shards=1)
    return RunRecord(
        run=run,
        founder="a",
        nonce="n",
        founded_at_s=0.0,
        layout=layout,
        protocol=protocol,
        bulk=tuple(bulk),
    )


def push(url: str, run: str, number: int, seconds: float, ready: Barrier, told: Any) -> None:  # noqa: ANN401  (a queue)
    """Tell how many bytes of contributions were acknowledged within `seconds`."""
    told.put(asyncio.run(_pushed(url, run, number, seconds, ready)))


async def _pushed(url: str, run: str, number: int, seconds: float, ready: Barrier) -> int:
    bus = await open_bus(url, run, name=f"l{number}", options=BusOptions())
    data = np.random.default_rng(number).bytes(BLOB_BYTES)
    await asyncio.to_thread(ready.wait)
    work = [asyncio.create_task(_contributing(bus, run, f"l{number}", lane, data)) for lane in range(AT_ONCE)]
    await asyncio.sleep(WARM_S)
    before = bus.stats.blob_bytes_up
    await asyncio.sleep(seconds)
    acknowledged = bus.stats.blob_bytes_up - before
    for each in work:
        each.cancel()
    await asyncio.gather(*work, return_exceptions=True)
    await bus.close()
    return acknowledged


async def _contributing(bus: Bus, run: str, learner: str, lane: int, data: bytes) -> None:
    """Store one contribution after the other, of the fragments in turn; purge those of before."""
    subjects, stems = Subjects(run), list[str]()
    for push_number in range(lane, 1 << 30, AT_ONCE):
        stem = subjects.contribution_stem(learner, push_number % FRAGMENTS, 1, push_number, "0" * 16)
        await bus.put_blob(stem, data)
        stems.append(stem)
        if len(stems) > KEPT:
            await bus.purge(f"{stems.pop(0)}.*")


def rate_of(urls: Sequence[str], run: str, seconds: float) -> float:
    """Return the bytes per second that the learners of a run store together, over brokers at these addresses."""
    asyncio.run(_founded(urls, run))
    return _at_once(push, [(urls[0], run, number, seconds) for number in range(LEARNERS)]) / seconds


async def _founded(urls: Sequence[str], run: str) -> None:
    bus, record = await open_bus(urls[0], run, name="founder"), record_of(run, urls[1:])
    await bus.provision(8 * GIB, record.bulk)
    await bus.put_record(record.subjects.run_record, encode(record), expected=0)
    await bus.close()


def _at_once(work: Any, asked: list[tuple[Any, ...]]) -> int:  # noqa: ANN401  (one of the functions above and below)
    ready, told = _SPAWN.Barrier(len(asked)), _SPAWN.Queue()
    processes = [_SPAWN.Process(target=work, args=(*words, ready, told)) for words in asked]
    for process in processes:
        process.start()
    total: int = sum(told.get(timeout=300.0) for _ in processes)
    for process in processes:
        process.join()
    return total


# -- links and limits -------------------------------------------------------------------------------------------------


@contextmanager
def link_to(port: int, bytes_s: float) -> Iterator[str]:
    """Yield the address of a relay to a local port that lets so many bytes a second pass each way."""
    ours, theirs = _SPAWN.Pipe()
    process = _SPAWN.Process(target=_relay, args=(port, bytes_s, theirs), daemon=True)
    process.start()
    try:
        yield f"nats://127.0.0.1:{ours.recv()}"
    finally:
        process.kill()
        process.join()


def _relay(port: int, bytes_s: float, opened: Any) -> None:  # noqa: ANN401  (a connection)
    asyncio.run(_relayed(port, bytes_s, opened))


async def _relayed(port: int, bytes_s: float, opened: Any) -> None:  # noqa: ANN401
    free_s = {"up": 0.0, "down": 0.0}

    async def carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, way: str) -> None:
        while piece := await reader.read(_PIECE):
            now_s = time.monotonic()
            free_s[way] = max(now_s, free_s[way]) + len(piece) / bytes_s
            await asyncio.sleep(free_s[way] - now_s)
            writer.write(piece)
            await writer.drain()
        writer.close()

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there = await asyncio.open_connection("127.0.0.1", port, limit=_PIECE)
        ways = carry(reader, there[1], "up"), carry(there[0], writer, "down")
        await asyncio.gather(*ways, return_exceptions=True)

    server = await asyncio.start_server(accept, "127.0.0.1", 0, limit=_PIECE)
    opened.send(server.sockets[0].getsockname()[1])
    await server.serve_forever()


def send_bare(seconds: float, ready: Barrier, told: Any) -> None:  # noqa: ANN401  (a queue)
    """Send pieces to a child that reads and forgets them, and tell how many bytes went within `seconds`."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        sink = _SPAWN.Process(target=_forget, args=(listening.getsockname()[1],))
        sink.start()
        wire, _ = listening.accept()
    piece, sent = memoryview(bytearray(CHUNK_BYTES)), 0
    ready.wait()
    end_s = time.monotonic() + seconds
    while time.monotonic() < end_s:
        wire.sendall(piece)
        sent += len(piece)
    wire.close()
    sink.join()
    told.put(sent)


def _forget(port: int) -> None:
    piece = bytearray(CHUNK_BYTES)
    with socket.create_connection(("127.0.0.1", port)) as wire:
        while wire.recv_into(piece):
            pass


# -- figures ----------------------------------------------------------------------------------------------------------


def measure(folder: Path, rounds: int, round_s: float) -> dict[str, list[float]]:
    rates: dict[str, list[float]] = defaultdict(list)
    with ExitStack() as stack:
        brokers = [stack.enter_context(EmbeddedBroker(folder / name)) for name in ("one", "two")]
        urls = [broker.url for broker in brokers]
        links = [stack.enter_context(link_to(int(url.rpartition(":")[2]), LINK_BYTES_S)) for url in urls]
        for number in track(range(rounds), description="measuring"):
            rates["bare sockets"].append(_at_once(send_bare, [(round_s,)] * LEARNERS) / round_s)
            rates["one broker"].append(rate_of(urls[:1], f"one-{number}", round_s))
            rates["two brokers"].append(rate_of(urls, f"two-{number}", round_s))
            rates["one broker behind a link"].append(rate_of(links[:1], f"link-{number}", round_s))
            rates["two brokers behind a link each"].append(rate_of(links, f"links-{number}", round_s))
    return rates


def figures_of(rates: dict[str, list[float]], round_s: float) -> list[Figure]:
    rounds = len(rates["one broker"])
    how = f"median of {rounds} rounds of {round_s:g} s, {LEARNERS} learners, {os.cpu_count()} cores"
    linked = f"{how}; {LINK_BYTES_S / 1e6:g} MB/s each way per broker"
    middle = {name: statistics.median(found) for name, found in rates.items()}
    figures = [fact(name, rate / 1e6, "MB/s", linked if "link" in name else how) for name, rate in middle.items()]
    pairs = (
        ("two brokers beside one", "two brokers", "one broker", None),
        ("two links beside one", "two brokers behind a link each", "one broker behind a link", LINKED_GOAL),
        ("one broker beside bare sockets", "one broker", "bare sockets", None),
    )
    for name, above, below, goal in pairs:
        ratio = statistics.median(a / b for a, b in zip(rates[above], rates[below], strict=True))
        figures.append(at_least(name, ratio, "x", goal, how))
    return figures


def main(*, minutes: float = 3.0) -> list[Figure]:
    rounds = max(1, round(minutes * 60 / (5 * (ROUND_S + WARM_S + 1.5))))
    with tempfile.TemporaryDirectory() as folder:
        rates = measure(Path(folder), rounds, ROUND_S)
    return figures_of(rates, ROUND_S)


if __name__ == "__main__":
    run_benchmark("bench-bulk", main)
