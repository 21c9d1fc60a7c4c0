"""The owner of a shard keeps run checkpoints outside the broker, on schedule and in the background.

Nothing here may delay or end a commit. One task waits for the next run checkpoint. Heavy work (encoding, hashing,
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
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

import msgspec

from atoll.archive.checkpoint_store import CheckpointStore
from atoll.archive.checkpoints import CheckpointObject, Manifest, Piece, due_number, founding, next_checkpoint_s, number
from atoll.archive.object_store import open_archive
from atoll.base.clock import Clock
from atoll.base.errors import AtollError, ProtocolMisuse
from atoll.base.logs import get
from atoll.bus.interface import Bus
from atoll.bus.signed import Signatures
from atoll.codec import PackedArrays
from atoll.merge.outer import State
from atoll.protocol.data import DataLedger
from atoll.protocol.ledger import Ledger
from atoll.run.delta_chain import digest_of_values, keyframe_of
from atoll.run.record import read_members, readable
from atoll.settings import ArchiveSettings
from atoll.wire.blobs import BlobRef, Cut, Pieces, Upload, ref_of
from atoll.wire.messages import Head, RunRecord
from atoll_synchronizer.store import Holding, ShardStore

log = get(__name__)

T = TypeVar("T")

LAST_MARK_S = 30.0
SLOW_BYTES_PER_S = 10e6
LEAVING_S = 3.0


@dataclass(slots=True)
class _Written:
    """The cost of one run checkpoint: bytes and objects written, objects named again."""

    size_bytes: int = 0
    objects: int = 0
    again: int = 0


class Archivist:
    """Makes the run checkpoints of one owner's tenure; `checkpoints` and `failures` count since its beginning."""

    def __init__(
        self, checkpoint_store: CheckpointStore, run: RunRecord, shard: int, settings: ArchiveSettings, clock: Clock
    ) -> None:
        """Write nothing yet."""
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
        """Make the last run checkpoint of a tenure that ends in good order; its time limit grows with its size.

        `finished`: the shard goes no further, so this run checkpoint stands for it in all later ones.
        """
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
        known = Ledger(former=told.former.reported())
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
        """Store what a head names and the last run checkpoint lacks; return the piece. Runs in the thread.

        `derived` is the outer state, where the run derives it: then the head names that of its keyframe.
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
        """Return the object of a blob, which must be what `ref` names."""
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

    A thread that hangs on a dead store then takes no thread from the folds and encoders, and keeps no process from
    ending. The interpreter joins an executor's threads when it exits, but not daemon threads.
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
