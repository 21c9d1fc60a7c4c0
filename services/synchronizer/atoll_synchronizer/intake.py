"""Facts in: the messages that one owner of a shard receives and accepts, as facts for its machine.

    hb.*  ── at-most-once ──┐   member?        ┌─► LearnerBeat
    queue ── durable ───────┴─► decode, check ─┼─► ContributionArrived │ LearnerBeat, LearnerLeft │ QueueDrained
                                               └─► junk: dropped without a round trip, counted, told now and then

A shard listens to members only (`member_roll`). It believes a manifest only if it came on the subject of the learner and
fragment that it names, carries the run's layout, and points at that learner's own chunks: a broker can protect subjects, so
everything else must agree with them. A message that no correct peer would send is junk, and nothing of it reaches the machine.

A fact that the machine cannot take is a mistake of ours, and the machine must not go on. But the queue would deliver the
message to the next owner, too. So the failure names the message (`MessageFailed`); the host begins a new candidacy, and from
the `SET_ASIDE_AFTER`-th failure on sets the message aside (`process`).
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
from collections import Counter
from collections.abc import Callable, Collection
from enum import Enum, auto
from functools import partial
from typing import Final

import msgspec

from atoll.base.errors import AtollError, BrokerUnavailable, BusError, PeerMisbehaved, RecordConflict, StorageFull
from atoll.base.logs import get
from atoll.base.retry import patiently
from atoll.bus.interface import Bus, Consumer, CoreMessage, Delivery, Subscription
from atoll.protocol.claims import ClaimJudge, PushClaim, lived_since_s
from atoll.protocol.events import (
    ContributionArrived,
    Fact,
    LearnerBeat,
    LearnerLeft,
    QueueDrained,
)
from atoll.protocol.ledger import life_of
from atoll.run.member_roll import IMPOSSIBLE_CLAIM, MemberRoll, Strangers, claim_of, with_claim
from atoll.run.record import recorded_progress
from atoll.wire.events import JunkEvent
from atoll.wire.messages import Beat, Contribution, RunRecord, decode, is_unproven
from atoll.wire.subjects import Subjects
from atoll_synchronizer.acknowledgements import PendingAcknowledgements, PendingManifest
from atoll_synchronizer.aggregator import check_manifest
from atoll_synchronizer.shard_context import EventLog, ShardContext, ShardOwner

log = get(__name__)
QUEUE_POLL_S = 0.5
QUEUE_ASK_S = 2.0
"""Interval of asking whether the queue is empty while messages keep coming: junk must not keep a run from ending."""
BATCH = 256
BEATS_EVERY_S = 0.02
BEATS_AT_ONCE = 128
"""Heartbeats are looked at so often, and so many at a time, at most: each awakening costs more than the heartbeat that it is
for, and a flood of them may not keep a shard from its rounds."""
CLAIM_LOOK_S: Final = 2.0
CLAIM_LOOK_S_MAX: Final = 10.0
REPORT_S: Final = 10.0
SENDERS_MAX: Final = 1024
SENDERS_TOLD: Final = 8
SENDER_CHARS_MAX: Final = 64
UNSIGNED: Final = "unsigned"


class LifeStanding(Enum):
    """A life as the members' records say: it may speak, it is over and has all its fates, or they must be read again first."""

    MEMBER = auto()
    OVER = auto()
    UNKNOWN = auto()


class MessageFailed(AtollError):
    """A message that nothing is wrong with by our rules has broken the machine; `digest` is its name."""

    def __init__(self, delivery: Delivery, error: BaseException) -> None:
        self.digest = digest_of(delivery)
        super().__init__(f"a message broke the shard's machine: {error!r}", got=delivery.subject)


