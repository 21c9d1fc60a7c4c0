"""What a crowd of honest learners costs a shard: `make bench-crowd`.

A real broker and one real shard; the learners are a script that speaks the protocol, so that a small machine has room for them.

    heartbeats   `MEMBERS` members beat once a second; the shard's processor time is that beside the same time without them
    an outage    `CUT` learners are cut off while one other goes on, until all that they push is stale. Then each fragment's
                 queue gets two pushes of each at once: the shard must refuse all of it, in bounded memory. Then each pushes
                 every fragment again, on the newest version, and all of that must be merged
"""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
import threading
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import psutil

from atoll.base.clock import SystemClock
from atoll.base.large_arrays import Vector
from atoll.bus.interface import Bus
from atoll.bus.open import open_bus
from atoll.bus.server import EmbeddedBroker
from atoll.bus.streams import GIB
from atoll.client.membership import claim, publish_origin
from atoll.codec import Encoded, encode_frame, format_of
from atoll.merge.fold import slice_norms
from atoll.model.layout import TensorSpec, plan_layout
from atoll.protocol.ledger import Account
from atoll.protocol.settings import ProtocolSettings
from atoll.run.heads import read_heads
from atoll.run.ledger import read_ledger
from atoll.wire.messages import Beat, Contribution, RunRecord, encode
from benchmarks.lib.harness import Figure, at_most, exactly, fact, run_benchmark
from benchmarks.lib.runs import cpu_s, shard_process

MINUTES = 4.0
MEMBERS, CUT, FRAGMENTS = 1000, 64, 24
BEAT_S = 1.0
JOIN_S = 5.0
CORE_MAX = 0.1
GROWTH_MAX = 1.3
STALE_S_MAX = 60.0
ELEMENTS = 32_768
TOKENS = 64
AT_ONCE = 64
WAIT_S = 300.0


def main(*, minutes: float = MINUTES, seed: int = 0) -> list[Figure]:
    return asyncio.run(heartbeats(60.0 * minutes / 4.0)) + asyncio.run(outage(seed))


# --- the two parts --------------------------------------------------------------------------------------------------------


async def heartbeats(part_s: float) -> list[Figure]:
    settings = {"interval_steps": 100_000, "overlap_steps": 10, "quorum": 1}
    with tempfile.TemporaryDirectory() as store, EmbeddedBroker(Path(store)) as broker:
        bus, run = await found_run(broker.url, "heartbeats", settings)
        names = [f"l{number}" for number in range(MEMBERS)]
        await in_batches([claim(bus, run.subjects, name, SystemClock()) for name in names])
        with shard_process(broker.url, run.run) as process:
            await beat_for(bus, run, names[:1], 5.0)
            quiet_s = await spent_s(process, beat_for(bus, run, names[:1], part_s))
            joined_s = await spent_s(process, beat_for(bus, run, names, JOIN_S))
            busy_s = await spent_s(process, beat_for(bus, run, names, part_s))
        await bus.close()
    share = (busy_s - quiet_s) / part_s
    how = (
        f"{MEMBERS} learners, one beat each per {BEAT_S:g} s, for {part_s:.0f} s: {busy_s:.2f} s of a core, "
        f"{quiet_s:.2f} s without"
    )
    each_ms = 1e3 * (busy_s - quiet_s) / (MEMBERS * part_s / BEAT_S)
    return [
        Figure("core for heartbeats", share, "cores", f"< {CORE_MAX}", share < CORE_MAX, how),
        fact("one heartbeat", each_ms, "ms", how),
        fact("when all of them are new", joined_s / JOIN_S, "cores", f"the first {JOIN_S:.0f} s"),
    ]


