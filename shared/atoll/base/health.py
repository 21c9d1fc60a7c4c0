"""Health by a file: a service touches it while it lives, and its age tells anybody who can see the file.

No port is opened and no library is needed to ask: a container's check runs `atoll health`, an orchestrator may look at
the file itself. A shard and an evaluator touch it while their loops run, a learner with every heartbeat that reached
the broker.
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
    """Touch `file` every two seconds while the loop that runs this lives; for ever, so cancel it."""
    while True:
        show_life(file)
        await asyncio.sleep(TOUCH_S)


def silent_s(file: Path, clock: Clock) -> float:
    """Return the seconds since `file` was touched; raise `OSError` when there is no such file."""
    if file.is_dir():
        raise IsADirectoryError(errno.EISDIR, "this is a folder", str(file))
    return max(0.0, clock.wall() - file.stat().st_mtime)
