"""Health as a file: a living service touches it, and its age shows whether the service still lives.

The check needs no port and no library: a container runs `atoll health`, and an orchestrator may look at the file itself.
Every service of a run touches the file only while the broker answers it: a learner with each heartbeat that arrived, a
synchronizer and an evaluator after an echo. So the file of a service that is cut off grows old.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
from collections.abc import Awaitable, Callable
from pathlib import Path

from atoll.base.clock import Clock
from atoll.base.errors import AtollError
from atoll.base.regular_files import DOCUMENT_BYTES_MAX, read_file

TOUCH_S = 2.0
REACH_S = 5.0


def show_life(file: Path | None) -> None:
    """Touch `file` if there is one, with this process's id in it; a full disk must not end what is alive."""
    if file is not None:
        with contextlib.suppress(OSError):
            file.touch()
            if read_file(file, DOCUMENT_BYTES_MAX) != (own := b"%d" % os.getpid()):
                file.write_bytes(own)


async def live(file: Path | None, reaches: Callable[[float], Awaitable[bool]] | None = None) -> None:
    """Touch `file` every `TOUCH_S` seconds while this loop runs and, if given, `reaches` says that the broker answers.

    `reaches` gets the seconds to wait for an answer. This never returns: cancel it.
    """
    while True:
        if reaches is None or await _answered(reaches):
            show_life(file)
        await asyncio.sleep(TOUCH_S)


async def _answered(reaches: Callable[[float], Awaitable[bool]]) -> bool:
    try:
        return await reaches(REACH_S)
    except AtollError:
        return False


def silent_s(file: Path, clock: Clock) -> float:
    """Return the seconds since `file` was touched; raise `OSError` when there is no such file."""
    if file.is_dir():
        raise IsADirectoryError(errno.EISDIR, "this is a folder", str(file))
    return max(0.0, clock.wall() - file.stat().st_mtime)
