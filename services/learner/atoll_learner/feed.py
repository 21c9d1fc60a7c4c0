"""Batches from units of blocks that a learner has leased, mixed over the whole text, with an exact cursor.

Every block is cut into windows of `sequence` tokens, each read with one token more, its last target; what is left of a block
after its last whole window is not trained on. A unit is a range of positions of an epoch. It has as many windows of each number
as positions, but from other blocks for each number: window w of position p is that of the block at position

    p + w * blocks / windows per block   (modulo the blocks)

So each window of each block is read once in an epoch, and the windows of a unit are pieces of as many blocks, as far as there
are so many; from a few whole blocks a learner learns less (docs/adr/0062). Learners with another `train.sequence` cut other
windows: they read as much of the text, but not exactly what the others leave. The windows of a unit are read in one fixed order
that mixes them all, a function of the seed and the unit. So "window 37 of this unit" is the whole cursor, for a restarted
process or another learner that was granted the rest; with another `train.sequence`, the same share of the unit.

The training thread gets a batch at once, except before the first lease has arrived. The ledger of leases is a record on the
bus; a slow network delays a batch only if no leased text is left. Every renewal and every request tells the ledger how far
reading has come; leaving returns the unread rest. If the ledger gives a unit to another learner (we were frozen or cut
off for longer than a lease), the feed stops reading it.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections import deque
from collections.abc import Callable, Coroutine
from concurrent.futures import CancelledError, Future, wait
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from atoll.base.errors import AtollError, DataError, ProtocolMisuse
from atoll.base.logs import get
from atoll.base.retry import RETRY_S, RETRY_S_MAX, pause_s
from atoll.client.data_leases import DataLeases
from atoll.client.join import IslandHandle
from atoll.protocol.data import DataGrant, Key, Progress
from atoll_learner.data.shards import TokenShards, mix_order

AHEAD_BATCHES = 8
LOOKED_UP = 1024
"""Places of so many windows are looked up at once."""


@dataclass(slots=True)
class Unit:
    """A granted range: the order of its windows, int64 (windows,), how many are read, and where the next of them are.

    `places` are block and first token of the windows from number `begin` on, int64 (some, 2).
    """

    key: Key
    order: npt.NDArray[np.int64]
    read: int
    begin: int = 0
    places: npt.NDArray[np.int64] = field(default_factory=lambda: np.empty((0, 2), np.int64))


class BatchReader:
    """Yields int32 batches of shape (batch, sequence + 1) from what it was granted, unit after unit."""

    def __init__(self, shards: TokenShards, sequence: int, batch: int, seed: int) -> None:
        shards.check_trainable(sequence)
        self._shards = shards
        self._sequence = sequence
        self._batch = batch
        self._seed = seed
        self._per_block = shards.block_tokens // sequence
        self._units: deque[Unit] = deque()
        self._finished: dict[Key, int] = {}
        self.batches = 0

    @property
    def unread(self) -> float:
        """Return the share of each block that is not trained on, behind its last whole window."""
        return 1.0 - self._per_block * self._sequence / self._shards.block_tokens

    @property
    def blocks(self) -> int:
        """Return how many blocks the text has."""
        return self._shards.blocks

    def grant(self, epoch: int, start: int, stop: int, *, read: int = 0, of: int = 0) -> None:
        """Add positions `start <= i < stop` of `epoch`, of which `read` of `of` windows (0: none) were read before.

        Raises:
            DataError: the text has no such positions; nothing is added.
        """
        if not 0 <= start < stop <= self.blocks:
            raise DataError("the text has no such blocks", got=f"{start} to {stop}", allowed=f"0 to {self.blocks}")
        key, windows = (epoch, start, stop), (stop - start) * self._per_block
        if any(unit.key == key for unit in self._units):
            return
        self._finished.pop(key, None)
        order = mix_order(windows, (self._seed, epoch, start, stop))
        self._units.append(Unit(key, order, read * windows // of if of else 0))

    def drop(self, key: Key) -> None:
        """Read no further in a unit that is no longer ours."""
        self._units = deque(unit for unit in self._units if unit.key != key)
        self._finished.pop(key, None)

    def progress(self) -> dict[Key, tuple[int, int]]:
        """Return (windows read, windows) of every unit that was granted and neither dropped nor forgotten."""
        reading = {unit.key: (unit.read, len(unit.order)) for unit in self._units}
        return {**{key: (windows, windows) for key, windows in self._finished.items()}, **reading}

    def forget(self, held: frozenset[Key]) -> None:
        """Drop what is read to its end and struck from the ledger."""
        self._finished = {key: windows for key, windows in self._finished.items() if key in held}

    def ready(self) -> bool:
        """Return whether a whole batch can be read."""
        return self._left() >= self._batch

    def needs_more(self) -> bool:
        """Return whether it is time to ask for the next grant."""
        return self._left() < AHEAD_BATCHES * self._batch

    def next(self) -> npt.NDArray[np.int32]:
        """Return the next batch; `ready` must hold."""
        if not self.ready():
            raise ProtocolMisuse("a batch was asked for that is not granted yet")
        self.batches += 1
        return np.stack([self._draw() for _ in range(self._batch)])

    def _left(self) -> int:
        return sum(len(unit.order) - unit.read for unit in self._units)

    def _draw(self) -> npt.NDArray[np.int32]:
        while self._units[0].read == len(self._units[0].order):
            self._finish()
        unit = self._units[0]
        if not 0 <= unit.read - unit.begin < len(unit.places):
            unit.begin, unit.places = unit.read, self._looked_up(unit)
        block, at = unit.places[unit.read - unit.begin]
        unit.read += 1
        if unit.read == len(unit.order):
            self._finish()
        return self._shards.window(int(block), int(at), self._sequence + 1)

    def _looked_up(self, unit: Unit) -> npt.NDArray[np.int64]:
        epoch, start, _ = unit.key
        positions, numbers = np.divmod(unit.order[unit.read : unit.read + LOOKED_UP], self._per_block)
        turned = (start + positions + numbers * self.blocks // self._per_block) % self.blocks
        blocks = self._shards.blocks_at(self._seed, epoch, turned)
        return np.stack([blocks, numbers * self._sequence], axis=1)

    def _finish(self) -> None:
        unit = self._units.popleft()
        self._finished[unit.key] = len(unit.order)


log = get(__name__)

LOOK_S = 0.2
RESUME_S = 30.0
ALONE_S = 10.0
"""So long a learner waits for leased text before it chooses some itself."""
NEWCOMER_ALONE_S = 60.0
"""The same for one that has read nothing yet: at a run's beginning all ask at once, and the first answers take longest."""
OWN_EPOCHS = 1 << 32
"""No run reads its data so often: from here on epochs are those of learners that choose for themselves."""


