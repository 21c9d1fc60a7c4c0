"""Batches for a learner, from blocks it has leased, with the next lease fetched before the last is used up.

The training thread asks for a batch and gets it at once, except before the first lease has arrived: the ledger of
leases is a record on the bus, and the network may be slow, but never while there is text in hand. Each lease that is
used up is struck from the ledger with the next request; leaving returns what was not begun.
"""

from __future__ import annotations

from concurrent.futures import Future

import numpy as np
import numpy.typing as npt

from atoll.island.join import IslandHandle
from atoll.wire.messages import DataGrant
from atoll_learner.data.batches import BatchReader
from atoll_learner.data.shards import TokenShards

LEASE_TIMEOUT_S = 60.0


class LeasedFeed:
    """Yields int32 batches of shape (batch, sequence + 1) for `island`, `lease_blocks` blocks at a time."""

    def __init__(self, island: IslandHandle, shards: TokenShards, reader: BatchReader, lease_blocks: int) -> None:
        """Ask for the first lease; it arrives while the model compiles."""
        self._island = island
        self._shards = shards
        self._reader = reader
        self._lease_blocks = lease_blocks
        self._granted: list[DataGrant] = []
        self._pending: Future[DataGrant] | None = None
        self._ask()

    def next(self) -> npt.NDArray[np.int32]:
        """Return the next batch; block only when nothing leased is left."""
        self._collect(wait=False)
        while not self._reader.ready():
            self._collect(wait=True)
        batch = self._reader.next()
        if self._reader.needs_more() and self._pending is None:
            self._ask()
        return batch

    def close(self) -> None:
        """Return what was leased and not begun."""
        self._collect(wait=self._pending is not None)
        used = tuple(
            DataGrant(grant.epoch, grant.start, self._reader.begun(grant.epoch, grant.start), "", 0)
            for grant in self._granted
        )
        self._island.call(self._island.session.leases.give_back(used)).result(LEASE_TIMEOUT_S)

    def _ask(self) -> None:
        done = tuple(g for g in self._granted if self._reader.begun(g.epoch, g.start) >= g.stop)
        self._granted = [grant for grant in self._granted if grant not in done]
        self._pending = self._island.call(self._island.session.leases.take(self._lease_blocks, done))

    def _collect(self, *, wait: bool) -> None:
        """Take the pending lease over when it is here, or wait for it."""
        if self._pending is None:
            self._ask()
        pending = self._pending
        if pending is None or not (wait or pending.done()):
            return
        grant = pending.result(LEASE_TIMEOUT_S)
        self._pending = None
        self._granted.append(grant)
        self._reader.grant(grant.epoch, grant.start, grant.stop)
