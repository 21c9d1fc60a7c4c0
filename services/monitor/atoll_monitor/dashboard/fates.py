"""What became of every token, for the page: now and then from the broker of a run, or from the event log of a saved one."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

from atoll.base.errors import AtollError
from atoll.base.logs import get
from atoll.bus.open import open_bus
from atoll.protocol.ledger import Ledger, apportion, settle
from atoll.protocol.settings import ProtocolSettings
from atoll.run.ledger import read_lives, total
from atoll.run.view import RunView
from atoll.settings import Settings, bus_options
from atoll_monitor.dashboard.scene import RunScene

log = get(__name__)

FATES_S: Final = 5.0
LOOK_S: Final = 0.5


def closed_fates(view: RunView, agreement: ProtocolSettings | None) -> dict[str, int] | None:
    """Return whole tokens by fate from the ledgers that shards wrote when they closed; None unless all shards did."""
    if agreement is None or len(view.closed) < agreement.shards:
        return None
    ledger = Ledger()
    for closed in view.closed.values():
        ledger.absorb(closed.ledger)
    return dict(apportion(settle(ledger, agreement.fragments).fates, agreement.fragments))


async def poll_fates(scene: RunScene, settings: Settings, wanted: Callable[[], bool]) -> None:
    """Keep `scene.fates` current while they are `wanted`, over a connection that lasts as long; nobody else pays for it.

    What cannot be read now keeps its last value.
    """
    while True:
        if wanted():
            try:
                await _read_while(wanted, scene, settings)
            except AtollError as error:
                log.info("fates.unknown", reason=str(error))
                await asyncio.sleep(FATES_S)
        await asyncio.sleep(LOOK_S)


async def _read_while(wanted: Callable[[], bool], scene: RunScene, settings: Settings) -> None:
    bus = await open_bus(settings.broker.url, settings.run, name="monitor-fates", options=bus_options(settings))
    try:
        while wanted():
            record = scene.watched.record
            if record is not None:
                fragments = len(record.layout.fragments)
                sums = total(await read_lives(bus, record), fragments)
                scene.fates = dict(apportion(sums, fragments))
            await asyncio.sleep(FATES_S if record is not None else LOOK_S)
    finally:
        await bus.close()
