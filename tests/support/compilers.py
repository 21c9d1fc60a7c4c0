"""The threads that compile kernels beside the work (`atoll.codec.kernels.background`), for tests that they would disturb."""

from __future__ import annotations

import threading

DEADLINE_S = 120.0


def compiling() -> threading.Thread | None:
    """Return a thread that compiles, if one does."""
    return next((thread for thread in threading.enumerate() if thread.name == "atoll-compiler"), None)


def await_compilers() -> None:
    """Return once nothing compiles, whichever test of this process began it: what a compiler logs goes to any test."""
    while (thread := compiling()) is not None:
        thread.join(DEADLINE_S)
