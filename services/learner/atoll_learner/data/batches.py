"""Batches from granted ranges of block positions, mixed, with an exact cursor.

A grant is a range of positions of an epoch. Blocks are opened in that order and cut into windows of `sequence + 1` tokens
that overlap by one (the last target of a window is the first input of the next); what is left of a block after its last
whole window is not trained on. Windows of some `MIX_BLOCKS` open blocks wait in a pool, from which batches are drawn by
a generator keyed with the seed and the grant: neighbouring windows come from one document, and a batch of eight pieces of
one document teaches little more than one of them. `begun` says how far into a grant reading has gone, which is what a
lease must know; a learner that leaves drops at most the pool.
"""

from __future__ import annotations

from collections import deque

import numpy as np
import numpy.typing as npt

from atoll.errors import ProtocolMisuse, SettingsError
from atoll_learner.data.shards import TokenShards

AHEAD_BATCHES = 8
MIX_BLOCKS = 64


class BatchReader:
    """Yields int32 batches of shape (batch, sequence + 1) from what it was granted."""

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
        self._queue: deque[tuple[int, int, int]] = deque()
        self._begun: dict[tuple[int, int], int] = {}
        self._pool: list[npt.NDArray[np.int32]] = []
        self._random = np.random.default_rng([seed])
        self.batches = 0

    def grant(self, epoch: int, start: int, stop: int) -> None:
        """Add positions `start <= i < stop` of `epoch` to what may be read."""
        self._begun[epoch, start] = start
        self._random = np.random.default_rng([self._seed, epoch, start])
        self._queue.extend((epoch, start, position) for position in range(start, stop))

    def begun(self, epoch: int, start: int) -> int:
        """Return the first position of the grant (epoch, start) that reading has not begun."""
        return self._begun[epoch, start]

    def ready(self) -> bool:
        """Return whether a whole batch can be read."""
        return len(self._pool) + len(self._queue) * self._per_block >= self._batch

    def needs_more(self) -> bool:
        """Return whether it is time to ask for the next grant."""
        return len(self._pool) + len(self._queue) * self._per_block < AHEAD_BATCHES * self._batch

    def next(self) -> npt.NDArray[np.int32]:
        """Return the next batch; `ready` must hold."""
        if not self.ready():
            raise ProtocolMisuse("a batch was asked for that is not granted yet")
        while self._queue and len(self._pool) < max(self._batch, MIX_BLOCKS * self._per_block):
            self._open(*self._queue.popleft())
        self.batches += 1
        return np.stack([self._draw() for _ in range(self._batch)])

    def _open(self, epoch: int, start: int, position: int) -> None:
        """Put the windows of one block into the pool."""
        self._begun[epoch, start] = position + 1
        tokens = self._shards.block(self._shards.block_at(self._seed, epoch, position))
        for at in range(0, self._per_block * self._sequence, self._sequence):
            self._pool.append(tokens[at : at + self._sequence + 1])

    def _draw(self) -> npt.NDArray[np.int32]:
        """Take one window out of the pool; the last one fills its place."""
        chosen = int(self._random.integers(len(self._pool)))
        self._pool[chosen], self._pool[-1] = self._pool[-1], self._pool[chosen]
        return self._pool.pop()
