"""From text to batches: sources, preparation, shards, order, reading."""

from __future__ import annotations

import errno
import json
import os
import re
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from atoll.base.errors import DataError, SettingsError, StorageFull
from atoll_learner.data.prepare import describe, prepare
from atoll_learner.data.shards import TokenShards, mix_order, permute
from atoll_learner.data.sources import files_of
from atoll_learner.data.tokenizer import ByteTokenizer
from atoll_learner.feed import BatchReader


def texts(folder: Path, count: int = 40, length: int = 400) -> list[Path]:
    """Write `count` different documents and return their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    for number in range(count):
        (folder / f"{number:03}.txt").write_text(f"document {number}: " + "abc " * length, encoding="utf-8")
    return sorted(folder.iterdir())


def test_every_token_of_every_document_is_in_exactly_one_file(tmp_path: Path) -> None:
    """Training and held-out tokens are the documents and their separators, no more and no less."""
    files = texts(tmp_path / "in")
    meta = prepare(files, tmp_path / "out", validation=0.2, block_tokens=256)

    total = sum(path.stat().st_size + 1 for path in files)
    assert meta.train_tokens + meta.validation_tokens == total
    assert meta.documents == 40
    assert 0 < meta.validation_tokens < total / 2


def test_the_split_and_the_fingerprint_do_not_depend_on_luck(tmp_path: Path) -> None:
    files = texts(tmp_path / "in")
    one = prepare(files, tmp_path / "a", validation=0.2, block_tokens=256)
    same = prepare(files, tmp_path / "b", validation=0.2, block_tokens=256)
    turned = prepare(files[::-1], tmp_path / "c", validation=0.2, block_tokens=256)

    assert one == same
    assert (one.validation_tokens, one.train_tokens) == (turned.validation_tokens, turned.train_tokens)
    assert one.fingerprint != turned.fingerprint


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("empty.txt", b"", "empty"),
        ("blank.txt", b" \n ", "empty"),
        ("binary.txt", b"abc\0def", "binary"),
        ("latin.txt", "für".encode("latin-1"), "UTF-8"),
        ("rows.jsonl", b'{"body": 1}\n', "no document"),
        ("rows.parquet", b"not parquet", "cannot be read"),
    ],
)
def test_what_is_not_text_is_refused_by_name(tmp_path: Path, name: str, content: bytes, said: str) -> None:
    (tmp_path / name).write_bytes(content)

    with pytest.raises(DataError, match=said) as raised:
        prepare([tmp_path / name], tmp_path / "out")

    assert name in str(raised.value)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("vocabulary", [0, 300])
def test_all_files_that_are_no_text_are_named_at_once(tmp_path: Path, vocabulary: int) -> None:
    files = texts(tmp_path / "in")
    for number in range(10):
        (tmp_path / f"in/old-{number}.txt").write_bytes("für".encode("latin-1"))

    with pytest.raises(
        DataError, match=r"UTF-8(.|\n)*old-0(.|\n)*9 more cannot be used.*old-8\.txt and 1 more"
    ) as raised:
        prepare(files_of([tmp_path / "in"]), tmp_path / "out", vocabulary=vocabulary)

    assert "iconv" in str(raised.value)
    assert not any(file.name in str(raised.value) for file in files)


def test_empty_texts_are_left_out_and_counted(tmp_path: Path) -> None:
    """A folder of sources has them, and many a row of a dataset is one; the shards are those of the others."""
    files = texts(tmp_path / "in")
    alone = prepare(files, tmp_path / "alone", validation=0.2, block_tokens=256)
    (tmp_path / "in/__init__.py").touch()
    (tmp_path / "in/blank.txt").write_bytes(b" \n ")
    (tmp_path / "in/rows.jsonl").write_text('{"text": ""}\n{"text": "\\n"}\n', encoding="utf-8")
    pq.write_table(pa.table({"text": ["", None]}), tmp_path / "in/rows.parquet")

    with_empty = prepare(files_of([tmp_path / "in"]), tmp_path / "out", validation=0.2, block_tokens=256)

    assert (with_empty.documents, with_empty.empty, with_empty.fingerprint) == (alone.documents, 6, alone.fingerprint)
    assert "documents (6 more are empty): " in describe(with_empty, tmp_path)
    assert "more" not in describe(alone, Path("folder"))


def test_a_full_disk_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = texts(tmp_path / "in")

    def full(descriptor: int) -> None:
        del descriptor
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(StorageFull):
        prepare(files, tmp_path / "out", validation=0.2, block_tokens=256)

    assert [path.name for path in tmp_path.iterdir()] == ["in"]


def test_a_byte_pair_vocabulary_round_trips(tmp_path: Path) -> None:
    prepare(texts(tmp_path / "in"), tmp_path / "out", vocabulary=320, validation=0.2, block_tokens=256)
    tokenizer = TokenShards(tmp_path / "out").tokenizer()
    text = "document 7: abc abc, ünïcode".encode()

    assert tokenizer.decode(tokenizer.encode(text).tolist()) == text
    assert tokenizer.vocab <= 320
    assert ByteTokenizer().decode(ByteTokenizer().encode(text).tolist()) == text


def test_damaged_shards_are_refused(tmp_path: Path) -> None:
    """Truncated, undescribed or missing: each says what to do."""
    prepare(texts(tmp_path / "in"), tmp_path / "out", validation=0.2, block_tokens=256)
    train = tmp_path / "out" / "train.bin"
    train.write_bytes(train.read_bytes()[:-1])
    with pytest.raises(DataError, match=r"train.bin is not what"):
        TokenShards(tmp_path / "out")
    whole = (tmp_path / "out" / "meta.json").read_text(encoding="utf-8")
    for wrong in ('"dtype":"object"', '"dtype":"float8"'):
        (tmp_path / "out" / "meta.json").write_text(re.sub(r'"dtype": ?"\w+"', wrong, whole), encoding="utf-8")
        with pytest.raises(DataError, match="damaged"):
            TokenShards(tmp_path / "out")
    (tmp_path / "out" / "meta.json").write_text("{", encoding="utf-8")
    with pytest.raises(DataError, match="damaged"):
        TokenShards(tmp_path / "out")
    with pytest.raises(DataError, match="no token shards"):
        TokenShards(tmp_path / "nowhere")


@pytest.mark.parametrize("count", [1, 2, 3, 17, 64, 1000])
def test_an_epoch_visits_every_block_once_in_its_own_order(count: int) -> None:
    positions = np.arange(count)
    orders = [permute(positions, count, 7, epoch) for epoch in (0, 1)]

    assert all(sorted(order) == list(range(count)) for order in orders)
    assert count < 17 or any(orders[0] != orders[1])
    both = permute(np.concatenate([positions, positions]), count, 7, np.repeat([0, 1], count))
    np.testing.assert_array_equal(both, np.concatenate(orders))


def test_the_order_of_an_epoch_is_the_same_in_every_release() -> None:
    """Learners of two releases read one epoch together: what one computes for a position, the other must compute, too."""
    assert permute(np.arange(9), 9, 7, 2).tolist() == [6, 5, 3, 8, 1, 4, 7, 2, 0]
    assert mix_order(9, (7, 2, 0, 9)).tolist() == [8, 1, 2, 6, 5, 0, 3, 4, 7]
    with pytest.raises(DataError, match="no such position"):
        permute(np.array([3, 9]), 9, 7, 2)


def shards_of(tmp_path: Path) -> TokenShards:
    prepare(texts(tmp_path / "in"), tmp_path / "out", validation=0.2, block_tokens=256)
    return TokenShards(tmp_path / "out")


def rows_of(reader: BatchReader) -> list[bytes]:
    rows = []
    while reader.ready():
        rows += [row.tobytes() for row in reader.next()]
    return rows


def test_a_grant_is_read_once_and_exactly(tmp_path: Path) -> None:
    """Every window of the granted blocks comes out once, and the cursor knows how many have."""
    shards = shards_of(tmp_path)
    reader = BatchReader(shards, 32, 4, seed=3)
    unit = (0, 2, 10)
    assert not reader.ready()
    reader.grant(*unit)
    assert reader.progress() == {unit: (0, 64)}
    reader.next()
    assert reader.progress() == {unit: (4, 64)}
    reader.grant(*unit)
    rows = rows_of(reader)

    again = BatchReader(shards, 32, 4, seed=3)
    again.grant(*unit)
    assert rows_of(again)[4:] == rows
    assert reader.progress() == {unit: (64, 64)}
    assert reader.needs_more()
    reader.forget(frozenset())
    assert reader.progress() == {}


@pytest.mark.parametrize("is_whole", [False, True])
@pytest.mark.parametrize("sequence", [32, 50, 256])
def test_an_epoch_in_units_reads_every_window_of_the_text_once(
    tmp_path: Path, sequence: int, *, is_whole: bool
) -> None:
    """Whoever reads them; behind the last token of the text, where a block ends with it, comes its first."""
    shards = numbered(tmp_path, is_whole=is_whole)
    text = np.fromfile(tmp_path / "out/train.bin", dtype=shards.meta.dtype).astype(np.int32)
    ring = np.concatenate([text, text[:1]])
    whole = [block * 256 + at for block in range(shards.blocks) for at in range(0, 257 - sequence, sequence)]
    readers = [BatchReader(shards, sequence, 1, seed=3) for _ in range(2)]
    for number, start in enumerate(range(0, shards.blocks, 10)):
        readers[number % 2].grant(4, start, min(start + 10, shards.blocks))

    rows = [row for reader in readers for row in rows_of(reader)]

    assert (len(text) % 256 == 0) == is_whole
    assert sorted(rows) == sorted(ring[at : at + sequence + 1].tobytes() for at in whole)
    assert len(set(rows)) > 0.9 * len(rows)


def numbered(tmp_path: Path, *, is_whole: bool) -> TokenShards:
    """Return shards of texts that differ everywhere; a whole one has no rest behind its last block."""
    files = [tmp_path / f"{number}.txt" for number in range(60)]
    for number, file in enumerate(files):
        file.write_text("".join(f"{number}/{line} " for line in range(100)), encoding="utf-8")
    meta = prepare(files, tmp_path / "out", validation=0.2, block_tokens=256)
    if is_whole:
        whole = meta.train_tokens // 256 * 256
        os.truncate(tmp_path / "out/train.bin", whole * np.dtype(meta.dtype).itemsize)
        told = json.loads((tmp_path / "out/meta.json").read_text()) | {"train_tokens": whole}
        (tmp_path / "out/meta.json").write_text(json.dumps(told))
    return TokenShards(tmp_path / "out")


def windows_read(monkeypatch: pytest.MonkeyPatch, shards: TokenShards, unit: tuple[int, int, int]) -> list[list[int]]:
    read: list[list[int]] = []

    def window(_shards: TokenShards, block: int, at: int, tokens: int) -> np.ndarray:
        read.append([block, at])
        return np.zeros(tokens, np.int32)

    reader = BatchReader(shards, 32, 4, seed=3)
    with monkeypatch.context() as patched:
        patched.setattr(TokenShards, "window", window)
        reader.grant(*unit)
        rows_of(reader)
    return read


def test_the_windows_of_a_unit_are_from_all_over_the_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Four positions of a unit are 32 windows, of as many blocks."""
    read = windows_read(monkeypatch, numbered(tmp_path, is_whole=False), (0, 40, 44))

    assert len(read) == 32
    assert len({block for block, _ in read}) == 32


