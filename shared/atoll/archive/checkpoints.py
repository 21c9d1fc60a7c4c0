"""Run checkpoints: every shard writes its part by itself, and parts with the same number belong together.

Checkpoint n is due n seconds after the founding of the run (a multiple of `archive.every_s`). Each shard writes per fragment
one head with exactly the keyframe, deltas, outer state and ledger that it names. Fragments are independent, so heads of
slightly different moments form a state that the run could have been in. A checkpoint is *complete* when every shard has
written its part, and a run is rebuilt from complete ones only. Numbers never decrease, whatever the clocks do (`due_number`),
as with Lamport's clocks.

    RUN/checkpoints/FOUNDING/NUMBER/SHARD.SHARDS.EPOCH.json        a manifest, written last, behind its own digest on a line;
                                                              `.final.json` at the end
    RUN/checkpoints/FOUNDING/NUMBER/SHARD.SHARDS.EPOCH.open.json   no manifest: the finished shard goes on in this epoch
    RUN/shard-S/DIGEST                                        an object, named by the blake2b of its bytes

A FOUNDING is `<founded_at ms>-<generation>-<nonce>`: later foundings and rebuilt runs sort after their sources. Names are all
that the rules below look at, and whoever can write to the archive can choose names. So only parts that were read and believed
are given to them (`atoll.archive.checkpoint_store`).

Within one checkpoint the highest epoch counts. A manifest with a lower epoch than an earlier checkpoint has comes from an owner
that did not know it was deposed: it is ignored. A finished shard's final manifest counts in all later checkpoints until it is
reopened.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable
from dataclasses import dataclass, field

import msgspec

from atoll.base.quantities import (
    COUNT_MAX,
    COUNTED_SHARE,
    Count,
    Epoch,
    ObjectDigest,
    RunTokens,
    Seconds,
    ShardNumber,
    SizeBytes,
)
from atoll.codec import KEYFRAME, frame_bytes
from atoll.merge.global_update import state_bytes_max
from atoll.protocol.data import DataLedger
from atoll.protocol.ledger import LEDGER_BYTES_MAX, Ledger
from atoll.wire.messages import SCHEMA, Head, Member, RunRecord

MANIFEST_BYTES_MAX = 64 << 20
INCOMPLETE_MAX = 8
LATE_CHECKPOINTS = 4
_NAME = re.compile(
    r"[^/]+/checkpoints/([0-9]+-[0-9]+-[A-Za-z0-9_-]+)/([0-9]{1,19})/"
    r"([0-9]{1,19})\.([0-9]{1,19})\.([0-9]{1,19})(\.final|\.open)?\.json"
)


class CheckpointObject(msgspec.Struct, frozen=True):
    """An object by its content: blake2b-256 in hex, and size."""

    digest: ObjectDigest
    size_bytes: SizeBytes

    @classmethod
    def of(cls, data: bytes) -> CheckpointObject:
        """Return the name of these bytes."""
        return cls(digest_of_bytes(data), len(data))


def digest_of_bytes(data: bytes) -> str:
    """Return the digest by which an archive names bytes: blake2b-256 in hex."""
    return hashlib.blake2b(data, digest_size=32).hexdigest()


class Piece(msgspec.Struct, frozen=True, kw_only=True):
    """One fragment: its head, and the bytes of everything that the head names."""

    head: Head
    frame: CheckpointObject
    state: CheckpointObject | None = None
    fragment_ledger: CheckpointObject | None = None

    @property
    def objects(self) -> tuple[CheckpointObject, ...]:
        """Return the objects that there are."""
        return tuple(found for found in (self.frame, self.state, self.fragment_ledger) if found is not None)


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """The part of one shard in one checkpoint, with everything else that a rebuilt run needs.

    `ledger` holds what learners had reported (no fates: those are in the ledgers), `tokens` their sum. `closed`: the ledgers
    were closed for good, at the run's token target.
    """

    run: RunRecord
    shard: ShardNumber
    epoch: Epoch
    number: Count
    made_at_s: Seconds
    tokens: RunTokens
    pieces: tuple[Piece, ...]
    ledger: Ledger
    members: tuple[Member, ...] = ()
    data: DataLedger | None = None
    final: bool = False
    closed: bool = False
    schema: int = SCHEMA

    @property
    def objects(self) -> dict[str, CheckpointObject]:
        """Return every object that the manifest names, by digest."""
        return {found.digest: found for piece in self.pieces for found in piece.objects}

    @property
    def path(self) -> str:
        """Return where the manifest lies."""
        return _path(self.run, self.number, self.shard, self.epoch, ".final" if self.final else "")


def oversized(manifest: Manifest) -> str:
    """Return which object is larger than the run's layout allows, or the empty string: nobody reads it then."""
    sizes = manifest.run.layout.fragment_sizes()
    for piece in manifest.pieces:
        elements = sizes[piece.head.fragment]
        for found, bytes_max in (
            (piece.frame, frame_bytes(elements, KEYFRAME)),
            (piece.state, state_bytes_max(elements)),
            (piece.fragment_ledger, LEDGER_BYTES_MAX),
        ):
            if found is not None and found.size_bytes > bytes_max:
                return f"{found.size_bytes} bytes of fragment {piece.head.fragment}, at most {bytes_max}"
    return ""


