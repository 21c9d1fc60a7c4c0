"""A global fragment on the broker: a keyframe and the deltas after it, as in a film.

    keyframe k ── delta k+1 ── delta k+2 ── ... ── delta v        all named by the head of version v

A keyframe is the float32 values of its version, bit for bit. A delta is what a version adds to the one before, in the
run's `codec_down`. A learner that holds version v - 1 reads a few bits per parameter, adds them and holds version v. A
learner that is new, or was away for long, reads the keyframe and every delta after it. All learners add the same
decoded numbers in the same order in float32, so all hold the same bits as the shard, whose own values are that sum too.
The shard keeps what rounding took from a delta and sends it with a later one (`atoll.merge.global_update`). Nothing drifts.
The head gives the digest of the values, so a learner notices a wrong sum and begins again at the keyframe.

Every `keyframe_versions` versions there is a new keyframe. The deltas before it stay for learners that are a little
behind, which need not read the keyframe. In float32 every version is a keyframe and there are no deltas.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import xxhash

from atoll.base import scratch_arrays
from atoll.base.buffer_pool import Vector
from atoll.base.errors import BlobCorrupt, BlobGone, FrameRejected, PeerMisbehaved
from atoll.base.logs import get
from atoll.base.parallel import off_loop, parts
from atoll.bus.interface import Bus
from atoll.codec import KEYFRAME, Encoded, FrameDecoder, FrameEncoder, Framing
from atoll.model.layout import FragmentSlice
from atoll.wire.blobs import BlobRef, Download
from atoll.wire.messages import Delta, Head, RunRecord
from atoll.wire.subjects import Subjects

log = get(__name__)

DELTAS_BEHIND = 8
"""Deltas before a keyframe that its head still names."""
_AHEAD = 8


@dataclass(frozen=True, slots=True)
class FrameReader:
    """A blob on its way into memory, and the frame that its pieces form; contributions are received like this, too.

    The number of elements and the codec say what an honest sender may send, so everything else is refused before memory
    is allocated. Each segment is checked and kept as it arrives. If the broker goes away meanwhile, the same reader
    continues where it was.
    """

    download: Download
    frame: FrameDecoder

    @classmethod
    def of(cls, ref: BlobRef, elements: int, codec: str, slices: Sequence[FragmentSlice] = ()) -> FrameReader:
        """Return a reader for the blob `ref`; it measures the slices while it reads.

        Raises:
            FrameRejected: `oversized` or `size`; no honest frame of so many elements is like that.
            PeerMisbehaved: the reference is none that a correct peer would write.
        """
        framing = Framing(elements, codec)
        if ref.size_bytes > framing.size_bytes:
            raise FrameRejected("oversized", "a frame is too large", got=ref.size_bytes, allowed=framing.size_bytes)
        if ref.chunks != framing.segments:
            raise FrameRejected("size", "a frame of another length", got=ref.chunks, allowed=framing.segments)
        return cls(Download(ref, framing.size_bytes), FrameDecoder(elements, codec, slices))

    async def receive(self, bus: Bus, keep: dict[int, bytes] | None = None) -> None:
        """Read what is missing, and `keep` the pieces as they came by number; raises what the bus and `FrameDecoder` raise."""
        elements = self.frame.framing.elements
        async with contextlib.aclosing(bus.pieces(self.download)) as pieces:
            async for portion in pieces:
                bus.stats.frame_bytes_down += sum(len(piece) for _, piece in portion)
                await off_loop(elements, self.frame.take, portion)
                if keep is not None:
                    keep |= {number: bytes(piece) for number, piece in portion}

    def take_whole(self, bus: Bus, piece: bytes, keep: dict[int, bytes] | None = None) -> None:
        """Take the one piece of a frame that a manifest carries; as `receive`, also in what it counts and raises."""
        self.download.take(0, piece)
        self.download.verify()
        bus.stats.frame_bytes_down += len(piece)
        bus.stats.blob_bytes_down += len(piece)
        self.frame.take([(0, piece)])
        if keep is not None:
            keep[0] = piece


class ChainFollower(Protocol):
    """Is told the values of every version that a reader comes through, for what follows from them (`atoll.run.outer_state`)."""

    async def begin(self, version: int) -> None:
        """Begin at a version, perhaps once more: the reader was misled before."""

    def follow(self, start: int, stop: int, before: Vector, after: Vector) -> None:
        """Go on to the next version, by its values and those before it, elements `start` to `stop`; called in a thread."""


def keyframe_of(values: Vector) -> FrameEncoder:
    """Return the frame of float32 values; they must not change while it is sent."""
    return FrameEncoder(Framing(values.size, KEYFRAME), lambda start, stop: values[start:stop])


def digest_of_values(values: Vector) -> str:
    """Return the digest of values that a head gives: xxh3-128 of their bytes, in hex."""
    digest = xxhash.xxh3_128()
    for start, stop in parts(0, values.size):
        digest.update(values[start:stop].data)
        scratch_arrays.release_pages(values[start:stop])
    return digest.hexdigest()


def delta_ref(subjects: Subjects, fragment: int, delta: Delta) -> BlobRef:
    """Return the reference of a delta's blob."""
    stem = subjects.delta_stem(fragment, delta.version, delta.nonce)
    return BlobRef(stem, delta.chunks, delta.size_bytes, delta.digest)


