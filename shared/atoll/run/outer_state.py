"""Reads the outer-optimizer state that a head names, or that its values tell.

Where the run derives its state (`atoll.merge.outer`), a head names the state of its keyframe. Each delta after that
moves the momentum on by the values before and after it, so values and momentum of the newest version are read together:

    keyframe k, state k ── delta k+1 ── ... ── delta v          momentum k ──► momentum k+1 ──► ... ──► momentum v

In other runs the head names the state of its own version.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass

import numpy as np

from atoll.base.buffer_pool import Vector
from atoll.base.errors import BlobCorrupt
from atoll.base.parallel import off_loop
from atoll.bus.interface import Bus
from atoll.codec import ArraysDecoder
from atoll.merge.global_update import GlobalUpdate, state_bytes_max
from atoll.merge.outer import State
from atoll.run.delta_chain import read_values
from atoll.wire.blobs import BlobRef, Download
from atoll.wire.messages import Head, RunRecord


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
    elements = run.layout.fragment_sizes()[head.fragment]
    if not update.derived:
        values = await read_values(bus, run, head, None if held is None else (held.version, held.values))
        return StatedVersion(head.version, values, await _stored(bus, head.state, update, values))
    reader = _StateReader(bus, head.state, update, elements, held)
    values = await read_values(bus, run, head, None if held is None else (held.version, held.values), reader)
    return StatedVersion(head.version, values, reader.state)


class _StateReader:
    """Follows a chain of deltas with the outer state."""

    def __init__(
        self, bus: Bus, ref: BlobRef | None, update: GlobalUpdate, elements: int, held: StatedVersion | None
    ) -> None:
        self._bus, self._ref, self._update, self._elements, self._held = bus, ref, update, elements, held
        self.state: State = {}

    async def begin(self, version: int) -> None:
        """Take the state of the version that is held, or of the keyframe."""
        held = self._held
        self._held = None  # who begins once more was misled by it
        if held is not None and held.version == version:
            self.state = {name: array.copy() for name, array in held.state.items()}
        elif version and self._ref is None and self._update.stored(self._update.init(np.zeros(1, np.float32))):
            raise BlobCorrupt("a keyframe without the outer state that belongs to it", got=f"version {version}")
        else:
            self.state = await _stored(self._bus, self._ref, self._update, np.zeros(self._elements, np.float32))

    def follow(self, start: int, stop: int, before: Vector, after: Vector) -> None:
        """Move the state on."""
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
