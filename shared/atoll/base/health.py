"""Health as a file: a living service touches it, and its age shows whether the service still lives.

The check needs no port and no library: a container runs `atoll health`, and an orchestrator may look at the file itself.
A shard and an evaluator touch the file while their loops run. A learner touches it with every heartbeat that reached the
broker.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
from pathlib import Path

from atoll.base.clock import Clock

TOUCH_S = 2.0


def show_life(file: Path | None) -> None:
    """Touch `file` if there is one, with this process's id in it; a full disk must not end what is alive."""
    if file is not None:
        with contextlib.suppress(OSError):
            file.touch()
            if file.read_bytes() != (own := b"%d" % os.getpid()):
                file.write_bytes(own)


async def live(file: Path | None) -> None:
    """Touch `file` every `TOUCH_S` seconds for as long as this loop runs. It never returns: cancel it."""
    while True:
        show_life(file)
        await asyncio.sleep(TOUCH_S)


def silent_s(file: Path, clock: Clock) -> float:
    """Return the seconds since `file` was touched; raise `OSError` when there is no such file."""
    if file.is_dir():
        raise IsADirectoryError(errno.EISDIR, "this is a folder", str(file))
    return max(0.0, clock.wall() - file.stat().st_mtime)
