"""The monitor's journal: it is whole after a kill, bounded, and has each event once; and the curves of sinks."""

from __future__ import annotations

import errno
import io
import json
from pathlib import Path
from typing import Any

import pytest
import zstandard

from atoll.base.errors import InUse, SettingsError
from atoll.wire.messages import Event
from atoll_monitor import records as journal_module
from atoll_monitor.records import RecordJournal
from support.events import event


def joined(at_s: float) -> Event:
    return event("joined", "a", at_s, incarnation=1)


def written(journal: RecordJournal) -> None:
    journal.write(journal.take_lines())


def lines_of(folder: Path) -> list[dict[str, Any]]:
    """Return every line of the journal of run `r`, the oldest first."""
    texts = []
    for path in sorted(folder.glob("r.*.jsonl.zst")):
        with zstandard.ZstdDecompressor().stream_reader(path.read_bytes()) as reader:
            texts.append(io.TextIOWrapper(reader, encoding="utf-8").read())
    texts.append((folder / "r.jsonl").read_text(encoding="utf-8"))
    return [json.loads(line) for text in texts for line in text.splitlines()]


def test_a_journal_that_goes_on_has_every_event_once(tmp_path: Path) -> None:
    """A monitor reads the event log from its beginning; a run that was founded anew numbers its entries from 1 again."""
    first = RecordJournal(tmp_path, "r", 4)
    for number in (1, 2, 3):
        first.put_event(joined(10.0 + number), number)
    first.close()
    second = RecordJournal(tmp_path, "r", 4)
    for number in (1, 2, 3, 4):
        second.put_event(joined(10.0 + number), number)
    second.put_event(joined(20.0), 1)
    second.close()

    told = lines_of(tmp_path)
    assert [(line["sequence"], line["at_s"]) for line in told] == [
        (1, 11.0),
        (2, 12.0),
        (3, 13.0),
        (4, 14.0),
        (1, 20.0),
    ]
    assert told[0] == {
        "kind": "event",
        "run": "r",
        "event": "joined",
        "who": "a",
        "at_s": 11.0,
        "fields": {"incarnation": 1},
        "sequence": 1,
        "newest_s": 11.0,
    }


@pytest.mark.parametrize(("there", "told"), [(1, [1, 8]), (7, [1, 7, 8])])
def test_a_monitor_that_dies_while_it_compresses_leaves_every_event_once(
    tmp_path: Path, there: int, told: list[int]
) -> None:
    """The compressed file is in its place, and the other not yet emptied; a file with something else in it is kept."""
    first = RecordJournal(tmp_path, "r", 4, file_bytes_max=100)
    first.put_event(joined(10.0), 1)
    kept = b"".join(first._waiting)
    written(first)
    first.close()
    assert len(kept) >= 100
    (tmp_path / "r.jsonl").write_bytes(kept.replace(b'"sequence":1', b'"sequence":%d' % there))
    second = RecordJournal(tmp_path, "r", 4, file_bytes_max=100)
    second.put_event(joined(10.0), 1)
    second.put_event(joined(18.0), 8)
    second.close()

    assert [line["sequence"] for line in lines_of(tmp_path)] == told


def test_half_a_line_is_cut_off_and_the_next_one_is_whole(tmp_path: Path) -> None:
    (tmp_path / "r.jsonl").write_bytes(b'{"kind":"metrics","run":"r"}\n{"kind":"met' + b"x" * 200_000)
    journal = RecordJournal(tmp_path, "r", 4)
    journal.put("metrics", {"at_s": 1.0})
    journal.close()
    (tmp_path / "q.jsonl").write_bytes(b'{"kind')
    RecordJournal(tmp_path, "q", 4).close()

    assert lines_of(tmp_path) == [{"kind": "metrics", "run": "r"}, {"kind": "metrics", "run": "r", "at_s": 1.0}]
    assert (tmp_path / "q.jsonl").read_bytes() == b""


def test_files_are_compressed_and_the_oldest_are_removed(tmp_path: Path) -> None:
    """What the folder may take is bounded; what is kept is the newest, without a gap; another run's files stay."""
    (tmp_path / "r.x.000001.jsonl.zst").write_bytes(b"of a run r.x")
    journal = RecordJournal(tmp_path, "r", files_max=3, file_bytes_max=1000)
    for number in range(200):
        journal.put("metrics", {"number": number, "filled": "x" * 100})
        written(journal)
    journal.close()

    numbers = [line["number"] for path in [tmp_path] for line in lines_of_run(path)]
    assert len(journal.compressed_files()) == 3
    assert numbers == list(range(numbers[0], 200))
    assert len(numbers) > 20
    assert (tmp_path / "r.x.000001.jsonl.zst").read_bytes() == b"of a run r.x"
    assert (tmp_path / "r.jsonl").stat().st_size < 1200
    assert journal.dropped_lines == 0


def lines_of_run(folder: Path) -> list[dict[str, Any]]:
    (folder / "r.x.000001.jsonl.zst").rename(folder / "other")
    found = lines_of(folder)
    (folder / "other").rename(folder / "r.x.000001.jsonl.zst")
    return found


def test_the_newest_event_is_found_in_a_compressed_file(tmp_path: Path) -> None:
    """The file was changed just before the monitor was killed; a damaged one costs that knowledge alone."""
    journal = RecordJournal(tmp_path, "r", 4, file_bytes_max=10)
    journal.put_event(joined(11.0), 7)
    written(journal)
    journal.close()
    again = RecordJournal(tmp_path, "r", 4)
    again.put_event(joined(11.0), 7)
    assert again.take_lines() == []
    again.close()
    journal.compressed_files()[0].write_bytes(b"damaged")
    third = RecordJournal(tmp_path, "r", 4)
    third.put_event(joined(11.0), 7)

    assert len(third.take_lines()) == 1
    third.close()
    assert len(journal.compressed_files()) == 1


class FullDisk(io.FileIO):
    """A file that takes ten more bytes, and then no more."""

    full = True

    def write(self, data: Any, /) -> int:  # noqa: ANN401  (any buffer)
        if self.full and len(data) > 10:
            return int(super().write(data[:10]))
        if self.full:
            raise OSError(errno.ENOSPC, "no space left")
        return int(super().write(data))


def test_what_cannot_be_written_is_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal_module, "WAITING_BYTES_MAX", 100)
    journal = RecordJournal(tmp_path, "r", 4)
    for _ in range(3):
        journal.put("metrics", {"filled": "x" * 20})
    assert journal.dropped_lines == 2
    written(journal)
    journal.put("metrics", {"filled": "x" * 20})
    before = (tmp_path / "r.jsonl").read_bytes()
    journal._file.close()
    journal._file = FullDisk(tmp_path / "r.jsonl", "a+")
    written(journal)

    assert journal.dropped_lines == 3
    assert (tmp_path / "r.jsonl").read_bytes() == before
    journal.put("metrics", {})
    journal._file.full = False
    journal.close()
    assert len(lines_of(tmp_path)) == 2


def test_a_journal_has_one_writer_and_a_folder(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    journal = RecordJournal(tmp_path, "r", 4)
    with pytest.raises(InUse, match="another monitor writes this journal"):
        RecordJournal(tmp_path, "r", 4)
    with pytest.raises(SettingsError, match="cannot write its journal"):
        RecordJournal(tmp_path / "file", "r", 4)
    journal.close()
    RecordJournal(tmp_path, "r", 4).close()
