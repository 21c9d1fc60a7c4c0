"""A synchronizer as a process: open the bus, wait for the run to be founded, be a host for its shards, obey signals.

A process wants one shard or all of them. Any number of processes may want the same shard: one owns it, and the others
stand by and take it over when its lease runs out (`atoll.protocol.ownership`). The processes share all shards
(`shard_assignment`).

The first SIGTERM or SIGINT asks the process to leave in good order (see `shard_assignment`); the second stops it at
once. Either way nothing is lost: what is not committed is still queued.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Coroutine
from dataclasses import replace
from typing import Any

from atoll.archive.checkpoint_store import CheckpointStore
from atoll.archive.object_store import open_archive
from atoll.archive.rebuild import rebuild
from atoll.base import fact_dumps, scratch_arrays
from atoll.base.clock import SystemClock
from atoll.base.errors import BrokerUnavailable, SettingsError
from atoll.base.health import live, rest
from atoll.base.logs import configure, get
from atoll.bus.interface import Bus
from atoll.bus.open import open_bus
from atoll.merge.outer import check_outer
from atoll.protocol.settings import NESTEROV
from atoll.run.heads import read_heads
from atoll.run.record import check_known, read_run
from atoll.settings import ArchiveSettings, Settings, bus_options
from atoll.wire.messages import RunRecord
from atoll.wire.subjects import Subjects, region_name
from atoll_synchronizer.archivist import make_retention
from atoll_synchronizer.region_service import RegionService
from atoll_synchronizer.service import ServingProcess, ShardService
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
    is_over = asyncio.run(serve(settings))
    if is_over and settings.stay:
        rest(settings.health_file)


async def serve(settings: Settings) -> bool:
    """Serve until the run is over or a signal ends it; return whether it is over."""
    shard, region = settings.synchronizer.shard, settings.synchronizer.region
    name = f"region-{check_region(settings)}" if region else "synchronizer" if shard is None else f"shard-{shard}"
    stop, signalled = asyncio.Event(), False
    loop = asyncio.get_running_loop()

    def leave() -> None:
        nonlocal signalled
        signalled = True
        stop.set()

    fact_dumps.policy.folder = settings.log.dump_dir
    fact_dumps.dump_on_signal()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, leave)
    # All large work is done beside this loop, and a round is many small requests: the connection needs no loop of its own.
    options, own_outer = replace(bus_options(settings), own_thread=False), settings.protocol.outer
    bus = await open_bus(settings.broker.url, settings.run, name=name, options=options)
    life = loop.create_task(live(settings.health_file, bus.reach))
    try:
        if settings.synchronizer.restore:
            checkpoint_store = CheckpointStore(
                open_archive(settings.synchronizer.restore), settings.run, bus.signatures
            )
            bytes_max = settings.broker.stream_bytes_max
            await rebuild(
                bus, checkpoint_store, SystemClock(), first=shard or 0, bytes_max=bytes_max, own_outer=own_outer
            )
        if region:
            await serve_region(bus, settings, stop)
            return not signalled
        record = await wait_for_run(bus, settings.run, stop)
        if record is None:
            return False
        shards = record.protocol.shards
        if shard is not None and shard >= shards:
            raise SettingsError(
                "this run has no such shard",
                got=shard,
                allowed=f"0..{shards - 1}",
                todo="set --shard, or leave it away",
            )
        wanted = tuple(range(shards)) if shard is None else (shard,)
        check_outer(record.protocol.outer, own_outer)
        await Host(bus, record, wanted, SystemClock(), settings.archive, own_outer=own_outer).serve(stop)
        return not signalled
    finally:
        life.cancel()
        await bus.close()


def check_region(settings: Settings) -> str:
    """Return the region that a process folds for; raise `SettingsError` for a name that cannot be, or for two tasks."""
    mine = settings.synchronizer
    if mine.shard is not None or mine.restore:
        raise SettingsError(
            "a region's synchronizer owns no shard and rebuilds no run",
            got="synchronizer.region with synchronizer.shard or synchronizer.restore",
            todo="start another process for the shard, without synchronizer.region",
        )
    return region_name(mine.region, "correct synchronizer.region")


async def serve_region(bus: Bus, settings: Settings, stop: asyncio.Event) -> None:
    """Fold for a region until the run is over or a signal ends it; a run that is founded anew goes on."""
    ended = "replaced"
    while ended == "replaced":
        record = await wait_for_run(bus, settings.run, stop)
        if record is None:
            return
        ended = await RegionService(bus, record, settings.synchronizer.region, SystemClock()).serve(stop)
        log.info("region.finished", region=settings.synchronizer.region, reason=ended)


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


async def serve_run(
    opener: Callable[[], Coroutine[Any, Any, Bus]],
    run: str,
    *,
    shard: int,
    archive: ArchiveSettings | None = None,
    own_outer: str = NESTEROV,
) -> str:
    """Serve `shard` of `run` inside another process and its loop (a tour, a test); return why it ended.

    Its rounds are retained if an `archive` says so; checkpoints are not made. Code of one's own as the run's outer optimizer is
    run if `own_outer` names the same.
    """
    bus = await opener()
    try:
        record = await wait_for_run(bus, run, asyncio.Event())
        if record is None:
            raise BrokerUnavailable("nobody founded the run", got=run)
        clock = SystemClock()
        retention = None if archive is None else make_retention(archive, record, shard, clock)
        process = ServingProcess(own_outer=own_outer)
        return await ShardService(bus, record, shard, clock, process=process, retention=retention).serve()
    finally:
        await bus.close()
