"""What the terminal of `atoll dashboard` says of a run that is not there: what the page waits for, and which runs there are.

The page waits as long as it takes, because a person may open it before the run. A name that was mistyped would be awaited for
ever, so the terminal names the runs that the broker keeps, where this identity may see them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Final

from atoll.base.errors import AtollError
from atoll.base.redacting import redacted
from atoll.base.wording import few
from atoll.bus.open import open_jetstream
from atoll.settings import Settings, bus_options
from atoll_monitor.watched import Watched

SOON_S: Final = 2.0
LOOK_S: Final = 0.5
PATIENCE_S: Final = 3.0
NAMED: Final = 8


async def tell_what_is_awaited(watched: Watched, settings: Settings, tell: Callable[[str], None]) -> None:
    """Tell once what the page waits for, unless the run is found soon, and once more when it is found."""
    await asyncio.sleep(SOON_S)
    if watched.record is not None:
        return
    tell(await waiting_for(settings))
    while watched.record is None:  # noqa: ASYNC110  (whoever follows the run sets no event)
        await asyncio.sleep(LOOK_S)
    tell(f"run {watched.run!r} is there: the page shows it")


async def waiting_for(settings: Settings) -> str:
    """Return what a run that is not founded waits for, in one or two sentences."""
    url = redacted(settings.broker.url)
    try:
        options = replace(bus_options(settings), patience_s=PATIENCE_S)
        bus = await open_jetstream(settings.broker.url, settings.run, name="dashboard", options=options)
    except AtollError:
        return f"no broker lets us in at {url} yet: the page waits for it, and for run {settings.run!r}"
    try:
        known = [stored.run for stored in await bus.stored_runs()]
    except AtollError:  # an identity of one run may not list others
        known = None
    finally:
        await bus.close()
    return f"nobody has founded run {settings.run!r} at {url} yet: the page waits for it. {_there(known)}".rstrip()


def _there(known: list[str] | None) -> str:
    if known is None:
        return ""
    if not known:
        return "This broker keeps no run."
    how = " (`atoll runs`)" if len(known) > NAMED else ""
    return f"This broker keeps {few(known, NAMED)}{how}."
