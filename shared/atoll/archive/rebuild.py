"""Rebuilds a run on an empty broker from the newest complete checkpoint, bit for bit as the shards held it.

    verify the checkpoint ─► run record (new nonce, `rebuilt`) ─► members, leases ─► per fragment: chunks, then head

The run record comes first, by compare-and-set: it names the checkpoint, so several processes may rebuild at once, or one may go
on where another died, and all write the same. Heads are created only where none exists, after the chunks they name; shards and
learners wait for all heads. Chunks come back under names of the new founding: an owner of the former one may still be about to
remove what its last commits superseded. A broker that still has the run is left as it is.

A process that survived the loss may have written a member record, a data ledger or a shard lease to the empty broker before us.
It knows nothing of the run and would give numbers out twice. So a record that is behind the archive is replaced by
compare-and-set; one that is ahead was written after the rebuild, and stays.

Member records get incarnations above every one that the archive knows, with room for those that began after the checkpoint:
push keys (learner, incarnation, fragment, push) stay unique for ever. All former incarnations count as gone, so their data
leases return to the pool. Shard leases come back released, with the archived epoch, so that the next owner's fence is above
every head.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import msgspec

from atoll.archive.checkpoint_store import CheckpointStore
from atoll.archive.checkpoints import CheckpointObject, Manifest, Piece, RunCheckpoint
from atoll.base.clock import Clock
from atoll.base.errors import AtollError, CheckpointError, PeerMisbehaved, RecordConflict, RunReplaced
from atoll.base.logs import get
from atoll.base.parsing import exhausted_counter
from atoll.base.quantities import COUNT_MAX, COUNTED_SHARE, INCARNATION_MAX, at_most
from atoll.bus.interface import Bus, Record
from atoll.codec import StoredFrame
from atoll.merge.outer import check_outer
from atoll.protocol.data import DataLedger
from atoll.protocol.ledger import Ledger, newest, split_life
from atoll.protocol.settings import NESTEROV
from atoll.run.delta_chain import frames_of
from atoll.run.heads import head_info, read_heads
from atoll.run.record import read_run
from atoll.run.stream_room import provide
from atoll.wire.blobs import BlobRef, Cut, Pieces, Upload, digest_of
from atoll.wire.messages import Head, Lease, Member, Rebuilt, RunRecord, decode, encode
from atoll.wire.subjects import Subjects

log = get(__name__)

T = TypeVar("T", Member, DataLedger, Lease)

INCARNATIONS = 1000
REBUILDER = "rebuilt"


@dataclass(frozen=True, slots=True)
class RebuildOutcome:
    """The outcome: the run record on the broker, and whether anything had to be rebuilt."""

    record: RunRecord
    rebuilt: bool


async def rebuild(
    bus: Bus,
    store: CheckpointStore,
    clock: Clock,
    *,
    first: int = 0,
    bytes_max: int | None = None,
    own_outer: str = NESTEROV,
) -> RebuildOutcome:
    """Make sure that the broker has the run; fragments of shard `first` come first, others may be done by others.

    Streams of tensors that the broker has lost may have `bytes_max` bytes, or what follows from the model. Raises
    `SettingsError` if the run names code as its outer optimizer that is not `own_outer`, that of this process's settings;
    `CheckpointError` if the archive holds no complete checkpoint.
    """
    subjects = Subjects(store.run)
    there = await read_run(bus, subjects)
    if there is not None and await _stands(bus, there):
        await _check_brokers(bus, there)
        await _say_it_stands(store, there)
        return RebuildOutcome(there, rebuilt=False)
    if there is None:
        checkpoint, manifests = await asyncio.to_thread(store.newest)
        offer = _record(checkpoint, manifests, clock.wall())
        check_outer(offer.protocol.outer, own_outer)
        await provide(bus, offer, bytes_max)
        there = await _claim(bus, offer)
        if there.rebuilt is None:
            await _say_it_stands(store, there)
            return RebuildOutcome(there, rebuilt=False)
    check_outer(there.protocol.outer, own_outer)
    manifests = await asyncio.to_thread(_named_by, store, there)
    await _restore_records(bus, there, manifests, clock)
    for manifest in sorted(manifests, key=lambda m: (m.shard - first) % len(manifests)):
        for piece in manifest.pieces:
            await _restore_piece(bus, there, store, manifest.shard, piece)
    rebuilt = there.rebuilt
    if rebuilt is None:
        raise CheckpointError("a run that nobody is rebuilding was rebuilt", got=there.nonce)
    log.warning(
        "run.rebuilt",
        checkpoint=rebuilt.checkpoint,
        source=rebuilt.source,
        nonce=there.nonce,
        tokens=rebuilt.tokens,
        versions=rebuilt.versions,
        checkpoint_at_s=round(rebuilt.checkpoint_at_s, 3),
    )
    return RebuildOutcome(there, rebuilt=True)


async def _stands(bus: Bus, there: RunRecord) -> bool:
    """Return whether the run is whole, or a learner is founding it: then there is nothing to do."""
    if there.rebuilt is None:
        return True
    return len(await read_heads(bus, there)) == len(there.layout.fragments)


async def _check_brokers(bus: Bus, there: RunRecord) -> None:
    """Raise `CheckpointError` if one of the run's further brokers has lost it: the parts of two times make no run."""
    try:
        if there.bulk:
            await read_heads(bus, there)
    except RunReplaced as error:
        raise CheckpointError(
            f"one of the brokers that keep fragments of run {there.run!r} has lost them",
            got=error.what,
            todo="remove what the others have (`atoll runs remove --force`), and start the shards with --restore again",
        ) from error


