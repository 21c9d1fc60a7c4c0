"""A process whose work is over stays, and does nothing, until it is told to stop.

An engine that is to bring containers back after a reboot of their host (`restart: unless-stopped`) starts them again whenever
they end, also when they have finished. So a service that has finished does not end there (`stay`): it makes room for a small
interpreter, which goes on to say that all is well (`atoll health`), and ends at the first signal.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import NoReturn

from atoll.base.health import TOUCH_S, show_life
from atoll.base.logs import get
from atoll.base.stop_signals import StopSignals

log = get(__name__)


def rest(health_file: Path | None) -> NoReturn:
    """Become a process that rests; everything that this one holds is freed."""
    log.info("process.resting", reason="the run is over", until="it is told to stop")
    sys.stdout.flush()
    sys.stderr.flush()
    os.execv(sys.executable, [sys.executable, "-m", "atoll.base.resting", str(health_file or "")])  # noqa: S606  (ourselves)


def main(health_file: Path | None) -> None:
    """Touch `health_file`, if any, until SIGTERM or SIGINT."""
    told = StopSignals()
    while not told.wait(TOUCH_S):
        show_life(health_file)


if __name__ == "__main__":
    main(Path(sys.argv[1]) if sys.argv[1] else None)
