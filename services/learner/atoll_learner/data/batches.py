"""Batches from granted units of blocks, mixed, with an exact cursor.

A unit is a range of positions of an epoch. Its blocks are cut into windows of `sequence + 1` tokens that overlap by one
(the last target of a window is the first input of the next); what is left of a block after its last whole window is not
trained on. The windows of a unit are read in one fixed order that mixes all its blocks, a function of the seed and the
unit: neighbouring windows come from one document, and a batch of eight pieces of one document teaches little more than
one of them. So `data.lease_blocks` is also how widely text is mixed.

Because the order is fixed, "window 37 of this unit" is the whole cursor. Whoever reads on, this process after a restart
or another learner that was granted the rest, goes on with window 38. A learner with another `train.sequence` cuts other
windows; it goes on at the same share of the unit.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from atoll.base.errors import ProtocolMisuse, SettingsError
from atoll.protocol.data import Key
from atoll_learner.data.shards import TokenShards

AHEAD_BATCHES = 8


@dataclass(slots=True)
class Unit:
    """A granted range: the order of its windows, int64 (windows,), how many are read, and the blocks met so far."""

    key: Key
    order: npt.NDArray[np.int64]
    read: int
    blocks: dict[int, int] = field(default_factory=dict)


class BatchReader:
    """Yields int32 batches of shape (batch, sequence + 1) from what it was granted, unit after unit."""

    def __init__(self, shards: TokenShards, sequence: int, batch: int, seed: int) -> None:
        """Start with nothing granted."""
        if shards.block_tokens <= sequence:
            raise SettingsError(
                "train.sequence does not fit into a block",
                got=sequence,
                allowed=f"below {shards.block_tokens} (block_tokens of the data)",
                todo="shorten the sequence or prepare larger blocks",
            )
        self._shards = shards
        self._sequence = sequence
        self._batch = batch
        self._seed = seed
        self._per_block = (shards.block_tokens - 1) // sequence
        self._units: deque[Unit] = deque()
        self._finished: dict[Key, int] = {}
        self.batches = 0

    @property
    def blocks(self) -> int:
        """Return how many blocks the text has."""
        return self._shards.blocks

    def grant(self, epoch: int, start: int, stop: int, *, read: int = 0, of: int = 0) -> None:
        """Add positions `start <= i < stop` of `epoch`, of which `read` of `of` windows (0: none) were read before."""
        key, windows = (epoch, start, stop), (stop - start) * self._per_block
        if any(unit.key == key for unit in self._units):
            return
        self._finished.pop(key, None)
        order = mixed(windows, (self._seed, epoch, start, stop))
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
        """Return the next window of the first unit that has one."""
        while self._units[0].read == len(self._units[0].order):
            self._finish()
        unit = self._units[0]
        epoch, start, _ = unit.key
        place, window = divmod(int(unit.order[unit.read]), self._per_block)
        unit.read += 1
        at = window * self._sequence
        if place not in unit.blocks:
            unit.blocks[place] = self._shards.block_at(self._seed, epoch, start + place)
        tokens = self._shards.block(unit.blocks[place])
        if unit.read == len(unit.order):
            self._finish()
        return tokens[at : at + self._sequence + 1]

    def _finish(self) -> None:
        unit = self._units.popleft()
        self._finished[unit.key] = len(unit.order)


def mixed(count: int, key: tuple[int, ...]) -> npt.NDArray[np.int64]:
    """Return the numbers below `count` in an order that depends on `key` alone, the same on every machine and version.

    The order of their hashes by SplitMix64 (Steele, Lea and Flood, 2014), keyed by hashing the parts of the key first.
    """
    state = np.zeros(1, dtype=np.uint64)
    for part in key:
        state = _scrambled(state ^ np.uint64(part))
    return np.argsort(_scrambled(np.arange(count, dtype=np.uint64) ^ state), kind="stable")


def _scrambled(values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Return SplitMix64 of uint64 values, elementwise; arithmetic wraps."""
    values = values + np.uint64(0x9E3779B97F4A7C15)
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))
