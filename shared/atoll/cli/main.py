"""The command line: the kernel's verbs and those that installed services add.

Building it imports nothing heavy: a verb imports what it needs when it runs, so `--help` and every verb that trains
nothing answer in under half a second. Services are found by the entry-point group `atoll.commands`, never imported by
name. If one cannot be loaded, standard error names it and the other verbs still work.

A mistake of the person, or a fault of the machine, becomes one message on standard error. The exit code is that of the
error (2: the person can change it, 3: the machine or the network), and 130 after Ctrl-C. Only our own bugs show a
traceback.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from importlib.metadata import entry_points
from typing import Annotated, Any

import typer
from typer.main import get_command

from atoll.base.exits import run_guarded, run_program
from atoll.cli import (
    archive,
    broker,
    config,
    deploy,
    doctor,
    fates,
    keys,
    replay,
    report,
    runs,
    story,
    up,
    watch,
)

GROUP = "atoll.commands"
HELP = "Train one model across asynchronous islands of compute."


def print_version(asked: bool) -> None:  # noqa: FBT001  (typer calls it)
    """Do as the verb `version` does and leave, if a person asked for that."""
    if asked:
        doctor.version_verb()
        raise typer.Exit


def program(
    *,
    version: Annotated[
        bool, typer.Option("--version", callback=print_version, is_eager=True, help="Do as the verb `version` does.")
    ] = False,
) -> None:
    """Read the options that stand before a verb."""
    del version


def build() -> typer.Typer:
    """Return the command line with the kernel's verbs and those of every installed service."""
    app = typer.Typer(
        name="atoll",
        help=HELP,
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,
    )
    app.callback(help=HELP)(program)
    for register in (
        up.register,
        broker.register,
        keys.register,
        deploy.register,
        runs.register,
        report.register,
        watch.register,
        fates.register,
        story.register,
        replay.register,
        archive.register,
        config.register,
        doctor.register,
    ):
        register(app)
    for point in sorted(entry_points(group=GROUP), key=lambda found: found.name):
        try:
            point.load()(app)
        except (ImportError, AttributeError) as error:
            print(f"atoll: the verbs of {point.name} cannot be loaded: {error}", file=sys.stderr)  # noqa: T201  (a command line speaks)
    return app


@functools.cache
def command() -> Callable[..., Any]:
    """Return the command line in the form that reads words; to make it takes longer than most verbs, so it is made once."""
    return get_command(build())


def main() -> None:
    """Run the command line and leave the process."""
    run_guarded(lambda: command()(prog_name="atoll"))


def run_verb(verb: Callable[..., None]) -> None:
    """Run one verb as a program of its own (`python -m atoll_learner`) with the same errors and exit codes."""
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)
    app.command(help=verb.__doc__)(verb)
    run_program(lambda: run_guarded(app))
