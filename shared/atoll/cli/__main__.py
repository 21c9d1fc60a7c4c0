"""`python -m atoll.cli`: the same as `atoll`, for children that must run under this very interpreter."""

from __future__ import annotations

from atoll.base.exits import run_program
from atoll.cli import main

if __name__ == "__main__":
    run_program(main)
