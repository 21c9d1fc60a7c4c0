"""Token shards as a reader sees them: blocks, held-out text, and the order of an epoch.

An epoch visits every block once, in an order that is a pure function of (seed, epoch): a four-round Feistel network over
the smallest even-width power of two, cycle-walked into range. Any position can be looked up at once, on any learner,
without storing or shuffling anything. A mixture (`mixture`) maps the positions of its epoch to blocks of its parts.
"""

from __future__ import annotations

import hashlib
import math
from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt

from atoll.base.errors import DataError
from atoll.base.parsing import parsed
from atoll_learner.data.prepare import Meta, as_array
from atoll_learner.data.tokenizer import BPE_FILE, BpeTokenizer, ByteTokenizer, Tokenizer

ROUNDS = 4


class TokenShards:
    """The prepared folder `folder`, memory-mapped."""

    def __init__(self, folder: Path) -> None:
        """Open and check the files.

        Raises:
            DataError: the folder is not prepared, or a file is shorter or longer than its description says.
        """
        self.folder = folder
        try:
            self.meta = parsed((folder / "meta.json").read_bytes(), Meta)
        except OSError as error:
            raise DataError(
                "no token shards here", got=str(folder), todo="run `atoll data prepare … --out` for it, or set data.dir"
            ) from error
        except msgspec.MsgspecError as error:
            raise DataError("meta.json is damaged", got=f"{folder}: {error}", todo="prepare the data again") from error
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
        size = file.stat().st_size if file.exists() else 0
        if size != wanted:
            raise DataError(
                f"{name} is not what meta.json says",
                got=f"{size} bytes",
                allowed=f"{wanted} bytes",
                todo="prepare again",
            )
        return as_array(file, self.meta.dtype)

    @property
    def blocks(self) -> int:
        """Return how many whole blocks there are; a shorter rest is not trained on."""
        return self.meta.train_tokens // self.meta.block_tokens

    @property
    def block_tokens(self) -> int:
        """Return the tokens of one block."""
        return self.meta.block_tokens

    def block(self, number: int) -> npt.NDArray[np.int32]:
        """Return block `number` as int32, shape (block_tokens,); the blocks of a mixture's parts are counted on."""
        part = 0
        while self.meta.parts and number >= self.meta.parts[part].blocks:
            number -= self.meta.parts[part].blocks
            part += 1
        start = number * self.meta.block_tokens
        return np.asarray(self._train[part][start : start + self.meta.block_tokens], dtype=np.int32)

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

    def block_at(self, seed: int, epoch: int, position: int) -> int:
        """Return which block stands at `position` in the order of `epoch`."""
        place = permuted(position, self.blocks, seed, epoch)
        before = 0
        for part in self.meta.parts:
            if place < part.positions:
                # How often this part was drawn from, in all epochs until here, says where it is in its own epochs.
                own_epoch, own_position = divmod(epoch * part.positions + place, part.blocks)
                return before + permuted(own_position, part.blocks, seed, own_epoch)
            place -= part.positions
            before += part.blocks
        return place

    def tokenizer(self) -> Tokenizer:
        """Return the tokenizer the shards were made with."""
        return (
            BpeTokenizer(self.folder / BPE_FILE, self.meta.separator)
            if self.meta.tokenizer == "bpe"
            else ByteTokenizer()
        )


def permuted(position: int, count: int, seed: int, epoch: int) -> int:
    """Return the image of `position` under the keyed bijection of `range(count)`."""
    if not 0 <= position < count:
        raise DataError("no such position in an epoch", got=position, allowed=f"0..{count - 1}")
    half = max(1, ((count - 1).bit_length() + 1) // 2)
    value = position
    while True:
        left, right = value >> half, value & ((1 << half) - 1)
        for number in range(ROUNDS):
            key = f"{seed}/{epoch}/{number}/{right}".encode()
            mix = int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "big") & ((1 << half) - 1)
            left, right = right, left ^ mix
        value = (left << half) | right
        if value < count:
            return value
