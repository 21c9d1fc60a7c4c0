"""One shard as a process: open the bus, wait for the run to be founded, stand by or serve, obey signals.

Any number of processes may want one shard: one owns it, the others stand by and take it over when its lease runs out
(`atoll.protocol.tenure`). An owner that was deposed, because it was frozen or cut off, stands by again.

The first SIGTERM or SIGINT asks the shard to finish: it serves on until the last learner has left and its queue is
empty, but no longer than `LEAVE_S` when learners go on training; the second stops it at once. Either way nothing is
lost: what is not committed is still queued.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Coroutine
from typing import Any

from atoll.bus.connect import open_bus
from atoll.bus.interface import Bus
from atoll.bus.subjects import Subjects
from atoll.clock import SystemClock
from atoll.errors import BrokerUnavailable, RecordConflict, SettingsError
from atoll.health import live
from atoll.island.founding import read_heads, read_run
from atoll.logs import configure, get
from atoll.settings import Settings, bus_options
from atoll.wire.messages import RunRecord
from atoll_synchronizer.service import ShardService

log = get(__name__)

POLL_S = 0.2
SAY_S = 10.0
LEAVE_S = 20.0
CLOSE_S = 5.0


def serve_shard(settings: Settings) -> None:
    """Serve the shard that `settings` names, in a loop of its own."""
    shard = settings.synchronizer.shard
    configure(settings.log.format, settings.log.level, role="synchronizer", run=settings.run, shard=shard)
    asyncio.run(serve(settings))


async def serve(settings: Settings) -> None:
    """Serve until the run is over or a signal ends it."""
    shard = settings.synchronizer.shard
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    bus = await open_bus(settings.broker.url, settings.run, name=f"shard-{shard}", options=bus_options(settings))
    life = loop.create_task(live(settings.health_file))
    try:
        record = await wait_for_run(bus, settings.run, stop)
        if record is None:
            return
        if shard >= record.protocol.shards:
            raise SettingsError(
                "this run has no such shard", got=shard, allowed=f"0..{record.protocol.shards - 1}", todo="set --shard"
            )
        await _serve_run(bus, record, settings, stop)
    finally:
        life.cancel()
        await bus.close()


async def _serve_run(bus: Bus, record: RunRecord, settings: Settings, stop: asyncio.Event) -> None:
    """Be a candidate for the shard, again after every time that somebody else has taken it over."""
    while True:
        service = ShardService(bus, record, settings.synchronizer.shard, SystemClock())
        try:
            reason = await _serve_once(service, stop)
        except RecordConflict as error:
            log.warning("shard.deposed", reason=str(error), commits=service.commits)
            if service.draining:
                return
            continue
        log.info("shard.finished", reason=reason, commits=service.commits)
        return


async def _serve_once(service: ShardService, stop: asyncio.Event) -> str:
    """Return why the candidacy ended; raise what `ShardService.serve` raises."""
    serving = asyncio.create_task(service.serve())
    stopping = asyncio.create_task(stop.wait())
    await asyncio.wait({serving, stopping}, return_when=asyncio.FIRST_COMPLETED)
    if not serving.done():
        stop.clear()
        log.info("shard.draining")
        service.order_drain()
        again = asyncio.create_task(stop.wait())
        await asyncio.wait({serving, again}, timeout=LEAVE_S, return_when=asyncio.FIRST_COMPLETED)
        again.cancel()
        service.leave()
        await asyncio.wait({serving}, timeout=CLOSE_S)
    stopping.cancel()
    if not serving.done():
        serving.cancel()
        raise BrokerUnavailable(
            "the shard left without closing its books", todo="the next owner resumes from its last commit"
        )
    return await serving


async def wait_for_run(bus: Bus, run: str, stop: asyncio.Event) -> RunRecord | None:
    """Return the run record once every fragment has a head, or None when told to stop before."""
    subjects = Subjects(run)
    waited_s = 0.0
    while not stop.is_set():
        record = await read_run(bus, subjects)
        if record is not None and len(await read_heads(bus, subjects, record.layout)) == len(record.layout.fragments):
            return record
        if waited_s % SAY_S < POLL_S:
            log.info("run.awaited", founded=record is not None)
        waited_s += POLL_S
        await asyncio.sleep(POLL_S)
    return None


async def serve_run(opener: Callable[[], Coroutine[Any, Any, Bus]], run: str, *, shard: int) -> str:
    """Serve `shard` of `run` inside somebody else's process and loop (a tour, a test); return why it ended."""
    bus = await opener()
    try:
        record = await wait_for_run(bus, run, asyncio.Event())
        if record is None:
            raise BrokerUnavailable("nobody founded the run", got=run)
        return await ShardService(bus, record, shard, SystemClock()).serve()
    finally:
        await bus.close()