class FactIntake:
    """The two subscriptions of one tenure; every fact goes to its `owner`. Messages with a digest in `aside` are not read."""

    def __init__(
        self,
        context: ShardContext,
        pending: PendingAcknowledgements,
        event_log: EventLog,
        owner: ShardOwner,
        aside: Collection[str] = (),
    ) -> None:
        self._context = context
        self._pending = pending
        self._event_log = event_log
        self._owner = owner
        self._aside = aside
        self.claimed_progress = ClaimedProgress(context.bus, context.run)
        self._beats: Subscription | None = None
        self._queue: Consumer | None = None
        self._claims = ClaimJudge(context.run.protocol)
        self._roll = MemberRoll(context.bus, context.subjects)
        self._waiting_beats = Strangers[CoreMessage]()
        self._waiting = Strangers[Delivery]()
        self._numbers = itertools.count()
        self._dropped: list[Delivery] = []
        self.junk = JunkReport(event_log)

    async def open(self, epoch: int) -> None:
        """Read who is a member, subscribe to heartbeats, and take the shard's queue over as the owner of this epoch."""
        bus, subjects, shard = self._context.bus, self._context.subjects, self._context.shard
        await patiently(self._roll.read, "the members")
        self._beats = await patiently(lambda: bus.listen(subjects.beat("*"), late_s_max=BEATS_EVERY_S), "heartbeats")
        queue, durable = subjects.contributions_of(shard), f"{self._context.name}-{epoch}"
        self._queue = await patiently(lambda: bus.consume(queue, durable=durable, takeover=True), "the queue")

    def region_of(self, learner: str) -> str:
        """Return the region whose synchronizer folds what a member sends, empty for none."""
        return self._roll.region_of(learner)

    async def close(self) -> None:
        """Stop receiving; the queue delivers everything unsettled to the next owner."""
        for feed in (self._beats, self._queue):
            if feed is not None:
                await feed.close()

    async def hear_beats(self) -> None:
        """Turn heartbeats into facts until closed."""
        while self._beats is not None:
            core_message, taken = await self._beats.next(QUEUE_POLL_S), 0
            while core_message is not None:
                self._on_beat(core_message)
                taken += 1
                core_message = await self._beats.next(0.0) if taken < BEATS_AT_ONCE else None
            await asyncio.sleep(BEATS_EVERY_S)

    async def read_queue(self) -> None:
        """Turn queued messages into facts until closed; raise `MessageFailed` if one broke the machine.

        Raises `RecordConflict` if a candidate that was frozen while it took the shard over removed our reader: we own nothing.
        """
        queue, asked_s = self._queue, self._context.clock.monotonic()
        while queue is not None:
            try:
                delivery = await queue.next(QUEUE_POLL_S)
                if delivery is not None:
                    for each in (delivery, *await queue.arrived(BATCH)):
                        await self._on_delivery(each)
                await self._discard()
                now_s = self._context.clock.monotonic()
                if delivery is None or now_s - asked_s >= QUEUE_ASK_S:
                    asked_s = now_s
                    if (proven := await queue.drained()) is not None:
                        now_s = self._context.clock.monotonic()
                        told = self.claimed_progress.tokens
                        self._owner.tell(QueueDrained(at_s=now_s, proven=proven, run_tokens=told, turns=queue.turns))
            except RecordConflict:
                raise
            except (BusError, BrokerUnavailable) as error:
                log.warning("queue.unreadable", reason=str(error))
                await asyncio.sleep(QUEUE_POLL_S)

    async def keep_roll(self) -> None:
        """Read the members whenever there are strangers, and judge what waited for that."""
        await self._roll.keep_reading(self._on_roll)

    async def _discard(self) -> None:
        if self._dropped and self._queue is not None:
            dropped, self._dropped = self._dropped, []
            for delivery in dropped:
                await delivery.drop()

    def _on_roll(self, began_s: float) -> bool:
        taken = False
        for core_message in self._waiting_beats.before(began_s):
            taken |= self._on_beat(core_message, settled=True)
        for delivery in self._waiting.before(began_s):
            taken |= self._take(delivery, settled=True)
        return taken

    def _on_beat(self, core_message: CoreMessage, *, settled: bool = False) -> bool:
        sender = sender_of(core_message.subject)
        if sender not in self._roll:
            return self._wait_for_roll(core_message, sender, settled=settled)
        try:
            beat = self._beat(core_message.data, core_message.subject, self._context.subjects.beat, settled=settled)
        except PeerMisbehaved as error:
            log.debug("beat.refused", subject=core_message.subject, reason=str(error))
            self.junk.count("beat", core_message.data, sender)
            return False
        if beat is None:
            return self._wait_for_roll(core_message, sender, settled=settled)
        # A farewell comes through the queue, behind the learner's last push; a heartbeat may overtake that push.
        if beat.state != "left":
            self._owner.tell(self._fact(beat))
        return True

    def _wait_for_roll(self, core_message: CoreMessage, sender: str, *, settled: bool) -> bool:
        if settled or not self._waiting_beats.put(sender, core_message):
            self.junk.count("stranger", core_message.data, sender)
        else:
            self._roll.ask()
        return False

    async def _on_delivery(self, delivery: Delivery) -> None:
        # The queue waits, too: a newcomer's manifest must not be dropped because there are many strangers.
        await self._waiting.room.wait()
        self._take(delivery)

    def _take(self, delivery: Delivery, *, settled: bool = False) -> bool:
        """Turn a member's queued message into facts; drop one that no correct peer sends. Say whether it was taken.

        A stranger's waits, unless it is `settled` who is a member.
        """
        if self._aside and digest_of(delivery) in self._aside:
            log.error("message.set_aside", subject=delivery.subject, bytes=len(delivery.data))
            return self._drop(delivery, "set_aside")
        try:
            read = self._farewell_facts if ".bye." in delivery.subject else self._contribution_facts
            facts = read(delivery, settled=settled) if sender_of(delivery.subject) in self._roll else None
        except PeerMisbehaved as error:
            log.debug("contribution.malformed", subject=delivery.subject, reason=str(error))
            return self._drop(delivery, "malformed")
        if facts is None and settled:
            return self._drop(delivery, "stranger")
        if facts is None:
            self._roll.ask()
            self._waiting.put(next(self._numbers), delivery)
            return False
        for fact in facts:
            try:
                self._owner.tell(fact)
            except Exception as error:
                raise MessageFailed(delivery, error) from error
        return True

    def _drop(self, delivery: Delivery, reason: str) -> bool:
        self.junk.count(reason, delivery.data, sender_of(delivery.subject))
        self._dropped.append(delivery)
        return False

    def _life_standing(self, learner: str, incarnation: int, *, settled: bool) -> LifeStanding:
        """Return the standing of a life; it is `settled` once the records were read after its message had arrived.

        A life without an account may have been folded so long ago that the ledgers do not name it any more. Then its own
        record tells.
        """
        if not self._roll.admits(learner, incarnation):
            return LifeStanding.UNKNOWN
        ledger, name = self._owner.ledger_now(), life_of(learner, incarnation)
        if not ledger.has_folded(name) or ledger.former.covers(name):
            return LifeStanding.MEMBER
        if not settled:
            return LifeStanding.UNKNOWN
        return LifeStanding.OVER if self._roll.is_over(learner, incarnation) else LifeStanding.MEMBER

    def _lived_s(self, learner: str, incarnation: int) -> float:
        """Return for how long a life can have lasted: since the members were read without it, or since the founding."""
        lived_s = self._roll.lived_s(learner, incarnation)
        return lived_since_s(self._context.run.founded_at_s, self._context.clock.wall()) if lived_s is None else lived_s

    def _contribution_facts(self, delivery: Delivery, *, settled: bool) -> list[Fact] | None:
        context = self._context
        manifest = read_manifest(delivery, context.subjects, context.run, context.shard)
        life = manifest.learner, manifest.incarnation
        standing = self._life_standing(*life, settled=settled)
        if standing is LifeStanding.OVER:
            self._drop(delivery, "former")
            return []
        if standing is LifeStanding.UNKNOWN:
            return None
        key = manifest.key
        # Of two deliveries the newer one is settled, and the older one says what is merged.
        if (former := self._pending.contributions.get(key)) is not None:
            manifest = former.manifest
        now_s = context.clock.monotonic()
        claim = PushClaim(manifest.steps, manifest.tokens, manifest.trained_tokens)
        # It is the member's own, so it is refused and not dropped: that is an offence, and leads to its quarantine.
        if fault := self._claims.push_fault(*life, claim, now_s, self._lived_s(*life)):
            log.debug("contribution.absurd", learner=manifest.learner, incarnation=manifest.incarnation, reason=fault)
        self._pending.contributions[key] = PendingManifest(delivery, manifest, now_s)
        arrived = ContributionArrived(
            at_s=now_s,
            key=key,
            base_version=manifest.base_version,
            tokens=manifest.tokens,
            steps=manifest.steps,
            trained_tokens=manifest.trained_tokens,
            final=manifest.final,
            absurd=bool(fault),
            cause_id=manifest.cause_id,
        )
        return [arrived]

    def _farewell_facts(self, delivery: Delivery, *, settled: bool) -> list[Fact] | None:
        context = self._context
        subject_of = partial(context.subjects.farewell, context.shard)
        beat = self._member_beat(delivery.data, delivery.subject, subject_of, settled=settled)
        if beat is None:
            return None
        fact = self._fact(self._last_report(beat))
        self._pending.farewells[beat.learner, beat.incarnation] = delivery
        return [fact, LearnerLeft(at_s=fact.at_s, learner=beat.learner, incarnation=beat.incarnation)]

    def _fact(self, beat: Beat) -> LearnerBeat:
        """Return the fact that a learner reported; what it says of the whole run is a claim, and no fact."""
        self.claimed_progress.note(beat.run_tokens, self._owner.ledger_now().run_tokens)
        return LearnerBeat(
            at_s=self._context.clock.monotonic(),
            learner=beat.learner,
            incarnation=beat.incarnation,
            training=beat.state == "training",
            step_s=beat.step_s,
            steps=beat.step,
            tokens=beat.tokens,
            pushed=beat.pushed,
            superseded=beat.superseded,
            refused_local=beat.refused_local,
        )

    def _beat(self, data: bytes, subject: str, subject_of: Callable[[str], str], *, settled: bool) -> Beat | None:
        """Return a heartbeat, as `_member_beat`; raise `PeerMisbehaved` also where a member says of itself what cannot be."""
        beat = self._member_beat(data, subject, subject_of, settled=settled)
        if beat is None:
            return None
        life = beat.learner, beat.incarnation
        if fault := self._claims.fault(*life, claim_of(beat), self._context.clock.monotonic(), self._lived_s(*life)):
            raise PeerMisbehaved(IMPOSSIBLE_CLAIM, got=fault)
        return beat

    def _last_report(self, beat: Beat) -> Beat:
        """Return a farewell with its totals as far as they are believed: whatever it says, its life has ended."""
        life, claim = (beat.learner, beat.incarnation), claim_of(beat)
        now = self._claims.last_claim(*life, claim, self._context.clock.monotonic(), self._lived_s(*life))
        if now == claim:
            return beat
        log.debug("farewell.cut", learner=beat.learner, incarnation=beat.incarnation, got=claim, allowed=now)
        return with_claim(beat, now)

    def _member_beat(
        self, data: bytes, subject: str, subject_of: Callable[[str], str], *, settled: bool
    ) -> Beat | None:
        """Return a heartbeat or farewell; None of an incarnation that is not known to be a member's, or that is over.

        Raises `PeerMisbehaved`: it is another learner's.
        """
        beat = read_beat(data, self._context.run)
        if subject != (ours := subject_of(beat.learner)):
            raise PeerMisbehaved("a heartbeat of somebody else", got=subject, allowed=ours)
        standing = self._life_standing(beat.learner, beat.incarnation, settled=settled)
        return beat if standing is LifeStanding.MEMBER else None


