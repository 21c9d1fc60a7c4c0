"""What a checkpoint is: *marks*, made by every shard by itself, that belong together by their number.

Mark n is made n seconds after the run was founded (a multiple of `archive.every_s`). Each shard writes what it holds at
about that time: per fragment one head with exactly the frame, outer state and books that it names. Fragments are
independent, so heads of slightly different moments make a state that the run could have been in. A mark is *complete*
when every shard has made it; only complete marks are rebuilt from.

Numbers never go back, whatever clocks do (`due_mark`): as in Lamport's clocks, a shard whose own clock is behind the
newest mark that any shard has made joins that mark, or, when it has made it already, makes the next one. So one clock
that is or was ahead carries all shards with it, and what is made later always has the higher number.

    RUN/marks/FOUNDING/MARK/SHARD.SHARDS.EPOCH.json           a manifest, written last; `.final.json` when the shard finished
    RUN/marks/FOUNDING/MARK/SHARD.SHARDS.EPOCH.open.json      empty: the shard that had finished goes on in this epoch
    RUN/shard-S/DIGEST                                        an object, named by the blake2b of its bytes

A FOUNDING is `<founded_at ms>-<generation>-<nonce>`: later foundings and rebuilt runs sort after those they came from, and
nothing of one is ever mixed with another. An owner writes under its own epoch only. At one mark the highest epoch
counts; a manifest with a lower epoch than an earlier mark has was written by an owner that did not know yet that it was
deposed, and counts as nothing. A shard that has finished makes no more marks: its final manifest stands in all later ones,
until the shard is opened again: what was drained and goes on without an archive must not pass for what it was.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field

import msgspec

from atoll.protocol.data import DataLedger
from atoll.protocol.ledger import Ledger
from atoll.wire.messages import SCHEMA, Head, Member, RunRecord

MANIFEST_BYTES_MAX = 64 << 20
INCOMPLETE_MAX = 8
LATE_MARKS = 4
_NAME = re.compile(r"marks/([^/]+)/(\d+)/(\d+)\.(\d+)\.(\d+)(\.final|\.open)?\.json$")


class CheckpointObject(msgspec.Struct, frozen=True):
    """An object by its content: blake2b-256 in hex, and size."""

    digest: str
    size_bytes: int


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
    """What one shard archived at one mark, with everything else that a rebuilt run needs.

    `ledger` holds what learners had reported (no fates: those are in the books), `tokens` their sum. `closed`: the books
    were closed for good, at the run's token target.
    """

    run: RunRecord
    shard: int
    epoch: int
    mark: int
    made_at_s: float
    tokens: int
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
        return _path(self.run, self.mark, self.shard, self.epoch, ".final" if self.final else "")


def opening(run: RunRecord, mark: int, shard: int, epoch: int) -> str:
    """Return where it is said that a shard goes on in `epoch`, from `mark` on."""
    return _path(run, mark, shard, epoch, ".open")


def _path(run: RunRecord, mark: int, shard: int, epoch: int, tail: str) -> str:
    name = f"{shard:05d}.{run.protocol.shards:05d}.{epoch:09d}{tail}.json"
    return f"{run.run}/marks/{founding(run)}/{mark:010d}/{name}"


def founding(run: RunRecord) -> str:
    """Return what foundings of one run id sort by."""
    generation = 0 if run.rebuilt is None else run.rebuilt.generation
    return f"{int(run.founded_at_s * 1000):014d}-{generation:04d}-{run.nonce}"


def number(run: RunRecord, now_s: float, every_s: int) -> int:
    """Return the mark that is due at wall time `now_s`: the same for every shard."""
    age_s = max(0.0, now_s - run.founded_at_s)
    return int(age_s // every_s) * every_s


def due_mark(run: RunRecord, shard: int, parts: Iterable[Part], now_s: float, every_s: int) -> int:
    """Return the mark that `shard` makes at wall time `now_s`, given what is in the archive; see the module docstring."""
    ours = [part for part in parts if part.founding == founding(run)]
    newest = max((part.mark for part in ours), default=0)
    by_clock = number(run, now_s, every_s)
    if by_clock >= newest:
        return by_clock
    made = any(part.mark == newest and part.shard == shard and not part.opened for part in ours)
    return newest + every_s if made else newest


def next_mark_s(run: RunRecord, now_s: float, every_s: int) -> float:
    """Return the wall time at which the next mark is due: at most `every_s` away, also before the founding."""
    return min(now_s, run.founded_at_s + number(run, now_s, every_s)) + every_s


@dataclass(frozen=True, slots=True)
class Part:
    """A manifest by its name alone; or, `opened`, none at all, but the end of a final one."""

    founding: str
    mark: int
    shard: int
    shards: int
    epoch: int
    final: bool
    opened: bool
    path: str

    @property
    def place(self) -> tuple[str, int]:
        """Return what marks are ordered by."""
        return self.founding, self.mark


@dataclass(slots=True)
class RunCheckpoint:
    """One mark: which part counts for each shard."""

    founding: str
    mark: int
    shards: int
    parts: dict[int, Part] = field(default_factory=dict)

    @property
    def place(self) -> tuple[str, int]:
        """Return what marks are ordered by."""
        return self.founding, self.mark

    @property
    def complete(self) -> bool:
        """Return whether every shard has made it."""
        return len(self.parts) == self.shards

    @property
    def missing(self) -> list[int]:
        """Return the shards that have not."""
        return [shard for shard in range(self.shards) if shard not in self.parts]


def parts_of(paths: Iterable[str]) -> list[Part]:
    """Return the manifests among `paths`; whatever is named otherwise is somebody else's."""
    found = [(_NAME.search(path), path) for path in paths]
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
        if name is not None
    ]


