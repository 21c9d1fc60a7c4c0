"""What a commit stores before its head, however many attempts that takes.

The outer step is taken once; its values are measured while it is being stored. Its delta, its keyframe, the outer state and
the books are uploads that remember what the broker has acknowledged, so an attempt that failed for want of room costs what
it had not stored. What a broker has acknowledged it may have lost when it comes back from a power cut, and a head must not
name that: so after a lost connection everything is sent again.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from atoll.base.waiting import all_of
from atoll.bus.interface import Bus
from atoll.merge.fold import l2_norm
from atoll.merge.global_update import UpdatedFragment
from atoll.run.delta_chain import digest_of_values
from atoll.wire.blobs import BlobRef, Pieces, Upload


@dataclass(frozen=True, slots=True)
class StoredBlobs:
    """Where everything lies that the next head names and the former one does not."""

    state: BlobRef
    fragment_ledger: BlobRef
    keyframe: BlobRef | None
    delta: BlobRef | None

    @property
    def refs(self) -> tuple[BlobRef, ...]:
        """Return all of it."""
        return tuple(ref for ref in (self.state, self.fragment_ledger, self.keyframe, self.delta) if ref is not None)

    @property
    def frame_bytes(self) -> int:
        """Return what keyframe and delta weigh."""
        return sum(ref.size_bytes for ref in (self.keyframe, self.delta) if ref is not None)


@dataclass(slots=True)
class CommitAttempt:
    """A commit that is being made; `reconnects` are those of the bus when all that is stored was stored.

    Once it is stored, `norm` and `digest` are those of its values.
    """

    nonce: str
    new: UpdatedFragment
    reconnects: int
    norm: float = 0.0
    digest: str = ""
    uploads: dict[str, tuple[str, Upload]] = field(default_factory=dict)
    measuring: asyncio.Task[None] | None = None

    def add(self, what: str, stem: str, pieces: Pieces) -> None:
        """Note something to be stored."""
        self.uploads[what] = (stem, Upload(pieces))

    async def stored(self, bus: Bus) -> StoredBlobs:
        """Store what is not stored yet, or may be lost."""
        # Once for all attempts: a thread that measures goes on when the attempt fails that it was begun with.
        self.measuring = self.measuring or asyncio.create_task(self._measure())
        while True:
            refs = await self._attempt(bus)
            await asyncio.shield(self.measuring)
            if bus.stats.reconnects == self.reconnects:
                return refs
            self.reconnects = bus.stats.reconnects
            for _, upload in self.uploads.values():
                upload.forget()

    async def _measure(self) -> None:
        """Measure the values."""
        self.norm = await asyncio.to_thread(l2_norm, self.new.values)
        self.digest = await asyncio.to_thread(digest_of_values, self.new.values)

    async def _attempt(self, bus: Bus) -> StoredBlobs:
        # Where one has failed, the others go on with the next attempt.
        refs = await all_of(bus.put_blob(stem, upload) for stem, upload in self.uploads.values())
        by_name = dict(zip(self.uploads, refs, strict=True))
        return StoredBlobs(by_name["state"], by_name["books"], by_name.get("keyframe"), by_name.get("delta"))
