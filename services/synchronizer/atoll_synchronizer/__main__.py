"""`python -m atoll_synchronizer`: the same as `atoll synchronizer`."""

from __future__ import annotations

from atoll.cli.main import run_verb
from atoll_synchronizer.commands import serve

if __name__ == "__main__":
    run_verb(serve)