def sender_of(subject: str) -> str:
    """Return the learner whose subject it is: the last level."""
    return subject.rpartition(".")[2]


def digest_of(delivery: Delivery) -> str:
    """Return a name for a queued message that is the same for each owner."""
    return hashlib.blake2b(delivery.data, digest_size=16, key=delivery.subject.encode()[-64:]).hexdigest()


def read_manifest(delivery: Delivery, subjects: Subjects, run: RunRecord, shard: int) -> Contribution:
    """Return the queued manifest; raise `PeerMisbehaved` unless it fits its subject and this run."""
    manifest = decode(Contribution, delivery.data)
    ours = subjects.contribution(shard, manifest.fragment, manifest.learner)
    if delivery.subject != ours or manifest.fragment not in run.protocol.fragments_of(shard):
        raise PeerMisbehaved("a manifest on a foreign subject", got=delivery.subject, allowed=ours)
    check_manifest(manifest, run)
    return manifest


def read_beat(data: bytes, run: RunRecord) -> Beat:
    """Return a heartbeat or farewell; raise `PeerMisbehaved` when its learner joined another founding of the run."""
    beat = decode(Beat, data)
    if beat.run_nonce != run.nonce:
        raise PeerMisbehaved("a learner of another founding of the run", got=beat.run_nonce, allowed=run.nonce)
    return beat


