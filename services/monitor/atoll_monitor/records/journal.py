"""The journal: every entry of the event log and a sample of every metric, as lines of JSON, in a folder that stays bounded.

    FOLDER/RUN.jsonl                    what is being written
    FOLDER/RUN.000001.jsonl.zst         what was written before, compressed; the oldest are removed

`put` and `take_lines` never block: lines wait in memory, and `write`, in a thread, writes them. Where the disk is full, or
slower than the run, lines are dropped and counted, never halved.

An event has its number in the event log. A journal that goes on after its monitor was killed skips what it has, though a
monitor reads the log from its beginning. A run founded anew numbers from 1 again, at later times, so both are compared.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from io import FileIO, TextIOWrapper
from itertools import chain
from pathlib import Path
from typing import Any, Final

import msgspec
import zstandard

from atoll.base.atomic_files import hold
from atoll.base.errors import InUse, SettingsError
from atoll.base.logs import get
from atoll.wire.messages import Event

log = get(__name__)

FILE_BYTES_MAX: Final = 32 << 20
WAITING_BYTES_MAX: Final = 64 << 20
_ENCODER: Final = msgspec.json.Encoder()


class _Place(msgspec.Struct):
    """Place of a line's event in the log."""

    sequence: int
    newest_s: float


class RecordJournal:
    """The files of one run's journal; only `write` and `close` touch them, and may run in a thread of their own."""

    def __init__(self, folder: Path, run: str, files_max: int, file_bytes_max: int = FILE_BYTES_MAX) -> None:
        """Open it, and find what it holds.

        Args:
            folder: made if need be.
            run: the id of the run.
            files_max: compressed files that are kept.
            file_bytes_max: size from which a file is compressed.

        Raises:
            SettingsError: the folder cannot be written.
            InUse: another monitor writes this journal.
        """
        self._folder, self._run = folder, run
        self._files_max, self._file_bytes_max = files_max, file_bytes_max
        self._path = folder / f"{run}.jsonl"
        self._waiting: list[bytes] = []
        self._waiting_bytes = 0
        self._too_many = self._unwritten = 0
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._lock = hold(folder / f".{run}.lock")
            if self._lock is None:
                raise InUse("another monitor writes this journal", got=self._path, todo="set monitor.folder")
            self._file = self._open()
        except OSError as error:
            raise SettingsError(
                "the monitor cannot write its journal",
                got=f"{error.filename or folder}: {error.strerror}",
                todo="set monitor.folder to a folder that it may write",
            ) from error
        self._sequence, self._newest_s = self._last_place()

    def put_event(self, event: Event, sequence: int) -> None:
        """Write down an entry of the event log, unless it is here already."""
        if sequence <= self._sequence and event.at_s <= self._newest_s:
            return
        self._sequence, self._newest_s = sequence, max(event.at_s, self._newest_s)
        entry = {"event": event.kind, "who": event.who, "at_s": event.at_s, "fields": event.fields}
        self.put("event", {**entry, "sequence": sequence, "newest_s": self._newest_s})

    def put(self, kind: str, fields: dict[str, Any]) -> None:
        """Write down a line."""
        line = _ENCODER.encode({"kind": kind, "run": self._run, **fields}) + b"\n"
        if self._waiting_bytes + len(line) > WAITING_BYTES_MAX:
            self._too_many += 1
            return
        self._waiting.append(line)
        self._waiting_bytes += len(line)

    @property
    def dropped_lines(self) -> int:
        """Return how many lines are missing."""
        return self._too_many + self._unwritten

    def take_lines(self) -> list[bytes]:
        """Return the lines that wait, which then wait no more."""
        lines, self._waiting, self._waiting_bytes = self._waiting, [], 0
        return lines

    def write(self, lines: list[bytes]) -> None:
        """Write lines. A disk that refuses them costs these and nothing else."""
        whole_bytes = self._file.seek(0, 2)
        try:
            left = memoryview(b"".join(lines))
            while left:
                left = left[self._file.write(left) :]
            if self._file.tell() >= self._file_bytes_max:
                self._rotate()
        except OSError as error:
            with contextlib.suppress(OSError):
                self._file.truncate(whole_bytes)
            self._unwritten += len(lines)
            log.warning("journal.unwritten", lines=len(lines), reason=str(error))

    def close(self) -> None:
        """Write what waits, and let another monitor have it."""
        self.write(self.take_lines())
        self._file.close()
        if self._lock is not None:
            self._lock.close()

    def compressed_files(self) -> list[Path]:
        """Return the compressed files, the oldest first."""
        name = re.compile(rf"{re.escape(self._run)}\.\d{{6}}\.jsonl\.zst")
        return sorted(path for path in self._folder.iterdir() if name.fullmatch(path.name))

    def _open(self) -> FileIO:
        """Return the file, at its end, without what a killed monitor left: half a line, or what it has just compressed."""
        file = FileIO(self._path, "a+")
        size = file.seek(0, 2)
        if size >= self._file_bytes_max and self._is_compressed(file):
            size = 0
        while size:
            step = min(size, 1 << 16)
            file.seek(size - step)
            if (end := file.read(step).rfind(b"\n")) >= 0:
                size += end + 1 - step
                break
            size -= step
        file.truncate(size)
        return file

    def _is_compressed(self, file: FileIO) -> bool:
        """Return whether the newest compressed file holds all of this one: its monitor died before it emptied the file."""
        file.seek(0)
        for path in self.compressed_files()[-1:]:
            try:
                with path.open("rb") as former, zstandard.ZstdDecompressor().stream_reader(former) as reader:
                    while chunk := reader.read(1 << 20):
                        if file.read(len(chunk)) != chunk:
                            return False
                    return not file.read(1)
            except (OSError, zstandard.ZstdError):
                return False
        return False

    def _rotate(self) -> None:
        """Compress the file and begin another; then remove what is too much."""
        numbers = [int(path.name.split(".")[-3]) for path in self.compressed_files()]
        into = self._folder / f"{self._run}.{max(numbers, default=0) + 1:06}.jsonl.zst"
        draft = into.with_suffix(".new")
        with draft.open("wb") as compressed:
            self._file.seek(0)
            zstandard.ZstdCompressor(level=3).copy_stream(self._file, compressed)
        draft.replace(into)
        self._file.truncate(0)
        for path in self.compressed_files()[: -self._files_max]:
            path.unlink(missing_ok=True)
        log.info("journal.rotated", file=into.name, size_bytes=into.stat().st_size)

    def _last_place(self) -> tuple[int, float]:
        """Return the number of the newest event that is here, and the latest time of any."""
        found = (0, 0.0)
        with self._path.open(encoding="utf-8", errors="replace") as present:
            for line in chain(self._lines_of_former(), present):
                if line.startswith('{"kind":"event"'):
                    with contextlib.suppress(msgspec.MsgspecError):  # a line that somebody has edited
                        place = msgspec.json.decode(line, type=_Place)
                        found = place.sequence, place.newest_s
        return found

    def _lines_of_former(self) -> Iterator[str]:
        """Yield the lines of the newest compressed file; none if it is damaged."""
        for path in self.compressed_files()[-1:]:
            try:
                with path.open("rb") as file, zstandard.ZstdDecompressor().stream_reader(file) as reader:
                    yield from TextIOWrapper(reader, encoding="utf-8", errors="replace")
            except (OSError, zstandard.ZstdError) as error:
                log.warning("journal.damaged", file=path.name, reason=str(error))
