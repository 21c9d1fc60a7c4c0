"""Batches from granted units of blocks, mixed over the whole text, with an exact cursor.

Every block is cut into windows of `sequence` tokens, each read with one token more, its last target; what is left of a block
after its last whole window is not trained on. A unit is a range of positions of an epoch. It has as many windows of each number
as positions, but from other blocks for each number: window w of position p is that of the block at position

    p + w * blocks / windows per block   (modulo the blocks)

So each window of each block is read once in an epoch, and the windows of a unit are pieces of as many blocks, if the text has
so many. Were they all the windows of its own blocks, a learner would see a few blocks alone for a hundred steps, and learn less
(docs/adr/0062). Learners with another `train.sequence` cut other windows: they read as much of the text, but not exactly what
the others leave.

The windows of a unit are read in one fixed order that mixes them all, a function of the seed and the unit. So "window 37 of
this unit" is the whole cursor. The next reader, this process after a restart or another learner that was granted the rest,
goes on with window 38; with another `train.sequence`, at the same share of the unit.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from atoll.base.errors import DataError, ProtocolMisuse
from atoll.protocol.data import Key
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
        """Return block and first token of the next windows of a unit, int64 (some, 2)."""
        epoch, start, _ = unit.key
        positions, numbers = np.divmod(unit.order[unit.read : unit.read + LOOKED_UP], self._per_block)
        turned = (start + positions + numbers * self.blocks // self._per_block) % self.blocks
        blocks = self._shards.blocks_at(self._seed, epoch, turned)
        return np.stack([blocks, numbers * self._sequence], axis=1)

    def _finish(self) -> None:
        unit = self._units.popleft()
        self._finished[unit.key] = len(unit.order)
