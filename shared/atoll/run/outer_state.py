"""Reads the outer-optimizer state that a head names."""

from __future__ import annotations

import contextlib

from atoll.base.parallel import off_loop
from atoll.bus.interface import Bus
from atoll.codec import ArraysDecoder
from atoll.merge.global_update import state_bytes_max
from atoll.merge.outer import State
from atoll.wire.blobs import BlobRef, Download


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
