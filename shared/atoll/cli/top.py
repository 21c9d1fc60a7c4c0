"""`atoll top`: the processes of a run and the bytes on their links, for any run on any broker.

On a terminal it is an application with panels and keys (`atoll.local.console_app`): learners, shards, the map of fragments,
rounds, faults and quarantine. Without a terminal it prints a line every ten seconds, and with `--once` one table: a row per
learner and per synchronizer process, as `atoll up` draws. Heartbeats and presences arrive live; everything else comes from
the event log. The verb only reads.
"""

from __future__ import annotations

import asyncio
import signal
import sys
from contextlib import suppress
from typing import TYPE_CHECKING, Annotated

import typer

from atoll.cli.options import Assignments, Broker, Config, Run
from atoll.cli.reading import Out, settings_of
from atoll.cli.watching import watched

if TYPE_CHECKING:
    from pathlib import Path

    from atoll.cli.watching import WatchedRun
    from atoll.settings import Settings

SHOW_S = 0.5
RECORD_S = 5.0
UNANSWERED_S = 5.0
"""After how long without an answer the broker counts as away: ten readings of the event log."""


def register(app: typer.Typer) -> None:
    """Add the verb."""
    app.command(name="top", help="Show the learners and shards of a run, live: speed, loss, lag, bytes.")(top)


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
    from atoll.base.logs import configure  # noqa: PLC0415  (a verb loads what it needs when it runs)

    with settings_of(out, run, broker, config, assignments) as settings:
        configure(settings.log.format, "error", role="top", run=settings.run)
        asyncio.run(_show(settings, out, once=once))


async def _show(settings: Settings, out: Path | None, *, once: bool) -> None:
    async with watched(settings, "top", out) as there:
        if once:
            await _print_once(there)
        elif sys.stdin.isatty() and sys.stdout.isatty():
            await _in_panels(there)
        else:
            await _in_lines(there)


async def _print_once(there: WatchedRun) -> None:
    from atoll.local.console import draw_once  # noqa: PLC0415
    from atoll.local.console_status import aged  # noqa: PLC0415
    from atoll.local.console_tables import TopMoment  # noqa: PLC0415

    await there.hear()
    record, wall_s = there.record, there.clock.wall()
    draw_once(aged(TopMoment(there.picture(), there.view.timeline, wall_s, record.closing), record.founded_at_s))


async def _in_lines(there: WatchedRun) -> None:
    """Print a line now and then, for a file or a pipe, until an error ends it."""
    from atoll.local.console import make_face  # noqa: PLC0415

    face = make_face(there.clock)
    try:
        while not there.following.done():
            await asyncio.sleep(SHOW_S)
            face.show(there.picture())
    finally:
        face.rest()


async def _in_panels(there: WatchedRun) -> None:
    """Show the panels until the person leaves them; signals leave them too, so that the terminal is whole again."""
    from atoll.base.errors import INTERRUPTED, AtollError  # noqa: PLC0415
    from atoll.local.console_app import TopApp  # noqa: PLC0415
    from atoll.local.console_tables import TopMoment  # noqa: PLC0415
    from atoll.run.record import founded_run  # noqa: PLC0415

    closing = there.record.closing

    async def look_for_the_end() -> None:
        nonlocal closing
        while not closing:
            await asyncio.sleep(RECORD_S)
            with suppress(AtollError):  # the heading tells of a broker that does not answer
                closing = (await founded_run(there.bus, there.run)).closing

    def moment() -> TopMoment:
        timeline, answered_s = there.view.timeline, there.watch.answered_s
        timeline.on_heartbeats(iter(there.view.learners.values()))
        picture = there.picture()
        silent_s = picture.now_s - (there.began_s if answered_s is None else answered_s)
        unanswered_s = silent_s if silent_s > UNANSWERED_S else 0.0
        return TopMoment(picture, timeline, there.clock.wall(), closing, unanswered_s)

    app, loop = TopApp(moment), asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, app.action_interrupt)
    looking = asyncio.create_task(look_for_the_end())
    try:
        if await app.run_async() == INTERRUPTED:
            raise KeyboardInterrupt
    finally:
        looking.cancel()
