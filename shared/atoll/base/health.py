"""Health as a file: a living service touches it, and its age shows whether the service still lives.

The check needs no port and no library (`atoll health`). Every service of a run touches the file only while the broker answers
it, so the file of a service that is cut off grows old.

An engine that is to bring containers back after a reboot of their host (`restart: unless-stopped`) starts them again whenever
they end, also when they have finished. So a service that has finished makes room for a small interpreter, this module, which
goes on to say that all is well and ends at the first signal (`rest`).
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import NoReturn

from atoll.base.clock import Clock
from atoll.base.errors import AtollError
from atoll.base.exits import StopSignals
from atoll.base.files import DOCUMENT_BYTES_MAX, read_file
from atoll.base.logs import get

log = get(__name__)

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
        with contextlib.suppress(AtollError):
            if reaches is None or await reaches(REACH_S):
                show_life(file)
        await asyncio.sleep(TOUCH_S)


def silent_s(file: Path, clock: Clock) -> float:
    """Return the seconds since `file` was touched; raise `OSError` when there is no such file."""
    if file.is_dir():
        raise IsADirectoryError(errno.EISDIR, "this is a folder", str(file))
    return max(0.0, clock.wall() - file.stat().st_mtime)


def rest(health_file: Path | None) -> NoReturn:
    """Become a process that rests; everything that this one holds is freed."""
    log.info("process.resting", reason="the run is over", until="it is told to stop")
    sys.stdout.flush()
    sys.stderr.flush()
    os.execv(sys.executable, [sys.executable, "-m", "atoll.base.health", str(health_file or "")])  # noqa: S606  (ourselves)


def main(health_file: Path | None) -> None:
    """Touch `health_file`, if any, until SIGTERM or SIGINT."""
    signals = StopSignals()
    while not signals.wait(TOUCH_S):
        show_life(health_file)


if __name__ == "__main__":
    main(Path(sys.argv[1]) if sys.argv[1] else None)
