"""Caches that the processes of one user keep for each other on a machine, and turns to fill them.

    $XDG_CACHE_HOME/atoll/...     ($XDG_CACHE_HOME is ~/.cache unless it is set)

A folder serves only if it is the user's and nobody else can write into it: processes run what they find there. Of processes
that start together and find a cache empty, the one with the turn compiles, and the others find what it has made. A turn is a
lock on a file beside the cache. After `PATIENCE_S` a process goes on out of turn.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import stat
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

from atoll.base.logs import get

log = get(__name__)

PATIENCE_S: Final = 120.0
POLL_S: Final = 0.1


def user_cache(*names: str) -> Path | None:
    """Return a folder in the user's cache, made if need be; None where it cannot be had, or is not the user's alone."""
    told = os.environ.get("XDG_CACHE_HOME", "")
    try:
        home = Path(told) if Path(told).is_absolute() else Path.home() / ".cache"
        if not home.is_absolute() or home.parent == home.parent.parent:  # no home, or an empty one
            return None
        home.mkdir(parents=True, exist_ok=True)
        folder, ours = home, True
        for name in ("atoll", *names):
            folder /= name
            folder.mkdir(exist_ok=True, mode=0o700)
            ours = ours and _is_ours(folder)
        return folder if ours and os.access(folder, os.W_OK | os.X_OK) else None
    except (OSError, RuntimeError):  # a user without a home
        return None


@contextlib.contextmanager
def turn(
    folder: Path | None, patience_s: float = PATIENCE_S, *, at_each_look: Callable[[], None] = lambda: None
) -> Iterator[bool]:
    """Hold the turn to compile into the cache in `folder`; yield whether this process got it, False without a cache.

    `at_each_look` is called while we wait, and may raise to end that.
    """
    if folder is None:
        yield False
        return
    began_s = time.monotonic()
    try:  # nothing that somebody has put in its place may end or delay a compiler
        file = os.open(folder / ".turn", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o600)
    except OSError as error:
        log.info("compile.turn", had=False, waited_s=0.0, reason=str(error))
        yield False
        return
    try:
        had = _lock(file, began_s + patience_s, at_each_look)
        waited_s = time.monotonic() - began_s
        if not had or waited_s > 1.0:
            log.info("compile.turn", had=had, waited_s=round(waited_s, 2))
        yield had
    finally:
        os.close(file)


def _is_ours(folder: Path) -> bool:
    about = folder.lstat()
    return stat.S_ISDIR(about.st_mode) and about.st_uid == os.geteuid() and not about.st_mode & 0o022


def _lock(file: int, deadline_s: float, at_each_look: Callable[[], None]) -> bool:
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            at_each_look()
            if time.monotonic() >= deadline_s:
                return False
            time.sleep(POLL_S)
        except OSError:
            # Some network file systems know no locks.
            return False
        else:
            return True
