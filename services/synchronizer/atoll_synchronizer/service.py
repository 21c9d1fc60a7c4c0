"""One candidacy for one shard: it stands by, owns, and finishes, hands over or is deposed. It decides nothing itself.

    FactIntake   ── facts ──► Shard.handle ── commands ─┬─► FragmentLanes: fold, commit, keep, acknowledge, in order
    timers       ── facts ──►      │                    ├─► Aggregator: fetch ── fact: ready or spoiled ──► Shard.handle
    LeaseKeeper  ── owns?          └ FactRecorder           └─► call, timer, finish, stand down

The machine (`atoll.protocol.shard`) decides; `intake` turns messages into facts, `FragmentLanes` turns commands into work.
While the broker is away, everything here waits and tries again (`atoll.base.retry`). Only one thing ends a candidacy
against its will: a write or a lease of another process, because then that process owns the shard.
"""
# ruff: noqa: D102  (a method without a docstring is the one of `ShardOwner`)

from __future__ import annotations

import asyncio
import contextlib
from collections import defaultdict
from collections.abc import Coroutine, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, assert_never

from atoll.base import fact_dumps
from atoll.base.background_tasks import BackgroundTasks
from atoll.base.clock import Clock, Identity, this_process
from atoll.base.errors import AtollError, BrokerUnavailable, BusError, ProtocolMisuse, RecordConflict, StorageFull
from atoll.base.logs import get
from atoll.base.retry import cancel_all, patiently
from atoll.bus.interface import Bus
from atoll.merge.outer import make_outer
from atoll.protocol.events import (
    Acknowledge,
    ArmTimer,
    Commit,
    CommitRefused,
    Committed,
    ContributionReady,
    ContributionSpoiled,
    Dismiss,
    DrainOrdered,
    Fact,
    Fetch,
    Finish,
    Fold,
    Isolate,
    Keep,
    Kept,
    LaneCommand,
    PublishCall,
    Refuse,
    ShardCommand,
    StandDown,
    TimerFired,
    Unfold,
)
from atoll.protocol.ledger import Ledger, parts
from atoll.protocol.recorder import FactRecorder
from atoll.protocol.settings import NESTEROV
from atoll.protocol.shard import Shard
from atoll.wire.events import LedgerEvent, ServingEvent
from atoll.wire.messages import Call, Contribution, Head, RunRecord, encode
from atoll_synchronizer.acknowledgements import PendingAcknowledgements
from atoll_synchronizer.aggregator import Aggregator
from atoll_synchronizer.archivist import Archivist, Retention
from atoll_synchronizer.garbage_collector import ShareKeeper
from atoll_synchronizer.intake import FactIntake
from atoll_synchronizer.lease import LeaseKeeper
from atoll_synchronizer.regions import RegionReader
from atoll_synchronizer.round_report import CommitRecord, RoundReporter
from atoll_synchronizer.shard_context import EventLog, ShardContext
from atoll_synchronizer.store import ShardStore

log = get(__name__)

HANDED_OVER = "handed over"


@dataclass(frozen=True, slots=True)
class ServingProcess:
    """The process that wants shards: who it is, the outer optimizer that its settings name, and the versions it has had.

    `versions` are the highest of the run's fragments, by fragment; they grow while it serves. Messages with a digest in
    `aside` have broken the shard's machine before.
    """

    identity: Identity = field(default_factory=this_process)
    own_outer: str = NESTEROV
    versions: dict[int, int] = field(default_factory=dict)
    aside: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class ShardTenure:
    """The parts of an owner, from the moment when the shard is ours: its machine, lanes, and what records both."""

    machine: Shard
    recorder: FactRecorder[ShardCommand]
    report: RoundReporter
    lanes: FragmentLanes


