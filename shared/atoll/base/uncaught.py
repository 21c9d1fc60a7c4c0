"""The message, and not the traceback, of an error of ours that a script does not catch.

`import atoll` puts this in the place of Python's own hooks, for the main thread and for others. It speaks only of what a
person, a machine or a peer has done; every other exception, a bug of ours (`ProtocolMisuse`) too, goes to the hook that was
there. A group of errors is told if all in it are of the first kind. A program that has set a hook of its own before keeps it.
The exit code stays Python's, 1. `ATOLL_TRACEBACK=1` brings tracebacks back. A program that catches an `AtollError` has its
parts as fields: `what`, `got`, `allowed`, `todo`.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Final

SWITCH: Final = "ATOLL_TRACEBACK"
SYSTEMS: Final = ("sys", "threading", "_thread", "apport_python_hook")
"""Modules whose hooks are there without a program's doing: Python's, and the one that Ubuntu installs for all."""


def install() -> None:
    """Take the place of Python's own hooks; those that a program has set are left."""
    if _is_the_systems(sys.excepthook):
        sys.excepthook = _main_hook(sys.excepthook)
    if _is_the_systems(threading.excepthook):
        threading.excepthook = _thread_hook(threading.excepthook)


def message_of(error: BaseException | None) -> str:
    """Return what a person reads of an error of ours that is no bug of ours; empty for any other."""
    # `import atoll` loads next to nothing.
    from atoll.base.errors import BusError, EnvironmentFault, PeerMisbehaved, UserError, for_a_terminal  # noqa: PLC0415

    if os.environ.get(SWITCH, "") not in ("", "0"):
        return ""
    errors = [] if error is None else list(leaves_of(error))
    told = all(isinstance(each, UserError | EnvironmentFault | BusError | PeerMisbehaved) for each in errors)
    return "\n".join(f"atoll: {for_a_terminal(str(each))}" for each in errors) if told else ""


def leaves_of(error: BaseException) -> Iterator[BaseException]:
    """Yield the errors in a group, and those in the groups inside; of any other error itself."""
    if not isinstance(error, BaseExceptionGroup):
        yield error
        return
    for each in error.exceptions:
        yield from leaves_of(each)


def _main_hook(
    former: Callable[[type[BaseException], BaseException, TracebackType | None], object],
) -> Callable[[type[BaseException], BaseException, TracebackType | None], object]:
    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if message := message_of(error):
            _say(message)
        else:
            former(kind, error, trace)

    return hook


def _thread_hook(
    former: Callable[[threading.ExceptHookArgs], object],
) -> Callable[[threading.ExceptHookArgs], object]:
    def hook(args: threading.ExceptHookArgs) -> None:
        if message := message_of(args.exc_value):
            from atoll.base.errors import for_a_terminal  # noqa: PLC0415  (`import atoll` loads next to nothing)

            thread = for_a_terminal(args.thread.name) if args.thread else "that has ended"
            _say(f"{message}\n  in:      thread {thread}")
        else:
            former(args)

    return hook


def _say(message: str) -> None:
    if sys.stderr is not None:
        print(message, file=sys.stderr, flush=True)  # noqa: T201  (where Python itself would print)


def _is_the_systems(hook: object) -> bool:
    return getattr(hook, "__module__", None) in SYSTEMS