def marks_of(parts: Iterable[Part]) -> list[RunCheckpoint]:
    """Return the marks that `parts` make, oldest first; see the module docstring for the rules."""
    by_place: dict[tuple[str, int], list[Part]] = {}
    for part in parts:
        by_place.setdefault(part.place, []).append(part)
    marks: list[RunCheckpoint] = []
    epochs: dict[tuple[str, int], int] = {}
    finals: dict[tuple[str, int], Part] = {}
    for (origin, mark), here in sorted(by_place.items()):
        made = RunCheckpoint(origin, mark, here[0].shards)
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
        marks.append(made)
    return marks


def lagging(parts: list[Part], shard: int, origin: str) -> RunCheckpoint | None:
    """Return the oldest of the marks that are late, when `shard` has made `LATE_MARKS` since the newest complete one."""
    marks = [mark for mark in marks_of(parts) if mark.founding == origin]
    complete = max((mark.mark for mark in marks if mark.complete), default=-1)
    since = [mark for mark in marks if mark.mark > complete and shard in mark.parts]
    return since[0] if len(since) >= LATE_MARKS else None


def retired(parts: list[Part], shard: int, keep: int, origin: str) -> list[Part]:
    """Return which manifests of `shard` may go: older than the `keep` newest complete marks, and part of none of them.

    Where another shard makes no marks, no mark is complete: then the newest `keep + INCOMPLETE_MAX` of this shard stay.
    Foundings that sort after `origin`, the one that is being archived, are not ours to judge and crowd nothing out.
    """
    parts = [part for part in parts if part.founding <= origin]
    marks = marks_of(parts)
    kept = [mark for mark in marks if mark.complete][-keep:]
    used = {part.path for mark in kept for part in mark.parts.values()}
    mine = sorted((p for p in parts if p.shard == shard), key=lambda p: (p.place, p.epoch, p.final))
    newest = {part.path for part in mine[-(keep + INCOMPLETE_MAX) :]}
    oldest = kept[0].place if len(kept) == keep else ("", -1)
    return [p for p in mine if p.path not in used and (p.place < oldest or p.path not in newest)]
