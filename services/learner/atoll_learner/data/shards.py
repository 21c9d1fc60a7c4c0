"""Token shards as a reader sees them: blocks, held-out text, and the order of an epoch.

An epoch visits every block once, in an order that is a pure function of (seed, epoch): `permute`. Any position can be
looked up at once, on any learner, without storing or shuffling anything. A mixture (`mixture`) maps the positions of its epoch
to blocks of its parts.

Files are mapped into memory. Windows are read from all over them, and around each place Linux would read half a megabyte more:
good for a text that will be in memory soon, and a hundred times too much for one that never fits. Such a text is read where it
is asked for alone.
"""

from __future__ import annotations

import math
import mmap
import os
from pathlib import Path
from typing import Final

import msgspec
import numpy as np
import numpy.typing as npt

from atoll.base.errors import DataError, SettingsError
from atoll.base.files import TEXT_BYTES_MAX, opened_file, read_file
from atoll.base.parsing import parsed
from atoll_learner.data.prepare import Meta
from atoll_learner.data.tokenizer import BPE_FILE, BpeTokenizer, ByteTokenizer, Tokenizer

ROUNDS: Final = 4
"""Of the Feistel network that permutes an epoch."""


class TokenShards:
    """The prepared folder `folder`, memory-mapped."""

    def __init__(self, folder: Path) -> None:
        """Open and check the files.

        Raises:
            DataError: the folder is not prepared, or files and description do not go together.
        """
        self.folder = folder
        try:
            self.meta = parsed(read_file(folder / "meta.json", TEXT_BYTES_MAX), Meta)
        except (FileNotFoundError, NotADirectoryError) as error:
            raise DataError(
                "no token shards here", got=str(folder), todo="run `atoll data prepare … --out` for it, or set data.dir"
            ) from error
        except OSError as error:
            got = f"{folder}: {error.strerror}"
            raise DataError("meta.json cannot be read", got=got, todo="prepare the data again") from error
        except msgspec.MsgspecError as error:
            raise DataError("meta.json is damaged", got=f"{folder}: {error}", todo="prepare the data again") from error
        if fault := self.meta.fault():
            raise DataError("meta.json is damaged", got=f"{folder}: {fault}", todo="prepare the data again")
        if not self.meta.parts:
            self._train = [self._open("train.bin", self.meta.train_tokens)]
            self._held_out = [self._open("held_out.bin", self.meta.validation_tokens)]
        else:
            self._train = [self._open(f"train-{i}.bin", part.train_tokens) for i, part in enumerate(self.meta.parts)]
            self._held_out = [
                self._open(f"held_out-{i}.bin", part.validation_tokens) for i, part in enumerate(self.meta.parts)
            ]

    def _open(self, name: str, tokens: int) -> npt.NDArray[np.integer]:
        file = self.folder / name
        wanted = tokens * np.dtype(self.meta.dtype).itemsize
        try:
            with opened_file(file) as opened:
                size = os.fstat(opened.fileno()).st_size
        except FileNotFoundError:
            size = 0
        except OSError as error:
            raise DataError(f"{name} cannot be read", got=f"{file}: {error.strerror}", todo="prepare again") from error
        if size != wanted:
            raise DataError(
                f"{name} is not what meta.json says",
                got=f"{size} bytes",
                allowed=f"{wanted} bytes",
                todo="prepare again",
            )
        return mapped(file, self.meta.dtype, is_scattered=size > memory_bytes() // 2)

    @property
    def blocks(self) -> int:
        """Return how many whole blocks there are; a shorter rest is not trained on."""
        return self.meta.train_tokens // self.meta.block_tokens

    @property
    def block_tokens(self) -> int:
        """Return the tokens of one block."""
        return self.meta.block_tokens

    def check_measurable(self, sequence: int) -> None:
        """Raise `DataError` if a model with this `sequence` cannot be measured on the held-out text."""
        if self.meta.validation_tokens <= sequence:
            raise DataError(
                "there is too little held-out text",
                got=f"{self.meta.validation_tokens} tokens",
                allowed=f"at least {sequence + 1}",
                todo="shorten train.sequence, prepare more text, or a larger --validation share",
            )

    def check_trainable(self, sequence: int) -> None:
        """Raise `SettingsError` if no window of this `sequence` fits into a block."""
        if self.block_tokens < sequence:
            raise SettingsError(
                "train.sequence does not fit into a block",
                got=sequence,
                allowed=f"at most {self.block_tokens} (block_tokens of the data)",
                todo="shorten the sequence or prepare larger blocks (--block-tokens)",
            )

    def window(self, block: int, at: int, tokens: int) -> npt.NDArray[np.int32]:
        """Return `tokens` tokens from place `at` of a block, int32 (tokens,); the blocks of a mixture's parts are counted on.

        A window may go on behind its block: what it is to predict last is the next block's first token. Behind the last token
        of the text comes its first.
        """
        part = 0
        while self.meta.parts and block >= self.meta.parts[part].blocks:
            block -= self.meta.parts[part].blocks
            part += 1
        text = self._train[part]
        start = block * self.meta.block_tokens + at
        found = np.asarray(text[start : start + tokens], dtype=np.int32)
        return found if len(found) == tokens else np.concatenate([found, text[: tokens - len(found)]], dtype=np.int32)

    def validation(self, tokens_max: int) -> npt.NDArray[np.int32]:
        """Return the first `tokens_max` held-out tokens as int32; of a mixture the first of each part, in its shares."""
        if not self.meta.parts:
            return np.asarray(self._held_out[0][:tokens_max], dtype=np.int32)
        share = min(1.0, tokens_max / self.meta.validation_tokens)
        taken = [math.floor(share * part.held_out) for part in self.meta.parts]
        return np.concatenate(
            [tokens[:count] for tokens, count in zip(self._held_out, taken, strict=True)],
            dtype=np.int32,
            casting="unsafe",
        )

    def blocks_at(self, seed: int, epoch: int, positions: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Return which blocks stand at `positions` in the order of `epoch`; both int64 (n,)."""
        places = permute(positions, self.blocks, seed, epoch)
        if not self.meta.parts:
            return places
        found = np.zeros_like(places)
        first_place = first_block = 0
        for part in self.meta.parts:
            of_part = (first_place <= places) & (places < first_place + part.positions)
            # How often this part was drawn from, in all epochs until here, says where it is in its own epochs.
            own_epoch, begun = divmod(epoch * part.positions % (1 << 62), part.blocks)
            further, own_positions = np.divmod(begun + places[of_part] - first_place, part.blocks)
            found[of_part] = first_block + permute(own_positions, part.blocks, seed, own_epoch + further)
            first_place += part.positions
            first_block += part.blocks
        return found

    def tokenizer(self) -> Tokenizer:
        """Return the tokenizer the shards were made with."""
        return (
            BpeTokenizer(self.folder / BPE_FILE, self.meta.separator)
            if self.meta.tokenizer == "bpe"
            else ByteTokenizer()
        )


def memory_bytes() -> int:
    """Return how much memory this machine has."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def mapped(file: Path, dtype: str, *, is_scattered: bool) -> npt.NDArray[np.integer]:
    """Return a file as a read-only array; `is_scattered` says that nothing around what is read will be wanted soon."""
    with opened_file(file) as opened:
        memory = mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ)
    if is_scattered:
        memory.madvise(mmap.MADV_RANDOM)
    return np.frombuffer(memory, dtype=np.dtype(dtype))


def permute(
    positions: npt.NDArray[np.int64], count: int, seed: int, epochs: npt.NDArray[np.int64] | int
) -> npt.NDArray[np.int64]:
    """Return the images of `positions`, int64 (n,), under the bijection of `range(count)` of the seed and each one's epoch.

    Every machine and version finds the same, of any size and without a table: a Feistel network over the smallest even-width
    power of two, walked until it lands in range (Black and Rogaway, 2002), on SplitMix64 (Steele, Lea and Flood, 2014). In
    arithmetic of arrays: a learner that reads many short windows looks up thousands of places a second, beside its training.

    Raises:
        DataError: a position is not below `count`.
    """
    if positions.size and not 0 <= int(positions.min()) <= int(positions.max()) < count:
        got = f"{positions.min()} to {positions.max()}"
        raise DataError("no such position in an epoch", got=got, allowed=f"0 to {count - 1}")
    half = np.uint64(max(1, ((count - 1).bit_length() + 1) // 2))
    mask = (np.uint64(1) << half) - np.uint64(1)
    values = positions.astype(np.uint64)
    key = _keyed(_hash_of(seed), np.asarray(epochs))
    keys = [np.broadcast_to(_keyed(key, np.asarray(number)), values.shape) for number in range(ROUNDS)]
    outside = np.ones(values.shape, dtype=bool)
    while outside.any():
        left, right = values[outside] >> half, values[outside] & mask
        for each in keys:
            left, right = right, left ^ (_scrambled(each[outside] ^ right) & mask)
        values[outside] = (left << half) | right
        outside = values >= count
    return values.astype(np.int64)


def mix_order(count: int, key: tuple[int, ...]) -> npt.NDArray[np.int64]:
    """Return the numbers below `count`, int64 (count,), in the order of their hashes under `key`: a table, so it is for few."""
    return np.argsort(_scrambled(np.arange(count, dtype=np.uint64) ^ _hash_of(*key)), kind="stable")


def _hash_of(*parts: int) -> npt.NDArray[np.uint64]:
    state = np.zeros(1, dtype=np.uint64)
    for part in parts:
        state = _keyed(state, np.asarray(part, dtype=np.uint64))
    return state


def _keyed(state: npt.NDArray[np.uint64], part: npt.NDArray[np.integer]) -> npt.NDArray[np.uint64]:
    return _scrambled(state ^ part.astype(np.uint64))


def _scrambled(values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Return SplitMix64 of uint64 values, elementwise; arithmetic wraps."""
    values = values + np.uint64(0x9E3779B97F4A7C15)
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))
