"""How a program of ours ends: what is no bug of ours becomes one message on standard error and an exit code.

Python clears its modules and collects their objects at the end: more than a second of a core for a program with JAX in it. A
program that another one of ours has started leaves that out (`run_program`). Threads that are no daemons have ended by then,
and handlers of `atexit` that were registered since it began have run.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import logging
import os
import select
import signal
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any, Final

from atoll.base import logs
from atoll.base.errors import AtollError, StorageFull, errors_in, exit_code_of, for_a_terminal, is_full, text_of
from atoll.base.extras import missing_extra
from atoll.base.logs import get

FORMAT: Final = "ATOLL_LOG__FORMAT"
SIGNALLED: Final = 128
"""What a shell adds to the number of a signal that ended a program."""

log = get(__name__)


def run_program(call: Callable[[], Any]) -> None:
    """Call what is the whole of a program that our own programs start, and end the process.

    Not for what a person types: what their tools have registered before us would not run.
    """
    codes: list[int] = []
    # The last registered runs first, so whatever `call` loads comes to its end before this.
    atexit.register(_leave, codes)
    try:
        call()
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            codes.append(end.code or 0)
        raise
    codes.append(0)


def end_as_python_does() -> None:
    """Let Python end this process in its own way: code of somebody else's runs in it, and may keep files open to the last."""
    atexit.unregister(_leave)


def leave_in_order_on_term() -> None:
    """Let SIGTERM end this command as `sys.exit` does, so that what it has begun to write is removed again."""
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(SIGNALLED + number))


def note_term() -> Callable[[], bool]:
    """Keep SIGTERM from ending this program, and return what says whether it came: for one that loads, and has a last work."""
    came: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: came.append(number))
    return lambda: bool(came)


class StopSignals:
    """SIGTERM and SIGINT from now on, as something that the main thread waits for; for the rest of the process.

    A handler runs in the main thread between two of its steps, also where `threading.Event.wait` holds the lock of its event:
    there `Event.set` would wait for ever. `queue.SimpleQueue` of Python 3.11 was seen to lose a signal at such a moment. A byte
    in a pipe has no lock.
    """

    def __init__(self) -> None:
        self._reader, self._writer = os.pipe()
        os.set_blocking(self._writer, False)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_signal)

    def wait(self, timeout_s: float) -> bool:
        """Return whether one has come within `timeout_s`; each is told once."""
        if not select.select([self._reader], [], [], timeout_s)[0]:
            return False
        os.read(self._reader, 1)
        return True

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        del number, frame
        with contextlib.suppress(BlockingIOError):  # a pipe full of signals says it, too
            os.write(self._writer, b"!")


def _leave(codes: list[int]) -> None:
    if not codes:
        return
    try:
        logging.shutdown()
        for stream in (sys.stdout, sys.stderr):
            if stream is not None:
                stream.flush()
    except (OSError, ValueError):
        return  # Python will tell of it
    os._exit(codes[-1])


def run_guarded(call: Callable[[], Any]) -> None:
    """Call, and turn every expected error into one message and an exit code."""
    # It asks a service, which sets its own handler, for its last facts (`atoll.base.fact_dumps`), and would end a program.
    if hasattr(signal, "SIGUSR1"):
        signal.signal(signal.SIGUSR1, lambda *_: None)
    try:
        _run_and_flush(call)
    except AtollError as error:
        _tell(error)
        sys.exit(exit_code_of(error))
    except KeyboardInterrupt as error:
        sys.exit(exit_code_of(error))
    except BrokenPipeError:
        # The reader has gone.
        silence_stdout()
        sys.exit(0)
    except Exception as error:
        told = _translate(error)
        if told is not None:
            _tell(told)
            sys.exit(exit_code_of(told))
        if not _speaks_json():
            raise
        log.exception("process.failed", kind=type(error).__name__, exit_code=exit_code_of(error), what=str(error))
        sys.exit(exit_code_of(error))


def _translate(error: Exception) -> AtollError | None:
    if isinstance(error, ModuleNotFoundError):
        return missing_extra(error)
    if not is_full(error) or _speaks_json():  # a log of a service tells better where it was
        return None
    silence_stdout()  # it may be what is full
    return StorageFull(
        "no room is left for what this command writes",
        got=getattr(error, "filename", None) or "standard output, or a file",
        todo="free space, or write elsewhere",
    )


def silence_stdout() -> None:
    """Write what standard output still takes, and let it lead nowhere: Python would complain once more at exit."""
    if sys.stdout is None:
        return
    for last in (sys.stdout.flush, lambda: os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())):
        with contextlib.suppress(OSError, ValueError, AttributeError):  # it is full, or is no file of the system's
            last()


def _run_and_flush(call: Callable[[], Any]) -> None:
    ended: SystemExit | None = None
    try:
        _unwrap_group(call)
    except SystemExit as end:
        ended = end
    if sys.stdout is not None and not sys.stdout.closed:
        sys.stdout.flush()
    if ended is not None:
        raise ended


def _unwrap_group(call: Callable[[], Any]) -> None:
    try:
        call()
    except ExceptionGroup as group:
        errors = list(errors_in(group))
        if not all(isinstance(each, AtollError) for each in errors):
            raise
        raise errors[0] from group  # the first has ended the others' work


def last_word_in(line: str) -> str:
    """Return the error that ended a process, as a terminal shows it, if this line of its log tells one, else nothing."""
    told = _last_word(line)
    return text_of({name: str(told[name]) for name in ("what", "got", "allowed", "todo") if name in told})


def last_kind_in(line: str) -> str:
    """Return the class of the error that ended a process, if this line of its log tells one, else nothing."""
    return str(_last_word(line).get("kind", ""))


def _last_word(line: str) -> dict[str, Any]:
    try:
        told = json.loads(line)
    except (ValueError, RecursionError):
        return {}
    return told if isinstance(told, dict) and told.get("event") == "process.failed" else {}


def _speaks_json() -> bool:
    """Return whether the last word is a line of JSON: as the log is, or as it was to be if the end came before the log."""
    if logs.outlet.last_word_as_json is None and os.environ.get(FORMAT) == "json":
        logs.configure("json")
    return bool(logs.outlet.last_word_as_json)


def _tell(error: AtollError) -> None:
    if _speaks_json():
        log.error("process.failed", kind=type(error).__name__, exit_code=exit_code_of(error), **error.parts())
    else:
        with contextlib.suppress(OSError):  # what says it may be full, too; the exit code tells
            print(f"atoll: {for_a_terminal(str(error))}", file=sys.stderr, flush=True)  # noqa: T201  (a command line speaks)
