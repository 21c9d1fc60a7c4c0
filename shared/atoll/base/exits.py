"""How a program of ours ends: what is no bug of ours becomes one message on standard error and an exit code."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable
from typing import Any

from atoll.base import logs
from atoll.base.errors import AtollError, exit_code_of, for_a_terminal, text_of
from atoll.base.extras import missing
from atoll.base.logs import get

log = get(__name__)


def guarded(call: Callable[[], Any]) -> None:
    """Call, and turn every expected error into one message and an exit code.

    SIGUSR1 asks a service for its last facts (`atoll.base.fact_dumps`). It would end a program that keeps none, so here it does
    nothing; a service sets its own handler.
    """
    if hasattr(signal, "SIGUSR1"):
        signal.signal(signal.SIGUSR1, lambda *_: None)
    try:
        call()
    except AtollError as error:
        _tell(error)
        sys.exit(exit_code_of(error))
    except KeyboardInterrupt as error:
        sys.exit(exit_code_of(error))
    except BrokenPipeError:
        # The reader has gone; Python would complain once more when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(0)
    except ModuleNotFoundError as error:
        told = missing(error)
        if told is None:
            raise
        _tell(told)
        sys.exit(exit_code_of(told))


def last_word_in(line: str) -> str:
    """Return the error that ended a process, as a terminal shows it, if this line of its log tells one, else nothing."""
    try:
        told = json.loads(line)
    except ValueError:
        return ""
    if not isinstance(told, dict) or told.get("event") != "process.failed":
        return ""
    return text_of({name: str(told[name]) for name in ("what", "got", "allowed", "todo") if name in told})


def _tell(error: AtollError) -> None:
    """Say what ends this program: a text on standard error, or one more line where its log is JSON."""
    if logs.outlet.last_word_as_json:
        log.error("process.failed", kind=type(error).__name__, exit_code=exit_code_of(error), **error.parts())
    else:
        print(f"atoll: {for_a_terminal(str(error))}", file=sys.stderr)  # noqa: T201  (a command line speaks)
