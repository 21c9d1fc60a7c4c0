"""A synchronizer as a process: a host that is candidate for one, several or all shards of a run, or folds for a region.

    per shard:  stand by ──lease──► own ──handed over, deposed──► stand by … ──run over──► done
    all:        presence of every host ─► `atoll.protocol.ownership` ─► hand a shard over

Any number of processes may want the same shard: one owns it, the others stand by and take it over when its lease runs out.
Processes may come and go while the run goes on. A new process hears the others and receives shards until all have their share.

The first SIGTERM or SIGINT asks a process to leave in good order: it hands its shards to hosts that stay, which takes a moment,
not a lease. The owner first makes its decisions durable, then releases the lease in favour of the next owner, which fences as
after any death. If no host is there to take a shard, its owner serves on for `LEAVE_S` at most: until the last learner has left
and the queue is empty, or until that time is over and the queue waits for a next owner. The second signal stops the process at
once. Either way nothing is lost: what is not committed is still queued.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections import Counter
from collections.abc import Callable, Coroutine
from dataclasses import replace
from typing import Any

from atoll import __version__
from atoll.archive.checkpoint_store import CheckpointStore
from atoll.archive.object_store import open_archive
from atoll.archive.rebuild import rebuild
from atoll.base import fact_dumps, large_arrays
from atoll.base.background_tasks import BackgroundTasks
from atoll.base.clock import Clock, Identity, SystemClock, this_process
from atoll.base.errors import BrokerUnavailable, BusError, PeerMisbehaved, RecordConflict, SettingsError
from atoll.base.health import live, rest
from atoll.base.logs import configure, get, is_power_of_two, say_in_this_task
from atoll.base.retry import patiently
from atoll.bus.interface import Bus
from atoll.bus.open import open_bus
from atoll.merge.outer import check_outer
from atoll.protocol.ownership import BEATS_PER_LEASE, Balance, HandOver, HostHeard, LookAtLeases
from atoll.protocol.recorder import FactRecorder
from atoll.protocol.settings import NESTEROV
from atoll.run.heads import read_heads
from atoll.run.record import check_known, read_run, the_run
from atoll.settings import Settings, bus_options
from atoll.settings.sections import ArchiveSettings
from atoll.wire.events import HostedEvent
from atoll.wire.messages import Presence, RunRecord, decode, encode
from atoll.wire.subjects import Subjects, region_name
from atoll.wire.traffic import TOLD_EVERY_S, moved_by
from atoll_synchronizer.archivist import make_archivist, make_retention
from atoll_synchronizer.intake import MessageFailed
from atoll_synchronizer.region_service import RegionService
from atoll_synchronizer.service import HANDED_OVER, ServingProcess, ShardService
from atoll_synchronizer.shard_context import EventLog

log = get(__name__)

POLL_S = 0.2
SAY_S = 10.0
LEAVE_S = 20.0
SET_ASIDE_AFTER = 3
"""Failures by one message after which its shard goes on without it."""
CLOSE_S = 5.0
HEAR_S = 0.2


def serve_shards(settings: Settings) -> None:
    """Serve the shard that `settings` names, or all, in a loop of its own."""
    configure(settings.log.format, settings.log.level, role="synchronizer", run=settings.run)
    large_arrays.policy.bytes_min, large_arrays.policy.folder = (
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

    Raises `SettingsError`: this Atoll cannot read the run's frames; a shard that it owned would be lost to all.
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

    Its rounds are retained if an `archive` says so; checkpoints are not made. Code of one's own as the run's outer optimizer
    is run if `own_outer` names the same.
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


class Host:
    """Wants `shards` of a founded run until the run is over or the process must leave."""

    def __init__(  # noqa: PLR0913  (who serves what, and how this process is set)
        self,
        bus: Bus,
        run: RunRecord,
        shards: tuple[int, ...],
        clock: Clock,
        archive: ArchiveSettings,
        identity: Identity | None = None,
        *,
        own_outer: str = NESTEROV,
    ) -> None:
        self.identity = identity or this_process()
        self.name = self.identity.name
        self._bus = bus
        self._run = run
        self._shards = shards
        self._clock = clock
        self._archive = archive
        self._own_outer = own_outer
        self._subjects = run.subjects
        self._balance = Balance(self.name, run.protocol.lease_s)
        self._recorder = FactRecorder(f"host-{self.name}", self._balance)
        fact_dumps.keep(self._recorder)
        self._services: dict[int, ShardService] = {}
        self._versions: dict[str, dict[int, int]] = {}
        """The highest versions that this process has had of each founding's fragments, by fragment."""
        self._moving: dict[int, asyncio.Task[None]] = {}
        self._leaving = False
        self._event_log = EventLog(bus, self._subjects, self.name, clock)
        self._served: set[int] = set()

    async def serve(self, stop: asyncio.Event) -> None:
        """Serve until every shard is finished; hand all over when `stop` is set, stop at once when it is set again.

        Raises `AtollError`: the reason why a candidacy ended, if neither the run nor another owner ended it.
        """
        candidacies = [asyncio.create_task(self._want(shard)) for shard in self._shards]
        failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        talk = BackgroundTasks(lambda error: None if failed.done() else failed.set_exception(error))
        talk.spawn(self._listen(), self._tell(), self._write_down_moved())
        stopping = asyncio.create_task(stop.wait())
        all_done = asyncio.gather(*candidacies)
        try:
            either: set[asyncio.Future[Any]] = {all_done, stopping, failed}
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            if failed.done():
                failed.result()
            if not all_done.done():
                stop.clear()
                await self._leave(all_done, stop)
            await all_done
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(CLOSE_S):
                    await self._record_moved()
        finally:
            works: list[asyncio.Future[Any]] = [failed, stopping, *candidacies, *self._moving.values()]
            for work in works:
                work.cancel()
            await talk.stop()
            await asyncio.gather(*works, all_done, return_exceptions=True)

    # --- one shard ----------------------------------------------------------------------------------------------------

    async def _want(self, shard: int) -> None:
        say_in_this_task(shard=shard)
        failed: Counter[str] = Counter()
        while True:
            kept = self._archive, self._run, shard, self._clock, self._bus.signatures
            service = ShardService(
                self._bus,
                self._run,
                shard,
                self._clock,
                process=ServingProcess(
                    self.identity,
                    self._own_outer,
                    self._versions.setdefault(self._run.nonce, {}),
                    _digests_to_set_aside(failed),
                ),
                archivist=make_archivist(*kept),
                retention=make_retention(*kept),
            )
            self._services[shard] = service
            if self._leaving:
                service.order_drain()
            try:
                reason = await service.serve()
            except RecordConflict as error:
                log.warning("shard.deposed", reason=str(error), commits=service.commits)
                reason = "deposed"
            except MessageFailed as error:
                failed[error.digest] += 1
                log.error("message.failed", message=error.digest, times=failed[error.digest], reason=str(error))  # noqa: TRY400
                reason = "broken"
            if reason not in (HANDED_OVER, "deposed", "broken") or self._leaving:
                log.info("shard.finished", reason=reason, commits=service.commits)
                del self._services[shard]
                return
            log.info("shard.given_up", reason=reason, commits=service.commits)
            # The run on the broker may no longer be the one we knew: it may have been rebuilt.
            self._run = await patiently(lambda: the_run(self._bus, self._subjects), "the run record")

    def _move(self, shard: int, to: str) -> None:
        running = self._moving.get(shard)
        if running is None or running.done():
            self._moving[shard] = asyncio.create_task(self._hand_over(self._services[shard], to))

    async def _hand_over(self, service: ShardService, to: str) -> None:
        began_s = self._clock.monotonic()
        log.info("shard.handing_over", shard=service.shard, to=to)
        await service.hand_over(to)
        log.info("shard.handed_over", shard=service.shard, to=to, took_s=round(self._clock.monotonic() - began_s, 4))
        await self._say()

    async def _leave(self, all_done: asyncio.Future[list[None]], stop: asyncio.Event) -> None:
        log.info("host.leaving", owns=sorted(self._own().owns))
        self._leaving = True
        await self._say()
        # Processes that leave together hear of each other first, and hand nothing to a host that leaves too.
        await asyncio.sleep(HEAR_S)
        for shard, service in self._services.items():
            to = self._balance.successor(shard, self._clock.monotonic())
            if to and service.owning and service.learners_present():
                self._move(shard, to)
            else:
                service.order_drain()
        again = asyncio.create_task(stop.wait())
        either: set[asyncio.Future[Any]] = {all_done, again}
        await asyncio.wait(either, timeout=LEAVE_S, return_when=asyncio.FIRST_COMPLETED)
        again.cancel()
        for service in self._services.values():
            service.leave()
        await asyncio.wait({all_done}, timeout=CLOSE_S)
        if not all_done.done():
            raise BrokerUnavailable(
                "the shard left without closing its ledger", todo="the next owner resumes from its last commit"
            )

    # --- the others ---------------------------------------------------------------------------------------------------

    def _own(self) -> HostHeard:
        services = self._services.items()
        owns = frozenset(shard for shard, service in services if service.lease.epoch and not service.gone.is_set())
        return HostHeard(
            at_s=self._clock.monotonic(),
            host=self.name,
            wants=frozenset() if self._leaving else frozenset(self._services),
            owns=owns,
            leaving=self._leaving,
        )

    async def _listen(self) -> None:
        refused, feed = 0, await patiently(lambda: self._bus.listen(self._subjects.presence("*")), "presence")
        try:
            async for core_message in feed:
                try:
                    heard = decode(Presence, core_message.data)
                except PeerMisbehaved as error:
                    refused += 1
                    if is_power_of_two(refused):
                        subject = core_message.subject
                        log.warning("presence.refused", subject=subject, reason=str(error), refused=refused)
                    continue
                self._on_presence(heard)
        finally:
            await feed.close()

    def _on_presence(self, heard: Presence) -> None:
        fact = HostHeard(
            at_s=self._clock.monotonic(),
            host=heard.name,
            wants=frozenset(heard.wants),
            owns=frozenset(heard.owns),
            leaving=heard.leaving,
        )
        others = [] if heard.name == self.name else self._recorder.handle(fact)
        for action in (*others, *self._recorder.handle(self._own())):
            if isinstance(action, HandOver):
                self._move(action.shard, action.to)
            elif isinstance(action, LookAtLeases):
                for service in self._services.values():
                    service.lease.nudge()

    async def _tell(self) -> None:
        while True:
            await self._say()
            await asyncio.sleep(self._run.protocol.lease_s / BEATS_PER_LEASE)

    async def _write_down_moved(self) -> None:
        """Record the traffic of our link in the event log at intervals, so that a killed process leaves it behind."""
        while True:
            await asyncio.sleep(TOLD_EVERY_S)
            await self._record_moved()

    async def _record_moved(self) -> None:
        moved, own = moved_by(self._bus.stats), self._own()
        await self._event_log.record(
            HostedEvent(
                shards=tuple(sorted(self._served)),
                moved=moved,
                owns=tuple(sorted(own.owns)),
                wants=tuple(sorted(own.wants)),
            )
        )

    async def _say(self) -> None:
        own = self._own()
        self._served |= own.owns
        presence = Presence(
            name=self.name,
            host=self.identity.host,
            pid=self.identity.pid,
            wants=tuple(sorted(own.wants)),
            owns=tuple(sorted(own.owns)),
            leaving=own.leaving,
            moved=moved_by(self._bus.stats),
            software=__version__,
        )
        try:
            await self._bus.tell(self._subjects.presence(self.name), encode(presence))
        except (BusError, BrokerUnavailable) as error:
            log.warning("presence.unsent", reason=str(error))


def _digests_to_set_aside(failed: Counter[str]) -> frozenset[str]:
    return frozenset(digest for digest, times in failed.items() if times >= SET_ASIDE_AFTER)