class ShardService:
    """One candidacy for one shard of a founded run, on the running loop: standby, owner, finished or deposed."""

    def __init__(  # noqa: PLR0913  (who serves what, and the two that archive it)
        self,
        bus: Bus,
        run: RunRecord,
        shard: int,
        clock: Clock,
        *,
        process: ServingProcess | None = None,
        archivist: Archivist | None = None,
        retention: Retention | None = None,
    ) -> None:
        """Prepare, on behalf of `process`; `serve` does the work.

        Raises `SettingsError`: the run's outer optimizer is code that the settings of the process do not name.
        """
        process = process or ServingProcess()
        self.context = ShardContext(bus, run, shard, clock)
        self.bus = bus
        self.run = run
        self.shard = shard
        self.clock = clock
        self.archivist = archivist
        self.retention = retention
        self.subjects = self.context.subjects
        protocol = run.protocol
        outer = make_outer(protocol.outer, protocol.outer_lr, protocol.outer_momentum, process.own_outer)
        self.store = ShardStore(bus, run, shard, outer, process.versions)
        self.identity = process.identity
        self.lease = LeaseKeeper(bus, run, shard, clock, self.identity)
        self.event_log = EventLog(bus, self.subjects, self.context.name, clock)
        self.pending = PendingAcknowledgements(
            bus,
            self.subjects,
            self.event_log,
            self.store.garbage_collector,
            self,
        )
        self.aggregator = Aggregator(bus, run, retention)
        self.intake = FactIntake(self.context, self.pending, self.event_log, self, process.aside)
        self.background = BackgroundTasks(self._on_failure)
        self.regions = RegionReader(self.context, self.aggregator, self.store.garbage_collector, self)
        self.ledger = Ledger()
        self._tenure: ShardTenure | None = None
        self.owning = self.draining = self._finished = False
        self._heir = ""
        self.gone = asyncio.Event()
        self._ended: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    @property
    def tenure(self) -> ShardTenure:
        """Return the parts of an owner. Raises `ProtocolMisuse`: the shard is not ours yet."""
        if self._tenure is None:
            raise ProtocolMisuse("this candidacy does not own its shard", got=self.context.name)
        return self._tenure

    @property
    def commits(self) -> int:
        """Return how many commits of this candidacy have become visible."""
        return 0 if self._tenure is None else self._tenure.lanes.commits

    async def serve(self) -> str:
        """Wait until the shard is ours, then serve until the run is over; return why it ended.

        Raises `RecordConflict`: another process owns the shard now; nothing of ours is visible from then on.
        """
        former = await self.lease.win()
        if not self.lease.epoch:
            return "nothing to own"
        self.ledger = former or self.ledger
        self.background.spawn(self._keep_lease())
        try:
            await self._unless_deposed(self._take_over(former))
            reason = await self._ended
            await self.background.stop()
            await self.pending.tell_refusals()
            await self.intake.junk.tell()
            await self.event_log.finish()
            ledger = self.store.ledger(self.tenure.machine.ledger)
            if reason != HANDED_OVER:
                await self._record_ledger(ledger, reason)
            await patiently(lambda: self.lease.release(ledger, closed=self._finished, to=self._heir), "the lease")
            await self.store.garbage_collector.sweep()
            if self.archivist and reason != HANDED_OVER:
                await self.archivist.close(self.bus, self.store, ledger, finished=self._finished)
            return reason
        finally:
            self.owning = False
            self.gone.set()
            await self.background.stop()
            await self.intake.close()

    async def _take_over(self, former: Ledger | None) -> None:
        began_s = self.clock.monotonic()
        self.event_log.epoch = epoch = self.lease.epoch
        await patiently(lambda: self.store.open(epoch), "the fence")
        versions = {p: holding.head.version for p, holding in self.store.holdings.items()}
        machine = Shard(
            self.run.protocol,
            self.shard,
            versions,
            fragment_ledgers=self.store.copied_ledgers(),
            ledger=former,
        )
        recorder = FactRecorder(self.context.name, machine)
        fact_dumps.keep(recorder)
        if self.retention:
            self.retention.begin(epoch, machine)
        self.ledger = machine.ledger
        report = RoundReporter(self.context, machine, self.event_log)
        lanes = FragmentLanes(versions, self, report)
        self._tenure = ShardTenure(machine, recorder, report, lanes)
        self.background.spawn(*(lanes.work(fragment) for fragment in versions))
        await self.intake.open(epoch)
        self.background.spawn(self.intake.hear_beats(), self.intake.read_queue(), self.intake.keep_roll())
        self.background.spawn(self.intake.claimed_progress.keep_verifying())
        self.background.spawn(self.pending.keep_telling(), self.intake.junk.keep_telling())
        self.background.spawn(self.pending.keep_holding(), self.store.garbage_collector.keep_sweeping())
        if self.shard == 0:
            self.background.spawn(ShareKeeper(self.context, self.event_log).keep())
        if self.archivist:
            self.background.spawn(self.archivist.keep(self.bus, self.store, lambda: self.tenure.machine.ledger))
        self.owning = True
        if self.draining:
            self.order_drain()
        took_s, newest = round(self.clock.monotonic() - began_s, 4), max(versions.values())
        log.info("shard.serving", fragments=len(versions), epoch=epoch, version_max=newest, took_s=took_s)
        serving = ServingEvent(
            epoch=epoch, versions=versions, took_s=took_s, host=self.identity.host, pid=self.identity.pid
        )
        self.background.spawn(self.event_log.record(serving))

    async def _unless_deposed(self, work: Coroutine[Any, Any, None]) -> None:
        doing = asyncio.ensure_future(work)
        either: set[asyncio.Future[Any]] = {doing, self._ended}
        try:
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            if not doing.done():
                self._ended.result()
                raise RecordConflict("this candidacy ended before it began to serve")
            doing.result()
        finally:
            await cancel_all([doing])

    def order_drain(self) -> None:
        """Finish when the last learner has left and the queue is empty; a standby leaves when the shard has an owner."""
        self.draining = True
        self.lease.leave()
        if self.owning:
            self.tell(DrainOrdered(at_s=self.clock.monotonic(), cause_id="drain"))

    def leave(self) -> None:
        """Stop serving now; what is queued stays queued for the next owner."""
        self._end("left")

    def learners_present(self) -> bool:
        """Return whether a learner may still push to this shard, which is ours."""
        return bool(self.tenure.machine.present())

    async def hand_over(self, to: str) -> None:
        """Make all decisions durable, decide nothing more, and release the shard to the process `to`."""
        if not self.owning or self._heir or self._ended.done() or self.tenure.machine.finished:
            return
        self._heir = to
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self.run.protocol.lease_s):
                await self.tenure.lanes.empty()
        self._end(HANDED_OVER)
        await self.gone.wait()

    # --- facts and commands -------------------------------------------------------------------------------------------

    def tell(self, fact: Fact) -> None:
        """Tell the machine a fact and do what it commands; nothing once the shard is being handed over."""
        if self._heir:
            return
        if self.retention:
            self.retention.fact(fact)
        for action in self.tenure.recorder.handle(fact):
            self._do(action)

    def _do(self, action: ShardCommand) -> None:
        match action:
            case ArmTimer():
                self.background.arm(
                    action.name,
                    action.due_s - self.clock.monotonic(),
                    lambda name: self.tell(TimerFired(at_s=self.clock.monotonic(), name=name)),
                )
            case PublishCall():
                if action.attempt == 1:
                    self.tenure.report.note_call(action.fragment)
                self.background.spawn(self._call(action))
            case Fetch():
                self.background.spawn(self._fetch(action))
            case Fold() | Unfold() | Commit() | Keep() | Acknowledge() | Dismiss():
                self.tenure.lanes.put(action)
            case Refuse():
                self.aggregator.forget(action.key)
                self.pending.refuse(action)
            case Isolate():
                self.background.spawn(self.pending.isolate(action))
            case Finish():
                self.background.spawn(self._finish(action.reason))
            case StandDown():
                self._stand_down(action.reason)
            case _:
                assert_never(action)

    async def _call(self, action: PublishCall) -> None:
        call = Call(
            fragment=action.fragment, version=action.version, attempt=action.attempt, run_tokens=action.run_tokens
        )
        try:
            await self.bus.tell(self.subjects.call(action.fragment), encode(call))
        except (BusError, BrokerUnavailable) as error:
            log.warning("call.unsent", fragment=action.fragment, reason=str(error))
        if action.attempt > 1:
            await self.tenure.report.record_wait(action)

    # --- what the parts ask (`ShardOwner`) ------------------------------------------------------------------------------

    def spawn(self, *works: Coroutine[Any, Any, None]) -> None:
        self.background.spawn(*works)

    def note_settled(self, manifest: Contribution) -> None:
        self.regions.note_settled(manifest)

    def ledger_now(self) -> Ledger:
        return self.tenure.machine.ledger

    def step_s(self) -> float:
        return self.tenure.machine.step_s() or 0.0

    def live_in(self, region: str) -> set[str]:
        return {learner for learner in self.tenure.machine.live() if self.region_of(learner) == region}

    def region_of(self, learner: str) -> str:
        return self.intake.region_of(learner)

    def head_of(self, fragment: int) -> Head:
        return self.store.holdings[fragment].head

    def norm_of(self, fragment: int) -> float:
        return self.store.holdings[fragment].norm

    async def _fetch(self, action: Fetch) -> None:
        manifest, region = self.pending.contributions[action.key].manifest, self.region_of(action.key.learner)
        sums = region and not manifest.frame and not action.apart
        if sums and await self.regions.take(region, action.key, manifest, action.cause_id):
            return
        reason, norm = await self.regions.read(region, action.key, manifest)
        now_s = self.clock.monotonic()
        if (held := self.pending.contributions.get(action.key)) is not None:
            held.ready_s = now_s
        if reason:
            self.tell(ContributionSpoiled(at_s=now_s, key=action.key, reason=reason, cause_id=action.cause_id))
        else:
            base_norm = self.norm_of(action.key.fragment)
            self.tell(
                ContributionReady(at_s=now_s, key=action.key, norm=norm, base_norm=base_norm, cause_id=action.cause_id)
            )

    # --- the rest -----------------------------------------------------------------------------------------------------

    async def _finish(self, reason: str) -> None:
        if self._ended.done():
            return
        await self.tenure.lanes.empty()
        if not self._ended.done():
            self._finished = True
            self._ended.set_result(reason)

    async def _record_ledger(self, ledger: Ledger, reason: str) -> None:
        for number, part in enumerate(parts(ledger)):
            await self.event_log.record(LedgerEvent(ledger=part, part=number, reason=reason, commits=self.commits))

    async def _keep_lease(self) -> None:
        self._stand_down(await self.lease.hold(lambda: self.ledger))

    def _stand_down(self, reason: str) -> None:
        self._end(RecordConflict("this shard was deposed", got=reason))

    def _on_failure(self, error: BaseException) -> None:
        fact_dumps.dump_if_our_bug(
            error, *([] if self._tenure is None else [self._tenure.recorder]), self.lease.recorder
        )
        self._end(error if isinstance(error, AtollError) else AtollError(f"the shard's driver failed: {error!r}"))

    def _end(self, how: str | AtollError) -> None:
        if self._ended.done():
            return
        if isinstance(how, str):
            self._ended.set_result(how)
        else:
            self._ended.set_exception(how)


