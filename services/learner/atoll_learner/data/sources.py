"""Documents from files: plain text, folders of it, .jsonl, .parquet, .arrow (a dataset of Hugging Face on disk), packed or not.

A document is one file, one line of a jsonl, one row of a table. Files are read as streams, so that memory does not grow with
them. A file that is longer than a part (`Reading.part_bytes`) is cut into several documents, at the end of a line where there
is one: otherwise one large file would be a single document, and nothing of it could be held out. A file that is no text is
refused by name: a byte 0 (binary), bytes that are not UTF-8. Every folder of sources and most datasets have texts with
nothing in them; such a text is an empty document, which `prepare` leaves out and counts.
"""

from __future__ import annotations

import gzip
import io
import json
import sysconfig
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import IO, Any

import zstandard

from atoll.base.errors import DataError
from atoll.base.files import BYTE_ORDER_MARK, check_regular, opened_file
from atoll.base.wording import few

TEXT_SUFFIXES = frozenset({".txt", ".md", ".rst", ".py", ".text"})
TABLES = frozenset({".parquet", ".arrow"})
PACKED = frozenset({".gz", ".zst"})
PART_BYTES_MIN = 2 << 10
PART_BYTES_MAX = 1 << 20
PARTS_MIN = 20
"""A file is at most so large a part of its corpus, that some of it can be held out."""
ROWS_AT_ONCE = 256
NAMES_SHOWN = 8
LINE_BYTES_MAX = 64 << 20
"""Of a line of jsonl, which is read whole: a document is a book at most."""
STDLIB_LEAVES_OUT = {"site-packages", "test", "tests", "idlelib", "lib2to3", "turtledemo", "__pycache__", "ensurepip"}


@dataclass(frozen=True, slots=True)
class Reading:
    """Rules by which files become documents.

    Attributes:
        field: the field of a jsonl line, or the column of a table, that holds the text.
        suffixes: further files that are text in a folder, by their suffixes.
        part_bytes: a longer text becomes several documents.
    """

    field: str = "text"
    suffixes: frozenset[str] = frozenset()
    part_bytes: int = PART_BYTES_MAX

    def takes(self, file: Path) -> bool:
        """Return whether a file of a folder is to be read."""
        return inner_suffix(file) in TEXT_SUFFIXES | TABLES | {".jsonl"} | self.suffixes


PLAIN = Reading()


