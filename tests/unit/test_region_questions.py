"""Questions that nobody should ask a region's synchronizer: each gets an answer, and none ends it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass

import msgspec
import numpy as np
import pytest

from atoll.base.clock import SystemClock
from atoll.bus.interface import Bus
from atoll.bus.memory import MemoryBroker, MemoryBus
from atoll.codec import FrameEncoder, Framing
from atoll.codec.arrays import pack_arrays
from atoll.wire.blobs import BlobRef, Upload
from atoll.wire.messages import Contribution, RegionAnswer, RegionAsk, RunRecord, WeighedPush, decode, encode
from atoll_synchronizer import region_service
from atoll_synchronizer.aggregator import PendingContribution, read_contribution
from atoll_synchronizer.region_service import RegionService
from support.founded_run import run_record

SOON_S = 120.0
HEARD_S = 0.1
PUSH = WeighedPush("a", 1, 1, 5.0)


@dataclass
class AskedRegion:
    """A region's synchronizer that serves, a contribution that it can read, and who asks."""

    bus: MemoryBus
    run: RunRecord
    manifest: Contribution
    serving: asyncio.Task[str]
    asked: int = 0

    async def ask(self, asked: RegionAsk) -> RegionAnswer:
        async with asyncio.timeout(SOON_S):
            while True:
                self.asked += 1
                subjects = self.run.subjects
                told = await self.bus.ask(
                    subjects.premerge("eu"),
                    encode(asked),
                    timeout_s=SOON_S,
                    answer_at=subjects.premerge_answer("eu", f"n{self.asked}"),
                )
                assert told is not None
                answer = decode(RegionAnswer, told)
                if answer.done:
                    return answer

    async def read(self, **changes: object) -> RegionAnswer:
        manifest = msgspec.structs.replace(self.manifest, **changes)
        return await self.ask(RegionAsk(verb="read", run_nonce=self.run.nonce, manifest=manifest))

    async def fold(self, state: BlobRef | None) -> RegionAnswer:
        return await self.ask(
            RegionAsk(verb="fold", run_nonce=self.run.nonce, fragment=0, base_version=0, pushes=(PUSH,), state=state)
        )


@pytest.fixture
async def region(run: str) -> AsyncIterator[AskedRegion]:
    """A region that serves a run with one contribution; its average has the outer state stored with every version."""
    record, broker = run_record(run), MemoryBroker()
    record = msgspec.structs.replace(record, protocol=msgspec.structs.replace(record.protocol, average_versions=4))
    bus, theirs = MemoryBus(run, broker), MemoryBus(run, broker)
    elements, slices = record.layout.fragment_sizes()[0], record.layout.slices(0)
    encoder = FrameEncoder(
        Framing(elements, record.protocol.codec_up), lambda start, stop: np.ones(stop - start, np.float32), slices
    )
    blob = await bus.put_blob(record.subjects.contribution_stem("a", 0, 1, 1, "0" * 16), Upload(encoder))
    manifest = Contribution(
        learner="a", incarnation=1, fragment=0, push=1, base_version=0, tokens=10, steps=2, trained_tokens=10, loss=None,
        norms=tuple(encoder.norms()), layout=record.layout.fingerprint, run_nonce=record.nonce, blob=blob,
    )  # fmt: skip
    stop = asyncio.Event()
    serving = asyncio.create_task(RegionService(theirs, record, "eu", SystemClock()).serve(stop))
    while not broker.hears(record.subjects.premerge("eu")):  # noqa: ASYNC110  (the broker in memory tells nobody)
        await asyncio.sleep(0)
    yield AskedRegion(bus, record, manifest, serving)
    assert not serving.done(), serving.result()
    stop.set()
    assert await serving == "stopped"


async def test_what_no_learner_of_the_run_can_have_sent_is_not_read(region: AskedRegion) -> None:
    blob = region.manifest.blob
    for changes in (
        {"blob": BlobRef("other.stream.x", blob.chunks, blob.size_bytes, blob.digest)},
        {"blob": BlobRef(region.run.subjects.contribution_stem("b", 0, 1, 1, "0" * 16), 1, 8, blob.digest)},
        {"run_nonce": "another"},
        {"layout": "0" * 16},
        {"fragment": 99},
    ):
        assert (await region.read(**changes)).reason == "malformed"
    assert (await region.read()).reason == ""


@pytest.mark.parametrize("arrays", [{"x": 8}, {"momentum": 3}, {}], ids=["none", "short", "empty"])
async def test_an_outer_state_that_is_none_fails_a_sum_and_nothing_else(
    region: AskedRegion, arrays: dict[str, int]
) -> None:
    assert region.run.protocol.correction == "heloco", "or no state is read"
    packed = pack_arrays({name: np.zeros(size, np.float32) for name, size in arrays.items()})
    state = await region.bus.put_blob(region.run.subjects.state_stem(0, 1, "1.ab"), packed)
    assert (await region.read()).reason == ""
    assert (await region.fold(state)).reason == "failed"
    assert (await region.fold(None)).blob is not None


async def test_a_state_whose_chunks_no_stream_keeps_fails_a_sum_and_nothing_else(region: AskedRegion) -> None:
    assert (await region.read()).reason == ""
    assert (await region.fold(BlobRef("other.stream.x", 1, 8, "0" * 32))).reason == "failed"
    assert (await region.fold(None)).blob is not None


async def test_a_sum_is_made_anew_once_its_contributions_were_read_again(region: AskedRegion) -> None:
    """The next owner asks for the same fold, and the former one may have removed the sum. A repeated question costs nothing."""
    assert (await region.read()).reason == ""
    first, repeated = await region.fold(None), await region.fold(None)
    assert first.blob is not None
    assert repeated.blob == first.blob
    await region.bus.purge(f"{first.blob.stem}.*")

    assert (await region.read()).reason == ""
    second = await region.fold(None)
    assert second.blob is not None
    assert await region.bus.get_blob(second.blob, second.blob.size_bytes)


async def test_what_is_still_being_read_is_not_missing(region: AskedRegion, monkeypatch: pytest.MonkeyPatch) -> None:
    """A second process of the region has read it already; the slower one said that it had not, and no sum was made."""
    begun, go_on = asyncio.Event(), asyncio.Event()

    async def slowly(bus: Bus, run: RunRecord, manifest: Contribution) -> PendingContribution | str:
        begun.set()
        await go_on.wait()
        return await read_contribution(bus, run, manifest)

    monkeypatch.setattr(region_service, "read_contribution", slowly)
    reading = asyncio.create_task(region.read())
    await begun.wait()
    folding = asyncio.create_task(region.fold(None))
    while region.asked < 2:  # noqa: ASYNC110  (nobody is told)
        await asyncio.sleep(0)
    await asyncio.sleep(HEARD_S)  # the question is there, and waits
    go_on.set()

    assert (await reading).reason == ""
    assert (await folding).blob is not None