Pending = Future[DataGrant] | asyncio.Future[DataGrant]
"""A requested grant."""


class Supply:
    """The leased and unread data as int32 batches of shape (batch, sequence + 1). Never waits.

    `call` starts a coroutine of the leases and returns its future.
    """

    def __init__(
        self,
        leases: DataLeases,
        call: Callable[[Coroutine[Any, Any, DataGrant]], Pending],
        reader: BatchReader,
        lease_blocks: int,
    ) -> None:
        self._leases = leases
        self._call = call
        self._reader = reader
        self._lease_blocks = lease_blocks
        self.pending: Pending | None = None
        self._failures = 0  # of requests, since the last that succeeded
        self._alone_since_s: float | None = (
            None  # since when nothing could be leased, once we have chosen for ourselves
        )

    def poll(self) -> npt.NDArray[np.int32] | None:
        """Return the next batch, or None when nothing leased is left; the next lease is asked for before that."""
        self._collect()
        if not self._reader.ready():
            return None
        batch = self._reader.next()
        self.publish()
        if self._reader.needs_more():
            self.want()
        return batch

    def want(self) -> None:
        """Ask for a lease unless one is on its way."""
        if self.pending is None:
            self.publish()
            self.pending = self._call(self._take_lease())

    async def _take_lease(self) -> DataGrant:
        if self._failures:
            await asyncio.sleep(pause_s(self._failures, RETRY_S, RETRY_S_MAX))
        return await self._leases.take(self._lease_blocks)

    def publish(self) -> None:
        """Tell the ledger's side how far we are, and stop reading what is lost."""
        for key in self._leases.lost & self._reader.progress().keys():
            self._reader.drop(key)
        self._reader.forget(self._leases.mine)
        self._leases.progress = self._reader.progress()

    def _collect(self) -> None:
        """Take the pending lease over when it is here; one that failed is asked for again when it is needed."""
        if self.pending is None or not self.pending.done():
            return
        pending, self.pending = self.pending, None
        try:
            grant = pending.result()
        except DataError:
            raise  # trying again cannot heal it
        except (AtollError, CancelledError) as error:
            self._failures += 1
            log.warning("data.no_lease", failures=self._failures, reason=str(error))
        else:
            self._failures, self._alone_since_s = 0, None
            self._grant(grant)

    def _grant(self, grant: DataGrant) -> None:
        self._reader.grant(grant.epoch, grant.start, grant.stop, read=grant.read, of=grant.of)


