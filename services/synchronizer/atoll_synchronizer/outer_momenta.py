"""The outer momenta with which a region compares what its learners send, where the run corrects by them.

A shard says which version the contributions are merged into. If the run stores its outer state with every version, the shard
names it, and the region reads it. If the run derives it (`atoll.run.outer_state`), the region follows the fragment: after the
first time it reads a delta per version, which learners of the region read anyway.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Final

import numpy as np

from atoll.base.errors import BlobGone, PeerMisbehaved
from atoll.bus.interface import Bus
from atoll.merge.correction import MomentumReference, correction_of
from atoll.merge.global_update import GlobalUpdate
from atoll.merge.outer import MOMENTUM, State, make_outer
from atoll.run.heads import read_head
from atoll.run.outer_state import StatedVersion, read_outer_state, read_version, update_in
from atoll.wire.blobs import BlobRef
from atoll.wire.messages import RunRecord

KEPT: Final = 4
"""Momenta that are kept, each as large as its fragment; derived ones have the values beside them."""
LOOKS: Final = 20
LOOK_S: Final = 0.1
"""A broker of the region may hear of a head later than the shard that wrote it."""


@dataclass(frozen=True, slots=True)
class _Kept:
    """A momentum, of the version or the blob that `name` says."""

    name: int | str
    reference: MomentumReference
    held: StatedVersion | None = None


class OuterMomenta:
    """Reads the momenta of a run's fragments and keeps the newest of some."""

    def __init__(self, bus: Bus, run: RunRecord) -> None:
        """Keep none yet."""
        self._bus, self._run = bus, run
        self._kept: dict[int, _Kept] = {}
        self._reading: dict[int, asyncio.Lock] = {}

    async def of(self, fragment: int, version: int, state: BlobRef | None) -> MomentumReference | None:
        """Return the momentum of a version, or of a newer one; None where the run corrects by none, or has none yet.

        Raises:
            BlobGone, BlobCorrupt, PeerMisbehaved: what the shard says of its fragment cannot be read here.
        """
        protocol = self._run.protocol
        if correction_of(protocol.of(fragment)) is None:
            return None
        # Whoever corrects has our own optimizer; another one is neither installed nor named here.
        update = update_in(self._run, fragment, make_outer(protocol.outer, protocol.outer_lr, protocol.outer_momentum))
        async with self._reading.setdefault(fragment, asyncio.Lock()):
            kept = self._kept.get(fragment)
            if update.derived:
                if version == 0:
                    return None
                if kept is None or kept.held is None or kept.held.version < version:
                    held = await self._followed(fragment, version, update, None if kept is None else kept.held)
                    kept = self._keep(fragment, held.version, held.state, held)
            elif state is None:
                return None
            elif kept is None or kept.name != state.stem:
                elements = self._run.layout.fragment_sizes()[fragment]
                kept = self._keep(fragment, state.stem, await read_outer_state(self._bus, state, elements))
            return kept.reference

    async def _followed(
        self, fragment: int, version: int, update: GlobalUpdate, held: StatedVersion | None
    ) -> StatedVersion:
        """Return the fragment's newest version, `version` at least."""
        for _ in range(LOOKS):
            head = await read_head(self._bus, self._run, fragment)
            if head is not None and head.version >= version:
                return await read_version(self._bus, self._run, head, update, held)
            await asyncio.sleep(LOOK_S)
        raise BlobGone("the head that a shard speaks of is not here", got=f"fragment {fragment}, version {version}")

    def _keep(self, fragment: int, name: int | str, state: State, held: StatedVersion | None = None) -> _Kept:
        """Keep the momentum of a state, and not that of the fragment that was asked for longest ago."""
        elements = self._run.layout.fragment_sizes()[fragment]
        momentum = state.get(MOMENTUM)
        if momentum is None or momentum.shape != (elements,) or momentum.dtype != np.float32:
            raise PeerMisbehaved("an outer state without the run's momentum", got=sorted(state), allowed=MOMENTUM)
        self._kept.pop(fragment, None)
        while len(self._kept) >= KEPT:
            self._kept.pop(next(iter(self._kept)))
        reference = MomentumReference.of(momentum, self._run.layout.slices(fragment))
        self._kept[fragment] = _Kept(name, reference, held)
        return self._kept[fragment]
