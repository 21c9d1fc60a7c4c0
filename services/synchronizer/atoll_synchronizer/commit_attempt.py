"""What a commit stores before its head, over however many attempts.

The shard takes the outer step once and measures its values while it stores them. The delta, the keyframe, the outer
state (if it is due) and the fragment ledger are uploads that remember the broker's acknowledgements. So an attempt that
failed for lack of room repeats only what is not stored yet. After a power cut a broker may have lost data that it acknowledged,
and a head must not name lost data. So after a lost connection the shard sends everything again.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from atoll.base.parallel import off_loop
from atoll.base.retry import all_of
from atoll.bus.interface import Bus
from atoll.merge.global_update import UpdatedFragment
from atoll.merge.norms import l2_norm
from atoll.run.delta_chain import digest_of_values
from atoll.wire.blobs import BlobRef, Upload


@dataclass(frozen=True, slots=True)
class StoredBlobs:
    """The references of all blobs that the next head names and the former one does not."""

    fragment_ledger: BlobRef
    keyframe: BlobRef | None = None
    delta: BlobRef | None = None
    state: BlobRef | None = None

    @property
    def refs(self) -> tuple[BlobRef, ...]:
        """Return all references."""
        return tuple(ref for ref in (self.fragment_ledger, self.keyframe, self.delta, self.state) if ref is not None)


@dataclass(slots=True)
class CommitAttempt:
    """A commit in progress: what is `new`, and its uploads and their stems by the name that `StoredBlobs` gives them.

    `head` is the subject of the head to come, and `reconnects` the count of its broker at the moment when all of it was
    stored. Once it is stored, `norm` and `digest` are those of its values.
    """

    nonce: str
    new: UpdatedFragment
    uploads: dict[str, tuple[str, Upload]]
    head: str
    reconnects: int
    norm: float = 0.0
    digest: str = ""
    measuring: asyncio.Task[None] | None = None

    async def stored(self, bus: Bus) -> StoredBlobs:
        """Store everything that is not stored yet or that the broker may have lost."""
        # Once for all attempts: the measuring thread goes on even if the attempt that began it fails.
        self.measuring = self.measuring or asyncio.create_task(self._measure())
        while True:
            # If one upload fails, the others go on with the next attempt.
            refs = await all_of(bus.put_blob(stem, upload) for stem, upload in self.uploads.values())
            await asyncio.shield(self.measuring)
            reconnects = bus.reconnects(self.head)
            if reconnects == self.reconnects:
                return StoredBlobs(**dict(zip(self.uploads, refs, strict=True)))
            self.reconnects = reconnects
            for _, upload in self.uploads.values():
                upload.forget()

    async def _measure(self) -> None:
        """Measure the values."""
        elements = self.new.values.size
        self.norm = await off_loop(elements, l2_norm, self.new.values)
        self.digest = await off_loop(elements, digest_of_values, self.new.values)