async def outage(seed: int) -> list[Figure]:
    """Return what it costs when all that many learners push is stale."""
    settings = {"interval_steps": 2, "quorum": 1, "correction": "none", "outlier_ratio": 0.0, "step_tokens_max": 0}
    with tempfile.TemporaryDirectory() as store, EmbeddedBroker(Path(store)) as broker:
        bus, run = await found_run(broker.url, "outage", settings)
        names = [f"l{number}" for number in range(CUT)]
        await in_batches([claim(bus, run.subjects, name, SystemClock()) for name in ("steady", *names)])
        vector = np.random.default_rng(seed).standard_normal(ELEMENTS).astype(np.float32) * 1e-3
        with shard_process(broker.url, run.run) as process, sampled_rss(process) as memory:
            beating = asyncio.create_task(beat_for(bus, run, ["steady", *names], 1e9))
            for version in range(run.protocol.age_max + 2):
                await push_all(bus, run, ["steady"], [version] * FRAGMENTS, (version + 1,), vector)
                await until_all(bus, run, version + 1)
            before = max(memory)
            began_s = time.monotonic()
            await push_all(bus, run, names, [0] * FRAGMENTS, (1, 2), vector)
            sent_s = time.monotonic() - began_s
            stale = await count_settled(bus, run, lambda account: sum(account.refused.values()), 2, names)
            stale_s, most = time.monotonic() - began_s, max(memory)
            versions = await versions_of(bus, run)
            again_s = time.monotonic()
            await push_all(bus, run, names, versions, (3,), vector)
            current = await count_settled(bus, run, lambda account: account.merged + account.merged_late, 1, names)
            current_s = time.monotonic() - again_s
            beating.cancel()
        await bus.close()
    pushes = 2 * CUT * FRAGMENTS
    how = f"{pushes} pushes of {CUT} learners and {FRAGMENTS} fragments, {2 * ELEMENTS / 1e3:.0f} kB each"
    how += f", sent in {sent_s:.1f} s"
    growth, all_again = most / before, CUT * FRAGMENTS
    told = f"the shard: {before / 1e6:.0f} MB before, {most / 1e6:.0f} MB at most"
    return [
        exactly("stale pushes refused", stale, "pushes", pushes, how),
        at_most("until all stale pushes were refused", stale_s, "s", STALE_S_MAX, how),
        at_most("until everybody's next push was merged", current_s, "s", STALE_S_MAX, "from then on"),
        exactly("pushes merged after it", current, "pushes", all_again, "by the ledgers"),
        at_most("memory after over before", growth, "ratio", GROWTH_MAX, told),
    ]


# --- the run and its learners ---------------------------------------------------------------------------------------------


async def found_run(url: str, name: str, settings: Mapping[str, object]) -> tuple[Bus, RunRecord]:
    bus = await open_bus(url, name, name="crowd")
    await bus.provision(8 * GIB)
    layout = plan_layout([TensorSpec(f"t{p}", (ELEMENTS,), "float32") for p in range(FRAGMENTS)], FRAGMENTS)
    protocol = msgspec.convert({"fragments": FRAGMENTS, "shards": 1, **settings}, ProtocolSettings).check()
    record = RunRecord(
        run=name, founder="crowd", nonce="first", founded_at_s=time.time(), layout=layout, protocol=protocol, data="d"
    )
    await bus.put_record(record.subjects.run_record, encode(record), expected=0)
    await publish_origin(bus, record, {p: np.zeros(n, np.float32) for p, n in enumerate(layout.fragment_sizes())})
    return bus, record


async def beat_for(bus: Bus, run: RunRecord, names: list[str], for_s: float) -> None:
    """Beat for the learners: all of them spread over each second."""
    began_s, step = time.monotonic(), 0
    while time.monotonic() < began_s + for_s:
        step += 1
        for number, name in enumerate(names):
            beat = Beat(
                learner=name,
                incarnation=1,
                run_nonce=run.nonce,
                state="training",
                at_s=time.time(),
                step=step,
                step_s=BEAT_S / 2.0,
                tokens=step * TOKENS,
                tokens_per_s=TOKENS / BEAT_S,
                loss=1.0,
                pushed=0,
                superseded=0,
            )
            await bus.tell(run.subjects.beat(name), encode(beat))
            due_s = began_s + (step - 1 + (number + 1) / len(names)) * BEAT_S
            if (wait_s := due_s - time.monotonic()) > 0.002:
                await asyncio.sleep(wait_s)


