"""The shard's driver: messages become facts, commands become work. It decides nothing.

    hb.*  ─► LearnerBeat ─┐                        ┌─► Fetch ─► workbench ─► ContributionReady | ContributionSpoiled
    queue ─► Contribution ┼─► Shard.handle ─► [...]┼─► Fold, Commit, Acknowledge   one lane per fragment, in order
    timer ─► TimerFired  ─┘                        └─► PublishCall, ArmTimer, Finish, StandDown

Commands that concern tensors or the broker go through a lane per fragment, which executes them strictly in the order
the machine gave them: a commit sees every fold before it, an acknowledgement never overtakes its commit. Lanes run
concurrently. A broker that is away makes a lane wait and try again, never skip. A lane whose compare-and-set was refused
does nothing more: somebody else owns the shard.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Coroutine
from typing import Any

from atoll.base.clock import Clock
from atoll.base.errors import (
    AtollError,
    BrokerUnavailable,
    BusError,
    PeerMisbehaved,
    RecordConflict,
)
from atoll.base.identity import Identity
from atoll.base.logs import get
from atoll.bus.interface import Bus, Consumer, CoreMessage, Delivery, Subscription
from atoll.merge.outer import make_outer
from atoll.protocol.events import (
    Acknowledge,
    Action,
    ArmTimer,
    Commit,
    CommitRefused,
    Committed,
    ContributionReady,
    ContributionSpoiled,
    Dismiss,
    DrainOrdered,
    Event,
    Fetch,
    Finish,
    Fold,
    Isolate,
    Keep,
    LearnerLeft,
    PublishCall,
    QueueDrained,
    StandDown,
    TimerFired,
)
from atoll.protocol.ledger import Ledger, parts
from atoll.protocol.shard import Shard
from atoll.wire.messages import Call, RunRecord, encode
from atoll.wire.subjects import Subjects
from atoll.wire.traffic import moved_by
from atoll_synchronizer.aggregator import Aggregator
from atoll_synchronizer.archivist import Archivist
from atoll_synchronizer.background_tasks import BackgroundTasks
from atoll_synchronizer.event_log import EventLog, patiently
from atoll_synchronizer.lease import LeaseKeeper
from atoll_synchronizer.manifest_validation import (
    DecidedCommit,
    arrival,
    beat_fact,
    read_beat,
    read_manifest,
    round_line,
)
from atoll_synchronizer.overrun_monitor import OverrunMonitor
from atoll_synchronizer.pending_acknowledgements import PendingAcknowledgements
from atoll_synchronizer.store import ShardStore

log = get(__name__)

QUEUE_POLL_S = 0.5
HANDED_OVER = "handed over"


class ShardService:
    """One candidacy for one shard of a founded run, on the running loop: standby, owner, finished or deposed."""

    def __init__(
        self,
        bus: Bus,
        run: RunRecord,
        shard: int,
        clock: Clock,
        *,
        identity: Identity | None = None,
        archivist: Archivist | None = None,
    ) -> None:
        """Prepare, on behalf of a process; `serve` does the work."""
        self.bus = bus
        self.run = run
        self.shard = shard
        self.clock = clock
        self.archivist = archivist
        self.who = f"shard-{shard}"
        self.subjects = Subjects(run.run)
        protocol = run.protocol
        self.store = ShardStore(bus, run, shard, make_outer(protocol.outer, protocol.outer_lr, protocol.outer_momentum))
        self.lease = LeaseKeeper(bus, self.subjects, shard, protocol, clock, identity)
        self.tape = EventLog(bus, self.subjects, self.who, clock)
        self.hands = PendingAcknowledgements(bus, self.subjects, self.tape, self.store.garbage)
        self.bench = Aggregator(bus, run)
        self.overrun = OverrunMonitor(protocol)
        self.owning = self.draining = self._finished = False
        self._heir = ""
        self.gone = asyncio.Event()
        self.commits = 0
        self._lanes: dict[int, asyncio.Queue[Fold | DecidedCommit | Keep | Acknowledge | Dismiss]] = {}
        self.background = BackgroundTasks(self._on_failure)
        self._feeds: list[Subscription | Consumer] = []
        self._ended: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    async def serve(self) -> str:
        """Wait until the shard is ours, then serve until the run is over; return why it ended.

        Raises:
            RecordConflict: another process owns the shard now; nothing of ours is visible from then on.
        """
        former = await self.lease.win()
        if not self.lease.epoch:
            return "nothing to own"
        self.ledger = former or Ledger()
        self.background.spawn(self._keep_lease())
        try:
            await self._unless_deposed(self._take_over(former))
            reason = await self._ended
            await self.background.stop()
            ledger = self.store.ledger(self.machine.ledger)
            if reason != HANDED_OVER:
                await self._record_ledger(ledger, reason)
            await patiently(lambda: self.lease.release(ledger, closed=self._finished, to=self._heir))
            await self.store.garbage.sweep()
            if self.archivist and reason != HANDED_OVER:
                await self.archivist.close(self.bus, self.store, ledger, finished=self._finished)
            return reason
        finally:
            self.owning = False
            self.gone.set()
            await self.background.stop()
            for feed in self._feeds:
                await feed.close()

    async def _take_over(self, former: Ledger | None) -> None:
        """Fence and load the fragments, begin to read the queue, and go on where the former owner was."""
        began_s = self.clock.monotonic()
        self.tape.epoch = epoch = self.lease.epoch
        await patiently(lambda: self.store.open(epoch))
        versions = {p: holding.head.version for p, holding in self.store.holdings.items()}
        self.machine = Shard(
            self.run.protocol, self.shard, versions, fragment_ledger=self.store.copied_ledgers(), ledger=former
        )
        self.ledger = self.machine.ledger
        for fragment in versions:
            self._lanes[fragment] = asyncio.Queue()
            self.background.spawn(self._work(fragment))
        beats = await patiently(lambda: self.bus.listen(self.subjects.beat("*")))
        queue, durable = self.subjects.contributions_of(self.shard), f"{self.who}-{epoch}"
        consumer = await patiently(lambda: self.bus.consume(queue, durable=durable, takeover=True))
        self._feeds = [beats, consumer]
        self.background.spawn(self._hear_beats(beats), self._read_queue(consumer))
        self.background.spawn(self.hands.keep_holding(), self.store.garbage.keep_sweeping())
        if self.archivist:
            self.background.spawn(self.archivist.keep(self.bus, self.store, lambda: self.machine.ledger))
        self.owning = True
        if self.draining:
            self.order_drain()
        took_s, newest = round(self.clock.monotonic() - began_s, 4), max(versions.values())
        log.info("shard.serving", fragments=len(versions), epoch=epoch, version_max=newest, took_s=took_s)

    async def _unless_deposed(self, work: Coroutine[Any, Any, None]) -> None:
        """Do `work`, but raise what ends this candidacy as soon as something does."""
        doing = asyncio.ensure_future(work)
        either: set[asyncio.Future[Any]] = {doing, self._ended}
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        if not doing.done():
            doing.cancel()
            await asyncio.wait({doing})
            self._ended.result()
            raise RecordConflict("this candidacy ended before it began to serve")
        doing.result()

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
        """Return whether somebody may still push to this shard, which is ours."""
        return bool(self.machine.present(self.clock.monotonic()))

    async def hand_over(self, to: str) -> None:
        """Make durable what is decided, decide nothing more, and release the shard to the process `to`."""
        if not self.owning or self._heir or self._ended.done() or self.machine.finished:
            return
        self._heir = to
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self.run.protocol.lease_s):
                await asyncio.gather(*(lane.join() for lane in self._lanes.values()))
        if not self._ended.done():
            self._ended.set_result(HANDED_OVER)
        await self.gone.wait()

    # --- facts --------------------------------------------------------------------------------------------------------

    async def _hear_beats(self, beats: Any) -> None:  # noqa: ANN401  (Subscription)
        async for core_message in beats:
            try:
                self._on_beat(core_message)
            except PeerMisbehaved as error:
                log.warning("beat.refused", subject=core_message.subject, reason=str(error))

    def _on_beat(self, core_message: CoreMessage) -> None:
        beat = read_beat(core_message.data, self.run)
        if beat.state == "left":
            return
        self._on_fact(beat_fact(beat, self.clock.monotonic()))

    async def _read_queue(self, consumer: Any) -> None:  # noqa: ANN401  (Consumer)
        while True:
            try:
                delivery = await consumer.next(QUEUE_POLL_S)
                if delivery is None:
                    proven = await consumer.drained()
                    self._on_fact(QueueDrained(at_s=self.clock.monotonic(), proven=proven))
                    continue
                await self._on_delivery(delivery)
            except RecordConflict as error:
                # Somebody who was frozen on his way to the shard removed our reader: without it we would own for nothing.
                self._on_failure(error)
                return
            except (BusError, BrokerUnavailable) as error:
                log.warning("queue.unreadable", reason=str(error))
                await asyncio.sleep(QUEUE_POLL_S)

    async def _on_delivery(self, delivery: Delivery) -> None:
        """Turn a queued message into a fact; what no correct peer sends is removed and counted."""
        try:
            if ".bye." in delivery.subject:
                self._on_farewell(delivery)
                return
            manifest = read_manifest(delivery, self.subjects, self.run, self.shard)
        except PeerMisbehaved as error:
            log.warning("contribution.malformed", subject=delivery.subject, reason=str(error))
            await self.tape.record("refused", learner=delivery.subject.rpartition(".")[2], reason="malformed")
            await delivery.ack()
            return
        arrived = arrival(manifest, self.clock.monotonic())
        self.hands.take(arrived.key, delivery, manifest)
        self._on_fact(arrived)

    def _on_farewell(self, delivery: Delivery) -> None:
        beat = read_beat(delivery.data, self.run)
        ours = self.subjects.farewell(self.shard, beat.learner)
        if delivery.subject != ours:
            raise PeerMisbehaved("a farewell of somebody else", got=delivery.subject, allowed=ours)
        now_s = self.clock.monotonic()
        self.hands.take_farewell(beat.learner, beat.incarnation, delivery)
        self._on_fact(beat_fact(beat, now_s))
        self._on_fact(LearnerLeft(at_s=now_s, learner=beat.learner, incarnation=beat.incarnation))

    def _on_fact(self, fact: Event) -> None:
        if self._heir:
            return
        for action in self.machine.handle(fact):
            self._do(action)

    # --- commands -----------------------------------------------------------------------------------------------------

    def _do(self, action: Action) -> None:
        if isinstance(action, ArmTimer):
            self.background.arm(action.name, action.due_s - self.clock.monotonic(), self._on_timer)
        elif isinstance(action, PublishCall):
            self.background.spawn(self._call(action))
        elif isinstance(action, Fetch):
            self.background.spawn(self._fetch(action))
        elif isinstance(action, Commit):
            self._lanes[action.fragment].put_nowait(DecidedCommit(action, self.clock.monotonic()))
        elif isinstance(action, Fold | Acknowledge):
            self._lanes[action.key.fragment].put_nowait(action)
        elif isinstance(action, Keep | Dismiss):
            self._lanes[action.fragment].put_nowait(action)
        elif isinstance(action, Isolate):
            self.background.spawn(self.hands.isolate(action))
        elif isinstance(action, Finish) and not self._ended.done():
            self.background.spawn(self._finish(action.reason))
        elif isinstance(action, StandDown) and not self._ended.done():
            self._ended.set_exception(RecordConflict("this shard was deposed", got=action.reason))

    def _on_timer(self, name: str) -> None:
        self._on_fact(TimerFired(at_s=self.clock.monotonic(), name=name))

    async def _call(self, action: PublishCall) -> None:
        call = Call(
            fragment=action.fragment, version=action.version, attempt=action.attempt, run_tokens=action.run_tokens
        )
        try:
            await self.bus.tell(self.subjects.call(action.fragment), encode(call))
        except (BusError, BrokerUnavailable) as error:
            log.warning("call.unsent", fragment=action.fragment, reason=str(error))

    async def _fetch(self, action: Fetch) -> None:
        reason, norm = await self.bench.tried(action.key, self.hands.manifest(action.key))
        now_s = self.clock.monotonic()
        if reason:
            self._on_fact(ContributionSpoiled(at_s=now_s, key=action.key, reason=reason, cause_id=action.cause_id))
        else:
            base_norm = self.store.holdings[action.key.fragment].norm
            self._on_fact(
                ContributionReady(at_s=now_s, key=action.key, norm=norm, base_norm=base_norm, cause_id=action.cause_id)
            )

    async def _work(self, fragment: int) -> None:
        """Execute one fragment's commands in order, until a write of ours is refused."""
        lane = self._lanes[fragment]
        try:
            while True:
                await self._execute(await lane.get())
                lane.task_done()
        except RecordConflict as error:
            self._on_fact(CommitRefused(at_s=self.clock.monotonic(), fragment=fragment, reason=str(error)))
            if not self._ended.done():
                # The machine had finished and says nothing more; its last writes were refused all the same.
                self._ended.set_exception(error)

    async def _execute(self, action: Fold | DecidedCommit | Keep | Acknowledge | Dismiss) -> None:
        if isinstance(action, Fold):
            await self.bench.fold(action, self.store.holdings[action.key.fragment].state)
        elif isinstance(action, Acknowledge):
            self.bench.forget(action.key)
            await self.hands.acknowledge(action)
        elif isinstance(action, Dismiss):
            await self.hands.dismiss(action)
        elif isinstance(action, Keep):
            await patiently(lambda: self.store.keep(action.fragment, action.fragment_ledger))
        else:
            await self._commit(action.command, action.at_s)

    async def _commit(self, command: Commit, decided_s: float) -> None:
        began_s = self.clock.monotonic()
        pseudo_gradient = await self.bench.merged(command.fragment)
        merged_s = self.clock.monotonic()
        written = await patiently(lambda: self.store.commit(command, pseudo_gradient))
        now_s = self.clock.monotonic()
        version = command.base_version + 1
        self.commits += 1
        self._on_fact(Committed(at_s=now_s, fragment=command.fragment, version=version, cause_id=command.cause_id))
        line = round_line(command, bytes_up=sum(self.hands.size_bytes(share.key) for share in command.shares))
        line |= {
            "bytes_down": written.frame_bytes,
            "waited_s": round(decided_s - command.called_s, 4),
            "merge_s": round(merged_s - began_s, 4),
            "commit_s": round(now_s - merged_s, 4),
            "run_tokens": self.machine.ledger.run_tokens,
            "parameters": pseudo_gradient.size,
        }
        link = moved_by(self.bus.stats).told
        log.info("round.committed", **{**line, "contributors": len(command.shares), "link": link})
        self.overrun.see(now_s - (command.called_s or now_s), self.machine.step_s(now_s))
        await self.tape.record("round", **line)

    # --- the rest -----------------------------------------------------------------------------------------------------

    async def _finish(self, reason: str) -> None:
        """End once every lane is empty."""
        await asyncio.gather(*(lane.join() for lane in self._lanes.values()))
        if not self._ended.done():
            self._finished = True
            self._ended.set_result(reason)

    async def _record_ledger(self, ledger: Ledger, reason: str) -> None:
        for number, part in enumerate(parts(ledger)):
            await self.tape.record("ledger", ledger=part, part=number, reason=reason, commits=self.commits)

    async def _keep_lease(self) -> None:
        """Renew the lease; stand down when somebody else holds it."""
        reason = await self.lease.hold(lambda: self.ledger)
        if not self._ended.done():
            self._ended.set_exception(RecordConflict("this shard was deposed", got=reason))

    def _on_failure(self, error: BaseException) -> None:
        if not self._ended.done():
            known = error if isinstance(error, AtollError) else AtollError(f"the shard's driver failed: {error!r}")
            self._ended.set_exception(known)
