"""A shard's state and how it becomes durable: global fragments, outer-optimizer state, fragment ledgers.

The commit of version v + 1 of a fragment is four writes in this order, and a crash between any two is harmless:

    1. chunks of the new delta, keyframe or both      (no reader sees them yet)
    2. chunks of the ledger, and of outer state      (no reader sees them yet)
    3. the head, by compare-and-set                  <- the commit point: it names all three
    4. purge of what was superseded                  (housekeeping, when readers are done: `garbage_collector`)

Frames that the new head no longer names stay until the next commit, because a reader may be in the middle of them. `keep`
writes what changes the ledger alone (a refusal, a farewell): new chunks of the ledger, and the head once more with the same
version. A refused compare-and-set means that another process owns the fragment: `RecordConflict`, and this shard stands down.

An owner that dies between the chunks and the head, or between the head and the purge, leaves chunks that no head will name;
they carry its epoch. Once a head names nothing of a former epoch (`atoll.run.delta_chain`), the store sweeps away what it
left.

The outer step is taken once for a commit, however many attempts storing takes (`CommitAttempt`). After a power cut a broker
may have lost data that it acknowledged, and a head must not name lost data: after a lost connection everything is sent again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import msgspec

from atoll.base.errors import (
    BlobCorrupt,
    BlobGone,
    BrokerUnavailable,
    BusError,
    PeerMisbehaved,
    ProtocolMisuse,
    RecordConflict,
    StorageFull,
)
from atoll.base.large_arrays import Vector
from atoll.base.logs import get
from atoll.base.parallel import off_loop
from atoll.base.parsing import parsed
from atoll.base.quantities import RUN_TOKENS_MAX, at_most
from atoll.base.retry import all_of
from atoll.bus.interface import Bus
from atoll.codec import EncodedFrame, PackedArrays
from atoll.merge.fold import l2_norm
from atoll.merge.global_update import GlobalUpdate, UpdatedFragment
from atoll.merge.outer import OuterOptimizer, State
from atoll.merge.round_merge import update_of
from atoll.protocol.events import Commit
from atoll.protocol.ledger import LEDGER_BYTES_MAX, FragmentLedger, Ledger, close_together
from atoll.run.delta_chain import continued, digest_of_values, frames_of, keyframe_of, read_version
from atoll.run.heads import head_info, head_nonce, went_back
from atoll.run.ledger import read_fragment_ledger
from atoll.run.record import the_run
from atoll.wire.blobs import BlobRef, Cut, Upload
from atoll.wire.messages import Delta, Head, Included, RunRecord, decode, encode
from atoll.wire.subjects import matches
from atoll_synchronizer.garbage_collector import GarbageCollector

LOAD_ATTEMPTS = 4
LOADS_AT_ONCE = 8
LOADED_ALONE_ELEMENTS = 1 << 22
SWEPT_EPOCHS = 64

log = get(__name__)


@dataclass(slots=True)
class Holding:
    """One fragment as its shard holds it: values (of L2 length `norm`), outer state, frozen ledger, its head.

    The head (of `revision`) names exactly these. No code changes the arrays in place, so a caller that takes them
    together has what the head names. Of the state the head may name less (`GlobalUpdate.stored`).
    """

    head: Head
    revision: int
    values: Vector
    state: State
    norm: float
    fragment_ledger: bytes | None = None


class ShardStore:
    """Loads and commits the fragments of one shard."""

    def __init__(
        self, bus: Bus, run: RunRecord, shard: int, outer: OuterOptimizer, versions: dict[int, int] | None = None
    ) -> None:
        """Hold nothing yet; `open` loads. `versions` are the highest that this process has had of the run's fragments."""
        self._versions = {} if versions is None else versions
        self._bus = bus
        self._run = run
        self._shard = shard
        self._outer = outer
        self._subjects = run.subjects
        self.epoch = 0
        self.holdings: dict[int, Holding] = {}
        self.fragment_ledger: dict[int, FragmentLedger] = {}
        self._attempts: dict[int, CommitAttempt] = {}
        self._unswept: dict[int, set[int]] = {}
        """The former tenures of each fragment that may have left something."""
        self.garbage_collector = GarbageCollector(bus)

    async def open(self, epoch: int) -> None:
        """Begin the tenure `epoch`: fence every head, then load its frame, state and ledger.

        Raises:
            RecordConflict: a later owner is there, or the broker holds another founding of the run.
            RunReplaced: the broker has lost the run; waiting for heads would keep a shard that no process can use.
            RunWentBack: a head is gone, or older than what this process has had.
        """
        self.epoch = epoch
        there = await the_run(self._bus, self._subjects)
        if there.nonce != self._run.nonce:
            raise RecordConflict("the run was rebuilt meanwhile", got=there.nonce, allowed=self._run.nonce)
        fragments, sizes = self._run.protocol.fragments_of(self._shard), self._run.layout.fragment_sizes()
        # Small fragments are loaded side by side: a chain of deltas is many small answers, and each is waited for.
        together = LOADS_AT_ONCE if max(sizes[p] for p in fragments) <= LOADED_ALONE_ELEMENTS else 1
        for first in range(0, len(fragments), together):
            some = fragments[first : first + together]
            loaded = await all_of(self._load(fragment) for fragment in some)
            self.holdings |= dict(zip(some, loaded, strict=True))
            self._versions |= {fragment: holding.head.version for fragment, holding in self.holdings.items()}

    async def commit(
        self,
        command: Commit,
        pseudo_gradient: Vector,
        memory: State | None = None,
        before_head: Callable[[Head, Holding], Awaitable[None]] | None = None,
        *,
        compress: bool = True,
    ) -> int:
        """Take the outer step and make `command.base_version + 1` visible with its ledger; return its frames' bytes.

        `memory` takes its place in the outer state, for a round merged by value. May be repeated. `before_head` is told the
        head that is about to be written and its base. `compress` the delta, where its codec can be.

        Raises `RecordConflict`: another process wrote this fragment's head.
        """
        held, fragment_ledger = self.holdings[command.fragment], command.fragment_ledger
        durable = parsed(fragment_ledger, FragmentLedger)  # before a head names one that no owner could read
        if held.head.version != command.base_version:
            got = (command.fragment, held.head.version, command.base_version)
            raise ProtocolMisuse("a commit on another version than the one we hold", got=got)
        attempt = self._attempts.get(command.fragment)
        if attempt is None or attempt.nonce != head_nonce(self.epoch, fragment_ledger):
            attempt = self._attempts[command.fragment] = await self._begin(
                command, held, pseudo_gradient, held.state | (memory or {}), compress=compress
            )
        try:
            stored = await attempt.stored(self._bus)
        except StorageFull:
            await self.garbage_collector.sweep()
            raise
        head = self._head(command, held, stored, attempt)
        if before_head is not None:
            await before_head(head, held)
        info = head_info(head) | {
            "learners": ",".join(share.key.learner for share in command.shares),
            "grace_s": round(command.grace_s, 4),
            "end": command.end,
        }
        try:
            revision = await self._write(head, held.revision, info, attempt.reconnects)
        except RecordConflict:
            await self._disown(command.fragment, *stored.refs)
            raise
        del self._attempts[command.fragment]
        frame_bytes = sum(ref.size_bytes for ref in (stored.keyframe, stored.delta) if ref is not None)
        self._bus.stats.frame_bytes_up += frame_bytes
        new = attempt.new
        self.holdings[command.fragment] = Holding(head, revision, new.values, new.state, attempt.norm, fragment_ledger)
        self.fragment_ledger[command.fragment] = durable
        self._versions[command.fragment] = head.version
        await self.garbage_collector.sweep(command.fragment, *_chunks(held.head.fragment_ledger))
        former = held.head.state if held.head.state != head.state else None
        self.garbage_collector.leave(command.fragment, *_chunks(*held.head.superseded, former))
        await self._sweep(command.fragment)
        return frame_bytes

    def update_of(self, fragment: int) -> GlobalUpdate:
        """Return the rules for a fragment's values."""
        return update_of(self._run.protocol, fragment, self._outer)

    async def _begin(
        self, command: Commit, held: Holding, pseudo_gradient: Vector, state: State, *, compress: bool
    ) -> CommitAttempt:
        fragment, version, nonce = (
            command.fragment,
            command.base_version + 1,
            head_nonce(self.epoch, command.fragment_ledger),
        )
        protocol, subjects = self._run.protocol.of(fragment), self._subjects
        update = self.update_of(fragment)
        new = await off_loop(held.values.size, update.step, held.values, pseudo_gradient, state)
        uploads = {
            "fragment_ledger": (subjects.ledger_stem(fragment, nonce), Upload(Cut(command.fragment_ledger))),
        }
        at_keyframe = new.delta is None or version - held.head.key_version >= protocol.keyframe_versions
        if at_keyframe:
            uploads["keyframe"] = subjects.global_stem(fragment, version, nonce), Upload(keyframe_of(new.values))
        if at_keyframe or not update.derived:
            stored = PackedArrays(update.stored(new.state))
            uploads["state"] = subjects.state_stem(fragment, version, nonce), Upload(stored)
        if new.delta is not None:
            delta = EncodedFrame(protocol.codec_down, new.delta, compress=compress)
            uploads["delta"] = subjects.delta_stem(fragment, version, nonce), Upload(delta)
        head = subjects.head(fragment)
        return CommitAttempt(nonce, new, uploads, head, self._bus.reconnects(head))

    async def keep(self, fragment: int, fragment_ledger: bytes) -> None:
        """Make the ledger of a fragment durable with the version it has. Raises what `commit` raises."""
        held, reconnects = self.holdings[fragment], self._bus.reconnects(self._subjects.head(fragment))
        durable = parsed(fragment_ledger, FragmentLedger)
        blob = await self._bus.put_blob(
            self._subjects.ledger_stem(fragment, head_nonce(self.epoch, fragment_ledger)), fragment_ledger
        )
        head = msgspec.structs.replace(held.head, fragment_ledger=blob)
        held.revision = await self._write(head, held.revision, head_info(head), reconnects)
        held.head, held.fragment_ledger, former = head, fragment_ledger, held.head.fragment_ledger
        self.fragment_ledger[fragment] = durable
        if former is not None and former.stem != blob.stem:
            await self.garbage_collector.remove(*_chunks(former))

    def ledger(self, told: Ledger) -> Ledger:
        """Return the durable fates of this shard's ledgers, with the newest reports that learners have `told`."""
        ledger, ledgers = Ledger(), self.copied_ledgers()
        close_together(ledgers, self._run.protocol.fragments)
        for fragment_ledger in ledgers.values():
            fragment_ledger.enter_into(ledger)
        ledger.learn(told)
        return ledger

    def copied_ledgers(self) -> dict[int, FragmentLedger]:
        """Return copies of the durable ledgers for a machine to add to; ours change only with what becomes durable."""
        return {
            fragment: parsed(msgspec.json.encode(fragment_ledger), FragmentLedger)
            for fragment, fragment_ledger in self.fragment_ledger.items()
        }

    async def _write(
        self, head: Head, revision: int, info: dict[str, str | int | float | bool], reconnects: int | None = None
    ) -> int:
        """Write a head by compare-and-set; an earlier attempt whose answer was lost counts as this one.

        `reconnects` tells on which connection the blobs that it newly names were stored: on a later one the head is not
        sent.
        """
        subject, data = self._subjects.head(head.fragment), encode(head)
        try:
            return await self._bus.put_record(subject, data, expected=revision, info=info, reconnects=reconnects)
        except RecordConflict:
            there = await self._bus.get_record(subject)
            if there is None or there.data != data:
                raise
            return there.revision

    async def _sweep(self, fragment: int) -> None:
        """Remove everything of this fragment that former epochs wrote, each epoch once the head names none of it."""
        unswept = self._unswept.setdefault(fragment, set())
        if not unswept:
            return
        named = [f"{ref.stem}.0" for ref in self._protected(self.holdings[fragment].head)]
        for epoch in sorted(unswept):
            former = self._subjects.written_in(fragment, epoch)
            if not any(matches(old, chunk) for old in former for chunk in named):
                unswept.discard(epoch)
                await self.garbage_collector.remove(*former)

    def _leftovers_of(self, former: int) -> set[int]:
        """Return the tenures that may have left something, where `former` is the last one that fenced the fragment.

        Nobody writes without a fence, so there was nobody between that one and ours, but epochs may leap (`lease`).
        """
        # Founders' writes count as epoch 0. The first owner removes them later, like all that a commit supersedes.
        first = 0 if self.epoch > 1 else 1
        recent, before = (range(max(first, end - SWEPT_EPOCHS), end) for end in (self.epoch, former + 1))
        return {*recent, *before} - {self.epoch}

    def _protected(self, head: Head) -> set[BlobRef]:
        named = (*frames_of(self._subjects, head), *head.superseded, head.state, head.fragment_ledger)
        return {ref for ref in named if ref is not None}

    async def _disown(self, fragment: int, *ours: BlobRef) -> None:
        """Remove the chunks of a refused commit, unless they are visible after all.

        The answer to our write may be lost, and a later owner's fence may follow it: that head names our chunks.
        """
        try:
            record = await self._bus.get_record(self._subjects.head(fragment))
        except (BusError, BrokerUnavailable) as error:
            log.warning("garbage.left", fragment=fragment, reason=str(error))
            return
        head = None if record is None else decode(Head, record.data)
        if head is not None and not self._protected(head) & set(ours):
            await self.garbage_collector.remove(*_chunks(*ours))

    async def _fence(self, fragment: int) -> tuple[Head, int]:
        """Write the head again with our epoch, so that every compare-and-set of a former owner is refused from now on."""
        while True:
            record = await self._bus.get_record(self._subjects.head(fragment))
            had = self._versions.get(fragment)
            if record is None and had is not None:
                raise went_back(self._run, fragment, None, had)
            if record is None:
                raise BrokerUnavailable(f"fragment {fragment} lost its head", todo="was the broker's store deleted?")
            head = decode(Head, record.data)
            if had is not None and head.version < had:
                raise went_back(self._run, fragment, head.version, had)
            if head.epoch > self.epoch:
                raise RecordConflict("a later owner writes this fragment", got=head.epoch, allowed=self.epoch)
            self._unswept[fragment] = self._unswept.get(fragment, set()) | self._leftovers_of(head.epoch)
            fenced = msgspec.structs.replace(head, epoch=self.epoch)
            try:
                return fenced, await self._write(fenced, record.revision, head_info(fenced))
            except RecordConflict:
                # The former owner committed once more before our fence: fence that commit.
                continue

    async def _load(self, fragment: int) -> Holding:
        for _ in range(LOAD_ATTEMPTS):
            head, revision = await self._fence(fragment)
            try:
                return await self._read(fragment, head, revision)
            except (BlobGone, BlobCorrupt, PeerMisbehaved) as error:
                log.warning("head.unreadable", fragment=fragment, version=head.version, reason=str(error))
        raise BrokerUnavailable(
            f"fragment {fragment} cannot be read", todo="is its stream damaged? restore the broker's store"
        )

    async def _read(self, fragment: int, head: Head, revision: int) -> Holding:
        update = self.update_of(fragment)
        read = await read_version(self._bus, self._run, head, update)
        values, state = read.values, update.taken_over(read.values, read.state)
        fragment_ledger = (
            None if head.fragment_ledger is None else await self._bus.get_blob(head.fragment_ledger, LEDGER_BYTES_MAX)
        )
        if fragment_ledger is not None:
            self.fragment_ledger[fragment] = read_fragment_ledger(fragment_ledger)
        norm = await off_loop(values.size, l2_norm, values)
        return Holding(head, revision, values, state, norm, fragment_ledger)

    def _head(self, command: Commit, held: Holding, stored: StoredBlobs, attempt: CommitAttempt) -> Head:
        version, former = command.base_version + 1, held.head
        deltas: tuple[Delta, ...] = ()
        if stored.delta is not None:
            made = stored.delta
            newest = Delta(version, attempt.nonce, made.chunks, made.size_bytes, made.digest)
            deltas = continued(former.deltas, newest, at_keyframe=stored.keyframe is not None)
        head = Head(
            fragment=command.fragment,
            version=version,
            epoch=self.epoch,
            nonce=attempt.nonce,
            layout=self._run.layout.fingerprint,
            keyframe=stored.keyframe or former.keyframe,
            key_version=version if stored.keyframe is not None else former.key_version,
            digest=attempt.digest,
            deltas=deltas,
            state=stored.state or former.state,
            fragment_ledger=stored.fragment_ledger,
            included=tuple(
                Included(
                    share.key.learner,
                    share.key.incarnation,
                    share.key.push,
                    share.base_version,
                    share.tokens,
                    share.steps,
                    share.weight,
                    share.age,
                    share.scale,
                )
                for share in command.shares
            ),
            tokens_counted=at_most(
                RUN_TOKENS_MAX,
                former.tokens_counted + sum(share.credit for share in command.shares),
            ),
            tokens_merged=at_most(RUN_TOKENS_MAX, former.tokens_merged + sum(share.tokens for share in command.shares)),
            cause_id=command.cause_id,
        )
        kept = frames_of(self._subjects, head)
        gone = tuple(ref for ref in frames_of(self._subjects, former) if ref not in kept)
        return msgspec.structs.replace(head, superseded=gone)


