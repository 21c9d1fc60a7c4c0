"""Contributions on their way in: how many at once, also while the broker is away."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from functools import partial

import numpy as np
import pytest

from atoll.base.errors import BrokerUnavailable
from atoll.bus.memory import MemoryBroker, MemoryBus
from atoll.codec import FrameDecoder, FrameEncoder, Framing
from atoll.model.layout import FragmentSlice
from atoll.protocol.events import Fold, PushKey
from atoll.wire.blobs import Download, Portion, Upload
from atoll.wire.messages import Contribution, RunRecord
from atoll_synchronizer.aggregator import KNOWN_S, READS_AT_ONCE, Aggregator
from support.founded_run import one_fragment_run

SIZE = 700_000


class Away(MemoryBus):
    """A bus that yields one piece of a blob, and then says that the broker is away, until it is `back`."""

    back = False
    pieces_read = 0
    enough: asyncio.Event

    async def pieces(self, download: Download) -> AsyncGenerator[Portion]:
        async for portion in super().pieces(download):
            self.pieces_read += 1
            if self.pieces_read >= 2 * READS_AT_ONCE:
                self.enough.set()
            yield portion
            if not self.back:
                raise BrokerUnavailable("away")


async def stored(bus: MemoryBus, run: RunRecord, learner: str, push: int, encoder: FrameEncoder) -> Contribution:
    blob = await bus.put_blob(run.subjects.contribution_stem(learner, 0, 1, push, "0" * 16), Upload(encoder))
    return Contribution(
        learner=learner, incarnation=1, fragment=0, push=push, base_version=0, tokens=1, steps=1, trained_tokens=1, loss=None,
        norms=tuple(encoder.norms()), layout=run.layout.fingerprint, run_nonce=run.nonce, blob=blob,
    )  # fmt: skip


async def test_an_outage_fills_no_memory_and_costs_no_piece_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many contributions are queued, so many have room; when the broker is back they go on where they were."""
    monkeypatch.setattr("atoll.base.retry.RETRY_S_MAX", 0.01)
    made: list[FrameDecoder] = []

    class Counted(FrameDecoder):
        def __init__(self, elements: int, codec: str, slices: Sequence[FragmentSlice]) -> None:
            super().__init__(elements, codec, slices)
            made.append(self)

    monkeypatch.setattr("atoll.run.delta_chain.FrameDecoder", Counted)
    run = one_fragment_run(SIZE, codec_up="f32")
    bus = Away(run.run, MemoryBroker())
    bus.enough = asyncio.Event()
    ones = FrameEncoder(
        Framing(SIZE, "f32"), lambda start, stop: np.ones(stop - start, np.float32), run.layout.slices(0)
    )
    manifest = await stored(bus, run, "a", 1, ones)
    bench, queued = Aggregator(bus, run), 3 * READS_AT_ONCE
    fetching = [
        asyncio.create_task(bench.fetch(PushKey(f"l{push % 12}", 1, 0, push), manifest)) for push in range(queued)
    ]
    await bus.enough.wait()
    assert len(made) == READS_AT_ONCE
    bus.back = True
    fetched = await asyncio.gather(*fetching)
    assert {reason for reason, _ in fetched} == {""}
    assert [norm for _, norm in fetched] == [pytest.approx(SIZE**0.5)] * queued
    assert bus.pieces_read == queued * manifest.blob.chunks


@pytest.mark.parametrize(
    ("codec", "compressed", "answered"),
    [("int4", (False, False), False), ("int4", (False, True), True), ("bf16", (False, False), True)],
)
async def test_a_round_is_answered_as_its_contributions_came(
    codec: str,
    compressed: tuple[bool, ...],
    answered: bool,  # noqa: FBT001
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Compressed if that of any learner was lately, or if their codec says nothing of it; and where nothing is known."""
    clock_s = [asyncio.get_running_loop().time()]
    monkeypatch.setattr(asyncio.get_running_loop(), "time", lambda: clock_s[0])
    size = 20_000
    run = one_fragment_run(size, codec_up=codec, correction="none")
    bus = MemoryBus(run.run, MemoryBroker())
    bench = Aggregator(bus, run)
    for push, compress in enumerate(compressed, 1):
        drawn = np.random.default_rng(push).standard_normal(size, np.float32)
        reading = partial(lambda values, start, stop: values[start:stop], drawn)
        encoder = FrameEncoder(Framing(size, codec), reading, run.layout.slices(0), compress=compress)
        manifest = await stored(bus, run, f"l{push}", push, encoder)
        key = PushKey(f"l{push}", 1, 0, push)
        assert (await bench.fetch(key, manifest))[0] == ""
        await bench.fold(Fold(key=key, weight=1.0, staleness_weight=1.0, age=0), {})
        clock_s[0] += 1.0
    assert bench.is_answer_compressed(0) == answered
    assert bench.is_answer_compressed(0) == answered
    clock_s[0] += KNOWN_S
    assert bench.is_answer_compressed(0)
