"""`atoll top`: the processes of a run and the bytes on their links, for any run on any broker.

It draws the same picture as `atoll up`: a row per learner and per synchronizer process, with steps, loss, speed, lag, and
the bytes on its link per second and in all. Heartbeats and presences arrive live; older link totals come from the event
log. The verb only reads.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Annotated

import typer

from atoll.cli.options import Assignments, Broker, Config, Run
from atoll.cli.reading import Out, opened, settings_of

if TYPE_CHECKING:
    from atoll.protocol.settings import ProtocolSettings
    from atoll.settings import Settings

SHOW_S = 0.5
BEATS_HEARD = 2.5
"""How many heartbeats `--once` waits for: two make a pace."""


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
        asyncio.run(_show(settings, once=once))


def _beat_s(protocol: ProtocolSettings) -> float:
    """Return the longest interval between two signs of life that a live process may have, in seconds."""
    from atoll.protocol.balance import BEATS_PER_LEASE  # noqa: PLC0415
    from atoll.protocol.pacing import BEATS_PER_SILENCE  # noqa: PLC0415

    return max(protocol.silence_s / BEATS_PER_SILENCE, protocol.lease_s / BEATS_PER_LEASE)


async def _show(settings: Settings, *, once: bool) -> None:
    from atoll.base.clock import SystemClock  # noqa: PLC0415
    from atoll.local.console import ConsolePicture, draw_once, make_face  # noqa: PLC0415
    from atoll.run.record import founded_run  # noqa: PLC0415
    from atoll.run.view import RunView  # noqa: PLC0415
    from atoll.run.watch import Watch  # noqa: PLC0415

    clock, view = SystemClock(), RunView()
    async with opened(settings, "top") as bus:
        record = await founded_run(bus, settings.run)
        watch = Watch(bus, settings.run, view, clock)
        face, began_s = make_face(clock), clock.monotonic()
        following = asyncio.create_task(watch.follow())
        try:
            await watch.catch_up()
            await asyncio.sleep(BEATS_HEARD * _beat_s(record.protocol) if once else SHOW_S)
            while not following.done():
                picture = ConsolePicture(view, settings.run, record.protocol, began_s, clock.monotonic())
                if once:
                    draw_once(picture)
                    return
                face.show(picture)
                await asyncio.sleep(SHOW_S)
            following.result()
        finally:
            face.rest()
            following.cancel()
