"""Text as people have it: one long file, packed files, tables with columns of their own, vocabularies of their own."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pytest
import zstandard
from pyarrow import parquet
from tokenizers import Tokenizer, models, pre_tokenizers

from atoll.base.errors import DataError
from atoll_learner.data.prepare import prepare
from atoll_learner.data.shards import TokenShards
from atoll_learner.data.sources import PART_BYTES_MIN, Reading, documents, files_of, part_bytes
from atoll_learner.data.tokenizer import ByteTokenizer, Vocabulary, train_bpe

ROWS = [f"row {number}: größer, länger, 東京 {'x' * (number % 7)}" for number in range(40)]


def packed(text: bytes) -> bytes:
    """Return text as gzip packs it at no time: bytes that are part of a test's name must be the same in every process."""
    return gzip.compress(text, mtime=0)


def as_jsonl(field: str) -> bytes:
    return "".join(json.dumps({field: row}) + "\n" for row in ROWS).encode()


def write_parquet(path: Path) -> None:
    """Write the rows as a column `body`."""
    parquet.write_table(pa.table({"body": ROWS, "other": [1] * len(ROWS)}), path)


def write_arrow(path: Path) -> None:
    """Write the rows as a dataset of Hugging Face lies on a disk: a stream of batches."""
    table = pa.table({"body": ROWS})
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_stream(sink, table.schema) as stream:
        stream.write_table(table, max_chunksize=7)


def write_arrow_file(path: Path) -> None:
    table = pa.table({"body": ROWS})
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, table.schema) as file:
        file.write_table(table, max_chunksize=7)


FORMATS: dict[str, Callable[[Path], object]] = {
    "a.jsonl": lambda path: path.write_bytes(as_jsonl("body")),
    "a.jsonl.gz": lambda path: path.write_bytes(packed(as_jsonl("body"))),
    "a.jsonl.zst": lambda path: path.write_bytes(zstandard.compress(as_jsonl("body"))),
    "a.parquet": write_parquet,
    "a.arrow": write_arrow,
    "b.arrow": write_arrow_file,
}


@pytest.mark.parametrize("name", FORMATS)
def test_every_format_holds_a_document_a_row(tmp_path: Path, name: str) -> None:
    FORMATS[name](tmp_path / name)

    (file,) = files_of([tmp_path])
    assert [part.decode() for part in documents(file, Reading("body"))] == ROWS
    with pytest.raises(DataError, match=r"(?s)text.*--field"):
        list(documents(file))


@pytest.mark.parametrize(("name", "pack"), [("a.txt", bytes), ("a.txt.gz", packed), ("a.md.zst", zstandard.compress)])
@pytest.mark.parametrize("between", ["\n", " "])
def test_a_long_text_is_cut_into_documents_and_nothing_is_lost(
    tmp_path: Path, name: str, pack: Callable[[bytes], bytes], between: str
) -> None:
    """Behind a line where there is one, and never inside a character."""
    text = (between.join(ROWS) * 40).encode()
    (tmp_path / name).write_bytes(pack(text))

    parts = list(documents(tmp_path / name, Reading(part_bytes=4096)))

    assert b"".join(parts) == text
    assert len(parts) > 10
    assert all(len(part) <= 4096 for part in parts)
    assert between == " " or all(part.endswith(b"\n") for part in parts[:-1])


@pytest.mark.parametrize(
    ("name", "content"),
    [("cut.txt.gz", packed(b"words " * 5000)[:-20]), ("junk.txt.zst", b"no frame"), ("junk.gz", b"no member")],
)
def test_a_damaged_archive_is_refused_by_name(tmp_path: Path, name: str, content: bytes) -> None:
    (tmp_path / name).write_bytes(content)

    with pytest.raises(DataError, match=name):
        list(documents(tmp_path / name))


