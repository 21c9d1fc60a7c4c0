"""A pseudo-gradient on its way: what arrives, what is kept for the next one, and when it is given up."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import numpy as np
import pytest

from atoll.base.errors import BrokerUnavailable, FrameRejected
from atoll.base.large_arrays import Vector
from atoll.bus.memory import MemoryBroker, MemoryBus
from atoll.client.pushing import FAST_BYTES_PER_S, PUSH_PATIENCE_S, Pusher
from atoll.codec import FORMATS, Encoded, decode_frame, frame_bytes
from atoll.protocol.events import Push
from atoll.wire.blobs import BlobRef, Upload
from atoll.wire.limits import Buffer
from atoll.wire.messages import Contribution, Member, decode
from atoll.wire.subjects import Subjects
from support.clocks import HandClock
from support.founded_run import one_fragment_run

SIZE = 600_000


class Rough(MemoryBus):
    """A bus that stores `through` pieces per attempt, and then says that the broker is away."""

    through = 1 << 30
    clock: HandClock

    async def put_blob(self, stem: str, payload: Buffer | Upload) -> BlobRef:
        upload = Upload.of(payload)
        for number in upload.missing()[: self.through]:
            upload.make(number)
            upload.stored.add(number)
        if upload.missing():
            self.clock.now_s += 0.6 * PUSH_PATIENCE_S
            raise BrokerUnavailable("away")
        return upload.ref(stem)


class Timed(MemoryBus):
    """A bus whose uploads take so long, of which `took_s` 0 stands for one that does not tell."""

    took_s = 0.0

    async def put_blob(self, stem: str, payload: Buffer | Upload) -> BlobRef:
        upload = Upload.of(payload)
        upload.busy_s += self.took_s
        return await super().put_blob(stem, upload)


class Isle:
    """A learner's way to the broker, and what lies there."""

    def __init__(self, codec: str, bus: type[MemoryBus] = MemoryBus, *, feedback: bool = False) -> None:
        self.run = one_fragment_run(SIZE, codec_up=codec, error_feedback=feedback)
        self.clock = HandClock(0.0)
        self.bus = bus(self.run.run, MemoryBroker())
        member = Member(learner="a", incarnation=1, nonce="n", host="h", pid=1, claimed_at_s=0.0)
        self.pusher = Pusher(self.bus, self.run, member, self.clock)
        self.pushes = 0

    async def push(self, origin: Vector, theta: Vector) -> None:
        await self.pusher.push(self.action(), origin, lambda start, stop: theta[start:stop], self.loss)

    async def push_made(self, make: Callable[[Vector | None], tuple[Encoded, Vector]]) -> None:
        await self.pusher.push_made(self.action(), make, self.loss)

    def action(self) -> Push:
        self.pushes += 1
        return Push(fragment=0, push=self.pushes, base_version=0, tokens=10, steps=1, trained_tokens=10, cause_id="c")

    async def loss(self) -> float | None:
        return 2.5

    async def arrived(self) -> tuple[Contribution, Vector]:
        """Return the newest manifest, and the pseudo-gradient that it names."""
        subject = self.run.subjects.contribution(0, 0, "a")
        newest = (await self.bus.replay(subject))[-1]
        manifest = decode(Contribution, newest.data)
        frame = await self.bus.get_blob(manifest.blob, 1 << 30)
        return manifest, decode_frame(frame, elements_expected=SIZE, codec=self.run.protocol.codec_up)


def drawn(seed: int) -> Vector:
    return np.random.default_rng(seed).normal(size=SIZE).astype(np.float32)


@pytest.fixture(autouse=True)
def _no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("atoll.base.retry.RETRY_S", 0.0)


@pytest.mark.parametrize("codec", ["f32", "int4"])
async def test_a_manifest_says_what_was_sent(codec: str) -> None:
    """The pseudo-gradient as its reader will see it, and its norm; the counters are those of the push."""
    isle = Isle(codec)
    origin, theta = drawn(1), drawn(2)
    await isle.push(origin, theta)
    manifest, got = await isle.arrived()
    assert got == pytest.approx(origin - theta, abs=0.0 if codec == "f32" else 0.6)
    (norm,) = manifest.norms
    assert norm == pytest.approx(float(np.linalg.norm(got.astype(np.float64))), rel=1e-9)
    assert (manifest.tokens, manifest.steps, manifest.loss) == (10, 1, 2.5)
    assert manifest.blob.chunks == (3 if codec == "f32" else 1)