class ClaimedProgress:
    """Progress that learners claim, verified against the leases of the run: `tokens`.

    A shard whose own fragments are behind learns from heartbeats alone that the run has reached its target; but a member that
    claims a larger number would end the run for all. So a claim is a reason to read the other shards' leases.
    """

    def __init__(self, bus: Bus, run: RunRecord) -> None:
        self._bus = bus
        self._run = run
        self.tokens = 0
        self._wanted = asyncio.Event()

    def note(self, run_tokens: int, known: int) -> None:
        """Have the leases read if a heartbeat says that the run is at its target, and by what is `known` it is not."""
        if max(self.tokens, known) < self._run.protocol.tokens_target <= run_tokens:
            self._wanted.set()

    async def keep_verifying(self) -> None:
        """Once a claim says that the run is over, read the leases until they say so, too: a learner that left says it once."""
        pause_s = CLAIM_LOOK_S
        await self._wanted.wait()
        while self.tokens < self._run.protocol.tokens_target:
            # A heartbeat may be ahead of the lease that says the same: most of such differences are gone by then.
            await asyncio.sleep(pause_s)
            try:
                self.tokens = max(self.tokens, (await recorded_progress(self._bus, self._run)).tokens)
            except (BusError, BrokerUnavailable, StorageFull) as error:
                log.warning("leases.unreadable", reason=str(error))
            pause_s = min(CLAIM_LOOK_S_MAX, 2.0 * pause_s)


