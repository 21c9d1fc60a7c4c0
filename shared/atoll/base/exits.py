"""How a program of ours ends: what is no bug of ours becomes one message on standard error and an exit code."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any

from atoll.base.errors import AtollError

INTERRUPTED = 130
NOT_INSTALLED = 2
_EXTRAS = {
    "jax": "learner",
    "flax": "learner",
    "optax": "learner",
    "safetensors": "learner",
    "ml_dtypes": "learner",
    "tokenizers": "bpe",
    "pyarrow": "parquet",
    "atoll_learner": "learner",
    "atoll_synchronizer": "synchronizer",
    "atoll_simulator": "simulator",
}


def guarded(call: Callable[[], Any]) -> None:
    """Call, and turn every expected error into one message and an exit code."""
    try:
        call()
    except AtollError as error:
        _leave(f"atoll: {error}", error.exit_code)
    except KeyboardInterrupt:
        _leave("", INTERRUPTED)
    except BrokenPipeError:
        # The reader has gone; Python would complain once more when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(0)
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in _EXTRAS:
            raise
        todo = f"pip install 'atoll[{_EXTRAS[package]}]'"
        _leave(f"atoll: this verb needs {package}, which is not installed\n  to do:   {todo}", NOT_INSTALLED)


def _leave(message: str, code: int) -> None:
    """Print `message`, if any, to standard error and leave with `code`."""
    if message:
        print(message, file=sys.stderr)  # noqa: T201  (a command line speaks)
    sys.exit(code)
