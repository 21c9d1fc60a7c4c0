"""The user's own cache folder: what the processes of one user keep for each other on a machine.

    $XDG_CACHE_HOME/atoll/...     ($XDG_CACHE_HOME is ~/.cache unless it is set)

A folder serves only if it is the user's and nobody else can write into it: processes run what they find there.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path


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


def _is_ours(folder: Path) -> bool:
    """Return whether a folder is this user's, and nobody else may write into it."""
    about = folder.lstat()
    return stat.S_ISDIR(about.st_mode) and about.st_uid == os.geteuid() and not about.st_mode & 0o022
