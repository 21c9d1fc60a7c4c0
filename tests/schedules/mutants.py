"""Mutants: named patches of production's machines and drivers, each of which a schedule must catch.

A simulation that finds nothing proves nothing until it is shown what it would find. Some were real: those say so, and each
stands for a fault that once was in the code (docs/lab/faults.md).
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np

from atoll.archive import rebuild as _rebuild
from atoll.base.clock import Clock, Identity
from atoll.base.errors import AtollError, BlobCorrupt, BlobGone, BrokerUnavailable, BusError, RecordConflict
from atoll.base.retry import all_of
from atoll.bus import memory as _bus
from atoll.bus.interface import Bus
from atoll.client import data_leases as _leases
from atoll.client import driver as _driver
from atoll.client import session as _session
from atoll.client.driver import IslandDriver
from atoll.client.optimizer_state import StateLender
from atoll.client.pushing import Pusher
from atoll.client.session import Session
from atoll.client.step_hook import StepHook
from atoll.merge.global_update import CARRY, DownlinkQuantiser
from atoll.protocol import events
from atoll.protocol.claims import StepAllowance
from atoll.protocol.data import DataLedger, LeaseWatch
from atoll.protocol.ledger import FragmentLedger, Ledger, SettledPushes
from atoll.protocol.ownership import LeaseSeen, LeaseUnseen, Tenure
from atoll.protocol.pacing import ConnectedTime, KnownLearner
from atoll.protocol.round import FragmentRound, Offer
from atoll.protocol.shard import Shard
from atoll.run import delta_chain as _chain
from atoll.run import heads as _heads
from atoll.run.heads import head_info
from atoll.run.record import readable
from atoll.run.standing import Making
from atoll.wire.blobs import Download, Upload
from atoll.wire.messages import Head, Lease, Member, decode, encode
from atoll.wire.subjects import Subjects
from atoll_synchronizer.aggregator import Aggregator
from atoll_synchronizer.garbage_collector import GarbageCollector
from atoll_synchronizer.intake import QUEUE_POLL_S, FactIntake
from atoll_synchronizer.lease import LeaseKeeper
from atoll_synchronizer.service import ShardService
from atoll_synchronizer.store import CommitAttempt, ShardStore, StoredBlobs
from schedules.schedule import play

# Modules whose names are patched where they are used.
data_leases: Any = _leases
driver: Any = _driver
session: Any = _session
rebuild: Any = _rebuild
delta_chain: Any = _chain
memory_bus: Any = _bus
heads: Any = _heads

# What the patches build on, as production has it.
HANDLE, FOLD = Shard.handle, FragmentRound.fold
ENTER, SEEN, WRITE = FragmentLedger.enter_into, Tenure._seen, ShardStore._write
LOOK = Tenure.handle
TAKE_BEAT = KnownLearner.take
FENCE = ShardStore._fence
COMMIT, HEAD, READ, READ_STATE = ShardStore.commit, ShardStore._head, ShardStore._read, _chain.read_outer_state
DO, DRAIN, STORED, FETCH = ShardService._do, Session.drain, CommitAttempt.stored, Aggregator.fetch
LEASE_INIT: Any = LeaseKeeper.__init__
SHARE, TAKE, GIVE_BACK = StateLender.share, data_leases.take, data_leases.give_back
EPOCH_OF, CLAIM = LeaseKeeper._epoch_of, session.claim
RENEW, ADVANCED = data_leases.renew, delta_chain._advanced


# --- the machines -----------------------------------------------------------------------------------------------------------


def forget_settled(self: FragmentLedger, key: events.PushKey) -> SettledPushes:
    """Nothing is remembered, so a redelivery is taken for new."""
    return self.settled.setdefault(f"{key.learner}/{key.incarnation}", SettledPushes())


def any_base(self: FragmentRound, offer: Offer) -> str:
    """Too old and too new are folded as well."""
    del self, offer
    return ""


def acknowledge_when_ready(self: Shard, event: events.Fact) -> list[events.ShardCommand]:
    """A contribution is acknowledged when it becomes ready, before its commit."""
    actions = HANDLE(self, event)
    early = [events.Acknowledge(key=event.key, fate="merged")] if isinstance(event, events.ContributionReady) else []
    return [*early, *actions]


def fold_twice(self: FragmentRound, offer: Offer, *more: Any) -> events.Command:  # noqa: ANN401  (as `FragmentRound.fold`)
    """A folded contribution is listed twice."""
    command = FOLD(self, offer, *more)
    self.shares.append(self.shares[-1])
    return command


def acknowledge_unkept(self: Shard, event: events.Fact) -> list[events.ShardCommand]:
    """Refusals are acknowledged before anything durable knows of them."""
    actions = HANDLE(self, event)
    if isinstance(event, events.LearnerLeft):
        return actions
    refused = [each for each in actions if isinstance(each, events.Refuse)]
    early = [events.Acknowledge(key=each.key, fate="refused", reason=each.reason) for each in refused]
    return [*(each for each in actions if not isinstance(each, events.Keep)), *early]


def dismiss_unkept(self: Shard, event: events.Fact) -> list[events.ShardCommand]:
    """Farewells are dismissed before anything durable knows of them."""
    actions = HANDLE(self, event)
    if not isinstance(event, events.LearnerLeft):
        return actions
    early = events.Dismiss(learner=event.learner, incarnation=event.incarnation, fragment=next(iter(self.slots)))
    return [*(each for each in actions if not isinstance(each, events.Keep)), early]


def ledger_of_later(self: Shard, event: events.Fact) -> list[events.ShardCommand]:
    """A ledger is kept as it stands when all that a fact led to is decided, even commits that never happen. It was real."""
    return [
        msgspec.structs.replace(each, fragment_ledger=self.slots[each.fragment].fragment_ledger.freeze(self.ledger))
        if isinstance(each, events.Keep)
        else each
        for each in HANDLE(self, event)
    ]


def never_held(self: StepAllowance, at_s: float) -> float:
    """A loop takes more steps a second than the run believes of one learner. It was real."""
    del self, at_s
    return 0.0


def lived_since_read(self: FactIntake, learner: str, incarnation: int) -> float:
    """An owner that has just taken over believes of a life no more than it has seen itself."""
    lived_s = self._roll.lived_s(learner, incarnation)
    return 0.0 if lived_s is None else lived_s


def reports_only(self: FragmentLedger, ledger: Ledger) -> None:
    """An heir takes over what learners reported, and not what was settled."""
    ENTER(FragmentLedger(reports=self.reports), ledger)


def reports_forgotten(self: FragmentLedger, ledger: Ledger) -> bytes:
    """The ledger does not carry what learners reported."""
    del ledger
    return msgspec.json.encode(FragmentLedger(self.settled))


def early_timer_lost(self: Shard, event: events.Fact) -> list[events.ShardCommand]:
    """A due timer that fires a tick early is not armed again: the fragment rests for ever. It was real."""
    actions = HANDLE(self, event)
    if isinstance(event, events.TimerFired) and event.name.startswith("due/") and len(actions) == 1:
        return [each for each in actions if not (isinstance(each, events.ArmTimer) and each.name == event.name)]
    return actions


def steal(self: Tenure, fact: LeaseSeen) -> list[events.Command]:
    """A candidate takes any lease it sees, however fresh, and does not fence (see `no_fence`)."""
    return SEEN(self, msgspec.structs.replace(fact, released=fact.released or not fact.ours))


def never_expires(self: Tenure, fact: LeaseSeen) -> list[events.Command]:
    """Only a lease that was released is taken; that of a dead owner is respected for ever."""
    self.still_s, self.looked_s = 0.0, None
    return SEEN(self, fact)


def absence_counts(self: Tenure, fact: events.Fact) -> list[events.Command]:
    """A candidate counts time in which nobody could renew. It was real."""
    if isinstance(fact, LeaseUnseen):
        return []
    if isinstance(fact, LeaseSeen) and self.looked_s is not None and fact.revision == self.revision:
        self.still_s, self.looked_s = self.still_s + fact.at_s - self.looked_s, None
    return LOOK(self, fact)


def always_connected(self: ConnectedTime, at_s: float) -> None:
    """A shard counts time in which it was cut off in whatever it measures. It was real."""
    self.first_s = at_s if self.sign_s is None else self.first_s
    self.sign_s = at_s


def paced_by_absence(self: KnownLearner, beat: events.LearnerBeat, heard_s: float) -> bool:
    """The steps that a learner took in an absence are timed with the absence in it. It was real."""
    self.absent_s = beat.at_s - heard_s
    return TAKE_BEAT(self, beat, heard_s)


def ends_by_calls(self: StepHook) -> bool:
    """A learner ends by what calls claim."""
    driver = self.session.driver
    return driver.drain_wanted or 0 < driver.run.protocol.tokens_target <= driver.progress.tokens


def ends_by_own_count(self: StepHook) -> bool:
    """A learner ends by what it has trained itself, also where it alone is cut off. It was real."""
    driver = self.session.driver
    return driver.drain_wanted or 0 < driver.run.protocol.tokens_target <= driver.machine.tokens


async def epoch_of_heads(self: LeaseKeeper, lease: Lease | None, revision: int) -> int:
    """Where a lease is lost, heads alone say the last epoch; an owner that has fenced nothing is forgotten. It was real."""
    return await EPOCH_OF(self, lease, 0 if lease is None else revision)


async def incarnation_anew(
    bus: Bus, subjects: Subjects, learner: str, clock: Clock, identity: Identity | None = None
) -> Member:
    """Where a member record is lost, the learner begins with incarnation 1 again."""
    record = await bus.get_record(subjects.member(learner))
    member: Member = await CLAIM(bus, subjects, learner, clock, identity)
    if record is None or readable(Member, record) is not None:
        return member
    member = msgspec.structs.replace(member, incarnation=1)
    await bus.put_record(subjects.member(learner), encode(member), expected=None)
    return member


# --- the shard's drivers ----------------------------------------------------------------------------------------------------


async def no_fence(self: ShardStore, fragment: int) -> tuple[Head, int]:
    """A new owner reads the head without writing its epoch into it."""
    record = await self._bus.get_record(self._subjects.head(fragment))
    if record is None:
        raise BrokerUnavailable("no head")
    return decode(Head, record.data), record.revision


async def any_epoch(self: ShardStore, fragment: int) -> tuple[Head, int]:
    """A fence does not look whether a later owner has fenced."""
    while True:
        record = await self._bus.get_record(self._subjects.head(fragment))
        if record is None:
            raise BrokerUnavailable("no head")
        fenced = msgspec.structs.replace(decode(Head, record.data), epoch=self.epoch)
        with contextlib.suppress(RecordConflict):
            return fenced, await self._write(fenced, record.revision, head_info(fenced))


async def load_before_fence(self: ShardStore, fragment: int) -> Any:  # noqa: ANN401  (a holding)
    """A new owner reads the ledger first and fences then: a commit between the two is forgotten."""
    for _ in range(4):
        head, revision = await no_fence(self, fragment)
        with contextlib.suppress(BlobGone, BlobCorrupt):
            held = await READ(self, fragment, head, revision)
            fenced, revision = await self._fence(fragment)
            held.head, held.revision = fenced, revision
            return held
    raise BrokerUnavailable("no head")


async def ledger_not_read(self: ShardStore, fragment: int, head: Head, revision: int) -> Any:  # noqa: ANN401
    """An heir begins with an empty ledger: what comes again after the takeover is new to it."""
    held = await READ(self, fragment, head, revision)
    self.fragment_ledger.pop(fragment, None)
    return held


async def overwrite(self: ShardStore, head: Head, revision: int, info: Any, reconnects: int | None = None) -> int:  # noqa: ANN401
    """Heads are written whatever their revision is."""
    del revision, reconnects
    return await self._bus.put_record(self._subjects.head(head.fragment), encode(head), expected=None, info=info)


async def any_connection(self: ShardStore, head: Head, revision: int, info: Any, reconnects: int | None = None) -> int:  # noqa: ANN401
    """A head is sent on whatever connection there is. It was real."""
    del reconnects
    return await WRITE(self, head, revision, info)


async def head_first(self: CommitAttempt, bus: Any) -> StoredBlobs:  # noqa: ANN401  (a bus)
    """The head becomes visible before the chunks it names are durable."""
    del bus
    refs = {}
    for name, (stem, upload) in self.uploads.items():
        for number in range(len(upload._source)):
            upload.make(number)
        refs[name] = upload.ref(stem)
    self.measuring = self.measuring or asyncio.create_task(self._measure())
    await self.measuring
    return StoredBlobs(**refs)


async def purge_first(self: ShardStore, command: events.Commit, pseudo_gradient: Any) -> Any:  # noqa: ANN401
    """What a commit supersedes is deleted before the new head is visible."""
    state = self.holdings[command.fragment].head.state
    if state is not None:
        await self.garbage_collector.remove(f"{state.stem}.*")
    return await COMMIT(self, command, pseudo_gradient)


async def purge_when_refused(self: ShardStore, fragment: int, *ours: Any) -> None:  # noqa: ANN401
    """A commit that was refused deletes its chunks, although a fence may stand on them. It was real."""
    del fragment
    await self.garbage_collector.remove(*(f"{ref.stem}.*" for ref in ours))


async def removing_fails(self: GarbageCollector, *subject_filters: str) -> None:
    """Removing is part of the commit: when it fails, the commit is done again. It was real."""
    for each in subject_filters:
        await self._bus.purge(each)


async def removed_reader_waits(self: FactIntake) -> None:
    """An owner whose reader was removed goes on owning, without ever reading again. It was real."""
    while True:
        try:
            delivery = await self._queue.next(QUEUE_POLL_S)  # type: ignore[union-attr]
            if delivery is None:
                proven = bool(await self._queue.drained())  # type: ignore[union-attr]
                self._owner.tell(
                    events.QueueDrained(
                        at_s=self._context.clock.monotonic(), proven=proven, run_tokens=self.claimed_progress.tokens
                    )
                )
                continue
            await self._on_delivery(delivery)
        except (BusError, BrokerUnavailable):
            await asyncio.sleep(QUEUE_POLL_S)


async def leave_early(self: Session, within_s: float) -> None:
    """A learner says farewell without having pushed what it holds."""
    machine = self.driver.machine
    for interval in machine.intervals.values():
        interval.from_tokens = machine.tokens
    await DRAIN(self, within_s)


class _Wall:
    """A clock whose monotonic reading is the wall's."""

    def __init__(self, clock: Any) -> None:  # noqa: ANN401
        self.wall = self.monotonic = clock.wall


