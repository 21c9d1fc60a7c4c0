"""How a region comes back after a cut: `make bench-regions`.

A hub and the broker of a region are two nats-servers on this machine, with a relay on their link. Writers in the region store
contributions without a pause. The link first swallows what the hub says, so that acknowledgements are lost, and is then cut;
frames are committed meanwhile. A reader that learns of each by reading the head tells when it has the newest; the queue at the
hub tells which contributions came, and how often.
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Final

import numpy as np
from rich.progress import track

from atoll.base.errors import BlobGone
from atoll.bus.interface import Bus
from atoll.bus.open import open_bus
from atoll.bus.streams import GIB
from atoll.model.layout import TensorSpec, plan_layout
from atoll.protocol.settings import ProtocolSettings
from atoll.wire.blobs import BlobRef
from atoll.wire.messages import RunRecord, decode, encode
from atoll.wire.subjects import Subjects
from benchmarks.lib.harness import Figure, at_most, fact, run_benchmark, zero
from support.links import unique_run
from support.regions import RelayedRegion, until

FRAME_BYTES: Final = 32 << 20
PUSH_BYTES: Final = 2 << 20
WRITERS: Final = 4
CURRENT_GOAL_S: Final = 120.0
SWALLOWED_S: Final = 1.0
COMMIT_S: Final = 1.0
SHORT_S: Final = 5.0


def record_of(run: str) -> RunRecord:
    layout = plan_layout([TensorSpec("w", (8,), "float32")], 1)
    protocol = ProtocolSettings(fragments=1, shards=1)
    return RunRecord(run=run, founder="a", nonce="n", founded_at_s=0.0, layout=layout, protocol=protocol)


async def commit(bus: Bus, run: str, version: int, size: int = FRAME_BYTES) -> BlobRef:
    """Store a version of fragment 0 at the hub, and then its head, which is the reference itself."""
    subjects = Subjects(run)
    ref = await bus.put_blob(subjects.global_stem(0, version, "n"), np.random.default_rng(version).bytes(size))
    await bus.put_record(subjects.head(0), encode(ref), expected=None)
    return ref


@dataclass(slots=True)
class CutResult:
    """Contributions that were acknowledged, that the shard met (by number), of which pieces were missing; and seconds."""

    acknowledged: set[str]
    met: Counter[str]
    broken: int
    current_s: float
    caught_up_s: float


async def cut_off(there: RelayedRegion, seconds: float) -> CutResult:
    run = unique_run()
    subjects = Subjects(run)
    shard, committer = [await open_bus(there.hub.url, run, name=name) for name in ("shard", "committer")]
    await shard.provision(4 * GIB)
    await shard.put_record(subjects.run_record, encode(record_of(run)), expected=0)
    ref = await commit(committer, run, 0)
    reader = await open_bus(there.leaf.url, run, name="reader")
    await reader.get_blob(ref, FRAME_BYTES)
    result, over = CutResult(set(), Counter(), 0, 0.0, 0.0), asyncio.Event()
    writers = [asyncio.create_task(_writing(there.leaf.url, run, number, result, over)) for number in range(WRITERS)]
    meeting = asyncio.create_task(_meeting(shard, subjects, result))
    await asyncio.sleep(SWALLOWED_S)
    there.link.blackhole("down")
    await asyncio.sleep(SWALLOWED_S)
    await asyncio.to_thread(there.cut)
    version, ends_s = 0, time.monotonic() + seconds
    while time.monotonic() < ends_s:
        version += 1
        ref = await commit(committer, run, version, FRAME_BYTES // 4)
        await asyncio.sleep(COMMIT_S)
    there.heal()
    healed_s = time.monotonic()

    async def knows() -> bool:
        record = await reader.get_record(subjects.head(0))
        return record is not None and decode(BlobRef, record.data) == ref

    await until(knows)
    await reader.get_blob(ref, FRAME_BYTES)
    result.current_s = time.monotonic() - healed_s
    over.set()
    await asyncio.gather(*writers)
    while result.acknowledged - result.met.keys() and time.monotonic() - healed_s < 2 * CURRENT_GOAL_S:
        await reader.reach(COMMIT_S)
    result.caught_up_s = time.monotonic() - healed_s
    await asyncio.sleep(COMMIT_S)  # for what might come twice
    meeting.cancel()
    await asyncio.gather(meeting, return_exceptions=True)
    for bus in (shard, committer, reader):
        await bus.close()
    return result


async def _writing(url: str, run: str, number: int, result: CutResult, over: asyncio.Event) -> None:
    """Be a learner that contributes one piece of work after the other, with a pause as if it trained."""
    bus, subjects, learner = await open_bus(url, run, name=f"l{number}"), Subjects(run), f"l{number}"
    for push in range(1 << 20):
        if over.is_set():
            break
        data = np.random.default_rng(push).bytes(PUSH_BYTES)
        ref = await bus.put_blob(subjects.contribution_stem(learner, 0, 1, push, "0" * 16), data)
        # A fragment of its own for each: the queue keeps two of a learner and fragment.
        subject = subjects.contribution(0, push, learner)
        await bus.publish(subject, encode(ref), msg_id=f"{learner}-{push}")
        result.acknowledged.add(subject)
        await asyncio.sleep(COMMIT_S)
    await bus.close()


async def _meeting(bus: Bus, subjects: Subjects, result: CutResult) -> None:
    """Be a shard that reads each contribution when its manifest comes."""
    consumer = await bus.consume(subjects.contributions_of(0), durable="shard")
    while True:
        delivery = await consumer.next(COMMIT_S)
        if delivery is not None:
            try:
                await bus.get_blob(decode(BlobRef, delivery.data), PUSH_BYTES)
            except BlobGone:
                result.broken += 1
            result.met[delivery.subject] += 1
            await delivery.ack()


def figures_of(cuts: list[tuple[float, CutResult]]) -> list[Figure]:
    found = []
    for seconds, cut in cuts:
        name, count = f"cut of {seconds:g} s", f"{len(cut.acknowledged)} contributions were acknowledged"
        lost, twice = len(cut.acknowledged - cut.met.keys()) + cut.broken, sum(n - 1 for n in cut.met.values())
        found += [
            at_most(f"{name}: current again", cut.current_s, "s", CURRENT_GOAL_S, "a reader has the newest frame"),
            fact(f"{name}: outbox empty", cut.caught_up_s, "s", f"the shard has met all; {count}"),
            zero(f"{name}: acknowledged and lost", lost, "", count),
            zero(f"{name}: met twice", twice, "", "by the shard, in its queue"),
        ]
    return found


def main(*, minutes: Annotated[float, "of the longest cut"] = 1.0) -> list[Figure]:
    with tempfile.TemporaryDirectory() as name, RelayedRegion(Path(name)) as there:
        lengths_s = track((SHORT_S, 60.0 * minutes), "cuts", transient=True)
        return figures_of([(seconds, asyncio.run(cut_off(there, seconds))) for seconds in lengths_s])


if __name__ == "__main__":
    run_benchmark("bench-regions", main)
