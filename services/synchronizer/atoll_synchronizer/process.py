"""A synchronizer as a process: open the bus, wait for the run to be founded, be a host for its shards, obey signals.

A process wants one shard or all of them. Any number of processes may want the same shard: one owns it, and the others
stand by and take it over when its lease runs out (`atoll.protocol.tenure`). The processes share all shards
(`shard_assignment`).

The first SIGTERM or SIGINT asks the process to leave in good order (see `shard_assignment`); the second stops it at
once. Either way nothing is lost: what is not committed is still queued.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Coroutine
from typing import Any

from atoll.archive.checkpoint_store import CheckpointStore
from atoll.archive.object_store import open_archive
from atoll.archive.rebuild import rebuild
from atoll.base import fact_dumps, scratch_arrays
from atoll.base.clock import SystemClock
from atoll.base.errors import BrokerUnavailable, SettingsError
from atoll.base.health import live
from atoll.base.logs import configure, get
from atoll.bus.interface import Bus
from atoll.bus.open import open_bus
from atoll.bus.signed import signatures_of
from atoll.run.heads import read_heads
from atoll.run.record import check_known, read_run
from atoll.settings import Settings, bus_options
from atoll.wire.messages import RunRecord
from atoll.wire.subjects import Subjects
from atoll_synchronizer.service import ShardService
from atoll_synchronizer.shard_assignment import Host

log = get(__name__)

POLL_S = 0.2
SAY_S = 10.0


def serve_shards(settings: Settings) -> None:
    """Serve the shard that `settings` names, or all, in a loop of its own."""
    configure(settings.log.format, settings.log.level, role="synchronizer", run=settings.run)
    scratch_arrays.policy.bytes_min, scratch_arrays.policy.folder = (
        settings.synchronizer.spill_bytes,
        settings.synchronizer.scratch_dir,
    )
    asyncio.run(serve(settings))


async def serve(settings: Settings) -> None:
    """Serve until the run is over or a signal ends it."""
    shard = settings.synchronizer.shard
    name = "synchronizer" if shard is None else f"shard-{shard}"
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    fact_dumps.policy.folder = settings.log.dump_dir
    fact_dumps.dump_on_signal()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    bus = await open_bus(settings.broker.url, settings.run, name=name, options=bus_options(settings))
    life = loop.create_task(live(settings.health_file))
    try:
        if settings.synchronizer.restore:
            checkpoint_store = CheckpointStore(
                open_archive(settings.synchronizer.restore), settings.run, signatures_of(bus)
            )
            bytes_max = settings.broker.stream_bytes_max
            await rebuild(bus, checkpoint_store, SystemClock(), first=shard or 0, bytes_max=bytes_max)
        record = await wait_for_run(bus, settings.run, stop)
        if record is None:
            return
        shards = record.protocol.shards
        if shard is not None and shard >= shards:
            raise SettingsError(
                "this run has no such shard",
                got=shard,
                allowed=f"0..{shards - 1}",
                todo="set --shard, or leave it away",
            )
        wanted = tuple(range(shards)) if shard is None else (shard,)
        await Host(bus, record, wanted, SystemClock(), settings.archive).serve(stop)
    finally:
        life.cancel()
        await bus.close()


async def wait_for_run(bus: Bus, run: str, stop: asyncio.Event) -> RunRecord | None:
    """Return the run record once every fragment has a head, or None when told to stop before.

    Raises:
        SettingsError: this Atoll cannot read the run's frames; a shard that it owned would be lost to all.
    """
    subjects = Subjects(run)
    waited_s = 0.0
    while not stop.is_set():
        record = await read_run(bus, subjects)
        if record is not None and len(await read_heads(bus, record)) == len(record.layout.fragments):
            return check_known(record)
        if waited_s % SAY_S < POLL_S:
            log.info("run.awaited", founded=record is not None)
        waited_s += POLL_S
        await asyncio.sleep(POLL_S)
    return None


async def serve_run(opener: Callable[[], Coroutine[Any, Any, Bus]], run: str, *, shard: int) -> str:
    """Serve `shard` of `run` inside another process and its loop (a tour, a test); return why it ended."""
    bus = await opener()
    try:
        record = await wait_for_run(bus, run, asyncio.Event())
        if record is None:
            raise BrokerUnavailable("nobody founded the run", got=run)
        return await ShardService(bus, record, shard, SystemClock()).serve()
    finally:
        await bus.close()