def part_bytes(files: Iterable[Path]) -> int:
    """Return the length from which on a text of this corpus is cut."""
    total = sum(file.stat().st_size for file in files)
    return max(PART_BYTES_MIN, min(PART_BYTES_MAX, total // PARTS_MIN))


def inner_suffix(file: Path) -> str:
    """Return the suffix of a file, of what is in it where it is packed (`.jsonl` of `a.jsonl.gz`)."""
    return Path(file.stem).suffix if file.suffix in PACKED else file.suffix


def stdlib_files() -> list[Path]:
    """Return the Python standard library's own sources, sorted, without tests: text that every machine has."""
    root = Path(sysconfig.get_path("stdlib"))
    found = [
        path
        for path in root.rglob("*.py")
        if not STDLIB_LEAVES_OUT & set(path.relative_to(root).parts[:-1]) and path.stat().st_size > 0
    ]
    return sorted(found, key=lambda path: path.relative_to(root).as_posix())


def files_of(inputs: list[Path], reading: Reading = PLAIN) -> list[Path]:
    """Return the files that `inputs` name, folders expanded to their text files in order."""
    files: list[Path] = []
    for path in inputs:
        try:
            path.stat()
        except FileNotFoundError:
            pass  # said below
        except OSError as error:
            raise DataError(
                "this path cannot be used", got=f"{path}: {error.strerror}", todo="check the path"
            ) from error
        if path.is_dir():
            inside = sorted(p for p in path.rglob("*") if reading.takes(p) and p.is_file())
            if not inside:
                allowed = sorted(TEXT_SUFFIXES | TABLES | {".jsonl"} | reading.suffixes)
                raise DataError(
                    "no text in this folder",
                    got=path,
                    allowed=f"{', '.join(allowed)}, also with .gz or .zst",
                    todo="name files, or --suffix for files of another kind",
                )
            files += inside
        elif path.is_file():
            files.append(path)
        elif path.exists():
            raise DataError("this is no file", got=path, allowed="a file or a folder", todo="name files")
        else:
            raise DataError(
                "no such file", got=path, allowed="text, .jsonl, .parquet, .arrow or a folder", todo="check the path"
            )
    if not files:
        raise DataError("nothing to prepare", got="no inputs", todo="name files or folders, or use --stdlib")
    return files


def documents(file: Path, reading: Reading = PLAIN) -> Iterator[bytes]:
    """Yield the documents of one file as UTF-8 bytes, b"" for each text that is empty.

    Raises `DataError` for one that is no text or cannot be read.
    """
    try:
        if inner_suffix(file) in TABLES:
            yield from _table(file, reading)
            return
        with _opened(file) as stream:
            yield from _jsonl(stream, file, reading) if inner_suffix(file) == ".jsonl" else _text(stream, file, reading)
    except (OSError, EOFError, zstandard.ZstdError) as error:
        said = getattr(error, "strerror", None) or str(error)
        raise DataError(
            "this file cannot be read", got=f"{file}: {said}", todo="correct its permissions, mend it or leave it out"
        ) from error


def documents_of(files: Iterable[Path], reading: Reading = PLAIN) -> Iterator[bytes]:
    """Yield the documents of all files. Raises a `DataError` that names each file which cannot be used, not the first alone."""
    rest = iter(files)
    for file in rest:
        try:
            yield from documents(file, reading)
        except DataError as error:
            others = [other for other in rest if not _is_usable(other, reading)]
            if not others:
                raise
            more = f"{len(others)} more cannot be used: {few(map(str, others), NAMES_SHOWN)}"
            raise DataError(error.what, got=f"{error.got}; {more}", allowed=error.allowed, todo=error.todo) from error


def _is_usable(file: Path, reading: Reading) -> bool:
    try:
        for _ in documents(file, reading):
            pass
    except DataError:
        return False
    return True


def checked_text(data: bytes, where: str, start: int = 0) -> bytes:
    """Return `data` if it is text, b"" if it is blank.

    Otherwise raise `DataError` that names `where`, and the offset after `start`.
    """
    if not data.strip():
        return b""
    if b"\0" in data:
        at = start + data.index(b"\0")
        raise DataError("this is not text but binary", got=f"{where}, byte 0 at offset {at}", todo="leave it out")
    try:
        data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise DataError(
            "this text is not UTF-8",
            got=f"{where}, offset {start + error.start}",
            todo="convert it, for example with iconv",
        ) from error
    return data


@contextmanager
def _opened(file: Path) -> Iterator[IO[bytes] | gzip.GzipFile]:
    with opened_file(file) as raw:
        if file.suffix == ".gz":
            with gzip.open(raw) as unpacked:
                yield unpacked
        elif file.suffix == ".zst":
            with zstandard.ZstdDecompressor().stream_reader(raw, read_across_frames=True) as reader:
                yield io.BufferedReader(reader)
        else:
            yield raw


def _text(stream: IO[bytes] | gzip.GzipFile, file: Path, reading: Reading) -> Iterator[bytes]:
    start, found = 0, False
    pieces = iter(lambda: stream.read(reading.part_bytes), b"")
    first = next(pieces, b"")
    if first.startswith(BYTE_ORDER_MARK):  # some editors begin with one, and it is none of the text
        first, start = first.removeprefix(BYTE_ORDER_MARK), len(BYTE_ORDER_MARK)
    for part in _parts(chain([first], pieces), reading.part_bytes):
        if part.strip():
            found = True
            yield checked_text(part, str(file), start)
        start += len(part)
    if not found:
        yield b""


def _parts(pieces: Iterator[bytes], most: int) -> Iterator[bytes]:
    """Yield pieces of text anew, of `most` bytes at most, cut behind a line or at least behind a character."""
    rest = b""
    for piece in pieces:
        rest += piece
        while len(rest) > most:
            cut = rest.rfind(b"\n", most // 2, most) + 1
            if not cut:
                cut = most
                while cut > most - 4 and rest[cut] & 0xC0 == 0x80:
                    cut -= 1
            yield rest[:cut]
            rest = rest[cut:]
    if rest:
        yield rest


def _rows(text: str, where: str, reading: Reading) -> Iterator[bytes]:
    try:
        encoded = text.encode()
    except UnicodeEncodeError as error:
        raise DataError(
            "this text is not UTF-8",
            got=f"{where}, half a character at {error.start}",
            todo="correct it or leave it out",
        ) from error
    data = checked_text(encoded, where)
    if len(data) <= reading.part_bytes:
        yield data
    else:
        yield from (part for part in _parts(iter([data]), PART_BYTES_MAX) if part.strip())


def _jsonl(lines: IO[bytes] | gzip.GzipFile, file: Path, reading: Reading) -> Iterator[bytes]:
    for number, line in enumerate(iter(lambda: lines.readline(LINE_BYTES_MAX + 1), b""), 1):
        if len(line) > LINE_BYTES_MAX:
            raise DataError(
                "this line is too long",
                got=f"{file}:{number}",
                allowed=f"at most {LINE_BYTES_MAX:,} bytes",
                todo="cut its text into several documents",
            )
        if not line.strip():
            continue
        text = _field(line, f"{file}:{number}", reading.field)
        yield from _rows(text, f"{file}:{number}", reading)


def _field(line: bytes, where: str, field: str) -> str:
    """Return the text of a line of jsonl, "" for null; raise `DataError` if there is none."""
    allowed, why = f'{{"{field}": "..."}}', ""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise DataError(
            "this line is no JSON", got=where, allowed=allowed, todo="correct it or leave it out"
        ) from error
    if not isinstance(row, dict):
        why = "it is no object"
    elif field not in row:
        why = f"it has {', '.join(sorted(row)[:NAMES_SHOWN]) or 'no fields'}"
    elif row[field] is not None and not isinstance(row[field], str):
        why = f"{field} is no text"
    if why:
        todo = "correct it, or name another field (`atoll data prepare --field`)"
        raise DataError("this line is no document", got=f"{where}: {why}", allowed=allowed, todo=todo)
    return row[field] or ""


def _table(file: Path, reading: Reading) -> Iterator[bytes]:
    if file.suffix in PACKED:
        raise DataError("a table is packed by itself", got=file, allowed=".parquet or .arrow", todo="unpack it")
    try:
        import pyarrow as pa  # noqa: PLC0415  (an extra)
        from pyarrow import ipc, parquet  # noqa: PLC0415
    except ImportError as error:
        raise DataError("tables need the 'pyarrow' library", got=file, todo="pip install 'atoll[parquet]'") from error
    row = 0
    check_regular(file)
    try:
        if file.suffix == ".parquet":
            table: Any = parquet.ParquetFile(file)
            _check_column(file, table.schema_arrow.names, reading)
            batches = table.iter_batches(batch_size=ROWS_AT_ONCE, columns=[reading.field])
        else:
            source = pa.memory_map(str(file))
            try:
                table = ipc.open_stream(source)
            except pa.ArrowInvalid:
                table = ipc.open_file(source)
            _check_column(file, table.schema.names, reading)
            held = table if hasattr(table, "read_next_batch") else map(table.get_batch, range(table.num_record_batches))
            batches = (batch.select([reading.field]) for batch in held)
        for batch in batches:
            for text in batch.column(0).to_pylist():
                if text is not None and not isinstance(text, str):
                    raise DataError(
                        f"column {reading.field} is no text", got=f"{file} row {row}", todo="name another --field"
                    )
                yield from _rows(text or "", f"{file} row {row}", reading)
                row += 1
    except (OSError, ValueError) as error:
        raise DataError("this table cannot be read", got=f"{file}: {error}", todo="write it again") from error


def _check_column(file: Path, names: list[str], reading: Reading) -> None:
    if reading.field not in names:
        raise DataError(
            f"no column named {reading.field}", got=f"{file}: {names}", todo="name one of them with --field"
        )
