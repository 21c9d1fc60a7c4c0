"""Text as people have it, and token sources of their own: batches, going on after a restart, their mistakes told."""

from __future__ import annotations

import gzip
import json
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import zstandard
from pyarrow import parquet
from tokenizers import Tokenizer, models, pre_tokenizers

from atoll.base.errors import DataError, SettingsError
from atoll_learner.data.prepare import prepare
from atoll_learner.data.shards import TokenShards
from atoll_learner.data.sources import PART_BYTES_MIN, Reading, documents, files_of, part_bytes
from atoll_learner.data.token_source import UNIT, SourceFeed, SourceRequest, start_of
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


ROOT = Path(__file__).parents[2]
MODULE = """
import numpy as np

def counting(request):
    for number in range(request.start, 10):
        yield np.arange(number, number + request.sequence + 1)

def bad(request):
    yield {wrong}

def raising(request):
    raise OSError("no such disk")

def raising_later(request):
    yield list(range(9))
    raise OSError("the disk is gone")
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    return tmp_path


def module(folder: Path, wrong: str = "None") -> str:
    name = f"sources_{abs(hash((folder, wrong)))}"
    (folder / f"{name}.py").write_text(MODULE.format(wrong=wrong), encoding="utf-8")
    return name


def never() -> bool:
    return False


def feed(source: str, start: int = 0, batch: int = 2) -> SourceFeed:
    return SourceFeed(source, SourceRequest("a", 3, 8, 256, start), batch)


def test_batches_are_the_windows_in_order_and_a_restart_goes_on(folder: Path) -> None:
    name = f"{module(folder)}:counting"
    first = feed(name, batch=3)
    one, two = first.next(never), first.next(never)
    kept = first.cursor
    assert not first.close(1.0)

    again = feed(name, start_of(kept), batch=3)
    three, end = again.next(never), again.next(never)

    assert kept == {UNIT: (6, 1 << 53)}
    for number, batch in enumerate((one, two, three)):
        assert batch is not None
        assert batch.dtype == np.int32
        assert batch[:, 0].tolist() == [3 * number, 3 * number + 1, 3 * number + 2]
    assert end is None


def test_a_learner_that_shall_end_waits_for_no_window(folder: Path) -> None:
    """`give_up` is asked before each; a cursor of leased blocks is no place in a source."""
    assert feed(f"{module(folder)}:counting").next(lambda: True) is None
    assert start_of({(0, 0, 1): (5, 24), (1, 64, 128): (3, 9)}) == start_of({}) == 0


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ("[1, 2, 3]", "int64 (3,)"),
        ("np.zeros(9)", "float64 (9,)"),
        ("np.full(9, 256)", "tokens 256..256"),
        ("np.full(9, -1)", "tokens -1..-1"),
        ("'text'", "<U4 ()"),
    ],
)
def test_a_window_that_is_none_is_refused(folder: Path, wrong: str, said: str) -> None:
    with pytest.raises(DataError, match="returned no window") as refused:
        feed(f"{module(folder, wrong)}:bad").next(never)

    assert said in str(refused.value)
    assert "integers (9,), tokens 0..255" in str(refused.value)


def test_a_source_that_fails_or_does_not_exist_is_named(folder: Path) -> None:
    name = module(folder)
    with pytest.raises(DataError, match="OSError: no such disk"):
        feed(f"{name}:raising")
    later = feed(f"{name}:raising_later")
    with pytest.raises(DataError, match="the disk is gone"):
        later.next(never)
    with pytest.raises(SettingsError, match=r"data\.source names what its module has not"):
        feed(f"{name}:nothing")


def test_grain_gives_each_learner_its_own_order_and_goes_on_at_any_window(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TEXTS", str(folder))
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    for number in range(5):
        (folder / f"{number}.md").write_text(f"text {number}, " * 30, encoding="utf-8")

    def batches(learner: str, start: int, count: int) -> list[list[list[int]]]:
        one = SourceFeed("grain_source:windows", SourceRequest(learner, 3, 8, 256, start), 4)
        found = [one.next(never) for _ in range(count)]
        return [batch.tolist() for batch in found if batch is not None]

    whole = batches("a", 0, 100)

    assert len(whole) == 100
    assert batches("a", 60, 5) == whole[15:20]
    assert batches("b", 0, 5) != whole[:5]