def opening(run: RunRecord, number: int, shard: int, epoch: int) -> str:
    """Return the path that says: this shard goes on in `epoch`, from checkpoint `number` on."""
    return _path(run, number, shard, epoch, ".open")


def _path(run: RunRecord, number: int, shard: int, epoch: int, tail: str) -> str:
    name = f"{shard:05d}.{run.protocol.shards:05d}.{epoch:09d}{tail}.json"
    return f"{run.run}/checkpoints/{founding(run)}/{number:010d}/{name}"


def founding(run: RunRecord) -> str:
    """Return the text by which foundings of one run id sort."""
    generation = 0 if run.rebuilt is None else run.rebuilt.generation
    return f"{int(run.founded_at_s * 1000):014d}-{generation:04d}-{run.nonce}"


def number(run: RunRecord, now_s: float, every_s: int) -> int:
    """Return the checkpoint that is due at wall time `now_s`: the same for every shard."""
    age_s = max(0.0, now_s - run.founded_at_s)
    return int(age_s // every_s) * every_s


def due_number(run: RunRecord, shard: int, parts: Iterable[Part], now_s: float, every_s: int) -> int:
    """Return the number of the checkpoint that `shard` makes at wall time `now_s`, given the `parts` in the archive."""
    ours = [part for part in parts if part.founding == founding(run)]
    newest = max((part.number for part in ours if part.number <= COUNT_MAX // COUNTED_SHARE), default=0)
    by_clock = number(run, now_s, every_s)
    if by_clock >= newest:
        return by_clock
    made = any(part.number == newest and part.shard == shard and not part.opened for part in ours)
    return newest + every_s if made else newest


def next_checkpoint_s(run: RunRecord, now_s: float, every_s: int) -> float:
    """Return the wall time at which the next checkpoint is due: at most `every_s` away, also before the founding."""
    return min(now_s, run.founded_at_s + number(run, now_s, every_s)) + every_s


@dataclass(frozen=True, slots=True)
class Part:
    """A manifest by its name alone; or, `opened`, none at all, but the end of a final one."""

    founding: str
    number: int
    shard: int
    shards: int
    epoch: int
    final: bool
    opened: bool
    path: str

    @property
    def place(self) -> tuple[str, int]:
        """Return what checkpoints are ordered by."""
        return self.founding, self.number


@dataclass(slots=True)
class RunCheckpoint:
    """One checkpoint: which part counts for each shard."""

    founding: str
    number: int
    shards: int
    parts: dict[int, Part] = field(default_factory=dict)

    @property
    def place(self) -> tuple[str, int]:
        """Return what checkpoints are ordered by."""
        return self.founding, self.number

    @property
    def complete(self) -> bool:
        """Return whether every shard has made it."""
        return len(self.parts) == self.shards

    @property
    def missing(self) -> list[int]:
        """Return the shards that have not."""
        return [shard for shard in range(self.shards) if shard not in self.parts]


def parts_of(paths: Iterable[str]) -> list[Part]:
    """Return the manifests among `paths`; other names belong to other programs."""
    found = [(_NAME.fullmatch(path), path) for path in paths]
    return [
        Part(
            name[1],
            int(name[2]),
            int(name[3]),
            int(name[4]),
            int(name[5]),
            name[6] == ".final",
            name[6] == ".open",
            path,
        )
        for name, path in found
        if name is not None and max(int(name[2]), int(name[5])) <= COUNT_MAX
    ]


def checkpoints_of(parts: Iterable[Part]) -> list[RunCheckpoint]:
    """Return the checkpoints that `parts` make, oldest first; see the module docstring for the rules."""
    by_place: dict[tuple[str, int], list[Part]] = {}
    for part in parts:
        by_place.setdefault(part.place, []).append(part)
    checkpoints: list[RunCheckpoint] = []
    epochs: dict[tuple[str, int], int] = {}
    finals: dict[tuple[str, int], Part] = {}
    for (origin, due), here in sorted(by_place.items()):
        made = RunCheckpoint(origin, due, here[0].shards)
        for part in sorted(here, key=lambda p: (p.shard, p.epoch, p.final)):
            key = (origin, part.shard)
            if part.epoch < epochs.get(key, 0) or part.shard >= made.shards:
                continue
            epochs[key] = part.epoch
            finals.pop(key, None)
            if part.opened:
                continue
            made.parts[part.shard] = part
            if part.final:
                finals[key] = part
        for (where, shard), part in finals.items():
            if where == origin:
                made.parts.setdefault(shard, part)
        checkpoints.append(made)
    return checkpoints


def lagging(parts: list[Part], shard: int, origin: str) -> RunCheckpoint | None:
    """Return the oldest late checkpoint, once `shard` has made `LATE_CHECKPOINTS` since the newest complete one."""
    checkpoints = [checkpoint for checkpoint in checkpoints_of(parts) if checkpoint.founding == origin]
    complete = max((checkpoint.number for checkpoint in checkpoints if checkpoint.complete), default=-1)
    since = [checkpoint for checkpoint in checkpoints if checkpoint.number > complete and shard in checkpoint.parts]
    return since[0] if len(since) >= LATE_CHECKPOINTS else None


def retired(parts: list[Part], shard: int, keep: int, origin: str, refused: Iterable[Part] = ()) -> list[Part]:
    """Return which manifests of `shard` may go: older than the `keep` newest complete checkpoints, and part of none of them.

    If another shard writes no parts, no checkpoint is complete: then the newest `keep + INCOMPLETE_MAX` of this shard stay.
    Foundings that sort after `origin` (the one being archived) are ignored. A `refused` one counts for nothing; it goes
    once it is older than everything that is kept.
    """
    parts = [part for part in parts if part.founding <= origin]
    checkpoints = checkpoints_of(parts)
    kept = [checkpoint for checkpoint in checkpoints if checkpoint.complete][-keep:]
    used = {part.path for checkpoint in kept for part in checkpoint.parts.values()}
    mine = sorted((p for p in parts if p.shard == shard), key=lambda p: (p.place, p.epoch, p.final))
    newest = {part.path for part in mine[-(keep + INCOMPLETE_MAX) :]}
    oldest = kept[0].place if len(kept) == keep else ("", -1)
    old = [p for p in refused if p.shard == shard and p.place < oldest]
    return old + [p for p in mine if p.path not in used and (p.place < oldest or p.path not in newest)]
