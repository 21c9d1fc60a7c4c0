"""A global fragment on the broker: a keyframe and the deltas after it, as in a film.

    keyframe k ── delta k+1 ── delta k+2 ── ... ── delta v        all named by the head of version v

A keyframe is the float32 values of its version, bit for bit. A delta is what the next version adds to the one before, in
the run's `codec_down`: a learner that holds version v - 1 reads a few bits per parameter, adds them and holds version v;
who comes new, or was away for long, reads the keyframe and every delta after it. Each adds the same decoded numbers in the
same order in float32, so all hold the same bits as the shard itself, whose own values are that sum too: what rounding took
from a delta it keeps and sends with a later one (`atoll.merge.downlink`). Nothing drifts. The head says the digest of
the values, so whoever has put them together wrongly knows it, and begins again at the keyframe.

Every `keyframe_versions` versions there is a new keyframe. Deltas before it are kept for learners that are a little behind:
they need not read it. In float32 every version is a keyframe and there are no deltas.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence

import numpy as np
import xxhash

from atoll.base import scratch_arrays
from atoll.base.buffer_pool import Vector
from atoll.base.errors import BlobCorrupt, BlobGone, PeerMisbehaved
from atoll.base.logs import get
from atoll.base.offload import off_loop
from atoll.base.parallel import parts
from atoll.bus.interface import Bus
from atoll.codec import KEYFRAME, Encoded, FrameDecoder, FrameEncoder, Framing
from atoll.run.blob_reader import FrameReader
from atoll.wire.blobs import BlobRef
from atoll.wire.messages import Delta, Head, RunRecord
from atoll.wire.subjects import Subjects

log = get(__name__)

DELTAS_BEHIND = 8
"""Deltas before a keyframe that its head still names."""
_AHEAD = 8


def keyframe_of(values: Vector) -> FrameEncoder:
    """Return the frame of float32 values; they must not change while it is sent."""
    return FrameEncoder(Framing(values.size, KEYFRAME), lambda start, stop: values[start:stop])


def digest_of_values(values: Vector) -> str:
    """Return what a head says of its values: xxh3-128 of their bytes, in hex."""
    digest = xxhash.xxh3_128()
    for start, stop in parts(0, values.size):
        digest.update(values[start:stop].data)
        scratch_arrays.release_pages(values[start:stop])
    return digest.hexdigest()


def delta_ref(subjects: Subjects, fragment: int, delta: Delta) -> BlobRef:
    """Return where a delta lies."""
    stem = subjects.delta_stem(fragment, delta.version, delta.nonce)
    return BlobRef(stem, delta.chunks, delta.size_bytes, delta.digest)


def frames_of(subjects: Subjects, head: Head) -> tuple[BlobRef, ...]:
    """Return every frame that a head names: the keyframe, then the deltas."""
    return head.keyframe, *(delta_ref(subjects, head.fragment, delta) for delta in head.deltas)


def newest_bytes(head: Head) -> int:
    """Return how large the frame is that a learner reads who holds the version before."""
    return head.deltas[-1].size_bytes if head.deltas else head.keyframe.size_bytes


def continued(deltas: Sequence[Delta], newest: Delta, *, at_keyframe: bool) -> tuple[Delta, ...]:
    """Return the deltas that a head names after one more; a new keyframe makes most of them superfluous."""
    kept = (*deltas, newest)
    return kept[-DELTAS_BEHIND:] if at_keyframe else kept


async def read_values(bus: Bus, run: RunRecord, head: Head, held: tuple[int, Vector] | None = None) -> Vector:
    """Return the values of `head`, flat float32 in layout order, in memory of their own.

    `held` is a version of the fragment and its values; if they are of use, only the deltas after them are read.

    Raises:
        BlobGone: what the head names was superseded and removed while it was being read.
        BlobCorrupt: what it names is damaged, or does not make what the head says.
        PeerMisbehaved: the head is none that a shard writes.
    """
    elements = run.layout.fragment_sizes()[head.fragment]
    if held is not None and held[0] <= head.version and _unbroken(head, held[0]):
        values: Vector = await off_loop(elements, scratch_arrays.spare, elements, np.float32)
        try:
            if await _advanced(bus, run, head, held, values):
                return values
            reason = "other values than the head's"
        except (BlobGone, BlobCorrupt) as error:
            reason = str(error)
        log.warning("fragment.begun_again", fragment=head.fragment, version=head.version, held=held[0], reason=reason)
    if not _unbroken(head, head.key_version):
        raise PeerMisbehaved("a head without its deltas", got=[delta.version for delta in head.deltas][:9])
    arriving = await _read(bus, head.keyframe, elements, KEYFRAME)
    values = await off_loop(elements, arriving.values)
    if not await _advanced(bus, run, head, (head.key_version, values), values):
        got = f"fragment {head.fragment} version {head.version}"
        raise BlobCorrupt("a keyframe and its deltas do not make what their head says", got=got, allowed=head.digest)
    return values


def _unbroken(head: Head, since: int) -> bool:
    """Return whether a head names every delta after the version `since`."""
    if not 0 <= head.version - since <= len(head.deltas):
        return False
    return {delta.version for delta in head.deltas} >= set(range(since + 1, head.version + 1))


async def _advanced(bus: Bus, run: RunRecord, head: Head, held: tuple[int, Vector], values: Vector) -> bool:
    """Do `values <- held + every delta after it`, several read ahead; return whether the head's values came out."""
    (since, base), subjects, codec = held, Subjects(run.run), run.protocol.codec_down
    todo = deque(sorted((delta for delta in head.deltas if delta.version > since), key=lambda delta: delta.version))
    ahead: deque[asyncio.Task[FrameDecoder]] = deque()
    most = min(_AHEAD, 4 * values.size // max(1, Framing(values.size, codec).size_bytes))  # as large as the values
    digest = xxhash.xxh3_128()
    if not todo:
        await off_loop(values.size, _add, base, None, values, digest)
    try:
        while todo or ahead:
            while todo and (not ahead or len(ahead) < most):
                ref = delta_ref(subjects, head.fragment, todo.popleft())
                ahead.append(asyncio.create_task(_read(bus, ref, values.size, codec)))
            delta = (await ahead[0]).encoded()
            ahead.popleft()
            await off_loop(values.size, _add, base, delta, values, None if todo or ahead else digest)
            base = values
    finally:
        for task in ahead:
            task.cancel()
        await asyncio.gather(*ahead, return_exceptions=True)
    return digest.hexdigest() == head.digest


def _add(base: Vector, delta: Encoded | None, values: Vector, digest: xxhash.xxh3_128 | None) -> None:
    """Do `values <- base + delta` and have `digest` see what comes out; base and values may be one.

    In one thread, part by part: what is in a cache is looked at three times, and the digest wants the parts in order.
    """
    for start, stop in parts(0, values.size):
        here = slice(start, stop)
        if base is not values:
            values[here] = base[here]
        if delta is not None:
            delta.blend(values, start, stop, 1.0, 1.0)
        if digest is not None:
            digest.update(values[here].data)
        scratch_arrays.release_pages(base[here], values[here])


async def _read(bus: Bus, ref: BlobRef, elements: int, codec: str) -> FrameDecoder:
    """Return a frame that is here as a whole; raise `BlobCorrupt` when it is not what a head may name."""
    try:
        arrival = await off_loop(elements, FrameReader.of, ref, elements, codec)
        await arrival.receive(bus)
    except PeerMisbehaved as error:
        raise BlobCorrupt("a head names a frame that cannot be used", got=f"{ref.stem}: {error}") from error
    return arrival.frame
