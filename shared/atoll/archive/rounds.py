"""The rounds that shards retain, so that each round can be made once more: `atoll.archive.replay` reads it.

    RUN/rounds/FOUNDING/run.json                                    the run record
    RUN/rounds/FOUNDING/fragment-P/VERSION.EPOCH.DIGEST.json        the round that made VERSION, whose values have DIGEST;
                                                                    `.part.json` if it lacks a contribution
    RUN/rounds/FOUNDING/facts-S/EPOCH.NUMBER.jsonl                  the facts of the machine of shard S, in order: a dump in
                                                                    pieces (`atoll.protocol.recorder`)
    RUN/rounds/FOUNDING/objects/DIGEST                              frames of contributions, values and outer states

A round names its base by the digest of the base's values, so rounds form chains. Two owners of a shard may both have made a
version; the chain that leads to the newest version holds the one that became visible. Where no chain leads to the base of a
round, the round holds an anchor: values and outer state of the base. A shard writes facts and round *before* the head, so no
version is visible whose round is missing, unless the archive was away. Nothing here is ever removed by a shard.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

import msgspec

from atoll.archive.checkpoints import CheckpointObject, founding
from atoll.archive.object_store import ArchiveStore
from atoll.archive.seals import Seals, read_object
from atoll.base.errors import CheckpointError
from atoll.base.quantities import Count, Digest, Epoch, ShardNumber
from atoll.bus.interface import Signatures
from atoll.wire.messages import Contribution, Head, RunRecord

_ROUND = re.compile(r"([0-9]{1,19})\.([0-9]{1,19})\.([0-9a-f]{1,64})(\.part)?\.json")
_FACTS = re.compile(r"([0-9]{1,19})\.([0-9]{1,19})\.jsonl")


class RetainedFold(msgspec.Struct, frozen=True, kw_only=True):
    """One contribution of a round, as it was folded: its manifest, its frame (None: not retained), and what it counted."""

    manifest: Contribution
    frame: CheckpointObject | None
    weight: float
    staleness_weight: float
    age: Count
    scale: float = 1.0


class Anchor(msgspec.Struct, frozen=True):
    """A version whole: its values (a keyframe in one piece) and its outer state (packed arrays)."""

    frame: CheckpointObject
    state: CheckpointObject


class RetainedRound(msgspec.Struct, frozen=True, kw_only=True):
    """One round: the head that it was to make, the digest of its base's values, and what was folded, in order.

    `folds` lacks contributions that came as part of a region's sum: then the round is not `whole`.
    """

    shard: ShardNumber
    epoch: Epoch
    head: Head
    base_digest: Digest
    folds: tuple[RetainedFold, ...]
    anchor: Anchor | None = None

    @property
    def whole(self) -> bool:
        """Return whether everything that the head includes is there."""
        return len(self.folds) == len(self.head.included) and all(fold.frame is not None for fold in self.folds)


@dataclass(frozen=True, slots=True)
class RoundName:
    """A retained round by its name alone; when it was stored, in seconds since the epoch by the store's clock."""

    fragment: int
    version: int
    epoch: int
    digest: str
    whole: bool
    path: str
    written_at_s: float


