"""The archive of a shard's owner: run checkpoints outside the broker, in the background, and its retained rounds.

Nothing of an `Archivist` may delay or end a commit. One task waits for the next run checkpoint. Heavy work (encoding, hashing,
writing) runs in a thread of its own, one fragment at a time. The archivist takes a fragment as the store holds it
between two commits: the head, arrays that no code changes, and the frozen ledger. It encodes the fragment again, which
must give the digests that the head names. An object that has not changed since the last run checkpoint is named again,
not written again. The archivist takes the reports of the learners after all fragments, so that they are never older
than the ledgers.

A full or missing archive costs a run checkpoint, never a commit. The archivist counts and logs the failure, and tries
again at the next one.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import partial
from typing import Final, TypeVar

import msgspec

from atoll.archive.checkpoint_store import CheckpointStore
from atoll.archive.checkpoints import CheckpointObject, Manifest, Piece, due_number, founding, next_checkpoint_s, number
from atoll.archive.object_store import open_archive
from atoll.archive.rounds import Anchor, RetainedFold, RetainedRound, RoundStore
from atoll.base.clock import Clock
from atoll.base.errors import AtollError, ProtocolMisuse
from atoll.base.logs import get
from atoll.bus.interface import Bus, Signatures
from atoll.codec import PackedArrays
from atoll.merge.outer import State
from atoll.protocol.data import DataLedger
from atoll.protocol.events import Fact, Fold, PushKey
from atoll.protocol.ledger import Ledger
from atoll.protocol.recorder import fact_line, first_line
from atoll.protocol.shard import Shard
from atoll.run.delta_chain import digest_of_values, keyframe_of
from atoll.run.record import read_members, readable
from atoll.settings.sections import ArchiveSettings
from atoll.wire.blobs import BlobRef, Cut, Pieces, Upload, ref_of
from atoll.wire.messages import Contribution, Head, RunRecord
from atoll_synchronizer.store import Holding, ShardStore

log = get(__name__)
T = TypeVar("T")
LAST_MARK_S = 30.0
SLOW_BYTES_PER_S = 10e6
LEAVING_S = 3.0
ACT_S: Final = 20.0
PAUSE_S: Final = 30.0
FACTS_MAX: Final = 1 << 17
"""Facts that wait for an archive that is away; of more than that a tenure's decisions cannot be replayed any more."""


@dataclass(slots=True)
class _Written:
    size_bytes: int = 0
    objects: int = 0
    again: int = 0