async def _say_it_stands(store: CheckpointStore, there: RunRecord) -> None:
    """Log that nothing is rebuilt; as a warning if the archive has checkpoints but none of this founding or its source."""
    log.info("run.stands", nonce=there.nonce, founder=there.founder, todo="nothing is rebuilt: the broker has the run")
    source = there.nonce if there.rebuilt is None else there.rebuilt.source
    try:
        checkpoints = [checkpoint for checkpoint in await asyncio.to_thread(store.checkpoints) if checkpoint.complete]
    except AtollError as error:
        log.warning("archive.unreadable", reason=str(error))
        return
    foreign = not any(nonce in checkpoint.founding for checkpoint in checkpoints for nonce in (there.nonce, source))
    if checkpoints and foreign:
        log.warning(
            "run.not_archived",
            nonce=there.nonce,
            archived=checkpoints[-1].founding,
            todo="the archive holds another founding of this run. To go back to it: stop everything, empty the broker's "
            "store, start the shards with --restore, and only then the learners",
        )


def _record(checkpoint: RunCheckpoint, manifests: list[Manifest], now_s: float) -> RunRecord:
    run = manifests[0].run
    generation = 0 if run.rebuilt is None else run.rebuilt.generation
    rebuilt = Rebuilt(
        source=run.nonce,
        checkpoint=checkpoint.number,
        generation=at_most(COUNT_MAX, generation + 1),
        tokens=reports_of(manifests).run_tokens,
        versions=sum(piece.head.version for manifest in manifests for piece in manifest.pieces),
        checkpoint_at_s=min(manifest.made_at_s for manifest in manifests),
        rebuilt_at_s=now_s,
    )
    return msgspec.structs.replace(run, nonce=secrets.token_hex(8), rebuilt=rebuilt)


async def _claim(bus: Bus, record: RunRecord) -> RunRecord:
    try:
        await bus.put_record(record.subjects.run_record, encode(record), expected=0, info={"run": record.run})
    except RecordConflict:
        there = await read_run(bus, record.subjects)
        if there is None:
            raise
        return there
    return record


def _named_by(store: CheckpointStore, record: RunRecord) -> list[Manifest]:
    rebuilt = record.rebuilt
    for checkpoint in store.checkpoints():
        if (
            rebuilt is not None
            and checkpoint.number == rebuilt.checkpoint
            and checkpoint.founding.endswith(rebuilt.source)
            and checkpoint.complete
        ):
            return store.manifests(checkpoint)
    raise CheckpointError(
        f"run {record.run!r} is being rebuilt from a checkpoint that this archive does not hold",
        got=f"checkpoint {rebuilt.checkpoint} of founding {rebuilt.source}" if rebuilt else "no checkpoint",
        allowed=f"a complete checkpoint in {store.object_store.where}",
        todo="use the archive that the rebuilding began with, or empty the broker's store and begin again",
    )


def reports_of(manifests: list[Manifest]) -> Ledger:
    """Return what learners had reported to any of the shards."""
    ledger = Ledger()
    for manifest in manifests:
        ledger.former.add(manifest.ledger.former)
    for manifest in manifests:
        ledger.learn(manifest.ledger)
    return ledger


