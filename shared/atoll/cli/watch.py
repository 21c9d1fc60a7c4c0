"""`atoll status`, `atoll top` and `atoll tap`: a run as it goes on. They only read.

**status** says whether a run trains, and what it waits for; for scripts and health checks. It listens until it has two
heartbeats of everybody, or has waited long enough for those. It leaves with 0 if the run trains or has ended, with 1 if it
waits for something or a learner that has not left is not heard, with 2 if nobody has founded it, and with 3 if its broker does
not answer.

**top** shows the processes of a run and the bytes on their links: on a terminal as an application with panels and keys
(`atoll.local.console_app`), elsewhere as a line every ten seconds, and with `--once` as one table.

**tap** prints the messages that a run stores, as they happen, and with `--since` those before: the broker says each again on
`tap.>` (`atoll.run.taps`). Reading them costs the run nothing and cannot change it. A terminal shows a line for people, a pipe
gets one JSON object per line.
"""

from __future__ import annotations

import asyncio
import json as json_text
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Final

import msgspec
import typer

from atoll.base.clock import Clock, SystemClock
from atoll.base.errors import INTERRUPTED, AtollError, SettingsError, redact
from atoll.base.logs import configure
from atoll.base.wording import duration
from atoll.bus.interface import Bus
from atoll.cli.options import Assignments, Broker, Config, Json, Out, Run
from atoll.cli.output import printable, say, say_json
from atoll.cli.reading import reading_bus, required_agreement, saved_in, settings_of, view_of_saved
from atoll.local.console import ConsolePicture, draw_once, make_face
from atoll.local.console_app import TopApp
from atoll.local.console_tables import TopMoment, status_lines, status_of, with_age
from atoll.local.journal import continuation
from atoll.protocol.ownership import BEATS_PER_LEASE
from atoll.protocol.pacing import BEATS_PER_SILENCE
from atoll.protocol.settings import ProtocolSettings
from atoll.run.folder import read_run_file
from atoll.run.history import History
from atoll.run.record import founded_run, read_run
from atoll.run.standing import status_schema
from atoll.run.taps import Selection, TapMessage, TapReader, asyncapi
from atoll.run.watch import Watch
from atoll.settings import Settings
from atoll.wire.messages import RunRecord
from atoll.wire.subjects import Subjects, filter_below, token
from atoll.wire.traffic import BusStats

WAITS: Final = 1
SHOW_S = 0.5
RECORD_S = 5.0
UNANSWERED_S = 5.0
"""After how long without an answer the broker counts as away: ten readings of the event log."""
BEATS_HEARD: Final = 2.5
"""For how many heartbeats' time a verb that looks once waits for a silent process: two make a pace."""
LOOK_S: Final = 0.05
BEGINNING: Final = "start"


def status(  # noqa: PLR0913  (one argument for each option)
    *,
    run: Run = None,
    broker: Broker = None,
    out: Out = None,
    json: Json = False,
    schema: Annotated[bool, typer.Option("--schema", help="Print the JSON schema of --json instead.")] = False,
    config: Config = None,
    assignments: Assignments = None,
) -> None:
    """Look at a run once."""
    if schema:
        say_json(status_schema())
        return
    founded_at_s = None
    if (saved := saved_in(out, run, broker)) is not None:
        agreed, url = required_agreement(saved.agreement, saved.folder), f"file:{saved.folder}"
        moment = _ended_moment(view_of_saved(saved), saved.run, agreed)
    else:
        with settings_of(out, run, broker, config, assignments) as settings:
            configure(settings.log.format, "error", role="status", run=settings.run)
            moment, founded_at_s = asyncio.run(_current_moment(settings, out))
            url = settings.broker.url

    told = status_of(moment, redact(url))
    if json:
        text = msgspec.json.format(msgspec.json.encode(told)).decode()
    else:
        text = status_lines(moment, founded_at_s)
        if out is not None and saved is None and told.standing == "stopped":
            file = read_run_file(out)
            text = "\n".join(filter(None, (text, continuation(file, out) if file else "")))
    say(text)
    if told.standing == "waiting" or told.unheard:
        raise typer.Exit(WAITS)


async def _current_moment(settings: Settings, out: Path | None) -> tuple[TopMoment, float]:
    async with watch_run(settings, "status", out) as there:
        await there.hear()
        return there.moment(), there.record.founded_at_s


def _ended_moment(view: History, run: str, protocol: ProtocolSettings) -> TopMoment:
    after_s = view.newest_s + 2.0 * protocol.silence_s
    began_s = view.began_s or 0.0
    return TopMoment(ConsolePicture(view, run, protocol, began_s, after_s), after_s, closing=True)


