"""A blob as the pieces in which it travels, and the progress of its transfer.

A sender has all bytes of a blob in memory (`Cut`), or makes each piece when it is due (a frame that is encoded segment by
segment, `atoll.codec`), so encoding, sending and storing overlap. A piece that is made twice must have the same bytes, since a
retry makes it again. `Upload` and `Download` remember which pieces are there. After a failure the caller gives them to the same
bus or to another, and they continue. The digest of a blob is that of the digests of its pieces, so either side can form it in
any order:

    digest = hash(hash(piece 0) | hash(piece 1) | ...)

`hash` is xxh3-128, which finds every accident. Where messages are signed it is BLAKE3 (`Upload.collision_free`): who has the
store must not be able to make other bytes of the same digest. A reader tells the two apart by their length.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections import deque
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from typing import Protocol

import blake3
import msgspec
import xxhash

from atoll.base.errors import BlobCorrupt, PeerMisbehaved, ProtocolMisuse
from atoll.base.quantities import Count, Digest, SizeBytes, Stem
from atoll.wire.limits import CHUNK_BYTES, Buffer

CHUNKS_MAX = 1 << 16
_BLAKE3_DIGITS = 64
_STEM = re.compile(r"[A-Za-z0-9_-]+(\.[A-Za-z0-9_-]+)*")
Portion = list[tuple[int, Buffer]]
"""Pieces of a blob that have arrived together: number and bytes of each."""
PAGE_PIECES = 8
"""Pieces that a reader requests at once."""
MADE_AHEAD = 4
"""Pieces that are made, or being made, ahead of the bus."""
SMALL_BYTES = 32 << 10
"""A blob of no more bytes is made where it is sent, and travels with everything else that is small."""


class BlobRef(msgspec.Struct, frozen=True):
    """Where a blob is: `chunks` messages at `stem.<0..chunks-1>`, `size_bytes` in all, `digest` as in the module."""

    stem: Stem
    chunks: Count
    size_bytes: SizeBytes
    digest: Digest

    @property
    def collision_free(self) -> bool:
        """Return whether nobody can make other bytes of this digest."""
        return len(self.digest) == _BLAKE3_DIGITS


class Pieces(Protocol):
    """Bytes in pieces of at most `CHUNK_BYTES` each."""

    @property
    def size_bytes_max(self) -> int:
        """Return how many bytes they are together, at most."""

    def __len__(self) -> int:
        """Return the number of pieces."""

    def piece(self, number: int) -> Buffer:
        """Return one, the same bytes each time; worker threads call this for several numbers at once."""


class Cut:
    """Consecutive buffers, cut into pieces of `CHUNK_BYTES`; only a piece that crosses a border is copied."""

    def __init__(self, *buffers: Buffer) -> None:
        """Refer to the buffers; they must not change while they are sent."""
        self._pieces: list[list[memoryview]] = [[]]
        room = CHUNK_BYTES
        for buffer in buffers:
            view, at = memoryview(buffer), 0
            if view.ndim != 1 or view.format != "B":
                view = view.cast("B")
            while at < len(view):
                if not room:
                    self._pieces.append([])
                    room = CHUNK_BYTES
                part = view[at : at + room]
                self._pieces[-1].append(part)
                at, room = at + len(part), room - len(part)
        if not self._pieces[-1]:
            self._pieces.pop()

    @property
    def size_bytes_max(self) -> int:
        """Return how many bytes they are."""
        return sum(len(part) for parts in self._pieces for part in parts)

    def __len__(self) -> int:
        return len(self._pieces)

    def piece(self, number: int) -> Buffer:
        """Return one."""
        parts = self._pieces[number]
        return parts[0] if len(parts) == 1 else b"".join(parts)


class Upload:
    """A blob on its way to the broker."""

    def __init__(self, source: Pieces) -> None:
        self._source = source
        self.is_small = source.size_bytes_max <= SMALL_BYTES
        self._made_at_once = self.is_small or isinstance(source, Cut)
        self.stored: set[int] = set()
        """Numbers of the pieces that the broker has; the bus adds them."""
        self.collision_free = False
        """Whether the digest is a BLAKE3; the signer of the reference sets it before the first piece is made."""
        self._made: dict[int, tuple[int, bytes]] = {}
        self.busy_s = 0.0
        """Seconds in which any piece was on its way to the broker; 0 where the bus does not say, or it is a region's own."""

    @classmethod
    def of(cls, payload: Buffer | Upload) -> Upload:
        """Return an upload unchanged, or an upload of the given bytes."""
        return payload if isinstance(payload, Upload) else cls(Cut(payload))

    def missing(self) -> list[int]:
        """Return the numbers of the pieces that are not stored yet."""
        return [number for number in range(len(self._source)) if number not in self.stored]

    def make(self, number: int) -> Buffer:
        """Return a piece and note its size and digest."""
        piece = self._source.piece(number)
        if len(piece) > CHUNK_BYTES:
            raise ProtocolMisuse("a piece of a blob is too large", got=len(piece), allowed=CHUNK_BYTES)
        self._made[number] = len(piece), _hash(piece, collision_free=self.collision_free)
        return piece

    async def pieces(self) -> AsyncGenerator[tuple[int, Buffer]]:
        """Yield number and bytes of the pieces that are not stored yet.

        Worker threads make the pieces, `MADE_AHEAD` pieces ahead of the reader, unless they are quickly made.
        """
        if self._made_at_once:
            for number in self.missing():
                yield number, self.make(number)
            return
        ahead: deque[tuple[int, asyncio.Task[Buffer]]] = deque()
        missing = deque(self.missing())
        try:
            while missing or ahead:
                while missing and len(ahead) < MADE_AHEAD:
                    number = missing.popleft()
                    ahead.append((number, asyncio.create_task(asyncio.to_thread(self.make, number))))
                number, making = ahead[0]
                piece = await making
                ahead.popleft()
                yield number, piece
        finally:
            for _, making in ahead:
                making.cancel()
            await asyncio.gather(*(making for _, making in ahead), return_exceptions=True)

    def forget(self) -> None:
        """Assume that nothing is stored, and send all of it again."""
        self.stored.clear()

    def ref(self, stem: str) -> BlobRef:
        """Return the blob's reference, once all of it is stored."""
        made = [self._made[number] for number in range(len(self._source))]
        digest = _hash(b"".join(digest for _, digest in made), collision_free=self.collision_free).hex()
        return BlobRef(stem, len(made), sum(size for size, _ in made), digest)