def lease_on_wall(self: LeaseKeeper, *known: Any) -> None:  # noqa: ANN401
    """How long a lease has stood still is measured by a clock that is set."""
    *before, clock, identity = known
    LEASE_INIT(self, *before, _Wall(clock), identity)


async def removed_when_read(self: Aggregator, key: Any, manifest: Any) -> tuple[str, float]:  # noqa: ANN401
    """The chunks of a contribution are removed as soon as they are read, not when its fate is durable."""
    reason, norm = await FETCH(self, key, manifest)
    if not reason:
        with contextlib.suppress(AtollError):
            await self._bus.purge(f"{manifest.blob.stem}.*")
    return reason, norm


# --- versions: keyframes, deltas, retries, removal --------------------------------------------------------------------------


def tokens_of_this_commit(self: ShardStore, command: events.Commit, held: Any, stored: Any, effort: Any) -> Head:  # noqa: ANN401
    """A head counts the tokens of its own commit only."""
    head = HEAD(self, command, held, stored, effort)
    return msgspec.structs.replace(head, tokens_merged=sum(share.tokens for share in command.shares))


def frames_not_kept(self: ShardStore, command: events.Commit, held: Any, stored: Any, effort: Any) -> Head:  # noqa: ANN401
    """A head does not name the frames that learners may still be reading."""
    return msgspec.structs.replace(HEAD(self, command, held, stored, effort), superseded=())