def top(
    *,
    run: Run = None,
    broker: Broker = None,
    out: Out = None,
    once: Annotated[bool, typer.Option("--once", help="Print one table and leave.")] = False,
    config: Config = None,
    assignments: Assignments = None,
) -> None:
    """Show a run until Ctrl-C, or once."""
    with settings_of(out, run, broker, config, assignments) as settings:
        configure(settings.log.format, "error", role="top", run=settings.run)
        asyncio.run(_show(settings, out, once=once))


async def _show(settings: Settings, out: Path | None, *, once: bool) -> None:
    async with watch_run(settings, "top", out) as there:
        if once:
            await there.hear()
            draw_once(with_age(there.moment(), there.record.founded_at_s))
        elif sys.stdin.isatty() and sys.stdout.isatty():
            await _in_panels(there)
        else:
            await _in_lines(there)


async def _in_lines(there: WatchedRun) -> None:
    face = make_face(there.clock)
    try:
        while not there.following.done():
            await asyncio.sleep(SHOW_S)
            face.show(there.picture())
    finally:
        face.rest()


async def _in_panels(there: WatchedRun) -> None:
    """Show the panels until the person leaves them; signals leave them too, so that the terminal is whole again."""
    closing = there.record.closing

    async def look_for_the_end() -> None:
        nonlocal closing
        while not closing:
            await asyncio.sleep(RECORD_S)
            with suppress(AtollError):  # the heading tells of a broker that does not answer
                closing = (await founded_run(there.bus, there.run)).closing

    def moment() -> TopMoment:
        there.view.sample_heartbeats()
        answered_s = there.watch.answered_s
        picture = there.picture()
        silent_s = picture.now_s - (there.began_s if answered_s is None else answered_s)
        unanswered_s = silent_s if silent_s > UNANSWERED_S else 0.0
        return TopMoment(picture, there.clock.wall(), closing, unanswered_s)

    app, loop = TopApp(moment), asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, app.action_interrupt)
    looking = asyncio.create_task(look_for_the_end())
    try:
        if await app.run_async() == INTERRUPTED:
            raise KeyboardInterrupt
    finally:
        looking.cancel()


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
    if schema:
        say_json(asyncapi())
        return
    learners = frozenset(token(one, "learner") for one in learner or ())
    selection = Selection(frozenset(kind or ()), learners, frozenset(fragment or ()))
    past_s = _seconds_back(since, follow=follow)
    with settings_of(out, run, broker, config, assignments) as settings:
        configure(settings.log.format, "error", role="tap", run=settings.run)
        printer = Printer(bodies=bodies, count=count)
        asyncio.run(_print_taps(settings, tail, selection, past_s, follow=follow, seconds=seconds, printer=printer))


def _seconds_back(since: str | None, *, follow: bool) -> float | None:
    if since is None:
        if not follow:
            raise SettingsError(
                "without what was and without what happens there is nothing to print",
                got="--no-follow without --since",
                todo="add --since, for example --since start",
            )
        return None
    return float("inf") if since == BEGINNING else duration(since, "--since")


async def _print_taps(  # noqa: PLR0913  (what the verb was asked)
    settings: Settings,
    tail: str,
    selection: Selection,
    past_s: float | None,
    *,
    follow: bool,
    seconds: float | None,
    printer: Printer,
) -> None:
    clock, wanted = SystemClock(), filter_below(tail, "the tap")
    async with reading_bus(settings, "tap") as bus:
        reader = TapReader(bus, settings.run, clock, selection, tail=wanted)
        await reader.listen()
        if await read_run(bus, Subjects(settings.run)) is None:
            typer.echo(f"atoll: nobody has founded run {settings.run!r} here yet; waiting", err=True)
        since_s = None if past_s is None else clock.wall() - past_s
        ends_s = None if seconds is None else clock.monotonic() + seconds
        async for told in reader.messages(since_s, follow=follow):
            if told is not None and printer.print(told):
                return
            printer.warn(reader, bus.stats)
            if ends_s is not None and clock.monotonic() >= ends_s:
                return


class Printer:
    """Prints messages, and says on the other output what a reader would miss."""

    def __init__(self, *, bodies: bool, count: int | None) -> None:
        self._bodies = bodies
        self._left = count
        self._pretty = sys.stdout.isatty()
        self._dropped = 0
        self._bodiless = False

    def print(self, told: TapMessage) -> bool:
        """Print one message, and return whether that was the last one."""
        line = (
            pretty_line(told, bodies=self._bodies) if self._pretty else json_text.dumps(told.line(bodies=self._bodies))
        )
        say(line)
        if self._left is not None:
            self._left -= 1
        return self._left == 0

    def warn(self, reader: TapReader, stats: BusStats) -> None:
        """Say what got lost, when it grows, and once that this run's taps have no bodies."""
        if (lost := stats.core_messages_dropped - self._dropped) > 0:
            typer.echo(f"atoll: {lost} messages came faster than they could be printed, and are lost", err=True)
            self._dropped = stats.core_messages_dropped
        if self._bodies and reader.bodiless and not self._bodiless:
            self._bodiless = True
            typer.echo("atoll: the taps of this run have no bodies; `atoll runs taps RUN bodies` adds them", err=True)


