"""How verbs read a run's event log into a `History`: from its broker, or from the folder of a saved run."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING

from atoll.cli.look import say
from atoll.cli.reading import opened, settings_of

if TYPE_CHECKING:
    from collections.abc import Iterable

    from atoll.protocol.settings import ProtocolSettings
    from atoll.run.saved import SavedRun
    from atoll.run.timeline import TimedView
    from atoll.settings import Settings
    from atoll.story.history import History


def history_of(
    verb: str,
    out: Path | None,
    run: str | None,
    broker: str | None,
    config: Path | None,
    assignments: list[str] | None,
) -> History:
    """Return the event log of a run; nothing is changed.

    Raises:
        SettingsError: the folder holds no run, or its event log cannot be read.
    """
    return _recorded(verb, out, run, broker, config, assignments)[0]


def recording_of(
    verb: str,
    out: Path | None,
    run: str | None,
    broker: str | None,
    config: Path | None = None,
    assignments: list[str] | None = None,
) -> tuple[History, ProtocolSettings]:
    """Return the event log of a run, and what its processes agreed on; nothing is changed.

    Raises:
        SettingsError: the folder holds no run, its event log cannot be read, or nothing says what was agreed on.
    """
    history, agreement = _recorded(verb, out, run, broker, config, assignments)
    return history, _known(agreement, out)


def _recorded(
    verb: str,
    out: Path | None,
    run: str | None,
    broker: str | None,
    config: Path | None,
    assignments: list[str] | None,
) -> tuple[History, ProtocolSettings | None]:
    from atoll.base.logs import configure  # noqa: PLC0415  (a verb loads what it needs when it runs)
    from atoll.run.saved import EVENTS_FILE  # noqa: PLC0415
    from atoll.story.history import History  # noqa: PLC0415

    if (saved := saved_in(out, run, broker)) is not None:
        history = History(virtual=saved.simulated)
        history.read_file(saved.folder / EVENTS_FILE)
        return history, saved.agreement
    with settings_of(out, run, broker, config, assignments) as settings:
        configure(settings.log.format, "error", role=verb, run=settings.run)
        return asyncio.run(_read(settings, verb))


def saved_in(out: Path | None, run: str | None, broker: str | None) -> SavedRun | None:
    """Return the saved run in a folder; None for a run that has a broker, or one that is not named by its folder."""
    from atoll.run.saved import saved_run  # noqa: PLC0415

    return None if out is None or run is not None or broker is not None else saved_run(out)


def view_of_saved(saved: SavedRun) -> TimedView:
    """Return the view of a saved run at its end.

    Raises:
        SettingsError: its event log cannot be read.
    """
    from atoll.run.timeline import TimedView  # noqa: PLC0415

    view = TimedView()
    for event in saved.events():
        if event is None:
            view.unreadable += 1
        else:
            view.on_event(event)
    return view


def agreement_of(saved: SavedRun) -> ProtocolSettings:
    """Return what the processes of a saved run agreed on.

    Raises:
        SettingsError: nothing says it.
    """
    return _known(saved.agreement, saved.folder)


def _known(agreement: ProtocolSettings | None, where: Path | None) -> ProtocolSettings:
    from atoll.base.errors import SettingsError  # noqa: PLC0415

    if agreement is None:
        raise SettingsError(
            "nothing says what the processes of this run agreed on",
            got=f"{where} without run.json",
            todo="put the run.json of the run beside its event log",
        )
    return agreement


async def _read(settings: Settings, verb: str) -> tuple[History, ProtocolSettings]:
    from atoll.run.record import founded_run  # noqa: PLC0415
    from atoll.story.history import History  # noqa: PLC0415

    history = History()
    async with opened(settings, verb) as bus:
        record = await founded_run(bus, settings.run)
        await history.read(bus, record.subjects)
    return history, record.protocol


def tell(lines: Iterable[str]) -> None:
    """Print lines that hold words of the run's processes: what cannot be printed is a question mark."""
    for line in lines:
        say("".join(c if c.isprintable() else "?" for c in line))