def _chunks(*blobs: BlobRef | None) -> list[str]:
    return [f"{blob.stem}.*" for blob in blobs if blob is not None]


@dataclass(frozen=True, slots=True)
class StoredBlobs:
    """The references of all blobs that the next head names and the former one does not."""

    fragment_ledger: BlobRef
    keyframe: BlobRef | None = None
    delta: BlobRef | None = None
    state: BlobRef | None = None

    @property
    def refs(self) -> tuple[BlobRef, ...]:
        """Return all references."""
        return tuple(ref for ref in (self.fragment_ledger, self.keyframe, self.delta, self.state) if ref is not None)


@dataclass(slots=True)
class CommitAttempt:
    """A commit in progress: what is `new`, and its uploads and their stems by the name that `StoredBlobs` gives them.

    `head` is the subject of the head to come, and `reconnects` the count of its broker at the moment when all of it was
    stored. Once it is stored, `norm` and `digest` are those of its values.
    """

    nonce: str
    new: UpdatedFragment
    uploads: dict[str, tuple[str, Upload]]
    head: str
    reconnects: int
    norm: float = 0.0
    digest: str = ""
    measuring: asyncio.Task[None] | None = None

    async def stored(self, bus: Bus) -> StoredBlobs:
        """Store everything that is not stored yet or that the broker may have lost."""
        # Once for all attempts: the measuring thread goes on even if the attempt that began it fails.
        self.measuring = self.measuring or asyncio.create_task(self._measure())
        while True:
            # If one upload fails, the others go on with the next attempt.
            refs = await all_of(bus.put_blob(stem, upload) for stem, upload in self.uploads.values())
            await asyncio.shield(self.measuring)
            reconnects = bus.reconnects(self.head)
            if reconnects == self.reconnects:
                return StoredBlobs(**dict(zip(self.uploads, refs, strict=True)))
            self.reconnects = reconnects
            for _, upload in self.uploads.values():
                upload.forget()

    async def _measure(self) -> None:
        elements = self.new.values.size
        self.norm = await off_loop(elements, l2_norm, self.new.values)
        self.digest = await off_loop(elements, digest_of_values, self.new.values)
