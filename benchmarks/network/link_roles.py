"""The two processes at the near end of the link of `link`: one that moves blobs for a while, one that trains meanwhile.

Both are ordinary clients of the broker at the far end. `moved` says what arrived of what was put or read within so many
seconds: pieces that the broker acknowledged, pieces that came and were checked. `trained` steps the demo's model on one core
in turns of a few seconds, with contributions on their way and without.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any

import numpy as np

from atoll.base.errors import BrokerUnavailable, BusError
from atoll.bus.interface import Bus
from atoll.bus.open import open_bus
from atoll.bus.options import BusOptions
from atoll.bus.streams import GIB
from atoll.wire.blobs import BlobRef
from atoll.wire.subjects import Subjects
from support.wan import enter

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


def moved(asked: LinkRequest) -> BlobsMoved:
    """Move blobs and return what came through."""
    enter(asked.namespace)
    os.sched_setaffinity(0, {asked.core})
    return asyncio.run(_moved(asked))


async def _moved(asked: LinkRequest) -> BlobsMoved:
    bus = await open_bus(asked.url, RUN, name="near", options=asked.options)
    await bus.provision(8 * GIB)
    if asked.way == "idle":
        work = asyncio.create_task(asyncio.sleep(0.0))
    elif asked.way == "up":
        work = asyncio.create_task(pushed(bus, "l0"))
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


async def pushed(bus: Bus, learner: str) -> None:
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
    """Return the frame that the far end has put."""
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
    """Be the far end: put one frame, and write where it lies."""
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


@dataclass(frozen=True, slots=True)
class TrainedSteps:
    """Seconds of every step with contributions on their way, and without; and payload megabits a second meanwhile."""

    moving: list[float]
    still: list[float]
    megabits_s: float


def trained(asked: LinkRequest, bus_core: int, turn_s: float, seed: int) -> TrainedSteps:
    """Train on one core; in every other turn contributions are on their way from the same process, its bus on `bus_core`."""
    enter(asked.namespace)
    os.sched_setaffinity(0, {bus_core})
    from atoll_learner.process import limit_threads  # noqa: PLC0415  (before JAX is loaded)

    limit_threads(1)
    from atoll.base.loop_thread import LoopThread  # noqa: PLC0415

    home = LoopThread("near")
    bus = home.submit(open_bus(asked.url, RUN, name="trains", options=asked.options)).result(30.0)
    home.submit(bus.provision(8 * GIB)).result(30.0)
    os.sched_setaffinity(0, {asked.core})  # this thread and those that it starts from now on
    step = _stepper(seed)
    steps: tuple[list[float], list[float]] = ([], [])
    megabits = []
    for turn in range(int(asked.seconds / turn_s)):
        moving = turn % 2 == 0
        work = home.submit(pushed(bus, "l1")) if moving else None
        time.sleep(WARM_S)  # what was on its way before has gone, what is to be has begun
        began_s, before = time.monotonic(), bus.stats.bytes_up
        while time.monotonic() < began_s + turn_s:
            steps[0 if moving else 1].append(step())
        if work is not None:
            megabits.append(8e-6 * (bus.stats.bytes_up - before) / (time.monotonic() - began_s))
            work.cancel()
    home.submit(bus.close()).result(30.0)
    home.stop()
    return TrainedSteps(*steps, float(np.median(megabits)))


def _stepper(seed: int) -> Callable[[], float]:
    """Return a step of the demo's model that says how long it took."""
    from atoll_learner.model import init_params  # noqa: PLC0415  (after the thread limits are set)
    from atoll_learner.model_settings import model_settings  # noqa: PLC0415
    from atoll_learner.train import init_optimizer, make_step  # noqa: PLC0415
    from atoll_learner.train_settings import train_settings  # noqa: PLC0415

    model = model_settings({}, vocab=256)
    train = train_settings({}, model=model)
    params = init_params(model, seed)
    run, state = make_step(model, train), init_optimizer(train, params)
    tokens = np.random.default_rng(seed).integers(0, 256, (train.batch, train.sequence + 1)).astype(np.int32)

    def step() -> float:
        nonlocal params, state
        began_s = time.perf_counter()
        params, state, loss = run(params, state, tokens, 1e-4)
        float(loss)
        return time.perf_counter() - began_s

    step()
    return step
