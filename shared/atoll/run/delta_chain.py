"""A global fragment on the broker: a keyframe and the deltas after it, as in a film; and its outer state.

    keyframe k, state k ── delta k+1 ── delta k+2 ── ... ── delta v        all named by the head of version v

A keyframe is the float32 values of its version, bit for bit. A delta is what a version adds to the one before, in the
run's `codec_down`; in float32 every version is a keyframe. All readers add the same decoded numbers in the same order in
float32, so all hold the same bits as the shard, whose own values are that sum too. The shard keeps what rounding took from a
delta and sends it with a later one (`atoll.merge.global_update`). The head gives the digest of the values, so a reader notices
a wrong sum and begins again at the keyframe. The deltas before a keyframe stay for learners that are a little behind.

Where the run derives its outer state (`atoll.merge.outer`), the head names that of its keyframe, and each delta after it moves
the momentum on by the values before and after. In other runs it names the state of its own version.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import xxhash

from atoll.base import large_arrays
from atoll.base.errors import BlobCorrupt, BlobGone, FrameRejected, PeerMisbehaved
from atoll.base.large_arrays import Vector
from atoll.base.logs import get
from atoll.base.parallel import off_loop, parts
from atoll.bus.interface import Bus
from atoll.codec import KEYFRAME, ArraysDecoder, Encoded, FrameDecoder, FrameEncoder, Framing
from atoll.merge.global_update import GlobalUpdate, state_bytes_max
from atoll.merge.outer import State
from atoll.model.layout import FragmentSlice
from atoll.wire.blobs import BlobRef, Download
from atoll.wire.limits import INLINE_BYTES_MAX
from atoll.wire.messages import Delta, Head, RunRecord
from atoll.wire.subjects import Subjects

log = get(__name__)

DELTAS_BEHIND = 8
"""Deltas before a keyframe that its head still names."""
_AHEAD = 8


@dataclass(frozen=True, slots=True)
class FrameReader:
    """A blob on its way into memory, and the frame that its pieces form; contributions are received like this, too.

    A frame that no honest sender of so many elements in this codec sends is refused before memory is allocated. If the broker
    goes away meanwhile, the same reader continues where it was.
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


def keyframe_of(values: Vector) -> FrameEncoder:
    """Return the frame of float32 values; they must not change while it is sent."""
    return FrameEncoder(Framing(values.size, KEYFRAME), lambda start, stop: values[start:stop])