def frames_of(subjects: Subjects, head: Head) -> tuple[BlobRef, ...]:
    """Return every frame that a head names: the keyframe, then the deltas."""
    return head.keyframe, *(delta_ref(subjects, head.fragment, delta) for delta in head.deltas)


def continued(deltas: Sequence[Delta], newest: Delta, *, at_keyframe: bool) -> tuple[Delta, ...]:
    """Return the deltas that a head names after one more; a new keyframe makes most of them superfluous."""
    kept = (*deltas, newest)
    return kept[-DELTAS_BEHIND:] if at_keyframe else kept


async def read_values(
    bus: Bus,
    run: RunRecord,
    head: Head,
    held: tuple[int, Vector] | None = None,
    follower: ChainFollower | None = None,
) -> Vector:
    """Return the values of `head`, flat float32 in layout order, in memory of their own.

    `held` is a version of the fragment and its values; if it helps, only the deltas after it are read. `follower` is told of
    every version on the way.

    Raises:
        BlobGone: a blob of the head was superseded and removed while it was being read.
        BlobCorrupt: a blob of the head is damaged, or the values do not match the head's digest.
        PeerMisbehaved: the head is none that a shard writes.
    """
    elements = run.layout.fragment_sizes()[head.fragment]
    named, oldest = {delta.version for delta in head.deltas}, head.version
    while oldest in named:  # from the version `oldest` on, the head names every delta
        oldest -= 1
    if held is not None and oldest <= held[0] <= head.version:
        values: Vector = await off_loop(elements, scratch_arrays.spare, elements, np.float32)
        try:
            if await _advanced(bus, run, head, held, values, follower):
                return values
            reason = "other values than the head's"
        except (BlobGone, BlobCorrupt) as error:
            reason = str(error)
        log.warning("fragment.begun_again", fragment=head.fragment, version=head.version, held=held[0], reason=reason)
    if not oldest <= head.key_version <= head.version:
        raise PeerMisbehaved("a head without its deltas", got=[delta.version for delta in head.deltas][:9])
    arriving = await _read(bus, head.keyframe, elements, KEYFRAME)
    values = await off_loop(elements, arriving.values)
    if not await _advanced(bus, run, head, (head.key_version, values), values, follower):
        got = f"fragment {head.fragment} version {head.version}"
        raise BlobCorrupt("a keyframe and its deltas do not make what their head says", got=got, allowed=head.digest)
    return values


async def _advanced(
    bus: Bus,
    run: RunRecord,
    head: Head,
    held: tuple[int, Vector],
    values: Vector,
    follower: ChainFollower | None = None,
) -> bool:
    """Do `values <- held + every delta after it`, reading ahead; return whether the head's values came out."""
    (since, base), codec = held, run.protocol.of(head.fragment).codec_down
    todo = deque(sorted((delta for delta in head.deltas if delta.version > since), key=lambda delta: delta.version))
    ahead: deque[asyncio.Task[FrameDecoder]] = deque()
    most = min(_AHEAD, 4 * values.size // max(1, Framing(values.size, codec).size_bytes))  # as large as the values
    digest = xxhash.xxh3_128()
    if follower is not None:
        await follower.begin(since)
    if not todo:
        await off_loop(values.size, _add, base, None, values, digest)
    try:
        if len(todo) == 1:
            delta = (
                await _read(bus, delta_ref(run.subjects, head.fragment, todo.popleft()), values.size, codec)
            ).vector
            await off_loop(values.size, _add, base, delta, values, digest, follower)
        while todo or ahead:
            while todo and (not ahead or len(ahead) < most):
                ref = delta_ref(run.subjects, head.fragment, todo.popleft())
                ahead.append(asyncio.create_task(_read(bus, ref, values.size, codec)))
            delta = (await ahead[0]).vector
            ahead.popleft()
            await off_loop(values.size, _add, base, delta, values, None if todo or ahead else digest, follower)
            base = values
    finally:
        for task in ahead:
            task.cancel()
        await asyncio.gather(*ahead, return_exceptions=True)
    return digest.hexdigest() == head.digest


def _add(
    base: Vector,
    delta: Encoded | None,
    values: Vector,
    digest: xxhash.xxh3_128 | None,
    follower: ChainFollower | None = None,
) -> None:
    """Do `values <- base + delta`, update `digest` with the result and tell `follower`; base and values may be one array.

    One thread works part by part: it touches cached data three times, and the digest needs the parts in order.
    """
    for start, stop in parts(0, values.size):
        here = slice(start, stop)
        before = base[here]
        if base is not values:
            values[here] = before
        elif follower is not None:
            before = before.copy()
        if delta is not None:
            delta.blend(values, start, stop, 1.0, 1.0)
            if follower is not None:
                follower.follow(start, stop, before, values[here])
        if digest is not None:
            digest.update(values[here].data)
        scratch_arrays.release_pages(base[here], values[here])


async def _read(bus: Bus, ref: BlobRef, elements: int, codec: str) -> FrameDecoder:
    """Return a frame that was read as a whole; raise `BlobCorrupt` if a head may not name it."""
    try:
        arrival = await off_loop(elements, FrameReader.of, ref, elements, codec)
        await arrival.receive(bus)
    except PeerMisbehaved as error:
        raise BlobCorrupt("a head names a frame that cannot be used", got=f"{ref.stem}: {error}") from error
    return arrival.frame