class Archivist:
    """Makes the run checkpoints of one owner's tenure; `checkpoints` and `failures` count since its beginning."""

    def __init__(
        self, checkpoint_store: CheckpointStore, run: RunRecord, shard: int, settings: ArchiveSettings, clock: Clock
    ) -> None:
        self._checkpoint_store = checkpoint_store
        self._run = run
        self._shard = shard
        self._settings = settings
        self._clock = clock
        self._last: dict[int, Piece] = {}
        self._busy = asyncio.Lock()
        self.checkpoints = 0
        self.failures = 0

    async def keep(self, bus: Bus, store: ShardStore, reports: Callable[[], Ledger]) -> None:
        """Make a run checkpoint now, and then one whenever it is due."""
        while True:
            await self.checkpoint(bus, store, reports)
            now_s = self._clock.wall()
            await asyncio.sleep(max(0.05, next_checkpoint_s(self._run, now_s, self._settings.every_s) - now_s))

    async def close(self, bus: Bus, store: ShardStore, reports: Ledger, *, finished: bool) -> None:
        """Make the last run checkpoint of a tenure that ends; one of a `finished` shard stands for it in all later ones."""
        heads = [held.head for held in store.holdings.values()]
        refs = [ref for head in heads for ref in (head.keyframe, head.state, head.fragment_ledger) if ref is not None]
        patience_s = LEAVING_S
        if finished:
            patience_s = LAST_MARK_S + sum(ref.size_bytes for ref in refs) / SLOW_BYTES_PER_S
        try:
            async with asyncio.timeout(patience_s):
                await self.checkpoint(bus, store, lambda: reports, final=finished)
        except TimeoutError:
            self.failures += 1
            log.warning(
                "archive.checkpoint_failed",
                final=finished,
                failures=self.failures,
                reason=f"the last checkpoint was not durable after {patience_s:.0f} s; the one before it stands",
            )

    async def checkpoint(
        self, bus: Bus, store: ShardStore, reports: Callable[[], Ledger], *, final: bool = False
    ) -> bool:
        """Make the run checkpoint that is due now; return whether it is durable. Raises nothing."""
        began_s = self._clock.monotonic()
        due = number(self._run, self._clock.wall(), self._settings.every_s)
        try:
            async with self._busy:
                parts = await in_thread(self._checkpoint_store.believed)
                due = due_number(self._run, self._shard, parts, self._clock.wall(), self._settings.every_s)
                if not self.checkpoints:
                    await in_thread(
                        partial(self._checkpoint_store.reopen, self._run, parts, due, self._shard, store.epoch)
                    )
                written = await self._make(bus, store, reports, due, final=final)
        except Exception as error:  # noqa: BLE001  (whatever ails the archive, the shard goes on)
            self.failures += 1
            log.warning("archive.checkpoint_failed", checkpoint=due, failures=self.failures, reason=str(error))
            return False
        self.checkpoints += 1
        log.info(
            "archive.checkpointed",
            checkpoint=due,
            final=final,
            objects=written.objects,
            again=written.again,
            bytes=written.size_bytes,
            took_s=round(self._clock.monotonic() - began_s, 4),
        )
        return True

    async def _make(
        self, bus: Bus, store: ShardStore, reports: Callable[[], Ledger], due: int, *, final: bool
    ) -> _Written:
        written = _Written()
        pieces: dict[int, Piece] = {}
        # An object that has been deleted meanwhile is written again.
        there = await in_thread(partial(self._checkpoint_store.objects, self._shard))
        for fragment, held in store.holdings.items():
            # Taken here without an await in between: one head and exactly what it names.
            taken = replace(held)
            update = store.update_of(fragment)
            state = update.stored(taken.state)
            pieces[fragment] = await in_thread(
                partial(self._archive, taken, state if update.derived else None, there, written)
            )
        told = reports()
        known = Ledger(former=told.former.without_fates())
        known.learn(told)
        target = self._run.protocol.tokens_target
        subjects = self._run.subjects
        data = await bus.get_record(subjects.data)
        manifest = Manifest(
            run=self._run,
            shard=self._shard,
            epoch=store.epoch,
            number=due,
            made_at_s=self._clock.wall(),
            tokens=known.run_tokens,
            pieces=tuple(pieces[fragment] for fragment in self._run.protocol.fragments_of(self._shard)),
            ledger=known,
            members=tuple(member for member in (await read_members(bus, subjects)).values() if member is not None),
            data=None if data is None else readable(DataLedger, data),
            final=final,
            closed=final and bool(target) and known.run_tokens >= target,
        )
        await in_thread(partial(self._publish, manifest))
        self._last = pieces
        return written

    def _archive(self, held: Holding, derived: State | None, there: set[CheckpointObject], written: _Written) -> Piece:
        """Store what a head names and the last run checkpoint lacks; `derived` is the outer state, where the run derives it.

        Then the head names that of its keyframe. Runs in the thread.
        """
        head, last = held.head, self._last.get(held.head.fragment)
        known: dict[BlobRef, CheckpointObject] = {}
        if last is not None:
            pairs = (
                (last.head.keyframe, last.frame),
                (last.head.state, last.state),
                (last.head.fragment_ledger, last.fragment_ledger),
            )
            known = {ref: found for ref, found in pairs if ref is not None and found in there}

        def stored(ref: BlobRef, pieces: Callable[[], Pieces]) -> CheckpointObject:
            if ref in known:
                written.again += 1
                return known[ref]
            return self._store(ref, pieces(), written)

        kept = held.state if derived is None else derived
        if head.key_version != head.version:
            head = self._whole(held, derived)
        return Piece(
            head=head,
            frame=stored(head.keyframe, lambda: keyframe_of(held.values)),
            state=None if head.state is None else stored(head.state, lambda: PackedArrays(kept)),
            fragment_ledger=None
            if head.fragment_ledger is None
            else stored(head.fragment_ledger, lambda: Cut(held.fragment_ledger or b"")),
        )

    def _whole(self, held: Holding, derived: State | None) -> Head:
        """Return a head that names its values as a keyframe, for a run checkpoint needs no deltas.

        `derived` is the outer state of the values, where the head names that of an earlier keyframe.
        """
        head, collision_free = held.head, held.head.keyframe.collision_free
        values = digest_of_values(held.values)
        if values != head.digest:
            raise ProtocolMisuse("a shard holds other values than its head says", got=values, allowed=head.digest)
        subjects, named = self._run.subjects, (head.fragment, head.version, head.nonce)
        keyframe = ref_of(keyframe_of(held.values), subjects.global_stem(*named), collision_free=collision_free)
        state = head.state
        if derived is not None:
            state = ref_of(PackedArrays(derived), subjects.state_stem(*named), collision_free=collision_free)
        return msgspec.structs.replace(head, keyframe=keyframe, key_version=head.version, deltas=(), state=state)

    def _store(self, ref: BlobRef, pieces: Pieces, written: _Written) -> CheckpointObject:
        made = Upload(pieces)
        made.collision_free = ref.collision_free
        data = b"".join(made.make(number) for number in range(len(pieces)))
        digest = made.ref(ref.stem).digest
        if digest != ref.digest:
            raise ProtocolMisuse("a shard holds something else than its head names", got=digest, allowed=ref)
        written.objects += 1
        written.size_bytes += len(data)
        return self._checkpoint_store.put_object(self._shard, data)

    def _publish(self, manifest: Manifest) -> None:
        """Make the run checkpoint visible, then tidy; failed tidying is repeated after the next. Runs in the thread."""
        self._checkpoint_store.publish(manifest)
        try:
            if not self.checkpoints:
                self._checkpoint_store.sweep(self._shard)
            self._checkpoint_store.retire(self._shard, self._settings.keep, founding(self._run))
        except AtollError as error:
            log.warning("archive.untidy", reason=str(error))