class LeasedFeed(Supply):
    """A supply for a training thread of `island`, which may wait."""

    pending: Future[DataGrant] | None

    def __init__(self, island: IslandHandle, reader: BatchReader, lease_blocks: int, cursor: Progress) -> None:
        """Take over what a checkpoint's `cursor` names, or ask for the first lease; it arrives while the model compiles."""
        super().__init__(island.session.leases, island.call, reader, lease_blocks)
        self._island = island
        self._own_units = 0
        if cursor:
            self._resume(cursor)
        if self._reader.needs_more():
            self.want()

    def next(self, give_up: Callable[[], bool]) -> npt.NDArray[np.int32] | None:
        """Return the next batch, or None once nothing leased is left and `give_up` says so; else block until there is.

        A learner that gets nothing more for `ALONE_S`, or nothing at all for `NEWCOMER_ALONE_S`, chooses a unit itself. In a
        long outage it waits so only once: until something is leased again, it chooses the next unit after one look.
        """
        began_s = time.monotonic() if self._alone_since_s is None else self._alone_since_s
        while (batch := self.poll()) is None:
            if give_up():
                return None
            self.want()
            wait([self.pending] if self.pending else [], LOOK_S)
            if time.monotonic() - began_s > (ALONE_S if self._reader.batches else NEWCOMER_ALONE_S):
                self._alone_since_s = began_s
                self._choose(time.monotonic() - began_s)
        return batch

    def _choose(self, alone_s: float) -> None:
        """Take a unit of our own choice, the same after the same number of others for this incarnation alone."""
        member = self._island.session.member
        key = hashlib.blake2b(
            f"{member.learner}/{member.incarnation}/{self._own_units}".encode(), digest_size=4
        ).digest()
        self._own_units += 1
        blocks = min(self._lease_blocks, self._reader.blocks)
        self._reader.grant(OWN_EPOCHS + int.from_bytes(key), 0, blocks)
        log.warning(
            "data.chosen",
            units=self._own_units,
            blocks=blocks,
            reason=f"nothing could be leased for {alone_s:.0f} s; others may read the same",
        )

    @property
    def cursor(self) -> Progress:
        """Return how far each unit in hand is read, for a checkpoint."""
        return self._reader.progress()

    def close(self, within_s: float) -> bool:
        """Return what was leased and not read; say whether the ledger knows it."""
        deadline_s = time.monotonic() + within_s
        if self.pending is not None:
            wait([self.pending], within_s)
            self.pending.cancel()
            self._collect()
        self.publish()
        giving = self._island.call(self._leases.give_back())
        try:
            giving.result(max(0.0, deadline_s - time.monotonic()))
        except (AtollError, TimeoutError) as error:
            giving.cancel()
            log.warning("data.not_returned", units=len(self._leases.mine), reason=str(error) or "no answer in time")
            return False
        return True

    def _resume(self, cursor: Progress) -> None:
        resuming = self._island.call(self._leases.resume(cursor))
        try:
            inherited = resuming.result(RESUME_S)
        except (AtollError, TimeoutError) as error:
            # If it has come through all the same, the first lease brings what it took over.
            resuming.cancel()
            log.warning("data.not_resumed", reason=str(error) or "no answer in time")
            return
        for grant in inherited:
            self._grant(grant)
        log.info("data.resumed", units=len(inherited), of=len(cursor))
