"""Reads a frame from the broker into memory, and remembers how far it has come.

Contributions, keyframes and deltas are received alike. The number of elements and the codec say what an honest sender
may send, so everything else is refused before memory is allocated. Each segment is checked and kept as it arrives. If
the broker goes away meanwhile, the same reader continues where it was.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass

from atoll.base.errors import FrameRejected
from atoll.base.parallel import off_loop
from atoll.bus.interface import Bus
from atoll.codec import FrameDecoder, Framing
from atoll.model.layout import FragmentSlice
from atoll.wire.blobs import BlobRef, Download


@dataclass(frozen=True, slots=True)
class FrameReader:
    """A blob, and the frame that its pieces form."""

    download: Download
    frame: FrameDecoder

    @classmethod
    def of(cls, ref: BlobRef, elements: int, codec: str, slices: Sequence[FragmentSlice] = ()) -> FrameReader:
        """Return a reader for the blob `ref`; it measures the slices `spans` while it reads.

        Raises:
            FrameRejected: `oversized` or `size`; no honest frame of so many elements is like that.
            PeerMisbehaved: the reference is none that a correct peer would write.
        """
        framing = Framing(elements, codec)
        if ref.size_bytes > framing.size_bytes:
            raise FrameRejected("oversized", "a frame is too large", got=ref.size_bytes, allowed=framing.size_bytes)
        if ref.chunks != len(framing):
            raise FrameRejected("size", "a frame of another length", got=ref.chunks, allowed=len(framing))
        return cls(Download(ref, framing.size_bytes), FrameDecoder(elements, codec, slices))

    async def receive(self, bus: Bus) -> None:
        """Read what is missing; raises what the bus and `FrameDecoder.take` raise."""
        elements = self.frame.framing.elements
        async with contextlib.aclosing(bus.pieces(self.download)) as pieces:
            async for portion in pieces:
                bus.stats.frame_bytes_down += sum(len(piece) for _, piece in portion)
                await off_loop(elements, self.frame.take_all, portion)
