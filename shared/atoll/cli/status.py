"""`atoll status`: whether a run trains, and what it waits for; for scripts and health checks.

It listens until it has two heartbeats of everybody, or has waited long enough for those. It leaves with 0 if the run trains or
has ended, with 1 if it waits for something or a learner that has not left is not heard, with 2 if nobody has founded it, and
with 3 if its broker does not answer. A saved run is over, and its folder tells how it ended. The verb only reads.
"""

from __future__ import annotations

import asyncio
import json as json_text
import sys
from typing import TYPE_CHECKING, Annotated, Final

import typer

from atoll.cli.histories import agreement_of, saved_in, view_of_saved
from atoll.cli.options import Assignments, Broker, Config, Run
from atoll.cli.reading import Out, settings_of
from atoll.cli.watching import watched

if TYPE_CHECKING:
    from pathlib import Path

    from atoll.local.console_tables import TopMoment
    from atoll.protocol.settings import ProtocolSettings
    from atoll.run.timeline import TimedView
    from atoll.settings import Settings

WAITS: Final = 1


def register(app: typer.Typer) -> None:
    """Add the verb."""
    told = "Say whether a run trains and what it waits for; leave with 1 if it waits or misses one."
    app.command(name="status", help=told)(status)


def status(  # noqa: PLR0913  (one argument for each option)
    *,
    run: Run = None,
    broker: Broker = None,
    out: Out = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    schema: Annotated[bool, typer.Option("--schema", help="Print the JSON schema of --json instead.")] = False,
    config: Config = None,
    assignments: Assignments = None,
) -> None:
    """Look at a run once."""
    import msgspec  # noqa: PLC0415  (a verb loads what it needs when it runs)

    from atoll.base.logs import configure  # noqa: PLC0415
    from atoll.run.standing import status_schema  # noqa: PLC0415

    if schema:
        sys.stdout.write(json_text.dumps(status_schema(), indent=2) + "\n")
        return
    founded_at_s = None
    if (saved := saved_in(out, run, broker)) is not None:
        moment, url = _ended(view_of_saved(saved), saved.run, agreement_of(saved)), f"file:{saved.folder}"
    else:
        with settings_of(out, run, broker, config, assignments) as settings:
            configure(settings.log.format, "error", role="status", run=settings.run)
            moment, founded_at_s = asyncio.run(_moment(settings, out))
            url = settings.broker.url
    from atoll.base.redacting import redacted  # noqa: PLC0415
    from atoll.local.console_status import status_lines, status_of  # noqa: PLC0415

    told = status_of(moment, redacted(url))
    if json:
        text = msgspec.json.format(msgspec.json.encode(told)).decode()
    else:
        text = status_lines(moment, founded_at_s)
        if out is not None and saved is None and told.standing == "stopped":
            text = "\n".join(filter(None, (text, _continued_by(out))))
    sys.stdout.write(f"{text}\n")
    if told.standing == "waiting" or told.unheard:
        raise typer.Exit(WAITS)


def _continued_by(out: Path) -> str:
    """Return the line that `atoll up` ended with, the command that continues the run of its folder."""
    from atoll.local.journal import continuation  # noqa: PLC0415
    from atoll.run.folder import read_run_file  # noqa: PLC0415

    file = read_run_file(out)
    return "" if file is None else continuation(file, out)


async def _moment(settings: Settings, out: Path | None) -> tuple[TopMoment, float]:
    """Return the run as it is now, and when it was founded."""
    from atoll.local.console_tables import TopMoment  # noqa: PLC0415

    async with watched(settings, "status", out) as there:
        await there.hear()
        moment = TopMoment(there.picture(), there.view.timeline, there.clock.wall(), there.record.closing)
        return moment, there.record.founded_at_s


def _ended(view: TimedView, run: str, protocol: ProtocolSettings) -> TopMoment:
    """Return the moment after a saved run: it is over, and nobody is heard any more."""
    from atoll.local.console import ConsolePicture  # noqa: PLC0415
    from atoll.local.console_tables import TopMoment  # noqa: PLC0415

    after_s = view.timeline.newest_s + 2.0 * protocol.silence_s
    began_s = view.timeline.began_s or 0.0
    return TopMoment(ConsolePicture(view, run, protocol, began_s, after_s), view.timeline, after_s, closing=True)
