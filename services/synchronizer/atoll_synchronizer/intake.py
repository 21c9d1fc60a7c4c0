"""Facts in: the messages that one owner of a shard receives and accepts, as facts for its machine.

    hb.*  ── at-most-once ──► LearnerBeat
    queue ── durable ───────► ContributionArrived │ LearnerBeat, LearnerLeft │ QueueDrained

A shard believes a manifest only if it came on the subject of the learner and fragment that it names, carries the run's
layout, and points at that learner's own chunks. A broker can protect subjects, so everything else must agree with them.
If no correct peer would send a message, the intake removes it from the queue, records it and counts it; nothing of it
reaches the machine.

`PendingAcknowledgements` keeps each delivery of the queue until its fate is durable. The shard settles a contribution
last of all: it tells the learner of a refusal, empties the contribution's place in line, and leaves the chunks to the
garbage collector. After a crash before that, the queue delivers the contribution once more, and the shard finds it in
the fragment's ledger.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import NamedTuple

from atoll.base.errors import BrokerUnavailable, BusError, PeerMisbehaved, RecordConflict
from atoll.base.logs import get
from atoll.base.retry import patiently
from atoll.bus.interface import Bus, Consumer, CoreMessage, Delivery, Subscription
from atoll.protocol.events import (
    Acknowledge,
    ContributionArrived,
    Dismiss,
    Event,
    Isolate,
    LearnerBeat,
    LearnerLeft,
    PushKey,
    QueueDrained,
)
from atoll.wire.messages import Beat, Contribution, RunRecord, Verdict, decode, encode
from atoll.wire.subjects import Subjects
from atoll_synchronizer.garbage_collector import GarbageCollector
from atoll_synchronizer.shard_context import EventLog, ShardContext

log = get(__name__)

QUEUE_POLL_S = 0.5
HOLD_S = 20.0


class PendingManifest(NamedTuple):
    """A contribution that is not settled yet."""

    delivery: Delivery
    manifest: Contribution


class PendingAcknowledgements:
    """The unsettled deliveries of one tenure: `contributions` by key, `farewells` by learner and incarnation."""

    def __init__(self, bus: Bus, subjects: Subjects, event_log: EventLog, garbage_collector: GarbageCollector) -> None:
        """Hold nothing yet."""
        self._bus = bus
        self._subjects = subjects
        self._event_log = event_log
        self._garbage_collector = garbage_collector
        self.contributions: dict[PushKey, PendingManifest] = {}
        self.farewells: dict[tuple[str, int], Delivery] = {}

    async def acknowledge(self, action: Acknowledge) -> None:
        """Settle one contribution for good."""
        if action.key not in self.contributions:
            # Delivered again while we settled the first delivery: one acknowledgement was enough.
            return
        delivery, manifest = self.contributions.pop(action.key)
        if action.fate == "refused":
            log.warning("contribution.refused", **action.key._asdict(), reason=action.reason)
            await self._tell(action.key, action.reason)
            await self._event_log.record("refused", **action.key._asdict(), reason=action.reason)
        await patiently(delivery.ack)
        self._garbage_collector.leave(action.key.fragment, f"{manifest.blob.stem}.*")

    async def dismiss(self, action: Dismiss) -> None:
        """Remove a farewell from the queue."""
        farewell = self.farewells.pop((action.learner, action.incarnation), None)
        if farewell is not None:
            await patiently(farewell.ack)

    async def isolate(self, action: Isolate) -> None:
        """Log, and record in the event log, that an incarnation is in quarantine; its next push learns so."""
        log.error(
            "learner.quarantined",
            learner=action.learner,
            incarnation=action.incarnation,
            offences=action.offences,
            reason=action.reason,
            todo="look at that machine; its next incarnation begins with a clean record",
        )
        await self._event_log.record(
            "quarantined",
            learner=action.learner,
            incarnation=action.incarnation,
            offences=action.offences,
            reason=action.reason,
        )

    async def keep_holding(self) -> None:
        """Tell the queue at intervals that we still work on the pending deliveries."""
        while True:
            await asyncio.sleep(HOLD_S)
            for delivery, _ in list(self.contributions.values()):
                await patiently(delivery.hold)

    async def _tell(self, key: PushKey, reason: str) -> None:
        verdict = Verdict(
            learner=key.learner,
            incarnation=key.incarnation,
            fragment=key.fragment,
            push=key.push,
            fate="refused",
            reason=reason,
        )
        await patiently(lambda: self._bus.tell(self._subjects.verdict(key.learner), encode(verdict)))


class FactIntake:
    """The two subscriptions of one tenure; every fact goes to `tell`."""

    def __init__(
        self,
        context: ShardContext,
        pending: PendingAcknowledgements,
        event_log: EventLog,
        tell: Callable[[Event], None],
    ) -> None:
        """Receive nothing yet; `open` subscribes."""
        self._context = context
        self._pending = pending
        self._event_log = event_log
        self._tell = tell
        self._beats: Subscription | None = None
        self._queue: Consumer | None = None

    async def open(self, epoch: int) -> None:
        """Subscribe to heartbeats, and take the shard's queue over as the owner of this epoch."""
        bus, subjects, shard = self._context.bus, self._context.subjects, self._context.shard
        self._beats = await patiently(lambda: bus.listen(subjects.beat("*")), "heartbeats")
        queue, durable = subjects.contributions_of(shard), f"{self._context.name}-{epoch}"
        self._queue = await patiently(lambda: bus.consume(queue, durable=durable, takeover=True), "the queue")

    async def close(self) -> None:
        """Stop receiving; the queue delivers everything unsettled to the next owner."""
        for feed in (self._beats, self._queue):
            if feed is not None:
                await feed.close()

    async def hear_beats(self) -> None:
        """Turn heartbeats into facts until closed."""
        if self._beats is None:
            return
        async for core_message in self._beats:
            try:
                self._on_beat(core_message)
            except PeerMisbehaved as error:
                log.warning("beat.refused", subject=core_message.subject, reason=str(error))

    async def read_queue(self) -> None:
        """Turn queued messages into facts until closed.

        Raises:
            RecordConflict: a candidate that was frozen while it took the shard over removed our reader: we own nothing.
        """
        queue = self._queue
        while queue is not None:
            try:
                delivery = await queue.next(QUEUE_POLL_S)
                if delivery is None:
                    self._tell(QueueDrained(at_s=self._context.clock.monotonic(), proven=await queue.drained()))
                else:
                    await self._on_delivery(delivery)
            except RecordConflict:
                raise
            except (BusError, BrokerUnavailable) as error:
                log.warning("queue.unreadable", reason=str(error))
                await asyncio.sleep(QUEUE_POLL_S)

    def _on_beat(self, core_message: CoreMessage) -> None:
        beat = read_beat(core_message.data, self._context.run)
        # A farewell comes through the queue, behind the learner's last push; a heartbeat may overtake that push.
        if beat.state != "left":
            self._tell(beat_fact(beat, self._context.clock.monotonic()))

    async def _on_delivery(self, delivery: Delivery) -> None:
        """Turn a queued message into a fact; remove and record one that no correct peer sends."""
        context = self._context
        try:
            if ".bye." in delivery.subject:
                self._on_farewell(delivery)
                return
            manifest = read_manifest(delivery, context.subjects, context.run, context.shard)
        except PeerMisbehaved as error:
            log.warning("contribution.malformed", subject=delivery.subject, reason=str(error))
            learner = delivery.subject.rpartition(".")[2]
            await self._event_log.record("refused", learner=learner, reason="malformed")
            await delivery.ack()
            return
        arrived = ContributionArrived(
            at_s=context.clock.monotonic(),
            key=PushKey(manifest.learner, manifest.incarnation, manifest.fragment, manifest.push),
            base_version=manifest.base_version,
            tokens=manifest.tokens,
            steps=manifest.steps,
            trained_tokens=manifest.trained_tokens,
            final=manifest.final,
            cause_id=manifest.cause_id,
        )
        # A second delivery replaces the first.
        self._pending.contributions[arrived.key] = PendingManifest(delivery, manifest)
        self._tell(arrived)

    def _on_farewell(self, delivery: Delivery) -> None:
        context = self._context
        beat = read_beat(delivery.data, context.run)
        ours = context.subjects.farewell(context.shard, beat.learner)
        if delivery.subject != ours:
            raise PeerMisbehaved("a farewell of somebody else", got=delivery.subject, allowed=ours)
        now_s = context.clock.monotonic()
        self._pending.farewells[beat.learner, beat.incarnation] = delivery
        self._tell(beat_fact(beat, now_s))
        self._tell(LearnerLeft(at_s=now_s, learner=beat.learner, incarnation=beat.incarnation))