def pretty_line(told: TapMessage, *, bodies: bool) -> str:
    """Return a message as a line for people: time of day (UTC), subject, `key=value` pairs or the whole message."""
    day_s = told.at_s % 86400
    clock = f"{int(day_s // 3600):02}:{int(day_s // 60 % 60):02}:{day_s % 60:06.3f}"
    pairs = " ".join(f"{key}={value}" for key, value in told.info.items())
    content = told.fault or json_text.dumps(told.body) if bodies else pairs
    # What peers write ends on a terminal, so nothing in it may move the cursor.
    return printable(f"{clock}  {told.subject:<32} {content}")


@dataclass(frozen=True, slots=True)
class WatchedRun:
    """A run that is followed; `began_s` is when that began, by `clock`, and `following` ends only by an error."""

    run: str
    bus: Bus
    record: RunRecord
    view: History
    watch: Watch
    clock: Clock
    began_s: float
    following: asyncio.Task[None]

    async def hear(self) -> None:
        """Wait until nobody is missing any more (`has_heard_all`); for a silent process so long as it takes to tell."""
        until_s = self.clock.monotonic() + BEATS_HEARD * heartbeat_pause_s_max(self.record.protocol)

        def hears_on() -> bool:
            waits = self.clock.monotonic() < until_s and not self.following.done()
            return waits and not has_heard_all(self.record, self.view)

        # A view tells nobody that it has changed.
        while hears_on():  # noqa: ASYNC110
            await asyncio.sleep(LOOK_S)

    def picture(self) -> ConsolePicture:
        """Return the run as it is now."""
        return ConsolePicture(self.view, self.run, self.record.protocol, self.began_s, self.clock.monotonic())

    def moment(self) -> TopMoment:
        """Return this moment of it."""
        return TopMoment(self.picture(), self.clock.wall(), self.record.closing)


def has_heard_all(record: RunRecord, view: History) -> bool:
    """Return whether nobody is missing: there are two heartbeats of each learner that has not left, and an owner of each shard.

    Two heartbeats make a pace. In a run that has reached its end a shard that has closed its ledger is not missing.
    """
    protocol, lives = record.protocol, [(learner, learner.latest) for learner in view.learners.values()]
    there = [learner for learner, life in lives if life is not None and not life.left]
    known = {shard for host in view.hosts.values() if host.heard_s is not None for shard in host.owns}
    if ended := record.closing or 0 < protocol.tokens_target <= view.run_tokens:
        known |= {shard for shard in range(protocol.shards) if f"shard-{shard}" in view.ledgers}
    heard = all(learner.present_s > 0.0 for learner in there)
    return bool(there or ended) and heard and known >= set(range(protocol.shards))


def heartbeat_pause_s_max(protocol: ProtocolSettings) -> float:
    """Return the longest pause between two heartbeats of a live process, learner or host, in seconds."""
    return max(protocol.silence_s / BEATS_PER_SILENCE, protocol.lease_s / BEATS_PER_LEASE)


@asynccontextmanager
async def watch_run(settings: Settings, verb: str, out: Path | None = None) -> AsyncIterator[WatchedRun]:
    """Follow a run while the block runs; its event log has been read when that begins. `out` is its folder, if it has one.

    Raises:
        SettingsError: nobody has founded the run.
        AtollError: what ended the following.
    """
    clock, view = SystemClock(), History()
    async with reading_bus(settings, verb) as bus:
        record = await _read_record(bus, settings.run, out)
        watch = Watch(bus, settings.run, view, clock)
        following = asyncio.create_task(watch.follow())
        try:
            await watch.catch_up()
            yield WatchedRun(settings.run, bus, record, view, watch, clock, clock.monotonic(), following)
            if following.done():
                following.result()
        finally:
            following.cancel()


async def _read_record(bus: Bus, run: str, out: Path | None) -> RunRecord:
    """Return the record of a run; raise `SettingsError` if it is not founded, which takes the `atoll up` of `out` a while."""
    if out is None:
        return await founded_run(bus, run)
    record = await read_run(bus, Subjects(run))
    if record is None:
        raise SettingsError(
            "the run of this folder is still being founded, or ended before it was",
            got=f"{out} without a run record",
            todo="try again in some seconds: the first learner of `atoll up` founds the run once it has its model",
        )
    return record
