"""What crosses the link of a region, and how a region comes back after a cut: `make bench-regions`.

A hub and the broker of a region are two nats-servers on this machine; their link goes through a relay that counts and cuts.

    bytes      readers in the region read frames of `FRAME_BYTES` as soon as they hear of each: one reader, then four. What the
               relay carries towards the region is counted; and the same for four readers that connect to the hub themselves
    cut        writers in the region store contributions without a pause. The link first swallows what the hub says, so that
               acknowledgements are lost, and is then cut. Frames are committed meanwhile. A reader that learns of each by
               reading the head tells when it has the newest; the queue at the hub tells which contributions came, and how
               often
    run        two learner processes in the region and a synchronizer process at the hub train one model through such a cut
"""

from __future__ import annotations

import asyncio
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Final

import numpy as np
from rich.progress import track

from atoll.base.errors import BlobGone
from atoll.bus.interface import Bus
from atoll.bus.open import open_bus
from atoll.bus.server import EmbeddedBroker
from atoll.bus.streams import GIB
from atoll.wire.blobs import BlobRef
from atoll.wire.messages import decode, encode
from atoll.wire.subjects import Subjects
from benchmarks.lib.harness import Figure, at_most, fact, run_benchmark, true, zero
from benchmarks.lib.runs import prepare
from benchmarks.network.bulk import record_of
from support.islands import DEADLINE_S, IslandProcess, unforked
from support.links import LinkProxy, unique_run
from support.regions import RelayedRegion, until

FRAME_BYTES: Final = 32 << 20
PUSH_BYTES: Final = 2 << 20
READERS: Final = 4
WRITERS: Final = 4
BYTES_GOAL: Final = 1.05
CURRENT_GOAL_S: Final = 120.0
SWALLOWED_S: Final = 1.0
COMMIT_S: Final = 1.0
ROUNDS: Final = 5
COMMITS: Final = 8


# -- bytes ------------------------------------------------------------------------------------------------------------


async def commit(bus: Bus, run: str, version: int, size: int = FRAME_BYTES) -> BlobRef:
    """Store a version of fragment 0 at the hub, and then its head, which is the reference itself."""
    subjects = Subjects(run)
    ref = await bus.put_blob(subjects.global_stem(0, version, "n"), np.random.default_rng(version).bytes(size))
    await bus.put_record(subjects.head(0), encode(ref), expected=None)
    return ref


async def without_region(hub: EmbeddedBroker, readers: int) -> list[int]:
    """Return the bytes of each frame towards readers that connect to the hub through a link of their site."""
    async with LinkProxy(hub.port) as link:
        return await carried(hub, link, [link.url] * readers)


async def carried(hub: EmbeddedBroker, link: LinkProxy, addresses: Sequence[str]) -> list[int]:
    """Return how many bytes the link carries towards readers at these addresses for each of some frames, after a first one."""
    run = unique_run()
    writer = await open_bus(hub.url, run, name="shard")
    await writer.provision(GIB)
    readers = [await open_bus(url, run, name=f"reader-{number}") for number, url in enumerate(addresses)]
    found = []
    for version in range(ROUNDS + 1):
        before = link.carried_bytes["down"]
        ref = await commit(writer, run, version)
        await asyncio.gather(*(reader.get_blob(ref, FRAME_BYTES) for reader in readers))
        found.append(link.carried_bytes["down"] - before)
    for bus in (writer, *readers):
        await bus.close()
    return found[1:]


# -- a cut ------------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class CutResult:
    """Contributions that were acknowledged, that the shard met (by number), of which pieces were missing; and seconds."""

    acknowledged: set[str]
    met: Counter[str]
    broken: int
    current_s: float
    caught_up_s: float


async def played(there: RelayedRegion, seconds: float) -> CutResult:
    """Cut the link while contributions are written, and heal it."""
    run = unique_run()
    subjects = Subjects(run)
    shard, committer = [await open_bus(there.hub.url, run, name=name) for name in ("shard", "committer")]
    await shard.provision(4 * GIB)
    await shard.put_record(subjects.run_record, encode(record_of(run, ())), expected=0)
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


# -- a run ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class RunResult:
    """What became of a run: seconds to a version after the healing, and its fates."""

    current_s: float
    errors: tuple[str, ...]
    is_exact: bool
    is_unforked: bool
    merged_tokens: int


