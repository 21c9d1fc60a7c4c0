"""Text of several kinds mixed by weight: `atoll data mix`, and the order in which such a mixture is read.

A mixture is a folder of token shards whose parts stay apart. An epoch has as many positions as its parts have blocks. Each
part gets its weight's share of them, to the block, and the epoch's permutation spreads them. A part is read in epochs of its
own: one that gets fewer positions than it has blocks goes on in the next epoch where it stopped, one that gets more begins
again in another order. Which block stands at a position is a pure function of seed, epoch and position, so leases, resuming
and other learners need to know nothing of it. Held-out text is mixed in the same shares, as far as the part with the least
goes.
"""

from __future__ import annotations

import hashlib
import math
import os
import shutil
from collections.abc import Sequence
from pathlib import Path

import msgspec

from atoll.base.errors import DataError, SettingsError
from atoll.base.files import read_file
from atoll_learner.data.prepare import MIN_HELD_OUT, Meta, MixturePart, replace_folder, work_folder
from atoll_learner.data.shards import TokenShards
from atoll_learner.data.tokenizer import BPE_FILE, TOKENIZER_BYTES_MAX

SAME = ("vocab", "block_tokens", "tokenizer", "separator")
"""Properties that all parts must share."""
Weights = dict[Path, float]
"""By folder."""


def weights_of(texts: Sequence[str]) -> Weights:
    """Return the weights of `folder=weight` texts.

    Raises:
        SettingsError: a text is no such pair, a weight is not above 0, or a folder is named twice.
    """
    found: Weights = {}
    for text in texts:
        path, equals, number = text.rpartition("=")
        try:
            weight = float(number) if equals else math.nan
        except ValueError:
            weight = math.nan
        if not (path and 0.0 < weight < math.inf) or Path(path) in found:
            raise SettingsError(
                "not a part of a mixture",
                got=text,
                allowed="folder=weight, above 0, each folder once",
                todo="see --help",
            )
        found[Path(path)] = weight
    if len(found) < 2:
        raise SettingsError("a mixture has at least two parts", got=len(found), todo="name more folders")
    return found


def mix(weights: Weights, out: Path) -> Meta:
    """Write the mixture of some folders of token shards to the folder `out` and return its description.

    Files are linked where the file system can do so, and copied elsewhere.

    Raises:
        DataError: a folder has no token shards, or they were not made with the same tokenizer and blocks.
        SettingsError: `out` holds what is not ours to replace, or is a part; or the weights have no sum.
        StorageFull: the disk is full; nothing is left behind.
    """
    if out.resolve() in {folder.resolve() for folder in weights}:
        raise SettingsError("a mixture cannot replace one of its parts", got=out, todo="use another --out")
    total = sum(weights.values())
    if not math.isfinite(total):
        got = ", ".join(f"{weight:g}" for weight in weights.values())
        raise SettingsError(
            "these weights have no sum", got=got, allowed="numbers such as 3 and 1", todo="use smaller ones"
        )
    shards = {folder: TokenShards(folder) for folder in weights}
    if nested := [folder for folder, each in shards.items() if each.meta.parts]:
        raise DataError("a mixture is no part of another", got=nested[0], todo="name its parts, with their weights")
    _check_same(shards)
    shares = [weight / total for weight in weights.values()]
    meta = _described(list(shards.values()), shares)
    with work_folder(out) as work:
        for number, folder in enumerate(shards):
            for name in ("train", "held_out"):
                _link(folder / f"{name}.bin", work / f"{name}-{number}.bin")
        if meta.tokenizer == "bpe":
            _link(next(iter(shards)) / BPE_FILE, work / BPE_FILE)
        (work / "meta.json").write_bytes(msgspec.json.format(msgspec.json.encode(meta)))
        replace_folder(work, out)
    return meta


def _described(shards: list[TokenShards], shares: list[float]) -> Meta:
    metas = [each.meta for each in shards]
    positions = apportioned(sum(each.blocks for each in shards), shares)
    # The largest held-out text in these shares.
    most = min(meta.validation_tokens / share for meta, share in zip(metas, shares, strict=True))
    held_out = [math.floor(most * share + 1e-9) for share in shares]
    if min(held_out) < MIN_HELD_OUT:
        raise DataError("a part has too little held-out text for its weight", got=held_out, todo="prepare more of it")
    content = hashlib.sha256()
    for meta, count in zip(metas, positions, strict=True):
        content.update(f"{meta.fingerprint} {count} ".encode())
    return Meta(
        vocab=metas[0].vocab,
        dtype=metas[0].dtype,
        block_tokens=metas[0].block_tokens,
        train_tokens=sum(positions) * metas[0].block_tokens,
        validation_tokens=sum(held_out),
        validation_bytes=round(
            sum(h * m.validation_bytes / m.validation_tokens for h, m in zip(held_out, metas, strict=True))
        ),
        documents=sum(meta.documents for meta in metas),
        empty=sum(meta.empty for meta in metas),
        source=hashlib.sha256(" ".join(meta.source for meta in metas).encode()).hexdigest(),
        fingerprint=content.hexdigest()[:32],
        tokenizer=metas[0].tokenizer,
        separator=metas[0].separator,
        parts=tuple(
            MixturePart(
                train_tokens=meta.train_tokens,
                validation_tokens=meta.validation_tokens,
                held_out=held,
                blocks=each.blocks,
                positions=count,
                fingerprint=meta.fingerprint,
            )
            for each, meta, count, held in zip(shards, metas, positions, held_out, strict=True)
        ),
    )


def apportioned(seats: int, shares: Sequence[float]) -> list[int]:
    """Return whole numbers that sum to `seats` and are within one of `shares` of it; a part has one at least."""
    exact = [share * seats for share in shares]
    found = [math.floor(each) for each in exact]
    by_rest = sorted(range(len(shares)), key=lambda i: (found[i] - exact[i], i))
    for i in by_rest[: seats - sum(found)]:
        found[i] += 1
    for i in range(len(found)):
        if not found[i]:
            found[found.index(max(found))] -= 1
            found[i] = 1
    return found


def _check_same(shards: dict[Path, TokenShards]) -> None:
    first, *others = shards.items()
    for folder, each in others:
        for name in SAME:
            one, other = getattr(first[1].meta, name), getattr(each.meta, name)
            if one != other:
                todo = "prepare them with the same --tokenizer and --block-tokens"
                raise DataError(
                    "these parts do not go together",
                    got=f"{name} = {other} in {folder}",
                    allowed=f"{one} as in {first[0]}",
                    todo=todo,
                )
        if each.meta.tokenizer == "bpe" and _vocabulary(folder) != _vocabulary(first[0]):
            raise DataError(
                "these parts were made with different vocabularies",
                got=folder / BPE_FILE,
                allowed=first[0] / BPE_FILE,
                todo="prepare them with the same --tokenizer",
            )


def _vocabulary(folder: Path) -> bytes:
    file = folder / BPE_FILE
    try:
        return read_file(file, TOKENIZER_BYTES_MAX)
    except OSError as error:
        raise DataError(
            "this vocabulary cannot be read", got=f"{file}: {error.strerror}", todo="prepare this part again"
        ) from error


def _link(source: Path, target: Path) -> None:
    try:
        os.link(source.resolve(), target)
    except OSError:
        shutil.copyfile(source, target)
