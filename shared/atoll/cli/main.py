"""The command line: the kernel's verbs and those that installed services add.

A verb of the kernel is a row of `VERBS`: its module is imported when it is used, so `--help`, and every verb that trains
nothing, answer in under half a second. Services are found by the entry-point group `atoll.commands`, never imported by
name. If one cannot be loaded, standard error names it and the other verbs still work.

A mistake of the person, or a fault of the machine, becomes one message on standard error. The exit code is that of the
error (2: the person can change it, 3: the machine or the network), and 130 after Ctrl-C. Only our own bugs show a
traceback.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import entry_points
from pathlib import Path
from typing import Annotated, Any, Final

import typer
from typer.core import TyperCommand, TyperGroup
from typer.main import get_command

from atoll.base.exits import run_guarded, run_program
from atoll.cli.options import Assignments, Config, with_flags
from atoll.cli.output import say

ENTRY_POINTS: Final = "atoll.commands"
HELP: Final = "Train one model across asynchronous islands of compute."
PLAIN: Final[dict[str, Any]] = {"pretty_exceptions_enable": False, "rich_markup_mode": None}
GROUPS: Final = ("run", "watch", "understand", "keep", "plan")
"""The headings of `atoll --help`, in their order; a verb names its own as `rich_help_panel`."""
FORMER: Final = {"story": "atoll why"}
"""Verbs of releases before, and what does their work now."""


@dataclass(frozen=True, slots=True)
class Verb:
    """One verb of the kernel: its heading, its help, and the function, or the typer with verbs of its own, that is it."""

    group: str
    help: str
    where: str


VERBS: Final = {
    "up": Verb("run", "Start a whole run on this machine, watch it, and write a report.", "up:up"),
    "broker": Verb("run", "Run a broker for islands, with its data in a folder, until Ctrl-C.", "broker:verbs"),
    "keys": Verb("run", "Who may enter a locked broker, and as what.", "keys:verbs"),
    "deploy": Verb(
        "run", "Render one description for every place of a run, and compare it with what runs.", "deploy:verbs"
    ),
    "config": Verb("run", "Show every setting, its value and where it comes from.", "config:config_verb"),
    "doctor": Verb(
        "run", "Check what Atoll needs on this machine, and that a run can be joined from here.", "deploy:doctor"
    ),
    "version": Verb("run", "Print the version, and which wire versions it speaks.", "main:version_verb"),
    "status": Verb(
        "watch",
        "Say whether a run trains and what it waits for; leave with 1 if it waits or misses one.",
        "watch:status",
    ),
    "top": Verb("watch", "Show the learners and shards of a run, live: speed, loss, lag, bytes.", "watch:top"),
    "tap": Verb("watch", "Print what a run stores, as it happens: contributions, heads, events.", "watch:tap"),
    "health": Verb("watch", "Leave with 0 while a service's health file is fresh, else with 1.", "main:health_verb"),
    "why": Verb(
        "understand",
        "Say what stands out in a run, what happened to a round, fragment, shard, learner or contribution, or answer: "
        "goodput, behind, refused, loss, grace.",
        "story:why",
    ),
    "fates": Verb(
        "understand", "Print what became of every token of a run, per incarnation and in total.", "fates:fates"
    ),
    "report": Verb("understand", "Look at the reports that runs have left.", "report:verbs"),
    "replay": Verb(
        "understand",
        "Make the rounds of a run once more, or tell a machine the facts of a dump, and compare.",
        "replay:replay",
    ),
    "runs": Verb(
        "keep", "List the runs that a broker keeps: how far they are, and what they take of its disk.", "runs:verbs"
    ),
    "archive": Verb("keep", "Look at checkpoints outside the broker.", "replay:verbs"),
}


class LazyVerb(TyperCommand):
    """A verb whose module is imported when it is used."""

    def __init__(self, name: str, verb: Verb) -> None:
        super().__init__(name, help=verb.help, rich_help_panel=verb.group, rich_markup_mode=None)
        self._where = verb.where

    def load(self) -> Any:  # noqa: ANN401  (typer vendors the parser's types)
        """Return the command itself."""
        module, _, name = self._where.partition(":")
        found = getattr(import_module(f"atoll.cli.{module}"), name)
        app = typer.Typer(add_completion=False, **PLAIN)
        if isinstance(found, typer.Typer):
            app = found
            app.info.help = self.help
        else:
            app.command(name=self.name, help=self.help)(found)
        return get_command(app)

    def make_context(self, info_name: str | None, args: list[str], parent: Any = None, **extra: Any) -> Any:  # noqa: ANN401
        """Return the context of the command itself."""
        return self.load().make_context(info_name, args, parent=parent, **extra)


class VerbGroup(TyperGroup):
    """All verbs: those of `VERBS` beside those that services have added, under the headings of `GROUPS`."""

    def __init__(self, *, commands: Any = None, **attributes: Any) -> None:  # noqa: ANN401  (typer vendors the types)
        ours: dict[str, Any] = {name: LazyVerb(name, verb) for name, verb in VERBS.items()}
        super().__init__(commands=ours | dict(commands or {}), **attributes)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:  # noqa: ANN401
        """Return the verb that was typed; of a former one say what does its work."""
        if args[0] in FORMER:
            ctx.fail(f"`atoll {args[0]}` is `{FORMER[args[0]]}` now: see `{FORMER[args[0]]} --help`.")
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: Any, formatter: Any) -> None:  # noqa: ANN401
        """Write the verbs, heading by heading; those of a service that names no heading come last."""
        del ctx
        sections: dict[str, list[tuple[str, Any]]] = {group: [] for group in GROUPS}
        for name, command in self.commands.items():
            sections.setdefault(getattr(command, "rich_help_panel", None) or "more", []).append((name, command))
        width = formatter.width - 6 - max(map(len, self.commands))
        for heading, found in sections.items():
            with formatter.section(heading.capitalize()):
                formatter.write_dl([(name, command.get_short_help_str(width)) for name, command in found])


def version_verb() -> None:
    """Print the version, and the wire versions of the runs that it can join."""
    from atoll import __version__  # noqa: PLC0415  (a verb loads what it needs when it runs)
    from atoll.wire.messages import spoken_versions  # noqa: PLC0415

    say(f"atoll {__version__}, wire {spoken_versions()}")


def print_version(wanted: bool) -> None:  # noqa: FBT001  (typer calls it)
    """Do as the verb `version` does and leave, if a person gave `--version`."""
    if wanted:
        version_verb()
        raise typer.Exit


def health_verb(
    file: Annotated[Path | None, typer.Option(help="The health file; default: health_file.")] = None,
    age_s: Annotated[float, typer.Option("--age", min=0.0, help="Seconds after which it is stale.")] = 15.0,
    config: Config = None,
    assignments: Assignments = None,
) -> None:
    """Leave with 0 if the file was touched within `--age` seconds, else with 1."""
    from atoll.base.clock import SystemClock  # noqa: PLC0415
    from atoll.base.errors import SettingsError  # noqa: PLC0415
    from atoll.base.health import silent_s  # noqa: PLC0415
    from atoll.settings import load  # noqa: PLC0415

    path = file if file is not None else load(config, with_flags(assignments)).settings.health_file
    if path is None:
        raise SettingsError(
            "no health file is configured", todo="set health_file for the service and here, or give --file"
        )
    try:
        since_s = silent_s(path, SystemClock())
    except OSError as error:
        say(f"unhealthy: {path}: {error.strerror}")
        raise typer.Exit(1) from None
    if since_s > age_s:
        say(f"unhealthy: last sign of life {since_s:.1f} s ago, allowed {age_s:g} s")
        raise typer.Exit(1)
    say(f"healthy: last sign of life {since_s:.1f} s ago")


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
    app = typer.Typer(name="atoll", cls=VerbGroup, help=HELP, no_args_is_help=True, **PLAIN)
    app.callback(help=HELP)(program)
    for point in sorted(entry_points(group=ENTRY_POINTS), key=lambda found: found.name):
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
    app = typer.Typer(add_completion=False, **PLAIN)
    app.command(help=verb.__doc__)(verb)
    run_program(lambda: run_guarded(app))