def delta_left_out(self: ShardStore, command: events.Commit, held: Any, stored: Any, effort: Any) -> Head:  # noqa: ANN401
    """A head with a keyframe of its own does not name its delta's predecessors, one without names only its own."""
    head = HEAD(self, command, held, stored, effort)
    return msgspec.structs.replace(head, deltas=head.deltas[-1:])


async def keyframe_once(self: CommitAttempt, bus: Any) -> StoredBlobs:  # noqa: ANN401
    """No keyframe is made where there is a delta."""
    if "delta" in self.uploads:
        self.uploads.pop("keyframe", None)
    return await STORED(self, bus)


async def carry_forgotten(bus: Any, ref: Any, elements: int) -> Any:  # noqa: ANN401
    """An heir begins without what rounding took from the versions before, where it is stored with them."""
    state = await READ_STATE(bus, ref, elements)
    return {name: np.zeros_like(array) if name == CARRY else array for name, array in state.items()}


def momentum_of_the_keyframe(self: Any, start: int, stop: int, before: Any, after: Any) -> None:  # noqa: ANN401
    """An heir takes the momentum of the keyframe for that of the newest version."""
    del self, start, stop, before, after


def nothing_settled(self: DownlinkQuantiser, values: Any, following: Any, delta: Any, carry: Any) -> None:  # noqa: ANN401
    """The values that a shard goes on from are not those that learners put together."""
    del self, values, following
    delta.codes[:], delta.scales[:], carry[:] = 0, 0.0, 0


