"""Files that somebody else may have made: only regular ones, never more than allowed, and every failure an `OSError`."""

from __future__ import annotations

import errno
import os
import socket
from pathlib import Path

import pytest

from atoll.base.files import NotRegular, TooLarge, lines_of, opened_file, read_file
from atoll.run.history import History


def test_a_file_is_read_up_to_its_bound(tmp_path: Path) -> None:
    file = tmp_path / "f"
    file.write_bytes(b"x" * 10)

    assert read_file(file, 10) == b"x" * 10
    with pytest.raises(TooLarge):
        read_file(file, 9)


def test_what_is_no_file_is_not_waited_for(tmp_path: Path) -> None:
    """A pipe, a folder, a socket, a device; a name with a zero in it is an error of the system like others."""
    os.mkfifo(tmp_path / "pipe")
    with socket.socket(socket.AF_UNIX) as bound:
        bound.bind(str(tmp_path / "socket"))
        for place in (tmp_path / "pipe", tmp_path / "socket", tmp_path, Path("/dev/zero")):
            with pytest.raises(NotRegular):
                opened_file(place)
        for place, why in ((tmp_path / "none", "No such file"), (Path("a\0b"), "null")):
            with pytest.raises(OSError, match=why):
                opened_file(place)


def test_a_link_is_followed_where_its_reader_allows_it(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(b"x")
    (tmp_path / "link").symlink_to(tmp_path / "f")

    with opened_file(tmp_path / "link") as file:
        assert file.read() == b"x"
    with pytest.raises(OSError, match=os.strerror(errno.ELOOP)):
        opened_file(tmp_path / "link", follow=False)


def test_a_line_without_end_takes_its_place_and_no_memory(tmp_path: Path) -> None:
    file = tmp_path / "f"
    file.write_bytes(b"a\n" + b"1234567\n" + b"12345678\n" + b"x" * 100 + b"\nb\n" + b"y" * 100)

    assert list(lines_of(file, 8)) == [b"a\n", b"1234567\n", None, None, b"b\n", None]


def test_an_event_log_with_lines_that_are_none_is_read_past_them(tmp_path: Path) -> None:
    line = (
        b'{"subject":"atoll.sim.ev.closed.shard-0","event":{"kind":"closed","who":"shard-0","at_s":1.0,"fields":{}}}\n'
    )
    bad = [
        b"\n",
        b"\xff\0\n",
        b'{"event":' + b"[" * 100_000 + b"\n",
        b'{"subject":"a","event":3}\n',
        b"x" * (9 << 20) + b"\n",
    ]
    (tmp_path / "events.jsonl").write_bytes(line + b"".join(bad) + line)
    history = History()
    history.read_file(tmp_path / "events.jsonl")

    assert history.unreadable == len(bad)
    assert history.newest_s == 1.0
