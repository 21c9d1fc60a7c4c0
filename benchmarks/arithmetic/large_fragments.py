"""What a very large fragment costs in memory: `make bench-memory`.

One fragment of 2 GB in float32, through an embedded broker with its store on disk, exactly as it is. Both roles let large
arrays lie in scratch files, as their services do by default. Peaks are the kernel's own (`VmHWM`), mapped scratch files
included.

    shard      a synchronizer process serves a round of M = 4 contributions and commits it; quorum 4, so that all are there
    learner    a process joins, steps, pushes and adopts. Taken off are its interpreter, its libraries and its own arrays, of
               which there are three sets: on an accelerator they do not lie in this memory at all
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Annotated

import numpy as np
import psutil

from atoll.base import large_arrays
from atoll.base.clock import SystemClock
from atoll.base.large_arrays import Vector
from atoll.bus.interface import Bus
from atoll.bus.open import open_bus
from atoll.bus.server import EmbeddedBroker
from atoll.client.membership import claim, found_or_join, publish_origin
from atoll.client.pushing import Pusher
from atoll.model.layout import TensorSpec, plan_layout
from atoll.protocol.events import Push
from atoll.protocol.settings import ProtocolSettings
from atoll.run.heads import read_head
from atoll.settings.sections import LearnerSettings
from atoll.wire.messages import Beat, RunRecord, encode
from atoll.wire.subjects import Subjects
from benchmarks.lib.compiled import compile_kernels, read_only
from benchmarks.lib.harness import Figure, at_most, run_benchmark
from benchmarks.lib.runs import shard_process

GIB = 1 << 30
SIZE_BYTES = 2 * GIB
TENSORS = 8
M = 4
SHARD_MAX, LEARNER_MAX = 3.0, 2.0
STREAM_BYTES = 32 * GIB
WAIT_S = 500.0
POLL_S = 0.5


def peak_bytes(pid: int) -> int:
    for line in Path(f"/proc/{pid}/status").read_text(encoding="ascii").splitlines():
        if line.startswith("VmHWM:"):
            return 1024 * int(line.split()[1])
    raise SystemExit("this system does not say how large a process was (VmHWM): run it on Linux")


def main(*, gib: Annotated[float, "size of the fragment in float32"] = SIZE_BYTES / GIB) -> list[Figure]:
    size_bytes = int(gib * GIB) // 4096 * 4096
    figures = []
    for name, measure, most in (("shard", shard_peak, SHARD_MAX), ("learner", learner_peak, LEARNER_MAX)):
        with tempfile.TemporaryDirectory() as folder, EmbeddedBroker(folder, bytes_max=8 * STREAM_BYTES) as broker:
            peak, how = measure(broker.url, size_bytes)
        share = peak / size_bytes
        figures.append(at_most(f"{name}, peak of memory", share, "fragments", most, how))
        print(f"{name}: {peak / 1e9:.3g} GB, {share:.3g} times the fragment; {how}", flush=True)
    return figures


def record_of(run: str, elements: int, quorum: int) -> RunRecord:
    protocol = ProtocolSettings(
        fragments=1,
        shards=1,
        interval_steps=4,
        quorum=quorum,
        codec_up="f32",
        codec_down="f32",
        outlier_ratio=0.0,
        norm_max=1e9,
    ).check()
    tensors = [TensorSpec(f"w{number}", (elements // TENSORS,), "float32") for number in range(TENSORS)]
    return RunRecord(
        run=run, founder="f", nonce="0" * 16, founded_at_s=0.0, layout=plan_layout(tensors, 1), protocol=protocol
    )


def shard_peak(url: str, size_bytes: int) -> tuple[int, str]:
    """Return the most that a shard had in memory until its first commit was visible."""
    run, elements = "shard", size_bytes // 4
    record = record_of(run, elements, M)
    began_s = time.monotonic()
    with shard_process(url, run, broker__stream_bytes_max=STREAM_BYTES) as shard:
        process = multiprocessing.get_context("spawn").Process(target=_fleet, args=(url, record, elements))
        process.start()
        try:
            process.join(WAIT_S)
            if process.exitcode != 0:
                raise SystemExit(f"the learners did not get through: {process.exitcode}")
            took_s = time.monotonic() - began_s
            return peak_bytes(shard.pid), f"M = {M}, one round in {took_s:.0f} s, origin and pushes included"
        finally:
            process.kill()


def _fleet(url: str, record: RunRecord, elements: int) -> None:
    """Be M learners, one after the other: found the run, push, and wait for the version that they make."""
    asyncio.run(_learners(url, record, elements))


async def _learners(url: str, record: RunRecord, elements: int) -> None:
    large_arrays.policy.bytes_min = GIB // 4
    bus = await open_bus(url, record.run, name="fleet")
    await bus.provision(STREAM_BYTES)
    origin = large_arrays.spare(elements, np.float32)
    await found_or_join(bus, record)
    await publish_origin(bus, record, {0: _filled(origin)})
    members = [await claim(bus, record.subjects, f"l{number}", SystemClock()) for number in range(M)]
    beating = asyncio.create_task(_beat(bus, record))
    for number, member in enumerate(members):
        action = Push(fragment=0, push=1, base_version=0, tokens=100, steps=4, trained_tokens=100, cause_id="")
        reading = partial(_away, origin, number)
        await Pusher(bus, record, member, SystemClock()).push(action, origin, reading, _no_loss)
        print(f"learner {number + 1} of {M} has pushed", flush=True)
    version = 0
    while not version:
        await asyncio.sleep(POLL_S)
        head = await read_head(bus, record, 0)
        version = head.version if head is not None else 0
    beating.cancel()
    await bus.close()


async def _no_loss() -> float | None:
    return None


async def _beat(bus: Bus, record: RunRecord) -> None:
    while True:
        for number in range(M):
            beat = Beat(
                learner=f"l{number}", incarnation=1, run_nonce=record.nonce, state="training", at_s=0.0, step=4, step_s=0.5,
                tokens=100, tokens_per_s=50.0, loss=None, pushed=100, superseded=0,
            )  # fmt: skip
            await bus.tell(Subjects(record.run).beat(beat.learner), encode(beat))
        await asyncio.sleep(1.0)


def _filled(vector: Vector) -> Vector:
    dice = np.random.default_rng(0)
    for start in range(0, vector.size, 1 << 20):
        part = vector[start : start + (1 << 20)]
        part[:] = dice.standard_normal(part.size, dtype=np.float32)
        large_arrays.release_pages(part)
    return vector


def _away(origin: Vector, number: int, start: int, stop: int) -> Vector:
    """Return values that a learner has moved to: a little further for each one."""
    moved: Vector = origin[start:stop] * np.float32(0.999 - 0.0001 * number)
    large_arrays.release_pages(origin[start:stop])
    return moved


def learner_peak(url: str, size_bytes: int) -> tuple[int, str]:
    """Return the most that a learner had in memory beside its interpreter, its libraries and its own arrays."""
    context = multiprocessing.get_context("spawn")
    told = context.Queue()
    process = context.Process(target=_island, args=(url, size_bytes // 4, told))
    began_s = time.monotonic()
    with shard_process(url, "learner", broker__stream_bytes_max=STREAM_BYTES):
        process.start()
        try:
            own_bytes, peak = (told.get(timeout=WAIT_S) for _ in range(2))
        finally:
            process.kill()
    took_s = time.monotonic() - began_s
    return peak - own_bytes, f"three sets of arrays of its own taken off; {took_s:.0f} s in all"


def _island(url: str, elements: int, told: multiprocessing.Queue[int]) -> None:
    """Be a learner: its parameters move once, are pushed, and what comes of them is adopted."""
    import jax  # noqa: F401, PLC0415  (taken off, too)

    from atoll.client.join import join  # noqa: PLC0415
    from atoll.client.options import JoinOptions  # noqa: PLC0415

    large_arrays.policy.bytes_min = LearnerSettings().spill_bytes
    dice = np.random.default_rng(0)
    size = elements // TENSORS
    arrays = {f"w{n}": read_only(dice.standard_normal(size, dtype=np.float32)) for n in range(TENSORS)}
    compile_kernels(["f32"])  # a library, too
    protocol = record_of("learner", elements, 1).protocol
    before = psutil.Process().memory_info().rss
    told.put(before + 2 * 4 * elements)
    opener, options = partial(open_bus, url, "learner", name="island"), JoinOptions(stream_bytes_max=STREAM_BYTES)
    with join(opener, run="learner", learner="a", params=arrays, protocol=protocol, options=options) as island:
        adopted = False
        while not adopted:
            arrays = _moved(arrays)
            place = id(arrays["w0"])
            arrays = island.step(arrays, tokens=10, loss=1.0)
            adopted = id(arrays["w0"]) != place
            time.sleep(1.0)
        told.put(peak_bytes(os.getpid()))
        time.sleep(WAIT_S)


def _moved(arrays: dict[str, Vector]) -> dict[str, Vector]:
    return {name: read_only(array * np.float32(0.999)) for name, array in arrays.items()}


if __name__ == "__main__":
    run_benchmark("bench-memory", main)
