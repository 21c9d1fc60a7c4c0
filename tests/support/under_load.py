"""Run a command while so many processes keep the machine busy: `python tests/support/under_load.py 8 make test`.

Each of them computes until its parent is gone, so that none outlives this program, however it ends.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import ExitStack

BUSY = """
import os
parent = int(__import__("sys").argv[1])
while os.getppid() == parent:
    sum(range(200_000))
"""


def main(count: int, command: list[str]) -> int:
    """Return the exit code of `command`."""
    # An interrupt of the terminal reaches the command, too; wait for its answer and leave with that.
    signal.signal(signal.SIGINT, lambda *_: None)
    with ExitStack() as stack:
        for _ in range(count):
            busy = stack.enter_context(subprocess.Popen([sys.executable, "-S", "-c", BUSY, str(os.getpid())]))
            stack.callback(busy.kill)
        return subprocess.run(command, check=False).returncode


if __name__ == "__main__":
    if not sys.argv[1].isdecimal():
        sys.exit(f"LOAD is a number of processes, got {sys.argv[1]!r}")
    sys.exit(main(int(sys.argv[1]), sys.argv[2:]))