def digest_of_values(values: Vector) -> str:
    """Return the digest of values that a head gives: xxh3-128 of their bytes, in hex."""
    digest = xxhash.xxh3_128()
    for start, stop in parts(0, values.size):
        digest.update(values[start:stop].data)
        large_arrays.release_pages(values[start:stop])
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
    follower: _StateReader | None = None,
) -> Vector:
    """Return the values of `head`, flat float32 in layout order, in memory of their own.

    `held` is a version of the fragment and its values; if it helps, only the deltas after it are read. `follower` follows
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
        values: Vector = await off_loop(elements, large_arrays.spare, elements, np.float32)
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
    follower: _StateReader | None,
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
    follower: _StateReader | None = None,
) -> None:
    """Do `values <- base + delta`, update `digest` with the result and `follower`; base and values may be one array."""
    # One thread works part by part: it touches cached data three times, and the digest needs the parts in order.
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
        large_arrays.release_pages(base[here], values[here])


async def _read(bus: Bus, ref: BlobRef, elements: int, codec: str) -> FrameDecoder:
    try:
        arrival = await off_loop(elements, FrameReader.of, ref, elements, codec)
        await arrival.receive(bus)
    except PeerMisbehaved as error:
        raise BlobCorrupt("a head names a frame that cannot be used", got=f"{ref.stem}: {error}") from error
    return arrival.frame


def is_inline(run: RunRecord, fragment: int) -> bool:
    """Return whether contributions of a fragment travel inside their manifests: by the run alone, so both sides know.

    Storing, reading and removing a short frame are three requests to the broker, which cost as much as its base64 (ADR 65). A
    learner whose region adds up sends none inline: its frames stay in the region.
    """
    return fits_manifest(Framing(run.layout.fragment_sizes()[fragment], run.protocol.of(fragment).codec_up))


def fits_manifest(framing: Framing) -> bool:
    """Return whether a manifest has room for any frame of such a vector."""
    return framing.segments == 1 and framing.size_bytes <= INLINE_BYTES_MAX


@dataclass(frozen=True, slots=True)
class StatedVersion:
    """A version of a fragment: its values, flat float32, and what is stored or derived of its outer state."""

    version: int
    values: Vector
    state: State


async def read_version(
    bus: Bus, run: RunRecord, head: Head, update: GlobalUpdate, held: StatedVersion | None = None
) -> StatedVersion:
    """Return the version that `head` makes visible; from one that is `held`, if it helps, and the deltas after it.

    Raises:
        BlobGone, BlobCorrupt, PeerMisbehaved: see `read_values`; or the state is none of this run's, or larger than any.
    """
    known = None if held is None else (held.version, held.values)
    if not update.derived:
        values = await read_values(bus, run, head, known)
        return StatedVersion(head.version, values, await _stored(bus, head.state, update, values))
    reader = _StateReader(bus, head.state, update, run.layout.fragment_sizes()[head.fragment], held)
    values = await read_values(bus, run, head, known, reader)
    return StatedVersion(head.version, values, reader.state)


class _StateReader:
    """Derives the outer state along a chain of deltas."""

    def __init__(
        self, bus: Bus, ref: BlobRef | None, update: GlobalUpdate, elements: int, held: StatedVersion | None
    ) -> None:
        self._bus, self._ref, self._update, self._elements, self._held = bus, ref, update, elements, held
        self.state: State = {}

    async def begin(self, version: int) -> None:
        """Take the state of the version that is held, or of the keyframe; called again if the values held were wrong."""
        held = self._held
        self._held = None  # who begins once more was misled by it
        if held is not None and held.version == version:
            self.state = {name: array.copy() for name, array in held.state.items()}
        elif version and self._ref is None and self._update.stored(self._update.init(np.zeros(1, np.float32))):
            raise BlobCorrupt("a keyframe without the outer state that belongs to it", got=f"version {version}")
        else:
            self.state = await _stored(self._bus, self._ref, self._update, np.zeros(self._elements, np.float32))

    def follow(self, start: int, stop: int, before: Vector, after: Vector) -> None:
        """Move elements `start` to `stop` on to the next version; called in a thread."""
        self._update.derive({name: array[start:stop] for name, array in self.state.items()}, before, after)


async def _stored(bus: Bus, ref: BlobRef | None, update: GlobalUpdate, values: Vector) -> State:
    """Return the state in a blob, or that in which a run begins with these values."""
    wanted = update.stored(update.init(values))
    if ref is None:
        return wanted
    return fitting(await read_outer_state(bus, ref, values.size), wanted)


def fitting(state: State, wanted: State) -> State:
    """Return a state whose arrays have the wanted shapes and dtypes; raise `BlobCorrupt` for any other."""
    there, due = ({name: (array.shape, array.dtype) for name, array in s.items()} for s in (state, wanted))
    if there != due:
        raise BlobCorrupt("an outer state that is not this run's", got=there, allowed=due)
    return state


async def read_outer_state(bus: Bus, ref: BlobRef, elements: int) -> State:
    """Return the arrays of the outer state of a fragment of `elements` numbers, by name.

    Raises:
        BlobGone, BlobCorrupt, PeerMisbehaved: it was removed, is damaged, or is larger than any state.
    """
    arriving, download = ArraysDecoder(ref.size_bytes), Download(ref, state_bytes_max(elements))
    async with contextlib.aclosing(bus.pieces(download)) as pieces:
        async for portion in pieces:
            for number, piece in portion:
                await off_loop(len(piece), arriving.take, number, piece)
    return arriving.arrays()
