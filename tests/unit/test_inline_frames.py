"""Small frames travel inside their manifests: which ones do, what their reader gets, and what it refuses."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import numpy as np
import pytest

from atoll.base.errors import FrameRejected, PeerMisbehaved
from atoll.base.large_arrays import Vector
from atoll.bus.memory import MemoryBroker, MemoryBus
from atoll.client.pushing import Pusher
from atoll.codec import frame_bytes
from atoll.protocol.events import Push
from atoll.protocol.quarantine import OFFENCES
from atoll.run.delta_chain import is_inline
from atoll.run.stream_room import places_of
from atoll.wire.limits import INLINE_BYTES_MAX
from atoll.wire.messages import Contribution, Member, RunRecord, decode
from atoll_synchronizer.aggregator import REPLACED, PendingContribution, check_manifest, read_contribution
from support.clocks import HandClock
from support.founded_run import one_fragment_run

SIZE = 1000
PIECES = "up.c.>"
NEIGHBOURS = (("b", 1, 1), ("a", 2, 1), ("a", 1, 2), ("a", 1, 11))
"""Learner, incarnation and push of contributions that are not learner a's first."""


def founded(codec: str = "f32", size: int = SIZE) -> RunRecord:
    return one_fragment_run(size, codec_up=codec)


def drawn(seed: int, size: int = SIZE) -> Vector:
    return np.random.default_rng(seed).normal(size=size).astype(np.float32)


async def pushed(run: RunRecord, bus: MemoryBus, theta: Vector, region: str = "") -> Contribution:
    """Push a pseudo-gradient of zeros less `theta`; return its manifest as a shard reads it."""
    member = Member(learner="a", incarnation=1, nonce="n", host="h", pid=1, claimed_at_s=0.0, region=region)
    push = Push(fragment=0, push=1, base_version=0, tokens=10, steps=1, trained_tokens=10, cause_id="c")

    async def loss() -> float | None:
        return None

    pusher = Pusher(bus, run, member, HandClock(0.0))
    await pusher.push(push, np.zeros_like(theta), lambda start, stop: theta[start:stop], loss)
    (queued,) = await bus.replay(run.subjects.contribution(0, 0, "a"))
    manifest = decode(Contribution, queued.data)
    check_manifest(manifest, run)
    return manifest


async def read(run: RunRecord, bus: MemoryBus, manifest: Contribution) -> PendingContribution:
    found = await read_contribution(bus, run, manifest)
    assert isinstance(found, PendingContribution)
    return found


@pytest.mark.parametrize("codec", ["f32", "bf16", "int4"])
async def test_an_inline_contribution_is_the_one_that_would_have_been_stored(codec: str) -> None:
    """The same numbers and norms, the same counters; nothing is stored beside the manifest, and nothing has to be read."""
    theta, inline, stored = drawn(2), founded(codec), founded(codec)
    buses = {run.run: MemoryBus(run.run, MemoryBroker()) for run in (inline, stored)}
    regions = {inline.run: "", stored.run: "north"}
    manifests = {run.run: await pushed(run, buses[run.run], theta, regions[run.run]) for run in (inline, stored)}
    inside, beside = manifests[inline.run], manifests[stored.run]
    assert (len(inside.frame), len(beside.frame)) == (inside.blob.size_bytes, 0)
    assert inside.blob.size_bytes == beside.blob.size_bytes
    assert inside.norms == beside.norms
    here, there = [
        (await read(run, buses[run.run], manifests[run.run])).pseudo_gradient.expanded() for run in (inline, stored)
    ]
    assert here.tobytes() == there.tobytes()

    for run, pieces in ((inline, 0), (stored, 1)):
        bus = buses[run.run]
        assert len(await bus.get_records(f"{run.subjects.prefix}.{PIECES}")) == pieces
        stats = bus.stats
        assert stats.frame_bytes_up == stats.frame_bytes_down == inside.blob.size_bytes
        assert stats.blob_bytes_up == stats.blob_bytes_down == inside.blob.size_bytes


def test_the_longest_frame_of_a_fragment_decides() -> None:
    most = max(size for size in range(900, 1100) if frame_bytes(size, "f32") <= INLINE_BYTES_MAX)
    assert is_inline(founded(size=most), 0)
    assert not is_inline(founded(size=most + 1), 0)
    assert is_inline(founded("int4", size=7 * most), 0)


