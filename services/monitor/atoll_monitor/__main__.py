"""`python -m atoll_monitor`: the same as `atoll monitor`."""

from __future__ import annotations

from atoll.cli.main import run_verb
from atoll_monitor.commands import monitor

if __name__ == "__main__":
    run_verb(monitor)
