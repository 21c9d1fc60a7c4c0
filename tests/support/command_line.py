"""The command line inside this process: what a person would see, without the second that an interpreter takes to start."""

from __future__ import annotations

import contextlib
import io
import os
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from unittest import mock

import typer
from typer.testing import CliRunner, Result

from atoll.cli.main import command, main
from support.compilers import await_compilers

SIGNALS = (signal.SIGINT, signal.SIGTERM)


@dataclass(frozen=True, slots=True)
class CommandResult:
    """What a command left behind: its exit status and what it wrote."""

    returncode: int
    stdout: str
    stderr: str


def atoll(*words: str, environment: Mapping[str, str] | None = None) -> CommandResult:
    """Run `atoll <words>` here, with no setting of the caller's environment but those of `environment`."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("ATOLL_")}
    out, err, code = io.StringIO(), io.StringIO(), 0
    await_compilers()
    with (
        mock.patch.dict(os.environ, {**kept, **(environment or {})}, clear=True),
        mock.patch.object(sys, "argv", ["atoll", *words]),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
        _signals_restored(),
    ):
        try:
            main()
        except SystemExit as left:
            code = left.code if isinstance(left.code, int) else int(left.code is not None)
    return CommandResult(code, out.getvalue(), err.getvalue())


def invoked(words: Sequence[str], environment: Mapping[str, str | None] | None = None) -> Result:
    """Run `atoll <words>` here by typer's own runner, which keeps an error as it was raised.

    The runner would make the form of the command line that reads words anew each time, which takes longer than most verbs.
    """
    with mock.patch("typer.testing._get_command", return_value=command()):
        return CliRunner().invoke(typer.Typer(), list(words), env=environment)


@contextlib.contextmanager
def _signals_restored() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
