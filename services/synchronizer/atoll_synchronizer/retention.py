"""The owner of a shard retains its rounds in the archive, so that `atoll replay` can make each of them once more.

    fetched  ─► frame as it came ─► archive          before the machine hears that it is ready
    facts    ─► pieces of a dump ─► archive  ┐
    folds    ─► the round        ─► archive  ┘       before the head

Unlike a run checkpoint (`archivist`) this is on the way of a commit: what is visible can be replayed. That costs a write or
two per round, so it is a setting (`archive.contributions`). An archive that is away or slow costs retained rounds, never
commits: each act has `ACT_S`, and nothing is tried for `PAUSE_S` after a failure, nor while an act that was given up still
hangs in its thread. A round that lacks something says so in its name, and the next one brings an anchor.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Mapping
from typing import Final, TypeVar

import msgspec

from atoll.archive.checkpoints import CheckpointObject
from atoll.archive.object_store import open_archive
from atoll.archive.rounds import Anchor, RetainedFold, RetainedRound, RoundStore
from atoll.base.clock import Clock
from atoll.base.logs import get
from atoll.bus.signed import Signatures
from atoll.codec import PackedArrays
from atoll.protocol.events import Fact, Fold, PushKey
from atoll.protocol.recorder import fact_line, first_line
from atoll.protocol.shard import Shard
from atoll.run.delta_chain import keyframe_of
from atoll.settings import ArchiveSettings
from atoll.wire.blobs import Pieces
from atoll.wire.messages import Contribution, Head, RunRecord
from atoll_synchronizer.archivist import in_thread
from atoll_synchronizer.store import Holding

log = get(__name__)

T = TypeVar("T")

ACT_S: Final = 20.0
PAUSE_S: Final = 30.0
FACTS_MAX: Final = 1 << 17
"""Facts that wait for an archive that is away; of more than that a tenure's decisions cannot be replayed any more."""


class Retention:
    """Record of one candidacy for a shard; `failures` and `size_bytes` count since its beginning."""

    def __init__(self, rounds: RoundStore, run: RunRecord, shard: int, clock: Clock) -> None:
        """Retain nothing yet."""
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

    def folded(self, command: Fold) -> None:
        """Note that a contribution enters its fragment's round."""
        self._folds.setdefault(command.key.fragment, []).append(command)

    def unfolded(self, fragment: int) -> None:
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
            made = RetainedRound(
                shard=made.shard,
                epoch=made.epoch,
                head=made.head,
                base_digest=made.base_digest,
                folds=made.folds,
                anchor=Anchor(frame, state),
            )
        return written + self._rounds.put_round(made)

    def _flush(self) -> None:
        """Store the facts that are not stored yet. Runs in a thread."""
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
        """Return what `work` returns, from a thread, or `otherwise` if the archive is away."""
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
