"""A frame that is about to arrive: what is refused before anything is allocated, and what arrives."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from atoll.base.errors import FrameRejected, PeerMisbehaved
from atoll.bus.memory import MemoryBroker, MemoryBus
from atoll.codec import FrameEncoder, Framing, frame_bytes
from atoll.run.delta_chain import FrameReader
from atoll.wire.blobs import BlobRef, Upload
from atoll.wire.messages import decode
from atoll.wire.subjects import Subjects

SIZE = 600_000
STEM = Subjects("r").global_stem(0, 1, "n")


async def test_what_was_sent_arrives_and_is_counted() -> None:
    """Every segment once; a frame's bytes are those of the blob."""
    values = np.random.default_rng(0).normal(size=SIZE).astype(np.float32)
    bus = MemoryBus("r", MemoryBroker())
    ref = await bus.put_blob(STEM, Upload(FrameEncoder(Framing(SIZE, "f32"), lambda start, stop: values[start:stop])))
    arrival = FrameReader.of(ref, SIZE, "f32")
    await arrival.receive(bus)
    assert arrival.frame.values().tobytes() == values.tobytes()
    assert bus.stats.frame_bytes_down == ref.size_bytes


@pytest.mark.parametrize(
    ("chunks", "size_bytes", "reason"),
    [(3, frame_bytes(SIZE, "f32") + 1, "oversized"), (2, frame_bytes(SIZE, "f32"), "size"), (4, 100, "size")],
)
def test_what_no_honest_sender_names_is_refused(chunks: int, size_bytes: int, reason: str) -> None:
    with pytest.raises(FrameRejected) as caught:
        FrameReader.of(BlobRef(STEM, chunks, size_bytes, ""), SIZE, "f32")
    assert caught.value.reason == reason


@pytest.mark.parametrize("stem", ["a.*", "a.>", "", "a..b", ".a", "a b", "a\n", "a" * 600])
def test_a_reference_to_no_subject_is_refused(stem: str) -> None:
    """A wildcard would read, and remove, what others wrote."""
    data = msgspec.json.encode(BlobRef(stem, 3, 100, "d" * 32))
    with pytest.raises(PeerMisbehaved, match="stem"):
        decode(BlobRef, data)
