"""Files that are there whole or not at all, and files that one process holds.

A reader always finds whole content: the writer puts the new content beside the old, makes it durable, and moves it into
place. A hold is a lock that the kernel releases when its holder dies, however it dies.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from pathlib import Path
from typing import IO


def write_whole(path: Path, data: bytes, draft: Path | None = None) -> None:
    """Write `data` to `path`, durable before it is visible; raise `OSError` with the old content in place.

    The content is first written to `draft` in the same folder. The default draft has a fixed name, so a later writer
    overwrites what a killed writer left. Writers that may run at the same time need different drafts.
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
