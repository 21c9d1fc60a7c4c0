"""The message, and not the traceback, of an error of ours that a script does not catch.

`import atoll` puts this in the place of Python's own hooks, for the main thread and for others. A group of errors is told if
all in it are the doing of a person, a machine or a peer; every other exception, a bug of ours (`ProtocolMisuse`) too, goes to
the hook that was there. A program that has set a hook of its own before keeps it. The exit code stays Python's, 1.
`ATOLL_TRACEBACK=1` brings tracebacks back.
"""

from __future__ import annotations

import os
import sys
import threading
from types import TracebackType
from typing import Final

from atoll.base.errors import EXPECTED, errors_in, for_a_terminal

SWITCH: Final = "ATOLL_TRACEBACK"
_SYSTEMS: Final = ("sys", "threading", "_thread", "apport_python_hook")
"""Modules whose hooks are there without a program's doing: Python's, and the one that Ubuntu installs for all."""


def install() -> None:
    """Take the place of Python's own hooks; those that a program has set are left."""
    former, former_of_threads = sys.excepthook, threading.excepthook

    def show(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if message := _uncaught_message(error):
            _say(message)
        else:
            former(kind, error, trace)

    def show_in_thread(args: threading.ExceptHookArgs) -> None:
        if message := _uncaught_message(args.exc_value):
            thread = for_a_terminal(args.thread.name) if args.thread else "that has ended"
            _say(f"{message}\n  in:      thread {thread}")
        else:
            former_of_threads(args)

    if _is_the_systems(former):
        sys.excepthook = show
    if _is_the_systems(former_of_threads):
        threading.excepthook = show_in_thread


def _uncaught_message(error: BaseException | None) -> str:
    errors = [] if error is None or os.environ.get(SWITCH, "") not in ("", "0") else list(errors_in(error))
    expected = all(isinstance(each, EXPECTED) for each in errors)
    return "\n".join(f"atoll: {for_a_terminal(str(each))}" for each in errors) if expected else ""


def _say(message: str) -> None:
    if sys.stderr is not None:
        print(message, file=sys.stderr, flush=True)  # noqa: T201  (where Python itself would print)


def _is_the_systems(hook: object) -> bool:
    return getattr(hook, "__module__", None) in _SYSTEMS
