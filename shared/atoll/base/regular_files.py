"""Reading files that somebody else may have made: the folder of a run that was copied, a report that was sent, an archive.

A pipe in the place of such a file would keep its reader waiting for ever, and a device or an endless line would fill the
memory. So these files are opened here: only regular ones, and never with more in memory than the reader has allowed. All that
goes wrong is an `OSError`, which every reader tells in words of its own. To some readers a file that is not there is as good
as an empty one: `text_or_empty`.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, Final

TEXT_BYTES_MAX: Final = 64 << 20
"""Far more than any text that is read whole: files of a deployment, certificates, samples."""


class NotRegular(OSError):
    """There is something else than a file under this name: a folder, a pipe, a socket, a device."""


class TooLarge(OSError):
    """The file is larger than its reader allows."""


def opened_file(path: Path, *, follow: bool = True) -> BinaryIO:
    """Open a regular file for reading.

    Args:
        path: the file.
        follow: whether `path` may be a symbolic link; without, a link is an `OSError` with `errno.ELOOP`.

    Raises:
        OSError: it cannot be opened, or is none (`NotRegular`).
    """
    try:
        # To open a pipe that nobody writes to would take for ever, unless we do not wait.
        handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | (0 if follow else os.O_NOFOLLOW))
    except ValueError as error:  # a zero in a name
        raise OSError(errno.EINVAL, str(error), str(path)) from error
    file = os.fdopen(handle, "rb") if stat.S_ISREG(os.fstat(handle).st_mode) else None
    if file is None:
        os.close(handle)
        raise NotRegular(errno.EINVAL, "not a regular file", str(path))
    return file


def read_file(path: Path, size_bytes_max: int) -> bytes:
    """Return the content of a regular file; raise `OSError` if it cannot be read, is none, or is larger than that."""
    with opened_file(path) as file:
        data = file.read(size_bytes_max + 1)
    if len(data) > size_bytes_max:
        raise TooLarge(errno.EFBIG, f"larger than {size_bytes_max:,} bytes", str(path))
    return data


def text_or_empty(path: Path) -> str:
    """Return the text of a regular file of at most `TEXT_BYTES_MAX`; empty if there is none that can be read.

    What is not UTF-8 is replaced: no reader of such a text can do anything else about it.
    """
    try:
        return read_file(path, TEXT_BYTES_MAX).decode("utf-8", "replace")
    except OSError:
        return ""


def lines_of(path: Path, line_bytes_max: int) -> Iterator[bytes | None]:
    """Yield the lines of a regular file; None in the place of each that is longer. Raises as `opened_file`."""
    with opened_file(path) as file:
        while line := file.readline(line_bytes_max):
            yield None if _is_cut(line, line_bytes_max) else line
            while _is_cut(line, line_bytes_max):
                line = file.readline(line_bytes_max)


def _is_cut(line: bytes, line_bytes_max: int) -> bool:
    return len(line) == line_bytes_max and not line.endswith(b"\n")