def read_manifest(delivery: Delivery, subjects: Subjects, run: RunRecord, shard: int) -> Contribution:
    """Return the queued manifest; raise `PeerMisbehaved` unless it fits its subject and this run."""
    manifest = decode(Contribution, delivery.data)
    ours = subjects.contribution(shard, manifest.fragment, manifest.learner)
    if delivery.subject != ours or manifest.fragment not in run.protocol.fragments_of(shard):
        raise PeerMisbehaved("a manifest on a foreign subject", got=delivery.subject, allowed=ours)
    if manifest.run_nonce != run.nonce:
        raise PeerMisbehaved("a manifest of another founding of the run", got=manifest.run_nonce, allowed=run.nonce)
    if manifest.layout != run.layout.fingerprint:
        raise PeerMisbehaved("another layout", got=manifest.layout, allowed=run.layout.fingerprint)
    stem = subjects.contribution_stem(manifest.learner, manifest.fragment, manifest.incarnation, manifest.push)
    if manifest.blob.stem != stem:
        raise PeerMisbehaved("a manifest that names foreign chunks", got=manifest.blob.stem, allowed=stem)
    return manifest


def read_beat(data: bytes, run: RunRecord) -> Beat:
    """Return a heartbeat or farewell; raise `PeerMisbehaved` when its learner joined another founding of the run."""
    beat = decode(Beat, data)
    if beat.run_nonce != run.nonce:
        raise PeerMisbehaved("a learner of another founding of the run", got=beat.run_nonce, allowed=run.nonce)
    return beat


def beat_fact(beat: Beat, at_s: float) -> LearnerBeat:
    """Return the fact that a learner reported."""
    return LearnerBeat(
        at_s=at_s,
        learner=beat.learner,
        incarnation=beat.incarnation,
        training=beat.state == "training",
        step_s=beat.step_s,
        tokens=beat.tokens,
        pushed=beat.pushed,
        superseded=beat.superseded,
        refused_local=beat.refused_local,
        run_tokens=beat.run_tokens,
    )