async def _restore_records(bus: Bus, run: RunRecord, manifests: list[Manifest], clock: Clock) -> None:
    for learner, incarnation in sorted(_incarnations(manifests).items()):
        member = Member(
            learner=learner,
            # One that no claimant can count on from is not counted on from (`atoll.client.membership`).
            incarnation=at_most(INCARNATION_MAX // COUNTED_SHARE, (incarnation // INCARNATIONS + 1) * INCARNATIONS),
            nonce=f"{REBUILDER}-{run.nonce}",
            host=REBUILDER,
            pid=0,
            claimed_at_s=clock.wall(),
            left=True,
        )
        await _settle(
            bus, run.subjects.member(learner), member, lambda there, ours: there.incarnation < ours.incarnation
        )
    ledgers = [manifest.data for manifest in manifests if manifest.data is not None and not _fault_of(manifest.data)]
    if ledgers:
        furthest = max(ledgers, key=_reach)
        # Its leases stay: the next learner that asks gives those of dead incarnations back.
        await _settle(bus, run.subjects.data, furthest, lambda there, ours: _reach(there) < _reach(ours))
    reports = reports_of(manifests)
    for manifest in manifests:
        lease = Lease(
            shard=manifest.shard,
            epoch=max(manifest.epoch, *(piece.head.epoch for piece in manifest.pieces)),
            nonce=f"{REBUILDER}-{run.nonce}",
            run_nonce=run.nonce,
            host=REBUILDER,
            pid=0,
            ledger=newest(reports),
            released=True,
            closed=manifest.closed,
        )
        # An owner of the rebuilt run has a later epoch; at the same one its fence would not be above the heads.
        await _settle(
            bus,
            run.subjects.lease(manifest.shard),
            lease,
            lambda there, ours: there.epoch <= ours.epoch and there.nonce != ours.nonce,
        )


def _incarnations(manifests: list[Manifest]) -> dict[str, int]:
    highest: dict[str, int] = {}
    for manifest in manifests:
        known = [(member.learner, member.incarnation) for member in manifest.members]
        known += manifest.ledger.former.until.items()
        known += map(split_life, manifest.ledger.accounts)
        for learner, incarnation in known:
            highest[learner] = max(incarnation, highest.get(learner, 0))
    return highest


def _fault_of(data: DataLedger) -> str:
    """Return why nobody could go on with a ledger of leases, or the empty string; it is left out, and leases begin anew."""
    fault = data.fault() or exhausted_counter(data)
    if fault:
        log.warning("record.refused", subject="data", reason=fault)
    return fault


def _reach(data: DataLedger) -> tuple[int, int]:
    return data.epoch, data.next_position


async def _settle(bus: Bus, subject: str, record: T, behind: Callable[[T, T], bool]) -> None:
    """Write a record where none exists, or where the existing one is `behind` this one.

    One that cannot be read may lie over that of a later owner or incarnation. The next taker counts on from the broker's
    numbers, so it stays; only the data ledger has nobody who would replace it with more than we know.
    """
    while True:
        there = await bus.get_record(subject)
        if there is not None and not _replaceable(there, record, behind):
            return
        with contextlib.suppress(RecordConflict):
            await bus.put_record(subject, encode(record), expected=0 if there is None else there.revision)
            return


def _replaceable(there: Record, ours: T, behind: Callable[[T, T], bool]) -> bool:
    try:
        return behind(decode(type(ours), there.data), ours)
    except PeerMisbehaved as error:
        log.warning("record.refused", subject=there.subject, reason=str(error))
        return isinstance(ours, DataLedger)


async def _restore_piece(bus: Bus, run: RunRecord, store: CheckpointStore, shard: int, piece: Piece) -> None:
    subjects, head = run.subjects, piece.head
    subject, nonce = subjects.head(head.fragment), f"{REBUILDER}.{run.nonce}"
    reconnects = bus.reconnects(subject)
    if await bus.get_record(subject) is not None:
        return
    blobs = (
        ("keyframe", head.keyframe, piece.frame, StoredFrame, subjects.global_stem(head.fragment, head.version, nonce)),
        ("state", head.state, piece.state, Cut, subjects.state_stem(head.fragment, head.version, nonce)),
        (
            "fragment_ledger",
            head.fragment_ledger,
            piece.fragment_ledger,
            Cut,
            subjects.ledger_stem(head.fragment, nonce),
        ),
    )
    restored: dict[str, BlobRef | None] = {name: None for name, *_ in blobs}
    for name, ref, found, cut, stem in blobs:
        if ref is not None and found is not None:
            restored[name] = await _restore_blob(bus, store, (shard, found, cut), ref, stem)
    head = msgspec.structs.replace(head, **restored, deltas=(), superseded=())
    try:
        await bus.put_record(subject, encode(head), expected=0, info=head_info(head), reconnects=reconnects)
    except RecordConflict:
        # Somebody rebuilding beside us was faster, and the run may have gone on: what its head does not name is garbage.
        there = await bus.get_record(subject)
        kept = {ref.stem for ref in _refs(subjects, decode(Head, there.data))} if there is not None else set()
        for *_, stem in blobs:
            if stem not in kept:
                await bus.purge(f"{stem}.*")


async def _restore_blob(
    bus: Bus,
    store: CheckpointStore,
    kept: tuple[int, CheckpointObject, Callable[[bytes], Pieces]],
    ref: BlobRef,
    stem: str,
) -> BlobRef:
    """Store one blob of the archive (its shard, where it is, how it was cut) under a new name; `ref` is the archived one."""
    shard, found, cut = kept
    data = await asyncio.to_thread(store.get_object, shard, found)
    pieces = cut(data)
    stored = await bus.put_blob(stem, Upload(pieces))
    digest = stored.digest
    if stored.collision_free != ref.collision_free:
        # An open run's archive on a locked broker, or the other way round: the new name has a digest of the other kind.
        digest = await asyncio.to_thread(digest_of, pieces, collision_free=ref.collision_free)
    if (stored.size_bytes, digest) != (ref.size_bytes, ref.digest):
        raise CheckpointError(
            "the archive holds other bytes than its head names",
            got=f"{digest} for {ref.stem}",
            allowed=ref.digest,
        )
    return stored


def _refs(subjects: Subjects, head: Head) -> list[BlobRef]:
    return [
        *frames_of(subjects, head),
        *head.superseded,
        *(ref for ref in (head.state, head.fragment_ledger) if ref is not None),
    ]
