"""`atoll why`: why a round waited, in plain words, and what caused what. It reads the event log and changes nothing."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Annotated

import typer

from atoll.cli.look import say
from atoll.cli.options import Assignments, Broker, Config, Run
from atoll.cli.reading import Out, opened, settings_of

if TYPE_CHECKING:
    from atoll.run.round_history import RoundHistory
    from atoll.settings import Settings

SLOWEST = 10


def register(app: typer.Typer) -> None:
    """Add the verb."""
    app.command(name="why", help="Say why a round waited, and what caused what; without one, the slowest rounds.")(why)


def why(  # noqa: PLR0913  (one option each)
    *,
    fragment: Annotated[int | None, typer.Option(min=0, help="Which fragment.")] = None,
    version: Annotated[
        int | None, typer.Option(min=1, help="The version that the round made.  [default: the newest]")
    ] = None,
    run: Run = None,
    broker: Broker = None,
    out: Out = None,
    config: Config = None,
    assignments: Assignments = None,
) -> None:
    """Read a run's event log and explain one round of it, or list the rounds that waited longest."""
    from atoll.base.errors import SettingsError  # noqa: PLC0415  (a verb loads what it needs when it runs)
    from atoll.base.logs import configure  # noqa: PLC0415

    if version is not None and fragment is None:
        raise SettingsError("a version of which fragment?", got=f"--version {version}", todo="give --fragment as well")
    with settings_of(out, run, broker, config, assignments) as settings:
        configure(settings.log.format, "error", role="why", run=settings.run)
        history = asyncio.run(_read(settings))
    for line in lines(history, fragment, version):
        say("".join(c if c.isprintable() else "?" for c in line))


async def _read(settings: Settings) -> RoundHistory:
    from atoll.run.record import founded_run  # noqa: PLC0415
    from atoll.run.round_history import RoundHistory  # noqa: PLC0415

    history = RoundHistory()
    async with opened(settings, "why") as bus:
        record = await founded_run(bus, settings.run)
        await history.read(bus, record.subjects)
    return history


def lines(history: RoundHistory, fragment: int | None, version: int | None) -> list[str]:
    """Return what there is to say of one round, or of the slowest ones.

    Raises:
        SettingsError: there is no such round.
    """
    from atoll.base.errors import SettingsError  # noqa: PLC0415
    from atoll.run.round_history import one_line, story  # noqa: PLC0415

    if fragment is None:
        slowest = history.slowest(SLOWEST)
        return [one_line(line) for line in slowest] or ["no round has ended yet"]
    found = history.find(fragment, version)
    if found is not None:
        told = story(history, found)
        still = history.waiting(fragment, found.round.version + 1) if version is None else None
        return told if still is None else [*told, "", f"the next round still waits: {still.why} ({still.cause_id})"]
    still = history.waiting(fragment, version or 1)
    if still is not None:
        return [f"fragment {fragment}: version {version or 1} is not there yet; {still.why} ({still.cause_id})"]
    there = [line.round.version for line in history.rounds if line.round.fragment == fragment]
    fragments = sorted({line.round.fragment for line in history.rounds})
    if not there and fragments:
        raise SettingsError(
            "the event log tells of no round of this fragment",
            got=fragment,
            allowed=f"fragments {fragments[0]} to {fragments[-1]}",
        )
    raise SettingsError(
        "the event log tells of no such round",
        got=f"fragment {fragment}, version {'newest' if version is None else version}",
        allowed=f"versions {min(there)} to {max(there)}" if there else None,
        todo="a round that has not ended is told by its shard's log (round.waiting)",
    )
