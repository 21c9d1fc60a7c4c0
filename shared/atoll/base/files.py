"""Files that a person names or somebody else may have made, read within bounds; files written whole or not at all.

A pipe in the place of such a file would keep its reader waiting for ever, and a device or an endless line would fill the
memory. So these files are opened here: only regular ones, and never with more in memory than the reader has allowed. All that
goes wrong is an `OSError`, whose `strerror` says what is wrong with the file. A library that opens a file by its name is given
one that was looked at first (`check_regular`). A test finds places that open a file in another way
(`tests/tidy/test_files_from_people.py`).

A writer puts the new content beside the old, makes it durable, and moves it into place (`write_whole`). A lock on a file
(`hold`) is released by the kernel when its holder dies, however it dies.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import IO, BinaryIO, Final

DOCUMENT_BYTES_MAX: Final = 1 << 20
"""Of what people write by hand, and of keys: far more than the settings of a large deployment."""
TEXT_BYTES_MAX: Final = 64 << 20
"""Far more than any text that a program writes to be read whole: files of a deployment, descriptions of models, samples."""
LINE_PIECES_MAX: Final = 16
"""A line that is so many times as long as its reader allows is none: the file is no text of lines."""
BYTE_ORDER_MARK: Final = b"\xef\xbb\xbf"
"""What some editors begin a text with; it is none of the text."""
_KINDS: Final = (
    (stat.S_ISDIR, "a folder"),
    (stat.S_ISFIFO, "a pipe"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
)


class NotRegular(OSError):
    """There is something else than a file under this name: a folder, a pipe, a socket, a device."""


class TooLarge(OSError):
    """The file is larger than its reader allows."""


class NotText(OSError):
    """The file is no text in UTF-8."""


def opened_file(path: Path, *, follow: bool = True) -> BinaryIO:
    """Open a regular file for reading; raise `OSError` if it cannot be opened, or is none (`NotRegular`).

    Without `follow`, a symbolic link is an `OSError` with `errno.ELOOP`.
    """
    try:
        # To open a pipe that nobody writes to would take for ever, unless we do not wait.
        handle = os.open(
            path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC | (0 if follow else os.O_NOFOLLOW)
        )
    except ValueError as error:  # a zero in a name
        raise OSError(errno.EINVAL, str(error), str(path)) from error
    except OSError as error:
        if error.errno != errno.ENXIO:
            raise
        raise NotRegular(errno.EINVAL, "not a regular file but a socket", str(path)) from error
    mode = os.fstat(handle).st_mode
    if not stat.S_ISREG(mode):
        os.close(handle)
        kind = next((kind for is_it, kind in _KINDS if is_it(mode)), "something else")
        raise NotRegular(errno.EINVAL, f"not a regular file but {kind}", str(path))
    return os.fdopen(handle, "rb")


def check_regular(path: Path) -> None:
    """Raise as `opened_file` if `path` is no regular file that can be opened."""
    opened_file(path).close()


def is_folder(path: Path) -> bool:
    """Return whether `path` is a folder; False for what nobody lets us look at, which its reader then says in words."""
    try:
        return path.is_dir()
    except OSError:
        return False


def read_file(path: Path, size_bytes_max: int) -> bytes:
    """Return the content of a regular file; raise `OSError` if it cannot be read, is none, or is larger than that."""
    with opened_file(path) as file:
        return read_whole(file, size_bytes_max, path)


def read_whole(file: BinaryIO, size_bytes_max: int, path: Path) -> bytes:
    """Return the content of a file that `opened_file` opened; raise `TooLarge` if it is larger than that."""
    size_bytes = os.fstat(file.fileno()).st_size
    data = file.read(size_bytes + 1) if size_bytes <= size_bytes_max else b""
    if len(data) > size_bytes:  # it has grown, or is of a file system that tells no size
        data += file.read(size_bytes_max + 1 - len(data))
    if max(size_bytes, len(data)) > size_bytes_max:
        raise TooLarge(errno.EFBIG, f"larger than {size_bytes_max:,} bytes", str(path))
    return data


def read_text(path: Path, size_bytes_max: int = DOCUMENT_BYTES_MAX) -> str:
    """Return the text of a regular file, without a byte order mark; a line ends with LF.

    Raises `OSError` as `read_file`, and if it is not UTF-8 (`NotText`).
    """
    return text_of_bytes(read_file(path, size_bytes_max), path)


def text_of_bytes(data: bytes, path: Path) -> str:
    """Return the text in `data` of the file `path`, as `read_text`."""
    try:
        text = data.removeprefix(BYTE_ORDER_MARK).decode("utf-8")
    except UnicodeDecodeError as error:
        raise NotText(errno.EILSEQ, f"not text in UTF-8: byte {error.object[error.start]:#04x}", str(path)) from error
    return text.replace("\r\n", "\n").replace("\r", "\n")


def text_or_empty(path: Path) -> str:
    """Return the text of a regular file of at most `TEXT_BYTES_MAX`, wrong bytes replaced; empty if none can be read."""
    try:
        return read_file(path, TEXT_BYTES_MAX).decode("utf-8", "replace")
    except OSError:
        return ""


def lines_of(path: Path, line_bytes_max: int) -> Iterator[bytes | None]:
    """Yield the lines of a regular file; None in the place of each that is longer, up to `LINE_PIECES_MAX` times."""
    with opened_file(path) as file:
        while line := file.readline(line_bytes_max):
            yield None if _is_cut(line, line_bytes_max) else line
            pieces = 1
            while _is_cut(line, line_bytes_max):
                pieces += 1
                if pieces > LINE_PIECES_MAX:
                    most = LINE_PIECES_MAX * line_bytes_max
                    raise TooLarge(errno.EFBIG, f"a line of more than {most:,} bytes", str(path))
                line = file.readline(line_bytes_max)


def _is_cut(line: bytes, line_bytes_max: int) -> bool:
    return len(line) == line_bytes_max and not line.endswith(b"\n")


def write_whole(path: Path, data: bytes, draft: Path | None = None) -> None:
    """Write `data` to `path`, durable before it is visible; raise `OSError` with the old content in place.

    The default `draft` has a fixed name, so a later writer overwrites what a killed writer left. Writers that may run at the
    same time need different drafts, in the same folder.
    """
    draft = draft or path.with_name(f".{path.name}.new")
    try:
        with open(draft, "wb", opener=_at_once) as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        draft.replace(path)
    except OSError:
        with contextlib.suppress(OSError):
            draft.unlink(missing_ok=True)
        raise


def _at_once(path: str, flags: int) -> int:
    """Open what is to be written; a pipe in its place is an `OSError`, and not waited for until somebody reads it."""
    return os.open(path, flags | os.O_NONBLOCK, 0o666)


def hold(path: Path) -> IO[str] | None:
    """Return `path`, opened (made if need be) and held until it is closed; None while another process holds it."""
    handle = _at_once(str(path), os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC)
    file = os.fdopen(handle, "w", encoding="utf-8")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        return None
    except BaseException:
        file.close()
        raise
    return file
