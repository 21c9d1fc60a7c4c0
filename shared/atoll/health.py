"""Health by a file: a service touches it while it lives, and its age tells anybody who can see the file.

No port is opened and no library is needed to ask: a container's check runs `atoll health`, an orchestrator may look at
the file itself. A shard touches it while its loop runs, a learner with every heartbeat that reached the broker.
"""

from __future__ import annotations

import contextlib
from pathlib import Path

from atoll.clock import Clock


def show_life(file: Path | None) -> None:
    """Touch `file` if there is one to touch; a full disk must not end what is alive."""
    if file is not None:
        with contextlib.suppress(OSError):
            file.touch()


def silent_s(file: Path, clock: Clock) -> float:
    """Return the seconds since `file` was touched; raise `OSError` when there is no such file."""
    return max(0.0, clock.wall() - file.stat().st_mtime)