@pytest.mark.parametrize("feedback", [True, False])
async def test_what_rounding_took_is_sent_with_the_next(feedback: bool) -> None:  # noqa: FBT001
    """With feedback the sum of what arrives is that of what was meant, but for one rounding; without, errors add up."""
    isle = Isle("int4", feedback=feedback)
    origin, theta, arrived = drawn(1), drawn(2), np.zeros(SIZE, np.float64)
    for _ in range(8):
        await isle.push(origin, theta)
        arrived += (await isle.arrived())[1]
        await isle.bus.purge(f"{Subjects(isle.run.run).prefix}.up.m.>")
    error = float(np.abs(arrived - 8.0 * (origin - theta)).max())
    assert (error < 0.8) == feedback


async def test_pushes_that_overlap_send_a_residue_once() -> None:
    """What was sent and what is kept is what was meant, whichever push ends first; also where one of them is given up."""
    isle = Isle("int4", feedback=True)
    origin, theta = drawn(1), drawn(2)
    await isle.push(origin, theta)
    sent = (await isle.arrived())[1].astype(np.float64)
    await isle.bus.purge(f"{Subjects(isle.run.run).prefix}.up.m.>")
    await asyncio.gather(isle.push(origin, theta), isle.push(origin, theta))
    for entry in await isle.bus.replay(Subjects(isle.run.run).contribution(0, 0, "a")):
        frame = await isle.bus.get_blob(decode(Contribution, entry.data).blob, 1 << 30)
        sent += decode_frame(frame, elements_expected=SIZE, codec="int4")
    spoilt = theta.copy()
    spoilt[0] = np.nan
    with pytest.raises(FrameRejected):
        await isle.push(origin, spoilt)
    kept = isle.pusher._residues[0]
    assert np.abs(sent + kept - 3.0 * (origin - theta)).max() < 1e-4


async def test_what_a_device_made_is_sent_as_it_is() -> None:
    """With the norm that its reader finds; what rounding took goes to who makes the next, and is kept when he fails."""
    isle = Isle("int4", feedback=True)
    given: list[Vector | None] = []
    origin, theta = drawn(1), drawn(2)

    def make(kept: Vector | None) -> tuple[Encoded, Vector]:
        given.append(kept)
        if len(given) == 2:
            raise RuntimeError("RESOURCE_EXHAUSTED")
        vector = origin - theta
        encoded = Encoded.of(vector, FORMATS["int4"])
        return encoded, vector - encoded.expanded()

    await isle.push_made(make)
    manifest, got = await isle.arrived()
    (norm,) = manifest.norms
    assert norm == pytest.approx(float(np.linalg.norm(got.astype(np.float64))), rel=1e-9)
    host = Isle("int4")
    await host.push(origin, theta)
    assert (await host.arrived())[0].norms == manifest.norms
    assert (await host.arrived())[0].blob.digest == manifest.blob.digest
    with pytest.raises(RuntimeError):
        await isle.push_made(make)
    await isle.push_made(make)
    assert given[0] is None
    assert given[1] is not None
    assert given[1] is given[2]
    assert np.array_equal(given[1], origin - theta - got)


async def test_frames_are_compressed_unless_the_last_one_went_up_fast() -> None:
    """Nothing is known of a link before the first one; what a slow link takes longer for comes shorter the next time."""
    isle = Isle("int4", Timed)
    assert isinstance(isle.bus, Timed)
    whole, sizes = frame_bytes(SIZE, "int4"), []
    for isle.bus.took_s in (1e-6, 1e-6, 10.0, 0.0, 1e-6):
        await isle.push(drawn(1), drawn(2))
        manifest, _ = await isle.arrived()
        sizes.append(manifest.blob.size_bytes == whole)
        await isle.bus.purge(f"{Subjects(isle.run.run).prefix}.up.m.>")
    assert sizes == [False, True, True, False, False]
    assert FAST_BYTES_PER_S * 10.0 > whole > FAST_BYTES_PER_S * 1e-6


async def test_what_is_not_finite_leaves_nothing_behind() -> None:
    isle = Isle("f32")
    theta = drawn(2)
    theta[-1] = np.nan
    with pytest.raises(FrameRejected):
        await isle.push(drawn(1), theta)
    assert await isle.bus.get_records(f"{Subjects(isle.run.run).prefix}.up.c.>") == []


async def test_a_push_that_gets_on_is_never_given_up() -> None:
    """However long it takes: each attempt of this one stores a segment and takes more than half of the patience."""
    isle = Isle("f32", Rough)
    assert isinstance(isle.bus, Rough)
    isle.bus.clock, isle.bus.through = isle.clock, 1
    await isle.push(drawn(1), drawn(2))
    assert isle.clock.now_s > PUSH_PATIENCE_S


async def test_a_push_that_does_not_get_on_is_given_up() -> None:
    isle = Isle("f32", Rough)
    assert isinstance(isle.bus, Rough)
    isle.bus.clock, isle.bus.through = isle.clock, 0
    with pytest.raises(BrokerUnavailable):
        await isle.push(drawn(1), drawn(2))
    assert PUSH_PATIENCE_S < isle.clock.now_s < 3 * PUSH_PATIENCE_S