async def push_all(
    bus: Bus, run: RunRecord, names: list[str], bases: list[int], pushes: tuple[int, ...], vector: Vector
) -> None:
    blob = encode_frame(vector, run.protocol.codec_up)
    arriving = Encoded.of(vector, format_of(run.protocol.codec_up))

    async def push(name: str, fragment: int, number: int) -> None:
        s = run.subjects
        stem = s.contribution_stem(name, fragment, 1, number, "0" * 16)
        manifest = Contribution(
            learner=name,
            incarnation=1,
            fragment=fragment,
            push=number,
            base_version=bases[fragment],
            tokens=TOKENS,
            steps=1,
            trained_tokens=TOKENS * number,
            loss=1.0,
            norms=tuple(slice_norms(run.layout.slices(fragment), arriving)),
            layout=run.layout.fingerprint,
            run_nonce=run.nonce,
            blob=await bus.put_blob(stem, blob),
        )
        subject = s.contribution(run.protocol.shard_of(fragment), fragment, name)
        await bus.publish(subject, encode(manifest), msg_id=f"{name}-{fragment}-{number}")

    await in_batches([push(name, p, number) for number in pushes for name in names for p in range(FRAGMENTS)])


async def count_settled(bus: Bus, run: RunRecord, of: Callable[[Account], int], each: int, names: list[str]) -> int:
    """Wait until so many pushes of each learner and fragment have a fate; return how many have, by the ledgers."""
    deadline_s, wanted = time.monotonic() + WAIT_S, each * FRAGMENTS * len(names)
    while True:
        accounts = (await read_ledger(bus, run)).accounts
        found = sum(of(accounts[f"{name}/1"]) // TOKENS for name in names if f"{name}/1" in accounts)
        if found >= wanted or time.monotonic() > deadline_s:
            return found
        await asyncio.sleep(0.2)


async def versions_of(bus: Bus, run: RunRecord) -> list[int]:
    return [head.version for _, head in sorted((await read_heads(bus, run)).items())]


async def until_all(bus: Bus, run: RunRecord, version: int) -> None:
    deadline_s = time.monotonic() + WAIT_S
    while min(await versions_of(bus, run)) < version:
        if time.monotonic() > deadline_s:
            raise SystemExit(f"no version {version} within {WAIT_S:g} s")
        await asyncio.sleep(0.05)


async def in_batches(work: list[Coroutine[Any, Any, Any]]) -> None:
    room = asyncio.Semaphore(AT_ONCE)

    async def one(doing: Coroutine[Any, Any, Any]) -> None:
        async with room:
            await doing

    await asyncio.gather(*(one(doing) for doing in work))


async def spent_s(process: psutil.Process, meanwhile: Coroutine[Any, Any, None]) -> float:
    """Return the processor time of a process while something is done."""
    before = cpu_s([process])
    await meanwhile
    return cpu_s([process]) - before


@contextlib.contextmanager
def sampled_rss(process: psutil.Process) -> Iterator[list[int]]:
    """Sample the memory of a process, in bytes, ten times a second."""
    over, found = threading.Event(), [process.memory_info().rss]

    def weigh() -> None:
        while not over.wait(0.1):
            with contextlib.suppress(psutil.Error):
                found.append(process.memory_info().rss)

    sampler = threading.Thread(target=weigh, daemon=True)
    sampler.start()
    try:
        yield found
    finally:
        over.set()
        sampler.join()


if __name__ == "__main__":
    run_benchmark("bench-crowd", main)