class FragmentLanes:
    """Commands out: one lane per fragment executes that fragment's commands strictly in the order the machine gave them.

    A commit sees every fold before it, and an acknowledgement never overtakes its commit. While the broker is away a lane
    waits and tries again; it never skips. After a refused compare-and-set a lane does nothing more: another process owns the
    shard.
    """

    def __init__(self, fragments: Iterable[int], service: ShardService, report: RoundReporter) -> None:
        self._service = service
        self._report = report
        self._clock = service.clock
        self._lanes: dict[int, asyncio.Queue[tuple[LaneCommand, float]]] = {p: asyncio.Queue() for p in fragments}
        self.commits = 0

    def put(self, command: LaneCommand) -> None:
        """Queue a command behind all earlier commands of its fragment."""
        fragment = command.key.fragment if isinstance(command, Fold | Acknowledge) else command.fragment
        self._lanes[fragment].put_nowait((command, self._clock.monotonic()))

    async def empty(self) -> None:
        """Wait until everything is executed."""
        await asyncio.gather(*(lane.join() for lane in self._lanes.values()))

    async def work(self, fragment: int) -> None:
        """Execute one fragment's commands; when a write is refused, tell the machine and raise `RecordConflict`."""
        lane = self._lanes[fragment]
        try:
            while True:
                command, put_s = await lane.get()
                await self._execute(command, put_s)
                lane.task_done()
        except RecordConflict as error:
            self._service.tell(CommitRefused(at_s=self._clock.monotonic(), fragment=fragment, reason=str(error)))
            raise

    async def _execute(self, command: LaneCommand, put_s: float) -> None:
        service = self._service
        match command:
            case Fold():
                await service.aggregator.fold(command, service.store.holdings[command.key.fragment].state)
                service.pending.tell_clip(command)
                if service.retention is not None:
                    service.retention.note_fold(command)
            case Unfold():
                service.aggregator.unfold(command.fragment)
                if service.retention is not None:
                    service.retention.note_unfold(command.fragment)
            case Acknowledge():
                await service.pending.acknowledge(command)
                if service.retention is not None:
                    service.retention.forget(command.key)
            case Dismiss():
                await service.pending.dismiss(command)
            case Keep(fragment=fragment, fragment_ledger=ledger):
                await patiently(lambda: service.store.keep(fragment, ledger), "a fragment's ledger")
                service.tell(Kept(at_s=self._clock.monotonic(), fragment=fragment, cause_id=command.cause_id))
            case Commit():
                await self._commit(command, put_s)
            case _:
                assert_never(command)

    async def _commit(self, command: Commit, decided_s: float) -> None:
        began_s, service = self._clock.monotonic(), self._service
        before_s = self._report.away_since_call_s(command.fragment)
        state = service.store.holdings[command.fragment].state
        merged = await service.aggregator.merged(command.fragment, state, command.base_version + 1)
        effects = await service.aggregator.effects(command.fragment, merged)
        compress = service.aggregator.is_answer_compressed(command.fragment)
        merged_s, hindered, retaining = self._clock.monotonic(), defaultdict[str, float](float), None
        away_s = self._report.away_s()

        def hinder(error: Exception, seconds: float) -> None:
            hindered["full" if isinstance(error, StorageFull) else "away"] += seconds

        if service.retention is not None:
            retaining = partial(service.retention.round, folds=service.retention.take_folds(command.fragment))
        bytes_down = await patiently(
            lambda: service.store.commit(command, merged.pseudo_gradient, merged.memory, retaining, compress=compress),
            "a commit",
            hindered=hinder,
        )
        now_s = self._clock.monotonic()
        # A request may outlast the time without a broker, and then no attempt has failed.
        waited_s = round(min(now_s - merged_s, self._report.away_s() - away_s), 3)
        if waited_s:
            hindered["away"] = max(hindered["away"], waited_s)
        self.commits += 1
        known = {share.key: service.pending.contributions.get(share.key) for share in command.shares}
        held = {key: one for key, one in known.items() if one is not None}
        bytes_up = sum(one.manifest.blob.size_bytes for one in held.values())
        fragment, version = command.fragment, command.base_version + 1
        self._service.tell(Committed(at_s=now_s, fragment=fragment, version=version, cause_id=command.cause_id))
        made = CommitRecord(
            decided_s=decided_s,
            began_s=began_s,
            merged_s=merged_s,
            visible_s=now_s,
            away_s=before_s,
            hindered=hindered,
            bytes_up=bytes_up,
            bytes_down=bytes_down,
            parameters=merged.pseudo_gradient.size,
            held=held,
            effects=effects,
            judgements=merged.judgements,
        )
        await self._report.record_commit(command, made)
