"""Documents from files: plain text, folders of it, .jsonl (field `text`), .parquet (column `text`, extra `parquet`).

A document is one file, one line of a jsonl, one row of a parquet. What cannot be text is refused by name, never skipped
in silence: an empty file, a byte 0 (binary), bytes that are not UTF-8.
"""

from __future__ import annotations

import json
import sysconfig
from collections.abc import Iterator
from pathlib import Path

from atoll.base.errors import DataError

TEXT_SUFFIXES = {".txt", ".md", ".rst", ".py", ".text"}
STDLIB_LEAVES_OUT = {"site-packages", "test", "tests", "idlelib", "lib2to3", "turtledemo", "__pycache__", "ensurepip"}


def stdlib_files() -> list[Path]:
    """Return the Python standard library's own sources, sorted, without tests: text that every machine has."""
    root = Path(sysconfig.get_path("stdlib"))
    found = [
        path
        for path in root.rglob("*.py")
        if not STDLIB_LEAVES_OUT & set(path.relative_to(root).parts[:-1]) and path.stat().st_size > 0
    ]
    return sorted(found, key=lambda path: path.relative_to(root).as_posix())


def files_of(inputs: list[Path]) -> list[Path]:
    """Return the files that `inputs` name, folders expanded to their text files in order."""
    files: list[Path] = []
    for path in inputs:
        if path.is_dir():
            inside = sorted(
                p for p in path.rglob("*") if p.suffix in TEXT_SUFFIXES | {".jsonl", ".parquet"} and p.is_file()
            )
            if not inside:
                raise DataError("no text in this folder", got=path, allowed=sorted(TEXT_SUFFIXES), todo="name files")
            files += inside
        elif path.is_file():
            files.append(path)
        elif path.exists():
            raise DataError("this is no file", got=path, allowed="a file or a folder", todo="name files")
        else:
            raise DataError(
                "no such file", got=path, allowed="text, .jsonl, .parquet or a folder", todo="check the path"
            )
    if not files:
        raise DataError("nothing to prepare", got="no inputs", todo="name files or folders, or use --stdlib")
    return files


def documents(file: Path) -> Iterator[bytes]:
    """Yield the documents of one file as UTF-8 bytes; raise `DataError` for one that is no text or cannot be read."""
    try:
        if file.suffix == ".jsonl":
            yield from _jsonl(file)
        elif file.suffix == ".parquet":
            yield from _parquet(file)
        else:
            yield checked_text(file.read_bytes(), str(file))
    except OSError as error:
        raise DataError(
            "this file cannot be read", got=f"{file}: {error.strerror}", todo="correct its permissions or leave it out"
        ) from error


def checked_text(data: bytes, where: str) -> bytes:
    """Return `data` if it is text; raise `DataError` naming `where` otherwise."""
    if not data.strip():
        raise DataError("this text is empty", got=f"{where}, {len(data)} bytes", todo="leave it out")
    if b"\0" in data:
        at = data.index(b"\0")
        raise DataError("this is not text but binary", got=f"{where}, byte 0 at offset {at}", todo="leave it out")
    try:
        data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise DataError(
            "this text is not UTF-8", got=f"{where}, offset {error.start}", todo="convert it, for example with iconv"
        ) from error
    return data


def _jsonl(file: Path) -> Iterator[bytes]:
    with file.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                text = json.loads(line)["text"]
            except (ValueError, KeyError, TypeError) as error:
                raise DataError(
                    "this line is no document", got=f"{file}:{number}", allowed='{"text": "..."}', todo="correct it"
                ) from error
            yield checked_text(str(text).encode(), f"{file}:{number}")


def _parquet(file: Path) -> Iterator[bytes]:
    try:
        from pyarrow import parquet  # noqa: PLC0415  (an extra)
    except ImportError as error:
        raise DataError("parquet needs the 'pyarrow' library", got=file, todo="pip install 'atoll[parquet]'") from error
    try:
        table = parquet.ParquetFile(file)
        if "text" not in table.schema_arrow.names:
            raise DataError("no column named text", got=f"{file}: {table.schema_arrow.names}", todo="rename a column")
        for batch in table.iter_batches(columns=["text"]):
            for number, text in enumerate(batch.column(0).to_pylist()):
                yield checked_text(str(text or "").encode(), f"{file} row {number}")
    except (OSError, ValueError) as error:
        raise DataError("this parquet file cannot be read", got=f"{file}: {error}", todo="write it again") from error