def trained(there: RelayedRegion, folder: Path, corpus: Path, seconds: float) -> RunResult:
    """Train in the region through a cut of so many seconds."""
    island = IslandProcess(folder, there.hub.url, corpus)
    try:
        island.start("shard", "synchronizer", "--shard", "0")
        for name in ("a", "b"):
            island.start(name, "learner", "--id", name, ATOLL_BROKER__URL=there.leaf.url)
        island.wait_for("shard", "round.committed", COMMITS)
        there.cut()
        time.sleep(seconds)
        before = {name: len(island.lines(name, "fragment.adopted")) for name in ("a", "b")}
        there.heal()
        healed_s = time.monotonic()
        for name, count in before.items():
            island.wait_for(name, "fragment.adopted", count + 1)
        current_s = time.monotonic() - healed_s
        island.wait_for("shard", "round.committed", len(island.lines("shard", "round.committed")) + COMMITS)
        for name in ("a", "b", "shard"):
            island.process(name).terminate()
            island.process(name).wait(DEADLINE_S)
        settled = asyncio.run(island.settlement())
        return RunResult(
            current_s,
            settled.errors,
            settled.exact,
            unforked(asyncio.run(island.events("round"))),
            settled.fates["merged"] + settled.fates["merged_late"],
        )
    finally:
        island.stop()


# -- figures ----------------------------------------------------------------------------------------------------------


def figures_of(
    carried_bytes: tuple[list[int], list[int], list[int]],
    cuts: list[tuple[float, CutResult]],
    run: RunResult,
    run_s: float,
) -> list[Figure]:
    """Return the figures; `carried_bytes` are those of one reader, of four, and of four without a region."""
    per_frame, *beside = (statistics.median(each) for each in carried_bytes)
    how = f"median of {ROUNDS} frames of {FRAME_BYTES >> 20} MiB, counted by a relay on the link"
    ratio, straight = (each / per_frame for each in beside)
    once = "bytes down, four readers beside one"
    found = [
        fact("bytes down of a frame, one reader", per_frame / FRAME_BYTES, "x", f"beside its size; {how}"),
        at_most(once, ratio, "x", BYTES_GOAL, how),
        fact("the same four without a region", straight, "x", how),
    ]
    for seconds, cut in cuts:
        name, count = f"cut of {seconds:g} s", f"{len(cut.acknowledged)} contributions were acknowledged"
        lost, twice = len(cut.acknowledged - cut.met.keys()) + cut.broken, sum(n - 1 for n in cut.met.values())
        found += [
            at_most(f"{name}: current again", cut.current_s, "s", CURRENT_GOAL_S, "a reader has the newest frame"),
            fact(f"{name}: outbox empty", cut.caught_up_s, "s", f"the shard has met all; {count}"),
            zero(f"{name}: acknowledged and lost", lost, "", count),
            zero(f"{name}: met twice", twice, "", "by the shard, in its queue"),
        ]
    how = f"two learners in the region, a synchronizer at the hub; cut for {run_s:g} s"
    told = f"{run.merged_tokens} token-fragments were merged; {'; '.join(run.errors) or 'no errors'}"
    return [
        *found,
        at_most("run: both learners adopt again", run.current_s, "s", CURRENT_GOAL_S, how),
        true("run: fates exact", run.is_exact, told),
        true("run: no version made twice", run.is_unforked, how),
    ]


def main(*, minutes: Annotated[float, "of the longest cut"] = 1.0) -> list[Figure]:
    corpus, longest_s = prepare(), 60.0 * minutes
    with tempfile.TemporaryDirectory() as name, RelayedRegion(Path(name)) as there:
        one = asyncio.run(carried(there.hub, there.link, [there.leaf.url]))
        four = asyncio.run(carried(there.hub, there.link, [there.leaf.url] * READERS))
        straight = asyncio.run(without_region(there.hub, READERS))
        cuts = [(each, asyncio.run(played(there, each))) for each in track((5.0, longest_s), "cuts", transient=True)]
        run = trained(there, Path(name), corpus, longest_s)
    return figures_of((one, four, straight), cuts, run, longest_s)


if __name__ == "__main__":
    run_benchmark("bench-regions", main)
