"""One candidacy for one shard: it stands by, owns, and finishes, hands over or is deposed. It decides nothing itself.

    FactIntake   ── facts ──► Shard.handle ── commands ─┬─► FragmentLanes: fold, commit, keep, acknowledge, in order
    timers       ── facts ──►      │                    ├─► Aggregator: fetch ── fact: ready or spoiled ──► Shard.handle
    LeaseKeeper  ── owns?          └ FactRecorder           └─► call, timer, finish, stand down

The machine (`atoll.protocol.shard`) decides; `intake` turns messages into facts, `lanes` turns commands into work.
While the broker is away, everything here waits and tries again (`atoll.base.retry`). Only one thing ends a candidacy
against its will: a write or a lease of another process, because then that process owns the shard.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Coroutine
from dataclasses import dataclass, field
from typing import Any

from atoll.base import fact_dumps
from atoll.base.background_tasks import BackgroundTasks
from atoll.base.clock import Clock
from atoll.base.errors import AtollError, BrokerUnavailable, BusError, ProtocolMisuse, RecordConflict
from atoll.base.identity import Identity, this_process
from atoll.base.logs import get
from atoll.base.retry import ended, patiently
from atoll.bus.interface import Bus
from atoll.merge.outer import make_outer
from atoll.protocol.events import (
    Acknowledge,
    ArmTimer,
    Command,
    Commit,
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
    PublishCall,
    Refuse,
    StandDown,
    TimerFired,
    Unfold,
)
from atoll.protocol.ledger import Ledger, parts
from atoll.protocol.recorder import FactRecorder
from atoll.protocol.settings import NESTEROV
from atoll.protocol.shard import Shard
from atoll.wire.messages import Call, Contribution, RunRecord, encode
from atoll.wire.version import SCHEMA_OF_FORMER_LIVES
from atoll_synchronizer.aggregator import Aggregator
from atoll_synchronizer.archivist import Archivist
from atoll_synchronizer.garbage_collector import ShareKeeper
from atoll_synchronizer.intake import FactIntake
from atoll_synchronizer.lanes import FragmentLanes, LaneTools
from atoll_synchronizer.lease import LeaseKeeper
from atoll_synchronizer.pending import PendingAcknowledgements
from atoll_synchronizer.regions import RegionReader, TenureAccess
from atoll_synchronizer.retention import Retention
from atoll_synchronizer.round_report import RoundReporter
from atoll_synchronizer.shard_context import EventLog, ShardContext
from atoll_synchronizer.store import ShardStore

log = get(__name__)

HANDED_OVER = "handed over"


@dataclass(frozen=True, slots=True)
class ServingProcess:
    """The process that wants shards: who it is, the outer optimizer that its settings name, and the versions it has had.

    `versions` are the highest of the run's fragments, by fragment; they grow while it serves.
    """

    identity: Identity = field(default_factory=this_process)
    own_outer: str = NESTEROV
    versions: dict[int, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ShardTenure:
    """The parts of an owner, from the moment when the shard is ours: its machine, lanes, and what records both."""

    machine: Shard
    recorder: FactRecorder
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

        Raises:
            SettingsError: the run's outer optimizer is code that the settings of the process do not name.
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
            on_settled=self._on_settled,
        )
        self.aggregator = Aggregator(bus, run, retention)
        self.intake = FactIntake(
            self.context, self.pending, self.event_log, self._on_fact, lambda: self.tenure.machine.ledger
        )
        self.background = BackgroundTasks(self._on_failure)
        self.regions = RegionReader(self.context, self.aggregator, self.store.garbage_collector, self._access())
        self.ledger = Ledger()
        self._tenure: ShardTenure | None = None
        self.owning = self.draining = self._finished = False
        self._heir = ""
        self.gone = asyncio.Event()
        self._ended: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    @property
    def tenure(self) -> ShardTenure:
        """Return the parts of an owner.

        Raises:
            ProtocolMisuse: the shard is not ours yet.
        """
        if self._tenure is None:
            raise ProtocolMisuse("this candidacy does not own its shard", got=self.context.name)
        return self._tenure

    @property
    def commits(self) -> int:
        """Return how many commits of this candidacy have become visible."""
        return 0 if self._tenure is None else self._tenure.lanes.commits

    async def serve(self) -> str:
        """Wait until the shard is ours, then serve until the run is over; return why it ended.

        Raises:
            RecordConflict: another process owns the shard now; nothing of ours is visible from then on.
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
        """Fence and load the fragments, begin to read the queue, and continue where the former owner stopped."""
        began_s = self.clock.monotonic()
        self.event_log.epoch = epoch = self.lease.epoch
        await patiently(lambda: self.store.open(epoch), "the fence")
        versions = {p: holding.head.version for p, holding in self.store.holdings.items()}
        machine = Shard(
            self.run.protocol,
            self.shard,
            versions,
            fragment_ledger=self.store.copied_ledgers(),
            ledger=former,
            folds=self.run.schema >= SCHEMA_OF_FORMER_LIVES,
        )
        recorder = FactRecorder(self.context.name, machine)
        fact_dumps.keep(recorder)
        if self.retention:
            self.retention.begin(epoch, machine)
        self.ledger = machine.ledger
        report = RoundReporter(self.context, machine, self.event_log)
        tools = LaneTools(self.aggregator, self.store, self.pending, report, self.retention)
        lanes = FragmentLanes(versions, tools, self.clock, self._on_fact)
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
        told = {
            "epoch": epoch,
            "versions": versions,
            "took_s": took_s,
            "host": self.identity.host,
            "pid": self.identity.pid,
        }
        self.background.spawn(self.event_log.record("serving", **told))

    async def _unless_deposed(self, work: Coroutine[Any, Any, None]) -> None:
        """Do `work`, but raise at once when something ends this candidacy."""
        doing = asyncio.ensure_future(work)
        either: set[asyncio.Future[Any]] = {doing, self._ended}
        try:
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            if not doing.done():
                self._ended.result()
                raise RecordConflict("this candidacy ended before it began to serve")
            doing.result()
        finally:
            await ended([doing])

    def order_drain(self) -> None:
        """Finish when the last learner has left and the queue is empty; a standby leaves when the shard has an owner."""
        self.draining = True
        self.lease.leave()
        if self.owning:
            self._on_fact(DrainOrdered(at_s=self.clock.monotonic(), cause_id="drain"))

    def leave(self) -> None:
        """Stop serving now; what is queued stays queued for the next owner."""
        if not self._ended.done():
            self._ended.set_result("left")

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
        if not self._ended.done():
            self._ended.set_result(HANDED_OVER)
        await self.gone.wait()

    # --- facts and commands -------------------------------------------------------------------------------------------

    def _on_fact(self, fact: Fact) -> None:
        if self._heir:
            return
        if self.retention:
            self.retention.fact(fact)
        for action in self.tenure.recorder.handle(fact):
            self._do(action)

    def _do(self, action: Command) -> None:
        if isinstance(action, ArmTimer):
            self.background.arm(
                action.name,
                action.due_s - self.clock.monotonic(),
                lambda name: self._on_fact(TimerFired(at_s=self.clock.monotonic(), name=name)),
            )
        elif isinstance(action, PublishCall):
            if action.attempt == 1:
                self.tenure.report.note_call(action.fragment)
            self.background.spawn(self._call(action))
        elif isinstance(action, Fetch):
            self.background.spawn(self._fetch(action))
        elif isinstance(action, Fold | Unfold | Commit | Keep | Acknowledge | Dismiss):
            self.tenure.lanes.put(action)
        elif isinstance(action, Refuse):
            self.aggregator.forget(action.key)
            self.pending.refuse(action)
        elif isinstance(action, Isolate):
            self.background.spawn(self.pending.isolate(action))
        elif isinstance(action, Finish) and not self._ended.done():
            self.background.spawn(self._finish(action.reason))
        elif isinstance(action, StandDown) and not self._ended.done():
            self._ended.set_exception(RecordConflict("this shard was deposed", got=action.reason))

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

    def _on_settled(self, manifest: Contribution) -> None:
        self.regions.on_settled(manifest)

    def _access(self) -> TenureAccess:
        """Return the access of the region reader to this tenure."""
        return TenureAccess(
            spawn=self.background.spawn,
            tell=self._on_fact,
            region_of=self.intake.region_of,
            live_of=lambda region: {
                learner for learner in self.tenure.machine.live() if self.intake.region_of(learner) == region
            },
            step_s=lambda: self.tenure.machine.step_s() or 0.0,
            head_of=lambda fragment: self.store.holdings[fragment].head,
            norm_of=lambda fragment: self.store.holdings[fragment].norm,
        )

    async def _fetch(self, action: Fetch) -> None:
        manifest, region = self.pending.contributions[action.key].manifest, self.intake.region_of(action.key.learner)
        sums = region and not manifest.frame and not action.apart
        if sums and await self.regions.take(region, action.key, manifest, action.cause_id):
            return
        reason, norm = await self.regions.read(region, action.key, manifest)
        now_s = self.clock.monotonic()
        if (held := self.pending.contributions.get(action.key)) is not None:
            held.ready_s = now_s
        if reason:
            self._on_fact(ContributionSpoiled(at_s=now_s, key=action.key, reason=reason, cause_id=action.cause_id))
        else:
            base_norm = self.store.holdings[action.key.fragment].norm
            self._on_fact(
                ContributionReady(at_s=now_s, key=action.key, norm=norm, base_norm=base_norm, cause_id=action.cause_id)
            )

    # --- the rest -----------------------------------------------------------------------------------------------------

    async def _finish(self, reason: str) -> None:
        """End once every lane is empty."""
        await self.tenure.lanes.empty()
        if not self._ended.done():
            self._finished = True
            self._ended.set_result(reason)

    async def _record_ledger(self, ledger: Ledger, reason: str) -> None:
        for number, part in enumerate(parts(ledger)):
            await self.event_log.record("ledger", ledger=part, part=number, reason=reason, commits=self.commits)

    async def _keep_lease(self) -> None:
        """Renew the lease; stand down when another process holds it."""
        reason = await self.lease.hold(lambda: self.ledger)
        if not self._ended.done():
            self._ended.set_exception(RecordConflict("this shard was deposed", got=reason))

    def _on_failure(self, error: BaseException) -> None:
        fact_dumps.dump_if_our_bug(
            error, *([] if self._tenure is None else [self._tenure.recorder]), self.lease.recorder
        )
        if not self._ended.done():
            known = error if isinstance(error, AtollError) else AtollError(f"the shard's driver failed: {error!r}")
            self._ended.set_exception(known)