@dataclass(slots=True)
class Arrived:
    """Received part of a blob: the digest of each piece by number, and their bytes."""

    digests: dict[int, bytes] = field(default_factory=dict)
    size_bytes: int = 0


class Download:
    """A blob on its way from the broker."""

    def __init__(self, ref: BlobRef, size_bytes_max: int) -> None:
        """Start with nothing read; raise `PeerMisbehaved` for a reference that no correct peer would write."""
        if ref.size_bytes > size_bytes_max:
            raise PeerMisbehaved(
                "a blob is larger than allowed", got=ref.size_bytes, allowed=f"up to {size_bytes_max} bytes"
            )
        if not 0 <= ref.chunks <= min(CHUNKS_MAX, max(0, ref.size_bytes)) or (ref.chunks == 0) != (ref.size_bytes == 0):
            raise PeerMisbehaved(
                "a blob's chunks do not fit its size", got=f"{ref.chunks} chunks, {ref.size_bytes} bytes"
            )
        if not _STEM.fullmatch(ref.stem):
            raise PeerMisbehaved("a blob's stem is not a subject", got=repr(ref.stem)[:200])
        self.ref = ref
        self.is_small = ref.size_bytes <= SMALL_BYTES
        self._collision_free = ref.collision_free
        self._arrived = Arrived()

    def elsewhere(self, stem: str) -> Download:
        """Return the same download, with one progress for both, of a copy that is kept under another stem."""
        other = Download(BlobRef(stem, self.ref.chunks, self.ref.size_bytes, self.ref.digest), self.ref.size_bytes)
        other._arrived = self._arrived
        return other

    def copy(self) -> Download:
        """Return a download with the same progress."""
        other = Download(self.ref, self.ref.size_bytes)
        other._arrived = Arrived(dict(self._arrived.digests), self._arrived.size_bytes)
        return other

    def pages(self) -> list[list[int]]:
        """Return the numbers of the pieces that have not arrived yet, in portions to ask for."""
        missing = [number for number in range(self.ref.chunks) if number not in self._arrived.digests]
        return [missing[at : at + PAGE_PIECES] for at in range(0, len(missing), PAGE_PIECES)]

    def take(self, number: int, piece: Buffer) -> None:
        """Note that a piece has arrived; raise `BlobCorrupt` if there is more than announced."""
        self._arrived.digests[number] = _hash(piece, collision_free=self._collision_free)
        self._arrived.size_bytes += len(piece)
        if self._arrived.size_bytes > self.ref.size_bytes:
            raise BlobCorrupt("a blob is longer than announced", got=self.ref.stem, allowed=self.ref.size_bytes)

    def verify(self) -> None:
        """Raise `BlobCorrupt` unless everything has arrived as announced."""
        size_bytes = self._arrived.size_bytes
        if size_bytes != self.ref.size_bytes:
            raise BlobCorrupt("a blob has another size than announced", got=size_bytes, allowed=self.ref.size_bytes)
        digests = b"".join(self._arrived.digests[number] for number in range(self.ref.chunks))
        digest = _hash(digests, collision_free=self._collision_free).hex()
        if digest != self.ref.digest:
            allowed = f"{self.ref.digest} at {self.ref.stem}"
            raise BlobCorrupt("a blob's bytes do not match their digest", got=digest, allowed=allowed)


def ref_of(pieces: Pieces, stem: str, *, collision_free: bool = False) -> BlobRef:
    """Return the reference that a blob of these pieces would have, with the digest in one of the two forms."""
    upload = Upload(pieces)
    upload.collision_free = collision_free
    for number in range(len(pieces)):
        upload.make(number)
    return upload.ref(stem)


def digest_of(pieces: Pieces, *, collision_free: bool = False) -> str:
    """Return the digest of a blob of these pieces, in one of the two forms."""
    return ref_of(pieces, "", collision_free=collision_free).digest


class Source(Protocol):
    """A source of blobs: a bus."""

    def pieces(self, download: Download) -> AsyncGenerator[Portion]:
        """Yield the missing pieces, and verify the whole."""


async def whole(source: Source, download: Download) -> bytes:
    """Return a download of a blob, with nothing read yet."""
    parts: list[Buffer] = [b""] * download.ref.chunks
    async with contextlib.aclosing(source.pieces(download)) as pieces:
        async for portion in pieces:
            for number, piece in portion:
                parts[number] = piece
    return b"".join(parts)


def _hash(data: Buffer, *, collision_free: bool) -> bytes:
    return blake3.blake3(data).digest() if collision_free else xxhash.xxh3_128_digest(data)