class RoundStore:
    """The retained rounds of one founding of a run; every call may block."""

    def __init__(self, object_store: ArchiveStore, run: str, origin: str, signatures: Signatures | None = None) -> None:
        self.object_store = object_store
        self.origin = origin
        self._folder = f"{run}/rounds/{origin}"
        self._seals = Seals(object_store, run, signatures)

    @classmethod
    def of(cls, object_store: ArchiveStore, run: RunRecord, signatures: Signatures | None = None) -> RoundStore:
        """Return the store of a run's own founding."""
        return cls(object_store, run.run, founding(run), signatures)

    def _put(self, path: str, text: bytes) -> int:
        data = self._seals.closed(path, text)
        self.object_store.put(path, data)
        return len(data)

    def put_run(self, run: RunRecord) -> int:
        """Store the run record; return the bytes."""
        return self._put(f"{self._folder}/run.json", msgspec.json.encode(run))

    def run(self) -> RunRecord:
        """Return the run record; raise `CheckpointError` where nothing was retained."""
        path = f"{self._folder}/run.json"
        record = self._seals.decoded(path, RunRecord, "the run record of retained rounds")
        if fault := record.fault():
            raise CheckpointError("retained rounds of no usable run", got=f"{path}: {fault}")
        return record

    def put_object(self, data: bytes) -> CheckpointObject:
        """Store bytes under their digest."""
        found = CheckpointObject.of(data)
        self.object_store.put(self.place(found), data)
        return found

    def place(self, found: CheckpointObject) -> str:
        """Return the path of an object."""
        return f"{self._folder}/objects/{found.digest}"

    def get_object(self, found: CheckpointObject) -> bytes:
        """Return an object's bytes; raise `CheckpointError` when they are missing or others than were stored."""
        return read_object(self.object_store, self.place(found), found)

    def put_round(self, made: RetainedRound) -> int:
        """Store a round; everything that it names is stored already. Return the bytes."""
        head = made.head
        tail = "" if made.whole else ".part"
        name = f"{head.version:010d}.{made.epoch:09d}.{head.digest}{tail}.json"
        return self._put(f"{self._folder}/fragment-{head.fragment}/{name}", msgspec.json.encode(made))

    def rounds(self, fragment: int) -> list[RoundName]:
        """Return the names of a fragment's rounds, by version and epoch."""
        folder = f"{self._folder}/fragment-{fragment}"
        found = []
        for name in self.object_store.names(folder):
            fields = _ROUND.fullmatch(name.path.removeprefix(f"{folder}/"))
            if fields is not None:
                version, epoch = int(fields[1]), int(fields[2])
                found.append(
                    RoundName(fragment, version, epoch, fields[3], fields[4] is None, name.path, name.written_at_s)
                )
        return sorted(found, key=lambda each: (each.version, each.epoch, each.digest))

    def reaches(self, fragment: int, version: int, digest: str) -> bool:
        """Return whether a whole round is retained that makes this version."""
        return any(each.whole and (each.version, each.digest) == (version, digest) for each in self.rounds(fragment))

    def round(self, name: RoundName) -> RetainedRound:
        """Return a round; raise `CheckpointError` when it is not what its name says."""
        made = self._seals.decoded(name.path, RetainedRound, "a retained round")
        told = (made.head.fragment, made.head.version, made.epoch, made.head.digest, made.whole)
        if told != (name.fragment, name.version, name.epoch, name.digest, name.whole):
            raise CheckpointError("a retained round is not what its name says", got=name.path, allowed=told)
        return made

    def put_facts(self, shard: int, epoch: int, number: int, lines: Iterable[bytes]) -> int:
        """Store a piece of what a machine was told; return the bytes."""
        return self._put(f"{self._folder}/facts-{shard}/{epoch:09d}.{number:09d}.jsonl", b"\n".join(lines))

    def facts(self, shard: int, epoch: int) -> tuple[list[bytes], str]:
        """Return the lines of a tenure as far as they are whole, and why they end early, or the empty string."""
        folder = f"{self._folder}/facts-{shard}"
        lines: list[bytes] = []
        due = 0
        for name in self.object_store.names(folder):
            fields = _FACTS.fullmatch(name.path.removeprefix(f"{folder}/"))
            if fields is None or int(fields[1]) != epoch:
                continue
            if int(fields[2]) != due:
                return lines, f"piece {due} of the facts of shard {shard} in epoch {epoch} is missing"
            try:
                lines += self._seals.read(name.path).splitlines()
            except CheckpointError as error:
                return lines, f"{error.what}: {error.got}"
            due += 1
        return lines, ""

    def size_bytes(self) -> int:
        """Return the size of everything retained."""
        return sum(name.size_bytes for name in self.object_store.names(self._folder))


def foundings(object_store: ArchiveStore, run: str) -> list[str]:
    """Return the foundings of a run of which rounds are retained, oldest first."""
    prefix = f"{run}/rounds"
    return sorted({name.path.removeprefix(f"{prefix}/").split("/")[0] for name in object_store.names(prefix)})
