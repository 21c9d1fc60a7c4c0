"""Token shards from documents: `train.bin`, `held_out.bin`, `meta.json`, written whole or not at all.

Held-out text is split off by whole documents, chosen by a keyed hash of each document's content, so the split does not
depend on the order of files and no document is on both sides. Where chance holds nothing out, as of a small corpus, it is the
document of the least hash. Training documents keep their order here: the order of training belongs to the epoch permutation.
The fingerprint covers every token and the tokenizer: two machines with the same fingerprint have the same data.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Final, Literal

import msgspec
import numpy as np

from atoll.base.errors import DataError, SettingsError, StorageFull, is_full
from atoll.base.quantities import Count
from atoll.base.wording import counted
from atoll_learner.data.sources import PLAIN, Reading, documents_of, part_bytes
from atoll_learner.data.tokenizer import (
    BPE_FILE,
    SEPARATOR,
    BpeTokenizer,
    ByteTokenizer,
    Tokenizer,
    Vocabulary,
    train_bpe,
)

BPE_SAMPLE_BYTES = 8 << 20
MIN_HELD_OUT = 2
SEEDS: Final = 1 << 64
"""Seeds are below this."""
Dtype = Literal["uint8", "uint16", "uint32"]
DTYPES: Final[dict[int, Dtype]] = {1 << 8: "uint8", 1 << 16: "uint16", 1 << 32: "uint32"}
"""The narrowest type for tokens of a vocabulary, by the largest vocabulary that it holds."""
OURS = re.compile(rf"(train|held_out)(-\d+)?\.bin|meta\.json|{re.escape(BPE_FILE)}")


class MixturePart(msgspec.Struct, frozen=True, kw_only=True):
    """One part of a mixture: what its files hold, and what of it an epoch and a measurement take.

    `positions` are an epoch's blocks of this part, `held_out` the tokens of its held-out text that count.
    """

    train_tokens: Count
    validation_tokens: Count
    held_out: Annotated[int, msgspec.Meta(ge=1)]
    blocks: Annotated[int, msgspec.Meta(ge=1)]
    positions: Annotated[int, msgspec.Meta(ge=1)]
    fingerprint: str


class Meta(msgspec.Struct, frozen=True, kw_only=True):
    """Contents of the shards; `source` is a hash of the documents, `fingerprint` one of tokens and tokenizer.

    `empty` counts texts that were left out, because there was nothing in them.

    Of a mixture both are of its parts, and held-out tokens and bytes are what is measured.
    """

    vocab: Annotated[int, msgspec.Meta(ge=1)]
    dtype: Dtype
    block_tokens: Annotated[int, msgspec.Meta(ge=1)]
    train_tokens: Count
    validation_tokens: Count
    validation_bytes: Count
    documents: Count
    empty: Count = 0
    source: str
    fingerprint: str
    tokenizer: str
    separator: str = SEPARATOR
    parts: tuple[MixturePart, ...] = ()
    schema: int = 1

    @property
    def tokens(self) -> int:
        """Return the training tokens."""
        return self.train_tokens

    def fault(self) -> str:
        """Return why nothing that we write has this description, or the empty string."""
        if self.train_tokens < self.block_tokens:
            return f"{self.train_tokens} training tokens are no block of {self.block_tokens}"
        if self.validation_tokens < MIN_HELD_OUT:
            return f"{self.validation_tokens} held-out tokens"
        if not self.parts:
            return ""
        for number, part in enumerate(self.parts):
            if part.blocks != part.train_tokens // self.block_tokens or part.held_out > part.validation_tokens:
                return f"part {number} says more or less than it has"
        whole = (self.train_tokens // self.block_tokens, self.validation_tokens)
        parts = (sum(part.positions for part in self.parts), sum(part.held_out for part in self.parts))
        return (
            ""
            if parts == whole
            else f"parts of {parts[0]} blocks and {parts[1]} held-out tokens, in all {whole[0]} and {whole[1]}"
        )


def prepare(  # noqa: PLR0913  (one per choice; all but two have defaults)
    files: list[Path],
    out: Path,
    *,
    vocabulary: int | Vocabulary = 0,
    validation: float = 0.05,
    block_tokens: int = 2_048,
    seed: int = 0,
    reading: Reading = PLAIN,
    progress: Callable[[Iterable[Path]], Iterable[Path]] = lambda files: files,
) -> Meta:
    """Write the token shards of `files` to the folder `out` and return their description.

    `vocabulary` is one that somebody has, or the size of one that is trained on the text; 0 for bytes.

    Raises:
        SettingsError: a choice is out of range, or `out` holds what is not ours to replace.
        DataError: a document is not text, all are empty, or there is too little text for one block and some of it held out.
        StorageFull: the disk is full; nothing is left behind.
    """
    _check_choices(validation, block_tokens, seed)
    with work_folder(out) as work:
        reading = replace(reading, part_bytes=part_bytes(files))
        if not any(documents_of(files, reading)):
            raise DataError(
                "this text is empty", got=", ".join(map(str, files[:3])), todo="name texts with words in them"
            )
        tokenizer = _tokenizer(files, vocabulary, work, reading)
        split = Split(validation, seed)
        meta = _write(files, work, tokenizer, split, block_tokens, reading, progress)
        if meta.validation_tokens < 1 and meta.documents > 1:
            meta = _write(files, work, tokenizer, split.with_least(), block_tokens, reading, progress)
        if meta.train_tokens < block_tokens or meta.validation_tokens < MIN_HELD_OUT:
            raise DataError(
                "there is too little text",
                got=f"{meta.documents} documents, {meta.train_tokens} training and {meta.validation_tokens} held-out tokens",
                allowed=f"at least {block_tokens} training tokens (one block) and some held-out text",
                todo="add text, lower --block-tokens or raise --validation",
            )
        replace_folder(work, out)
    return meta


def describe(meta: Meta, folder: Path) -> str:
    """Return token shards in one line."""
    blocks = sum(part.positions for part in meta.parts)
    shares = [f"{part.positions / blocks:.1%} of {part.fingerprint[:8]}" for part in meta.parts]
    mixed = f"{' and '.join(shares)}: " if shares else ""
    left_out = f" ({counted(meta.empty, 'more is', 'more are')} empty)" if meta.empty else ""
    return (
        f"{mixed}{counted(meta.documents, 'document')}{left_out}: {meta.train_tokens} training "
        f"and {meta.validation_tokens} held-out tokens, vocabulary {meta.vocab}, fingerprint {meta.fingerprint}, in {folder}"
    )


def _check_choices(validation: float, block_tokens: int, seed: int) -> None:
    if not 0.0 < validation < 1.0:
        raise SettingsError("the held-out share is out of range", got=validation, allowed="above 0, below 1")
    if not 256 <= block_tokens <= 1 << 26:
        raise SettingsError("block_tokens is out of range", got=block_tokens, allowed="256..67108864")
    if not 0 <= seed < SEEDS:
        raise SettingsError("the seed is out of range", got=seed, allowed="0 to 2^64 - 1", todo="use another --seed")


@contextmanager
def work_folder(out: Path) -> Iterator[Path]:
    """Yield a folder beside `out` that is gone afterwards; raise what the disk says in our words."""
    work: Path | None = None
    try:
        _check_ours(out)
        out.parent.mkdir(parents=True, exist_ok=True)
        work = Path(tempfile.mkdtemp(prefix=f".{out.name}-", dir=out.parent))
        yield work
    except OSError as error:
        if is_full(error):
            raise StorageFull(
                "no room for the token shards", got=str(out), todo="free space or use another --out"
            ) from error
        raise SettingsError(
            "the token shards cannot be written there",
            got=f"{error.filename or out}: {error.strerror}",
            allowed="a folder we may write to",
            todo="correct its permissions or use another --out",
        ) from error
    finally:
        if work is not None:
            shutil.rmtree(work, ignore_errors=True)


@dataclass(slots=True)
class Split:
    """Which documents are held out: those whose keyed hash falls below a share; `least` is the least hash that was seen."""

    share: float
    seed: int
    least: int = 1 << 64
    forced: int = -1

    def holds_out(self, document: bytes) -> bool:
        """Return whether a document is held out."""
        digest = hashlib.blake2b(document, digest_size=8, key=self.seed.to_bytes(8, "big")).digest()
        number = int.from_bytes(digest, "big")
        self.least = min(self.least, number)
        return number < self.share * 2**64 or number == self.forced

    def with_least(self) -> Split:
        """Return a split that also holds out the document of the least hash."""
        return Split(self.share, self.seed, forced=self.least)


def _write(  # noqa: PLR0913, PLR0917  (`prepare` checked them)
    files: list[Path],
    work: Path,
    tokenizer: Tokenizer,
    split: Split,
    block_tokens: int,
    reading: Reading,
    progress: Callable[[Iterable[Path]], Iterable[Path]],
) -> Meta:
    dtype = next(name for most, name in DTYPES.items() if tokenizer.vocab <= most)
    source, content = hashlib.sha256(), hashlib.sha256(f"{tokenizer.vocab}".encode())
    counts = {"train": 0, "held_out": 0}
    number = held_bytes = empty = 0
    with (work / "train.bin").open("wb") as train, (work / "held_out.bin").open("wb") as held_out:
        for document in documents_of(progress(files), reading):
            if not document:
                empty += 1
                continue
            source.update(hashlib.sha256(document).digest())
            kept = split.holds_out(document)
            tokens = np.append(tokenizer.encode(document), tokenizer.separator).astype(dtype)
            (held_out if kept else train).write(tokens.tobytes())
            content.update(b"v" if kept else b"t")
            content.update(tokens.tobytes())
            counts["held_out" if kept else "train"] += len(tokens)
            held_bytes += len(document) + 1 if kept else 0
            number += 1
    meta = Meta(
        vocab=tokenizer.vocab,
        dtype=dtype,
        block_tokens=block_tokens,
        train_tokens=counts["train"],
        validation_tokens=counts["held_out"],
        validation_bytes=held_bytes,
        documents=number,
        empty=empty,
        source=source.hexdigest(),
        fingerprint=content.hexdigest()[:32],
        tokenizer="bpe" if isinstance(tokenizer, BpeTokenizer) else "bytes",
        separator=tokenizer.separator_name if isinstance(tokenizer, BpeTokenizer) else SEPARATOR,
    )
    (work / "meta.json").write_bytes(msgspec.json.format(msgspec.json.encode(meta)))
    return meta


def _tokenizer(files: list[Path], vocabulary: int | Vocabulary, work: Path, reading: Reading) -> Tokenizer:
    if isinstance(vocabulary, Vocabulary):
        tokenizer = BpeTokenizer(vocabulary.file, vocabulary.separator)
        shutil.copyfile(vocabulary.file, work / BPE_FILE)
        return tokenizer
    if not vocabulary:
        return ByteTokenizer()

    def texts() -> Iterable[str]:
        taken = 0
        for document in documents_of(files, reading):
            yield document.decode("utf-8")
            taken += len(document)
            if taken > BPE_SAMPLE_BYTES:
                return

    return train_bpe(texts(), vocabulary, work / BPE_FILE)


def _check_ours(out: Path) -> None:
    if not out.is_symlink() and (
        not out.exists() or (out.is_dir() and all(OURS.fullmatch(entry.name) for entry in out.iterdir()))
    ):
        return
    raise SettingsError(
        "--out holds something else",
        got=out,
        allowed="a new or empty folder, or one with token shards, which are replaced",
        todo="name another folder",
    )


def replace_folder(work: Path, out: Path) -> None:
    """Put the finished folder in its place; what was there before goes."""
    for file in work.iterdir():
        with file.open("rb") as handle:
            os.fsync(handle.fileno())
    old = out.with_name(f".{out.name}-old")
    shutil.rmtree(old, ignore_errors=True)
    if out.exists():
        out.rename(old)
    work.rename(out)
    shutil.rmtree(old, ignore_errors=True)