async def test_frames_stay_in_a_region_that_adds_up() -> None:
    """A learner whose synchronizer folds what it sends stores its frames, however small they are."""
    run = founded()
    bus = MemoryBus(run.run, MemoryBroker())
    manifest = await pushed(run, bus, drawn(2), region="north")
    assert manifest.frame == b""
    assert len(await bus.get_records(f"{run.subjects.prefix}.{PIECES}")) == 1


async def test_what_is_not_finite_is_not_sent() -> None:
    run = founded()
    bus = MemoryBus(run.run, MemoryBroker())
    with pytest.raises(FrameRejected):
        await pushed(run, bus, np.full(SIZE, np.nan, np.float32))
    assert await bus.replay(run.subjects.contribution(0, 0, "a")) == []


async def test_an_inline_frame_that_is_not_what_its_manifest_says_is_refused() -> None:
    """Damaged, cut off, longer than said, another frame: nothing of it is folded, and nothing is waited for."""
    run = founded()
    bus = MemoryBus(run.run, MemoryBroker())
    manifest = await pushed(run, bus, drawn(2))
    other = await pushed(sibling := founded(), MemoryBus(sibling.run, MemoryBroker()), drawn(3))
    flipped = bytearray(manifest.frame)
    flipped[-1] ^= 1
    for frame in (bytes(flipped), manifest.frame[:-1], manifest.frame + b"x", other.frame):
        assert await read_contribution(bus, run, msgspec.structs.replace(manifest, frame=frame)) == "corrupt"
    several = msgspec.structs.replace(manifest.blob, chunks=2)
    assert await read_contribution(bus, run, msgspec.structs.replace(manifest, blob=several)) == "size"


async def test_nobody_is_blamed_for_bytes_that_its_manifest_does_not_name() -> None:
    """Whoever runs a broker can write where others' chunks lie: three such bytes isolated an honest learner."""
    run = founded()
    bus = MemoryBus(run.run, MemoryBroker())
    await bus.fit(replace(places_of(run), keeps_first=False))
    manifest = await pushed(run, bus, drawn(2), region="north")
    honest = bytes(await bus.get_blob(manifest.blob, manifest.blob.size_bytes))
    assert not isinstance(await read_contribution(bus, run, manifest), str)

    for written in (b"x", honest[:-1] + bytes([honest[-1] ^ 1])):
        await bus.put_blob(manifest.blob.stem, written)
        assert await read_contribution(bus, run, manifest) == REPLACED
    assert REPLACED not in OFFENCES


async def test_a_manifest_names_the_chunks_of_its_own_push_alone() -> None:
    run, theta = founded(), drawn(2)
    first, again = [await pushed(run, MemoryBus(run.run, MemoryBroker()), theta) for _ in range(2)]
    assert first.blob.stem != again.blob.stem
    nonce = "0123456789abcdef"
    own = run.subjects.contribution_stem("a", 0, 1, 1, nonce).removesuffix(f"-{nonce}")
    foreign = [f"{own}-", f"{own}-{nonce[:-1]}", f"{own}-{nonce.upper()}", f"{own}-{nonce}-1"]
    foreign += [run.subjects.contribution_stem(who, 0, life, push, nonce) for who, life, push in NEIGHBOURS]
    foreign += [own]
    for stem in foreign:
        blob = msgspec.structs.replace(first.blob, stem=stem)
        with pytest.raises(PeerMisbehaved, match="foreign chunks"):
            check_manifest(msgspec.structs.replace(first, blob=blob), run)


async def test_a_frame_where_none_is_inline_is_no_manifest() -> None:
    manifest = await pushed(run := founded(), MemoryBus(run.run, MemoryBroker()), drawn(2))
    long = msgspec.structs.replace(founded(size=20 * SIZE), run=run.run)
    with pytest.raises(PeerMisbehaved, match="carries a frame"):
        check_manifest(msgspec.structs.replace(manifest, layout=long.layout.fingerprint), long)
    with pytest.raises(PeerMisbehaved):
        decode(Contribution, msgspec.json.encode(msgspec.structs.replace(manifest, frame=bytes(INLINE_BYTES_MAX + 1))))
