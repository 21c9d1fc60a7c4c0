"""The command line: one `atoll` in front of everything, light until a verb runs."""

from __future__ import annotations

import sys

from atoll.base.errors import INTERRUPTED


def main() -> None:
    """Run the command line; Ctrl-C is no error, not even while Python still loads what a verb needs."""
    try:
        from atoll.cli.main import main as run  # noqa: PLC0415  (inside the guard)

        run()
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