def test_every_release_reads_the_same_windows_for_a_unit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Learners of two releases read one epoch together, and another rotation would be as good as ours: so ours is pinned."""
    shards = numbered(tmp_path, is_whole=True)
    assert shards.blocks == 112

    assert windows_read(monkeypatch, shards, (1, 7, 8)) == [
        [95, 224],
        [57, 32],
        [107, 0],
        [40, 128],
        [62, 160],
        [86, 64],
        [64, 192],
        [34, 96],
    ]


def test_positions_that_the_text_does_not_have_are_refused(tmp_path: Path) -> None:
    """They would be read for others, twice."""
    shards = shards_of(tmp_path)
    reader = BatchReader(shards, 32, 4, seed=3)
    for start, stop in ((0, shards.blocks + 1), (3, 3), (-1, 2)):
        with pytest.raises(DataError, match="no such blocks"):
            reader.grant(0, start, stop)

    assert reader.progress() == {}


def test_another_reader_goes_on_at_the_very_window(tmp_path: Path) -> None:
    """The order of a unit hangs on the unit alone: two halves read by two are the whole, in the same order."""
    shards = shards_of(tmp_path)
    whole, first, second = (BatchReader(shards, 32, 4, seed=3) for _ in range(3))
    whole.grant(1, 0, 6)
    first.grant(1, 0, 6)
    begun = [first.next().tobytes() for _ in range(3)]
    read, of = first.progress()[1, 0, 6]
    second.grant(1, 0, 6, read=read, of=of)
    batches = [whole.next().tobytes() for _ in range(10)]

    assert begun + [second.next().tobytes() for _ in range(7)] == batches
    assert whole.progress() == second.progress()


def test_a_unit_that_is_lost_is_read_no_further(tmp_path: Path) -> None:
    reader = BatchReader(shards_of(tmp_path), 32, 4, seed=3)
    reader.grant(0, 0, 2)
    reader.grant(0, 2, 4)
    reader.next()
    reader.drop((0, 0, 2))

    assert reader.progress() == {(0, 2, 4): (0, 16)}
    assert len(rows_of(reader)) == 16


def test_what_is_not_ours_is_never_replaced(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("some text\n" * 2000, encoding="utf-8")
    folder, file, link = tmp_path / "folder", tmp_path / "file", tmp_path / "link"
    folder.mkdir()
    (folder / "thesis.txt").write_text("precious", encoding="utf-8")
    file.write_text("precious", encoding="utf-8")
    link.symlink_to(folder)
    before = sorted(tmp_path.rglob("*"))
    for out in (folder, file, link):
        with pytest.raises(SettingsError, match="something else"):
            prepare([text], out)

    assert sorted(tmp_path.rglob("*")) == before


def test_a_description_that_nothing_of_ours_has_is_refused(tmp_path: Path) -> None:
    shards = shards_of(tmp_path)
    meta = json.loads((shards.folder / "meta.json").read_text())
    for wrong in ({"block_tokens": meta["train_tokens"] + 1}, {"validation_tokens": 0}, {"train_tokens": 0}):
        (shards.folder / "meta.json").write_text(json.dumps(meta | wrong))
        with pytest.raises(DataError, match=r"meta\.json is damaged"):
            TokenShards(shards.folder)