async def chain_unchecked(
    bus: Any,  # noqa: ANN401
    run: Any,  # noqa: ANN401
    head: Head,
    held: Any,  # noqa: ANN401
    values: Any,  # noqa: ANN401
    follower: Any = None,  # noqa: ANN401
) -> bool:
    """A reader that is two versions behind takes the newest delta alone, and does not compare what came out."""
    if len(head.deltas) > 1 and held[0] < head.version - 1:
        head = msgspec.structs.replace(head, deltas=head.deltas[-1:])
    await ADVANCED(bus, run, head, held, values, follower)
    return True


def state_bound(elements: int) -> int:
    """The largest outer state is computed with a factor too little."""
    return 2 * elements


async def stored_once(self: CommitAttempt, bus: Any) -> StoredBlobs:  # noqa: ANN401
    """What was acknowledged before the connection was lost counts as stored."""
    self.measuring = self.measuring or asyncio.create_task(self._measure())
    refs = await all_of(bus.put_blob(stem, upload) for stem, upload in self.uploads.values())
    await self.measuring
    self.reconnects = bus.reconnects(self.head)
    return StoredBlobs(**dict(zip(self.uploads, refs, strict=True)))


def counted_pieces(self: Upload) -> list[int]:
    """An upload that goes on sends as many pieces as are missing, not those that are."""
    return list(range(len(self.stored), len(self._source)))


