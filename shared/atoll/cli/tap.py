"""`atoll tap`: the messages that a run stores, as they happen, and with `--since` those before.

The broker says every manifest, head, membership change, heartbeat and event of a run again on `tap.>` (`atoll.run.taps`).
Reading them costs the run nothing and cannot change it. A terminal shows a line for people, a pipe gets one JSON object per
line: with `--bodies` the whole message, without it what its writer thought worth showing.
"""

from __future__ import annotations

import asyncio
import json
import sys
from typing import TYPE_CHECKING, Annotated, Final

import typer

from atoll.cli.options import Assignments, Broker, Config, Run
from atoll.cli.reading import Out, reading_bus, settings_of

if TYPE_CHECKING:
    from atoll.run.taps import Selection, Tapped, Tapping
    from atoll.settings import Settings
    from atoll.wire.traffic import BusStats

BEGINNING: Final = "start"


def register(app: typer.Typer) -> None:
    """Add the verb."""
    app.command(name="tap", help="Print what a run stores, as it happens: contributions, heads, events.")(tap)


def tap(  # noqa: PLR0913  (one option each)
    tail: Annotated[str, typer.Argument(help="Which taps: 'ev.>', 'gl.head.*', 'ev.round.shard-0', …")] = ">",
    *,
    bodies: Annotated[bool, typer.Option("--bodies", help="Print whole messages, not only what they show.")] = False,
    kind: Annotated[
        list[str] | None,
        typer.Option(help="Only messages of this kind: round, head, contribution, beat, …; repeatable."),
    ] = None,
    learner: Annotated[list[str] | None, typer.Option(help="Only what is about this learner; repeatable.")] = None,
    fragment: Annotated[
        list[int] | None, typer.Option(min=0, help="Only what is about this fragment; repeatable.")
    ] = None,
    since: Annotated[
        str | None,
        typer.Option(
            help="Begin with how things stand and the events since then: 90s, 5m, 2h, 1d, or `start` for all."
        ),
    ] = None,
    follow: Annotated[bool, typer.Option("--follow/--no-follow", help="Go on with what happens.")] = True,
    schema: Annotated[
        bool, typer.Option("--schema", help="Print the AsyncAPI document of all messages instead; needs no broker.")
    ] = False,
    run: Run = None,
    broker: Broker = None,
    out: Out = None,
    count: Annotated[int | None, typer.Option(min=1, help="Leave after this many lines.")] = None,
    seconds: Annotated[float | None, typer.Option(min=0.0, help="Leave after this many seconds.")] = None,
    config: Config = None,
    assignments: Assignments = None,
) -> None:
    """Print taps until told to stop, one line each."""
    from atoll.base.logs import configure  # noqa: PLC0415  (a verb loads what it needs when it runs)

    if schema:
        from atoll.run.taps import asyncapi  # noqa: PLC0415

        sys.stdout.write(json.dumps(asyncapi(), indent=2) + "\n")
        return
    selection, past_s = _selection(kind, learner, fragment), _seconds(since, follow=follow)
    with settings_of(out, run, broker, config, assignments) as settings:
        configure(settings.log.format, "error", role="tap", run=settings.run)
        printer = Printer(bodies=bodies, count=count)
        asyncio.run(_print(settings, tail, selection, past_s, follow=follow, seconds=seconds, printer=printer))


def _selection(kinds: list[str] | None, learners: list[str] | None, fragments: list[int] | None) -> Selection:
    from atoll.run.taps import Selection  # noqa: PLC0415
    from atoll.wire.subjects import token  # noqa: PLC0415

    named = frozenset(token(learner, "learner") for learner in learners or ())
    return Selection(frozenset(kinds or ()), named, frozenset(fragments or ()))


def _seconds(since: str | None, *, follow: bool) -> float | None:
    """Return how far back to begin, in seconds; infinity for the beginning, None for now."""
    from atoll.base.errors import SettingsError  # noqa: PLC0415
    from atoll.base.units import duration  # noqa: PLC0415

    if since is None:
        if not follow:
            raise SettingsError(
                "without what was and without what happens there is nothing to print",
                got="--no-follow without --since",
                todo="add --since, for example --since start",
            )
        return None
    return float("inf") if since == BEGINNING else duration(since, "--since")


async def _print(  # noqa: PLR0913  (what the verb was asked)
    settings: Settings,
    tail: str,
    selection: Selection,
    past_s: float | None,
    *,
    follow: bool,
    seconds: float | None,
    printer: Printer,
) -> None:
    from atoll.base.clock import SystemClock  # noqa: PLC0415
    from atoll.run.record import read_run  # noqa: PLC0415
    from atoll.run.taps import Tapping  # noqa: PLC0415
    from atoll.wire.subjects import Subjects, filter_below  # noqa: PLC0415

    clock, wanted = SystemClock(), filter_below(tail, "the tap")
    async with reading_bus(settings, "tap") as bus:
        tapping = Tapping(bus, settings.run, clock, selection, tail=wanted)
        await tapping.listen()
        if await read_run(bus, Subjects(settings.run)) is None:
            typer.echo(f"atoll: nobody has founded run {settings.run!r} here yet; waiting", err=True)
        since_s = None if past_s is None else clock.wall() - past_s
        ends_s = None if seconds is None else clock.monotonic() + seconds
        async for told in tapping.messages(since_s, follow=follow):
            if told is not None and printer.print(told):
                return
            printer.warn(tapping, bus.stats)
            if ends_s is not None and clock.monotonic() >= ends_s:
                return


class Printer:
    """Prints messages, and says on the other output what a reader would miss."""

    def __init__(self, *, bodies: bool, count: int | None) -> None:
        """Print up to `count` messages, all if that is None."""
        self._bodies = bodies
        self._left = count
        self._pretty = sys.stdout.isatty()
        self._dropped = 0
        self._bodiless = False

    def print(self, told: Tapped) -> bool:
        """Print one message, and return whether that was the last one."""
        line = pretty_line(told, bodies=self._bodies) if self._pretty else json.dumps(told.line(bodies=self._bodies))
        print(line, flush=True)  # noqa: T201  (this is the verb's output)
        if self._left is not None:
            self._left -= 1
        return self._left == 0

    def warn(self, tapping: Tapping, stats: BusStats) -> None:
        """Say what got lost, when it grows, and once that this run's taps have no bodies."""
        if (lost := stats.core_messages_dropped - self._dropped) > 0:
            typer.echo(f"atoll: {lost} messages came faster than they could be printed, and are lost", err=True)
            self._dropped = stats.core_messages_dropped
        if self._bodies and tapping.bodiless and not self._bodiless:
            self._bodiless = True
            typer.echo("atoll: the taps of this run have no bodies; `atoll runs taps RUN bodies` adds them", err=True)


def pretty_line(told: Tapped, *, bodies: bool) -> str:
    """Return a message as a line for people: time of day (UTC), subject, `key=value` pairs or the whole message."""
    day_s = told.at_s % 86400
    clock = f"{int(day_s // 3600):02}:{int(day_s // 60 % 60):02}:{day_s % 60:06.3f}"
    pairs = " ".join(f"{key}={value}" for key, value in told.info.items())
    content = told.fault or json.dumps(told.body) if bodies else pairs
    # What peers write ends on a terminal, so nothing in it may move the cursor.
    return "".join(c if c.isprintable() else "?" for c in f"{clock}  {told.subject:<32} {content}")