async def in_thread(work: Callable[[], T]) -> T:
    """Return what `work` returns, from a thread of its own that nothing waits for at exit.

    A thread that hangs on a dead store takes none from folds and encoders: the interpreter joins an executor's, but no daemon.
    """
    done: Future[T] = Future()

    def act() -> None:
        if not done.set_running_or_notify_cancel():
            return
        try:
            done.set_result(work())
        except BaseException as error:  # noqa: BLE001  (raised again where the result is awaited)
            done.set_exception(error)

    threading.Thread(target=act, name="archive", daemon=True).start()
    return await asyncio.wrap_future(done)


def make_archivist(
    settings: ArchiveSettings, run: RunRecord, shard: int, clock: Clock, signatures: Signatures | None = None
) -> Archivist | None:
    """Return the archivist of this shard, or None if no archive is set; with `signatures` it signs what it archives."""
    if not settings.url or not settings.every_s:
        return None
    return Archivist(CheckpointStore(open_archive(settings.url), run.run, signatures), run, shard, settings, clock)


class Retention:
    """The retained rounds of one candidacy, so that `atoll replay` can make each of them once more.

        fetched  ─► frame as it came ─► archive          before the machine hears that it is ready
        facts    ─► pieces of a dump ─► archive  ┐
        folds    ─► the round        ─► archive  ┘       before the head

    Unlike a run checkpoint this is on the way of a commit, so it is a setting (`archive.contributions`). An archive that is
    away or slow costs retained rounds, never commits: each act has `ACT_S`, and nothing is tried for `PAUSE_S` after a
    failure, nor while an act that was given up still hangs in its thread. A round that lacks something says so in its name,
    and the next one brings an anchor. `failures` and `size_bytes` count since the beginning of the candidacy.
    """

    def __init__(self, rounds: RoundStore, run: RunRecord, shard: int, clock: Clock) -> None:
        self._rounds = rounds
        self._run = run
        self._shard = shard
        self._clock = clock
        self._epoch = 0
        self._held: dict[PushKey, tuple[Contribution, CheckpointObject | None]] = {}
        self._folds: dict[int, list[Fold]] = {}
        self._reached: dict[int, str] = {}
        self._kept: dict[int, str] = {}
        self._first: bytes | None = None
        self._facts: list[Fact] = []
        self._pieces = 0
        self._flushing = threading.Lock()
        self._dropped = False
        self._away_until_s = 0.0
        self._running: set[object] = set()  # acts at work in their threads, and those of them that nobody waits for
        self._given_up: set[object] = set()
        self._named = False
        self.failures = 0
        self.size_bytes = 0

    def begin(self, epoch: int, machine: Shard) -> None:
        """Begin the tenure `epoch` of a machine that was not told anything yet."""
        self._epoch = epoch
        self._first = first_line(f"shard-{self._shard}", "its rounds are retained", machine)

    def fact(self, fact: Fact) -> None:
        """Retain what the machine is about to be told."""
        if self._dropped or (self._first is None and not self._pieces):
            return
        self._facts.append(fact)
        if len(self._facts) > FACTS_MAX:
            self._facts, self._dropped = [], True
            log.warning("rounds.facts_dropped", facts=FACTS_MAX, todo="is the archive away? see rounds.not_retained")

    async def contribution(self, key: PushKey, manifest: Contribution, pieces: Mapping[int, bytes]) -> None:
        """Retain a contribution as it came, in pieces by number."""
        data = b"".join(pieces[number] for number in sorted(pieces))
        found = await self._act("a contribution", lambda: self._rounds.put_object(data), None)
        self.size_bytes += 0 if found is None else found.size_bytes
        self._held[key] = msgspec.structs.replace(manifest, frame=b""), found

    def note_fold(self, command: Fold) -> None:
        """Note that a contribution enters its fragment's round."""
        self._folds.setdefault(command.key.fragment, []).append(command)

    def note_unfold(self, fragment: int) -> None:
        """Note that nothing of the fragment's round counts."""
        self._folds.pop(fragment, None)

    def forget(self, key: PushKey) -> None:
        """Forget a contribution that is settled."""
        self._held.pop(key, None)

    def take_folds(self, fragment: int) -> tuple[RetainedFold, ...]:
        """Return what was folded into the fragment's round, and begin the next one."""
        found = []
        for fold in self._folds.pop(fragment, []):
            manifest, frame = self._held.get(fold.key, (None, None))
            if manifest is not None:
                found.append(
                    RetainedFold(
                        manifest=manifest,
                        frame=frame,
                        weight=fold.weight,
                        staleness_weight=fold.staleness_weight,
                        age=fold.age,
                        scale=fold.scale,
                    )
                )
        return tuple(found)

    async def round(self, head: Head, base: Holding, folds: tuple[RetainedFold, ...]) -> None:
        """Retain the round that is about to make `head` on `base`; a repeated attempt is retained once."""
        fragment = head.fragment
        if self._kept.get(fragment) == head.nonce:
            return
        began_s, before_bytes = self._clock.monotonic(), self.size_bytes
        await self._act("facts", self._flush, None)
        made = RetainedRound(shard=self._shard, epoch=self._epoch, head=head, base_digest=base.head.digest, folds=folds)
        written = await self._act("a round", lambda: self._write(made, base), 0)
        if not written:
            self._reached.pop(fragment, None)
            return
        self.size_bytes += written
        self._kept[fragment] = head.nonce
        if made.whole:
            self._reached[fragment] = head.digest
        else:
            self._reached.pop(fragment, None)
        log.info(
            "round.retained",
            fragment=fragment,
            version=head.version,
            contributions=len(folds),
            whole=made.whole,
            bytes=self.size_bytes - before_bytes + sum(fold.frame.size_bytes for fold in folds if fold.frame),
            bytes_of_tenure=self.size_bytes,
            took_s=round(self._clock.monotonic() - began_s, 4),
        )

    def _write(self, made: RetainedRound, base: Holding) -> int:
        """Store a round, with an anchor if nothing leads to its base; return the bytes. Runs in a thread."""
        head, written = base.head, 0
        if not self._named:
            written += self._rounds.put_run(self._run)
            self._named = True
        if self._reached.get(head.fragment) != head.digest and not self._rounds.reaches(
            head.fragment, head.version, head.digest
        ):
            frame = self._rounds.put_object(_whole(keyframe_of(base.values)))
            state = self._rounds.put_object(_whole(PackedArrays(base.state)))
            written += frame.size_bytes + state.size_bytes
            made = msgspec.structs.replace(made, anchor=Anchor(frame, state))
        return written + self._rounds.put_round(made)

    def _flush(self) -> None:
        # An act that was given up after `ACT_S` may still be at work: pieces must not overlap.
        with self._flushing:
            first, facts = self._first, list(self._facts)
            if self._dropped or (first is None and not facts):
                return
            lines = [fact_line(fact) for fact in facts]
            self.size_bytes += self._rounds.put_facts(
                self._shard, self._epoch, self._pieces, lines if first is None else [first, *lines]
            )
            self._pieces += 1
            self._first = None
            del self._facts[: len(facts)]

    async def _act(self, what: str, work: Callable[[], T], otherwise: T) -> T:
        self._given_up &= self._running
        if self._given_up or self._clock.monotonic() < self._away_until_s:
            self.failures += 1
            return otherwise
        act = object()

        def working() -> T:
            self._running.add(act)
            try:
                return work()
            finally:
                self._running.discard(act)

        try:
            async with asyncio.timeout(ACT_S):
                return await in_thread(working)
        except Exception as error:  # noqa: BLE001  (whatever ails the archive, the shard goes on)
            self._given_up.add(act)
            self.failures += 1
            self._away_until_s = self._clock.monotonic() + PAUSE_S
            reason = str(error) or f"the archive did not answer within {ACT_S:.0f} s"
            log.warning("rounds.not_retained", what=what, failures=self.failures, reason=reason, again_in_s=PAUSE_S)
            return otherwise


def _whole(pieces: Pieces) -> bytes:
    return b"".join(bytes(pieces.piece(number)) for number in range(len(pieces)))


def make_retention(
    settings: ArchiveSettings, run: RunRecord, shard: int, clock: Clock, signatures: Signatures | None = None
) -> Retention | None:
    """Return what retains this shard's rounds, or None if no archive is set or it retains none."""
    if not settings.url or not settings.contributions:
        return None
    return Retention(RoundStore.of(open_archive(settings.url), run, signatures), run, shard, clock)