async def scrambled(source: Any, download: Download) -> bytes:  # noqa: ANN401
    """Pieces of a blob are taken in the order in which they come."""
    parts = []
    async with contextlib.aclosing(source.pieces(download)) as pieces:
        async for portion in pieces:
            parts += [bytes(piece) for _, piece in portion]
    return b"".join(parts)


async def swept_unseen(self: ShardStore, fragment: int) -> None:
    """What former epochs wrote is swept although the head may name it."""
    for epoch in range(1, self.epoch):
        await self.garbage_collector.remove(*self._subjects.written_in(fragment, epoch))


def left_for_ever(self: GarbageCollector, fragment: int, *subject_filters: str) -> None:
    """What a commit leaves is never removed."""
    del self, fragment, subject_filters


# --- learners: residuals, lending, data -------------------------------------------------------------------------------------


def residual_dropped(self: Pusher, fragment: int, residue: Any) -> None:  # noqa: ANN401
    """What rounding took from a push is not added to the next one."""
    del self, fragment, residue


def residual_replaced(self: Pusher, fragment: int, residue: Any) -> None:  # noqa: ANN401
    """What rounding took is kept twice as large as it is."""
    if residue is not None:
        self._residues[fragment] = residue + residue


def lent_by_reference(self: StateLender, state: Any, *, donated: bool) -> None:  # noqa: ANN401
    """A state that the next step overwrites is lent without a copy."""
    del donated
    SHARE(self, state, donated=False)


def granted_twice(ledger: DataLedger, learner: str, incarnation: int, blocks: int) -> Any:  # noqa: ANN401
    """Positions that were granted count as untouched."""
    after, grant = TAKE(ledger, learner, incarnation, blocks)
    return msgspec.structs.replace(after, epoch=ledger.epoch, next_position=ledger.next_position), grant


def returned_unread(ledger: DataLedger, learner: str, incarnation: int, progress: Any) -> DataLedger:  # noqa: ANN401
    """A unit that is given back begins anew for the next one."""
    after = GIVE_BACK(ledger, learner, incarnation, progress)
    returned = tuple(msgspec.structs.replace(grant, read=0) for grant in after.returned)
    found: DataLedger = msgspec.structs.replace(after, returned=returned)
    return found


def bury_the_living(self: LeaseWatch, ledger: DataLedger, now_s: float) -> set[Any]:
    """Whoever else holds data is taken for dead."""
    del self, now_s
    return {grant.holder for grant in ledger.grants}


def finished_not_struck(ledger: DataLedger, learner: str, incarnation: int, progress: Any) -> DataLedger:  # noqa: ANN401
    """A unit that was read whole is counted and stays leased."""
    after = RENEW(ledger, learner, incarnation, progress)
    gone = tuple(grant for grant in ledger.grants if grant.key not in {each.key for each in after.grants})
    found: DataLedger = msgspec.structs.replace(after, grants=(*after.grants, *gone))
    return found


def released_below(*arguments: Any, **named: Any) -> Any:  # noqa: ANN401
    """A rebuilt lease begins at epoch 0: no owner is above the heads."""
    if named.get("host") == rebuild.REBUILDER and "epoch" in named:
        named["epoch"] = 0
    return LEASE(*arguments, **named)


LEASE, RESTORE = rebuild.Lease, rebuild._restore_blob