class JunkReport:
    """Messages that one tenure has dropped; `messages` counts since its beginning.

    They are told at intervals: a line and an event per message would cost more than the message.
    """

    def __init__(self, event_log: EventLog) -> None:
        self._event_log = event_log
        self._reasons: Counter[str] = Counter()
        self._senders: Counter[str] = Counter()
        self._unsigned: Counter[str] = Counter()
        self.messages = 0

    def count(self, reason: str, data: bytes, learner: str) -> None:
        """Note a dropped message that came on a subject of this learner; one that nobody signed is `unsigned`."""
        self.messages += 1
        reason, names = (UNSIGNED, self._unsigned) if is_unproven(data) else (reason, self._senders)
        self._reasons[reason] += 1
        learner = learner[:SENDER_CHARS_MAX]
        if learner in names or len(names) < SENDERS_MAX:
            names[learner] += 1

    async def keep_telling(self) -> None:
        """Tell at intervals."""
        while True:
            await asyncio.sleep(REPORT_S)
            await self.tell()

    async def tell(self) -> None:
        """Log and record what was dropped since the last time, if anything was."""
        if not self._reasons:
            return
        dropped = JunkEvent(
            messages=self._reasons.total(),
            reasons=dict(self._reasons),
            senders=dict(self._senders.most_common(SENDERS_TOLD)),
            unsigned_on_subjects_of=dict(self._unsigned.most_common(SENDERS_TOLD)),
        )
        self._reasons, self._senders, self._unsigned = Counter(), Counter(), Counter()
        log.warning("junk.dropped", **msgspec.structs.asdict(dropped))
        await self._event_log.record(dropped)