def test_a_small_corpus_of_one_file_has_held_out_text(tmp_path: Path) -> None:
    (tmp_path / "book.txt").write_text("\n".join(ROWS * 30), encoding="utf-8")
    size = (tmp_path / "book.txt").stat().st_size

    metas = [prepare([tmp_path / "book.txt"], tmp_path / "out", block_tokens=1024, seed=seed) for seed in range(12)]

    assert 40_000 < size < 60_000
    assert part_bytes([tmp_path / "book.txt"]) == max(PART_BYTES_MIN, size // 20)
    for meta in metas:
        assert meta.validation_tokens >= 100
        assert meta.train_tokens + meta.validation_tokens == size + meta.documents
    read = TokenShards(tmp_path / "out")
    assert read.meta == metas[-1]


def test_somebodys_vocabulary_is_used_with_its_separator(tmp_path: Path) -> None:
    """Its token between documents is found by a usual name, or named; a vocabulary without one is refused."""
    texts = [tmp_path / f"{number}.txt" for number in range(40)]
    for number, file in enumerate(texts):
        file.write_text(f"document {number} " * 60, encoding="utf-8")
    train_bpe(["document 1 2 3"] * 10, 300, tmp_path / "trained.json")
    theirs = json.loads((tmp_path / "trained.json").read_text(encoding="utf-8"))
    renamed = json.loads(json.dumps(theirs).replace("<|doc|>", "<|end_of_text|>"))
    (tmp_path / "theirs.json").write_text(json.dumps(renamed), encoding="utf-8")
    bare = Tokenizer(models.WordLevel({"document": 0, "[UNK]": 1}, "[UNK]"))
    bare.pre_tokenizer = pre_tokenizers.Whitespace()
    bare.save(str(tmp_path / "bare.json"))

    meta = prepare(texts, tmp_path / "out", block_tokens=512, vocabulary=Vocabulary(tmp_path / "theirs.json"))
    named = prepare(
        texts, tmp_path / "two", block_tokens=256, vocabulary=Vocabulary(tmp_path / "bare.json", "document")
    )

    assert (meta.separator, meta.tokenizer, named.separator) == ("<|end_of_text|>", "bpe", "document")
    tokenizer = TokenShards(tmp_path / "out").tokenizer()
    assert tokenizer.decode(tokenizer.encode(b"document 7")) == b"document 7"
    assert tokenizer.vocab == meta.vocab
    with pytest.raises(DataError, match="--separator"):
        prepare(texts, tmp_path / "three", vocabulary=Vocabulary(tmp_path / "bare.json"))
    (tmp_path / "junk.json").write_text("{}", encoding="utf-8")
    with pytest.raises(DataError, match="cannot be read"):
        prepare(texts, tmp_path / "three", vocabulary=Vocabulary(tmp_path / "junk.json"))
    assert not (tmp_path / "three").exists()
    assert ByteTokenizer().separator == 0


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ('{"text": 5}', "text is no text"),
        ('{"text": {"a": ["SECRET"]}}', "text is no text"),
        ('{"text": false}', "text is no text"),
        ('{"body": "words", "id": 1}', "it has body, id"),
        ("[1]", "it is no object"),
        ('{"text": "words"', "this line is no JSON"),
        (r'{"text": "\ud800 alone"}', "half a character at 0"),
    ],
)
def test_a_row_without_text_is_refused_with_the_reason(tmp_path: Path, row: str, said: str) -> None:
    """A number or a list was trained on as Python writes it; half a character ended in a traceback."""
    (tmp_path / "a.jsonl").write_text('{"text": "words"}\n' + row + "\n", encoding="utf-8")

    with pytest.raises(DataError, match=r"a\.jsonl:2") as raised:
        list(documents(tmp_path / "a.jsonl"))

    assert said in str(raised.value)
    assert "SECRET" not in str(raised.value)


@pytest.mark.parametrize(("content", "kept"), [(b"\xef\xbb\xbfwords", [b"words"]), (b"\xef\xbb\xbf", [b""])])
def test_a_byte_order_mark_is_no_text(tmp_path: Path, content: bytes, kept: list[bytes]) -> None:
    """Where a file has nothing else it is empty."""
    (tmp_path / "a.txt").write_bytes(content)

    assert list(documents(tmp_path / "a.txt")) == kept