Patch = tuple[Any, str, Any]


async def restored_by_name(bus: Any, store: Any, kept: Any, ref: Any, stem: str) -> Any:  # noqa: ANN401
    """A rebuilt chunk has its former name, which an owner of the former founding may be about to remove. It was real."""
    del stem
    return await RESTORE(bus, store, kept, ref, ref.stem)


async def followed_back(bus: Any, run: Any, held: Any) -> Any:  # noqa: ANN401
    """A learner follows a head that went back, as that of a rebuilt run does. It was real."""
    head = await heads.read_head(bus, run, held.fragment)
    if head is None:
        raise BlobGone("the head is gone")
    return await heads.fetch_frame(bus, run, head)


async def served_back(self: ShardStore, fragment: int) -> tuple[Head, int]:
    """A shard serves again from a head below its own commits. It was real."""
    self._versions.pop(fragment, None)
    return await FENCE(self, fragment)


async def trained_on(self: IslandDriver, fragment: int, had: Mapping[int, int]) -> AtollError | None:
    """A learner trains on although the heads are below its anchors. It was real."""
    del self, fragment, had
    return None


def never_still(self: Making) -> bool:
    """A run whose learners are heard trains, whatever comes of it. It was real."""
    del self
    return False


@dataclass(frozen=True, slots=True)
class ScheduleMutant:
    """Patches, and where they show: happenings per minute and settings that make it likely, what is drawn otherwise."""

    patches: tuple[Patch, ...]
    rates: Mapping[str, float] | None = None
    fixed: Mapping[str, Any] = field(default_factory=dict)


SMALL = {"chunk_bytes": 1024, "rows": 60}
FREEZES = {"freeze": 30.0, "freeze at an await": 30.0, "join": 10.0}
SLOW_FENCES = {"freeze at an await": 60.0, "freeze": 40.0, "messages slow": 30.0, "join": 10.0}
POWER = {"power cut": 40.0, "requests lost": 20.0, "join": 10.0}
SPOILT = {"hostile records": 20.0, "crash": 20.0, "freeze": 20.0, "join": 20.0}
FULL = {"disk full": 30.0, "requests lost": 20.0}
COMING = {"join": 30.0, "leave": 20.0, "messages late": 30.0}
DELTAS = {"codec_down": "int4", "keyframe_versions": 5}
LOST = {"store lost": 12.0, "messages slow": 30.0}
ARCHIVED = {"archive_every_s": 2, "storm_s": 20.0}
OUTAGE = {"broker gone": 6.0, "join": 8.0}
LONG_STORM = {"storm_s": 30.0, "archive_every_s": 0, "hosts": 3}
CUT_OFF = {"synchronizer cut off": 5.0, "leave": 2.0, "join": 4.0}
ONE_HOST = {"storm_s": 40.0, "archive_every_s": 0, "hosts": 1, "quorum": 3, "learners": 4}
ALONE = {"learner cut off": 6.0, "synchronizer cut off": 2.0, "join": 6.0}
TARGET = {"storm_s": 40.0, "archive_every_s": 0, "tokens_target": 1500, "learners": 3}
SET_BACK = {"store set back": 6.0}
ONE_SERVES = {"storm_s": 20.0, "archive_every_s": 0, "hosts": 1, "learners": 2, "quorum": 1, "regional": False}
TOKENLESS = {"storm_s": 40.0, "archive_every_s": 0, "learners": 2, "quorum": 2, "regional": False, "tokenless": True}
FAST = {"steps_per_s_max": 0.5, "storm_s": 20.0}
CRASHES = {"crash": 15.0, "crash at an await": 20.0, "join": 12.0}

