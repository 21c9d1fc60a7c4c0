"""Files whole or not at all, and files that one process holds."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from atoll.base.files import hold, write_whole

FOREVER = """
import sys, itertools
from pathlib import Path
from atoll.base.files import write_whole
print("begun", flush=True)
for number in itertools.count():
    write_whole(Path(sys.argv[1]), b"%d" % (number % 10) * 3_000_000)
"""
HOLDING = """
import sys, time
from pathlib import Path
from atoll.base.files import hold
file = hold(Path(sys.argv[1]))
print("held", flush=True)
time.sleep(600)
"""


def test_a_writer_that_is_killed_leaves_a_whole_file(tmp_path: Path) -> None:
    """Killed anywhere in its writing, one version or another is there, and what it left beside it is written over."""
    path = tmp_path / "file"
    write_whole(path, b"first")
    for _ in range(3):
        with subprocess.Popen([sys.executable, "-c", FOREVER, str(path)], stdout=subprocess.PIPE) as process:
            assert process.stdout is not None
            process.stdout.readline()
            while path.read_bytes() == b"first":
                pass
            process.send_signal(signal.SIGKILL)
        content = path.read_bytes()

        assert len(content) == 3_000_000
        assert len(set(content)) == 1
    write_whole(path, b"last")
    assert [entry.name for entry in tmp_path.iterdir()] == ["file"]
    assert path.read_bytes() == b"last"


def test_a_write_that_fails_leaves_the_old_content_and_nothing_beside_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "file"
    write_whole(path, b"old")

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        write_whole(path, b"new")

    assert path.read_bytes() == b"old"
    assert [entry.name for entry in tmp_path.iterdir()] == ["file"]


def test_one_process_holds_a_file_until_it_dies(tmp_path: Path) -> None:
    """A second holder is told so, not kept waiting; the kernel frees what a killed holder had."""
    path = tmp_path / "lock"
    with subprocess.Popen([sys.executable, "-c", HOLDING, str(path)], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        assert hold(path) is None
        process.kill()
    held = hold(path)

    assert held is not None
    assert hold(path) is None
    held.close()


def test_a_pipe_in_the_place_of_a_file_is_not_waited_for(tmp_path: Path) -> None:
    """Nobody reads it, so it would not open; what there was stays."""
    (tmp_path / "f").write_bytes(b"former")
    os.mkfifo(tmp_path / ".f.new")
    with pytest.raises(OSError, match=os.strerror(errno.ENXIO)):
        write_whole(tmp_path / "f", b"new")
    assert (tmp_path / "f").read_bytes() == b"former"
    os.mkfifo(tmp_path / "lock")
    with pytest.raises(OSError, match=os.strerror(errno.ENXIO)):
        hold(tmp_path / "lock")