MUTANTS: dict[str, ScheduleMutant] = {
    "no dedupe": ScheduleMutant(((FragmentLedger, "_settle", forget_settled),)),
    "no dedupe after an election": ScheduleMutant(
        ((FragmentLedger, "_settle", forget_settled),), {"leader lost": 30.0}
    ),
    "any base": ScheduleMutant(((FragmentRound, "refusal", any_base),)),
    "ack before commit": ScheduleMutant(((Shard, "handle", acknowledge_when_ready),)),
    "counted twice": ScheduleMutant(((FragmentRound, "fold", fold_twice),)),
    "refusal acked before kept": ScheduleMutant(((Shard, "handle", acknowledge_unkept),)),
    "farewell dismissed before kept": ScheduleMutant(((Shard, "handle", dismiss_unkept),)),
    "ledger of a later moment": ScheduleMutant(
        ((Shard, "handle", ledger_of_later),), {**CRASHES, "chunk damaged": 30.0, "leave": 15.0, "messages late": 20.0}
    ),
    "a fast loop is not held": ScheduleMutant(((StepAllowance, "wait_s", never_held),), {}, FAST),
    "an heir counts a life from its own reading": ScheduleMutant(
        ((FactIntake, "_lived_s", lived_since_read),), CRASHES, FAST | {"storm_s": 60.0}
    ),
    "lost fates": ScheduleMutant(((FragmentLedger, "enter_into", reports_only),), CRASHES),
    "lost reports": ScheduleMutant(((FragmentLedger, "freeze", reports_forgotten),)),
    "ledger not read at takeover": ScheduleMutant(((ShardStore, "_read", ledger_not_read),), CRASHES),
    "ledger read before the fence": ScheduleMutant(
        ((ShardStore, "_load", load_before_fence),), {**FREEZES, "clock ahead": 12.0, "messages late": 20.0}
    ),
    "no fence": ScheduleMutant(((ShardStore, "_fence", no_fence),)),
    "revision not checked": ScheduleMutant(((ShardStore, "_write", overwrite),), FREEZES),
    "lease stolen, no fence": ScheduleMutant(((Tenure, "_seen", steal), (ShardStore, "_fence", no_fence))),
    "epoch of heads": ScheduleMutant(((LeaseKeeper, "_epoch_of", epoch_of_heads),), SPOILT),
    "incarnation anew": ScheduleMutant(((session, "claim", incarnation_anew),), SPOILT),
    "an absence counts as stillness": ScheduleMutant(((Tenure, "handle", absence_counts),), OUTAGE, LONG_STORM),
    "a shard's own absence enters its averages": ScheduleMutant(
        ((ConnectedTime, "sign", always_connected),), CUT_OFF, ONE_HOST
    ),
    "an absence enters the pace": ScheduleMutant(((KnownLearner, "take", paced_by_absence),), OUTAGE, LONG_STORM),
    "a call ends a run": ScheduleMutant(((StepHook, "done", property(ends_by_calls)),), ALONE, TARGET),
    "a learner's own count ends a run": ScheduleMutant(
        ((StepHook, "done", property(ends_by_own_count)),), ALONE, TARGET
    ),
    "lease never expires": ScheduleMutant(((Tenure, "_seen", never_expires),), CRASHES),
    "head before chunks": ScheduleMutant(((CommitAttempt, "stored", head_first),)),
    "purge before head": ScheduleMutant(((ShardStore, "commit", purge_first),)),
    "purge of a refused commit": ScheduleMutant(
        ((ShardStore, "_disown", purge_when_refused),),
        {"answers lost": 90.0, "freeze": 40.0, "freeze at an await": 40.0},
        {"storm_s": 20.0, "hosts": 2},
    ),
    "purge is part of the commit": ScheduleMutant(
        ((GarbageCollector, "remove", removing_fails),), {"cut both ways": 40.0}
    ),
    "removed reader stays owner": ScheduleMutant(((FactIntake, "read_queue", removed_reader_waits),), FREEZES),
    "early timer lost": ScheduleMutant(((Shard, "handle", early_timer_lost),), {"clock ahead": 6.0}),
    "farewell before pushes": ScheduleMutant(((Session, "drain", leave_early),)),
    "fence of any epoch": ScheduleMutant(((ShardStore, "_fence", any_epoch),), SLOW_FENCES, {"hosts": 2}),
    "lease on wall time": ScheduleMutant(((LeaseKeeper, "__init__", lease_on_wall),), {"wall clock set": 60.0}),
    "contributions removed when read": ScheduleMutant(((Aggregator, "fetch", removed_when_read),)),
    "tokens of one commit": ScheduleMutant(((ShardStore, "_head", tokens_of_this_commit),)),
    "frames not kept for readers": ScheduleMutant(((ShardStore, "_head", frames_not_kept),)),
    "deltas left out": ScheduleMutant(((ShardStore, "_head", delta_left_out),), None, DELTAS),
    "no keyframe beside deltas": ScheduleMutant(
        ((CommitAttempt, "stored", keyframe_once),), None, DELTAS | {"keyframe_versions": 2}
    ),
    "carry lost at takeover": ScheduleMutant(
        ((delta_chain, "read_outer_state", carry_forgotten),), CRASHES, DELTAS | {"average_versions": 4}
    ),
    "keyframe's momentum at takeover": ScheduleMutant(
        ((delta_chain._StateReader, "follow", momentum_of_the_keyframe),), CRASHES, DELTAS | {"average_versions": 0}
    ),
    "downlink not settled": ScheduleMutant(((DownlinkQuantiser, "settle", nothing_settled),), None, DELTAS),
    "chain unchecked": ScheduleMutant(((delta_chain, "_advanced", chain_unchecked),), None, DELTAS),
    "outer state bounded too low": ScheduleMutant(
        ((delta_chain, "state_bytes_max", state_bound),), CRASHES, {"outer_momentum": 0.3}
    ),
    "stored before a reconnect": ScheduleMutant(((CommitAttempt, "stored", stored_once),), POWER, SMALL),
    "head on a later connection": ScheduleMutant(((ShardStore, "_write", any_connection),), POWER),
    "upload resumed by count": ScheduleMutant(((Upload, "missing", counted_pieces),), FULL, SMALL),
    "pieces in any order": ScheduleMutant(
        ((memory_bus, "whole", scrambled),), CRASHES, SMALL | {"chunk_bytes": 600, "learners": 3}
    ),
    "former epochs swept unseen": ScheduleMutant(((ShardStore, "_sweep", swept_unseen),), CRASHES, DELTAS),
    "leftovers never removed": ScheduleMutant(((GarbageCollector, "leave", left_for_ever),), {}),
    "residual dropped": ScheduleMutant(
        ((Pusher, "_keep", residual_dropped),), {}, {"codec_up": "int4", "error_feedback": True}
    ),
    "residual doubled": ScheduleMutant(
        ((Pusher, "_keep", residual_replaced),), {}, {"codec_up": "int4", "error_feedback": True}
    ),
    "state lent by reference": ScheduleMutant(
        ((StateLender, "share", lent_by_reference),), COMING, {"learners": 3, "slow_threads": 1.0}
    ),
    "data granted twice": ScheduleMutant(((data_leases, "take", granted_twice),)),
    "data returned unread": ScheduleMutant(((data_leases, "give_back", returned_unread),), COMING, {"learners": 3}),
    "live data leases buried": ScheduleMutant(
        ((LeaseWatch, "dead_holders", bury_the_living),), {"join": 12.0}, {"learners": 3}
    ),
    "finished data stays leased": ScheduleMutant(((data_leases, "renew", finished_not_struck),)),
    "a head that went back is followed": ScheduleMutant(((driver, "fetch_newest", followed_back),), LOST, ARCHIVED),
    "a store that went back is served": ScheduleMutant(((ShardStore, "_fence", served_back),), SET_BACK, ONE_SERVES),
    "a store that went back is followed": ScheduleMutant(
        ((IslandDriver, "_went_back", trained_on),), SET_BACK, ONE_SERVES
    ),
    "a run that merges nothing trains": ScheduleMutant(
        ((Making, "stands_still", property(never_still)),), {}, TOKENLESS
    ),
    "rebuilt under former names": ScheduleMutant(((rebuild, "_restore_blob", restored_by_name),), LOST, ARCHIVED),
    "rebuilt lease below the heads": ScheduleMutant(
        ((rebuild, "Lease", released_below),),
        {"store lost": 10.0, "crash": 10.0},
        {"archive_every_s": 2, "storm_s": 20.0},
    ),
}


@contextlib.contextmanager
def planted(name: str) -> Iterator[None]:
    """Patch a mutant in for the length of a block."""
    patches = MUTANTS[name].patches
    originals = [(target, attribute, getattr(target, attribute)) for target, attribute, _ in patches]
    try:
        for target, attribute, patch in patches:
            setattr(target, attribute, patch)
        yield
    finally:
        for target, attribute, original in originals:
            setattr(target, attribute, original)


@dataclass(frozen=True, slots=True)
class Caught:
    """How many schedules, and seconds, it took until a mutant was caught, and by what; `what` is empty when it never was."""

    name: str
    schedules: int
    took_s: float
    kind: str
    what: str


def hunt(name: str, first: int, schedules_max: int) -> Caught:
    """Play schedules from seed `first` with a mutant planted, where it shows, until one fails."""
    mutant, began_s = MUTANTS[name], time.process_time()
    with planted(name):
        for number in range(schedules_max):
            outcome = play(first + number, rates=mutant.rates, fixed=mutant.fixed)
            if outcome.violation:
                return Caught(name, number + 1, time.process_time() - began_s, outcome.kind, outcome.what)
    return Caught(name, schedules_max, time.process_time() - began_s, "", "")
