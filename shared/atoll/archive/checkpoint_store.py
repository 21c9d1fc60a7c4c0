"""One run's checkpoints in an object store. A crash between any two writes leaves complete checkpoints complete.

A run checkpoint is written in this order: objects; the manifest; then retired manifests are removed; then the objects that only
those named. An object's name is the digest of its content, and an object belongs to one shard, so two shards never write or
remove the same one. A new owner removes objects that no manifest names, once they are so old that no writer can still be about
to name them. While a manifest may be one that only another version of Atoll can read, no object is removed.

A manifest of a locked run is signed for its name by a shard, and a reader with an identity takes no other. Whoever has the
store can remove a checkpoint, and not change one. A manifest that is unreadable, or not believed, counts for nothing: not for
the numbers of checkpoints, not for what is complete, and not for what is old. It is told once. Every call here may block.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterable
from dataclasses import dataclass

import msgspec

from atoll.archive.checkpoints import (
    MANIFEST_BYTES_MAX,
    CheckpointObject,
    Manifest,
    Part,
    RunCheckpoint,
    checkpoints_of,
    founding,
    lagging,
    opening,
    oversized,
    parts_of,
    retired,
)
from atoll.archive.object_store import ArchiveStore, Name
from atoll.archive.seals import Seals, read_object
from atoll.base.errors import CheckpointError, ProtocolMisuse, on_one_line
from atoll.base.logs import get
from atoll.bus.interface import Signatures
from atoll.wire.messages import SCHEMA, RunRecord

log = get(__name__)

ORPHAN_AGE_S = 6 * 3600.0
OPENING_BYTES_MAX = 4096
REASONS_TOLD = 3
REFUSED_TOLD = 16
_DIGEST = re.compile("[0-9a-f]{64}")


@dataclass(frozen=True, slots=True)
class Look:
    """One look at a part: the digests that it needs (None: it may need any), and why it does not count, if so."""

    part: Part
    objects: frozenset[str] | None
    fault: CheckpointError | None = None


class CheckpointStore:
    """The run checkpoints of `run` in an object store."""

    def __init__(self, object_store: ArchiveStore, run: str, signatures: Signatures | None = None) -> None:
        """Read nothing yet. With `signatures` manifests are signed, and those that nobody signed are not believed."""
        self.object_store = object_store
        self.run = run
        self._seals = Seals(object_store, run, signatures)
        self._seen: dict[Name, Look] = {}
        self._published: str | None = None

    # --- writing ----------------------------------------------------------------------------------------------------

    def put_object(self, shard: int, data: bytes) -> CheckpointObject:
        """Store an object durably and return its name."""
        found = CheckpointObject.of(data)
        self.object_store.put(self._object(shard, found.digest), data)
        return found

    def objects(self, shard: int) -> set[CheckpointObject]:
        """Return the objects of one shard that are there."""
        return {CheckpointObject(digest, name.size_bytes) for digest, name in self._stored(shard)}

    def _stored(self, shard: int) -> list[tuple[str, Name]]:
        folder = f"{self.run}/shard-{shard}/"
        found = [(name.path.removeprefix(folder), name) for name in self.object_store.names(folder[:-1])]
        return [(digest, name) for digest, name in found if _DIGEST.fullmatch(digest)]

    def publish(self, manifest: Manifest) -> None:
        """Make one shard's part of a checkpoint visible; every object that it names is stored already."""
        data = self._seals.closed(manifest.path, msgspec.json.encode(manifest))
        if len(data) > MANIFEST_BYTES_MAX:
            raise ProtocolMisuse(
                "a manifest is larger than any reader takes", got=len(data), allowed=MANIFEST_BYTES_MAX
            )
        self._put(manifest.path, data)
        self._published = manifest.path

    def reopen(self, run: RunRecord, parts: list[Part], number: int, shard: int, epoch: int) -> None:
        """Record that `shard` goes on from checkpoint `number` in `epoch` if `parts` hold a final manifest of a former one."""
        origin = founding(run)
        if any(p.final and (p.founding, p.shard) == (origin, shard) and p.epoch < epoch for p in parts):
            path = opening(run, number, shard, epoch)
            self._put(path, self._seals.signed(path, b"{}"))

    def endorse(self, part: Part) -> None:
        """Sign a part that can be read, whoever wrote it; raise `CheckpointError` if it cannot be read."""
        if part.opened:
            self._put(part.path, self._seals.signed(part.path, b"{}"))
        else:
            self.publish(CheckpointStore(self.object_store, self.run).read(part))

    def _put(self, path: str, data: bytes) -> None:
        self.object_store.put(path, data)
        # By a coarse clock, what we replaced may look the same from outside.
        self._seen = {name: seen for name, seen in self._seen.items() if name.path != path}

    def retire(self, shard: int, keep: int, origin: str) -> int:
        """Remove what `keep` complete checkpoints of the founding `origin` do not need of one shard; return their number."""
        found = self._look()
        parts = [seen.part for seen in found if seen.fault is None]
        self._say_what_is_wrong(parts, shard, origin)
        going = retired(parts, shard, keep, origin, [seen.part for seen in found if seen.fault is not None])
        gone = {part.path for part in going}
        if not gone:
            return 0
        staying = [seen for seen in found if seen.part.shard == shard and seen.part.path not in gone]
        candidates = {digest for seen in found if seen.part.path in gone for digest in seen.objects or ()}
        needed = _needed(staying)
        self.object_store.remove(sorted(gone))
        garbage = [] if needed is None else sorted(candidates - needed)
        self.object_store.remove([self._object(shard, digest) for digest in garbage])
        return len(garbage)

    def _say_what_is_wrong(self, parts: list[Part], shard: int, origin: str) -> None:
        counting = {part.path for checkpoint in checkpoints_of(parts) for part in checkpoint.parts.values()}
        if self._published is not None and self._published not in counting:
            log.warning(
                "archive.not_counted",
                path=self._published,
                todo="the checkpoint that this shard has just made does not count: it is gone, or not believed, or another "
                "owner of the shard has made one. `atoll archive show` lists what is there; who else can write there?",
            )
        late = lagging(parts, shard, origin)
        if late is not None:
            log.warning(
                "archive.incomplete",
                since=late.number,
                missing=late.missing,
                todo="no checkpoint is complete since: do all shards write to this archive, with one archive.every_s?",
            )
        later = max((part.founding for part in parts), default=origin)
        if later > origin:
            log.warning(
                "archive.foreign",
                ours=origin,
                newest=later,
                todo="the archive holds checkpoints of a founding that counts as newer: --restore would go back to those. Was "
                "a founder's clock wrong? move them away, or archive to another place",
            )

    def sweep(self, shard: int) -> int:
        """Remove old objects of one shard that no manifest names; return how many: none while one may name any."""
        needed = _needed([seen for seen in self._look() if seen.part.shard == shard])
        if needed is None:
            return 0
        before_s = time.time() - ORPHAN_AGE_S
        garbage = [
            name.path for digest, name in self._stored(shard) if name.written_at_s < before_s and digest not in needed
        ]
        self.object_store.remove(garbage)
        return len(garbage)

    # --- reading ----------------------------------------------------------------------------------------------------

    def parts(self) -> list[Part]:
        """Return every manifest's name, whoever wrote it."""
        return parts_of(name.path for name in self.object_store.names(f"{self.run}/checkpoints"))

    def believed(self) -> list[Part]:
        """Return the manifests that count: those that can be read and, behind a lock, that a shard of the run signed."""
        return [seen.part for seen in self._look() if seen.fault is None]

    def checkpoints(self) -> list[RunCheckpoint]:
        """Return every checkpoint that believed manifests make, oldest first."""
        return checkpoints_of(self.believed())

    def _look(self) -> list[Look]:
        """Look at every manifest. One that has not changed since the last time is not read again, and not told again."""
        known, found, refused = self._seen, {}, []
        for name in self.object_store.names(f"{self.run}/checkpoints"):
            for part in parts_of([name.path]):
                seen = known.get(name) or self._look_at(part)
                if seen is None:
                    continue
                found[name] = seen
                if seen.fault is not None and name not in known:
                    refused.append(seen)
        self._seen = found
        _tell(refused)
        return list(found.values())

    def _look_at(self, part: Part) -> Look | None:
        try:
            return Look(part, self._objects_of(part))
        except CheckpointError as error:
            there = {name.path for name in self.object_store.names(part.path.rpartition("/")[0])}
            return Look(part, self._objects_of_refused(part), error) if part.path in there else None

    def _objects_of(self, part: Part) -> frozenset[str]:
        if not part.opened:
            return frozenset(self.read(part).objects)
        if self._seals.locked:
            self._seals.opened(part.path, self.object_store.get(part.path, OPENING_BYTES_MAX))
        return frozenset()

    def _objects_of_refused(self, part: Part) -> frozenset[str] | None:
        """Return the digests that a part needs although it does not count, None if it may need any.

        Another version of Atoll may be able to read it, or somebody signs it later. Behind a lock, what no shard signed
        and nobody can read needs nothing: otherwise one empty file would keep every object for ever.
        """
        if not self._seals.locked:
            return None
        try:
            self._seals.read(part.path)
        except CheckpointError:
            try:
                return frozenset(CheckpointStore(self.object_store, self.run).read(part).objects)
            except CheckpointError:
                return frozenset()
        return None

    def read(self, part: Part) -> Manifest:
        """Return a manifest; raise `CheckpointError` when it is not what its name says."""
        manifest = self._seals.decoded(part.path, Manifest, "a manifest of the archive")
        if fault := manifest.run.fault():
            raise CheckpointError("a manifest of the archive has no usable run", got=f"{part.path}: {fault}")
        if manifest.schema != SCHEMA or manifest.path != part.path:
            raise CheckpointError(
                "a manifest of the archive is not what its name says", got=manifest.path, allowed=part.path
            )
        owned = manifest.run.protocol.fragments_of(manifest.shard)
        if [piece.head.fragment for piece in manifest.pieces] != list(owned):
            raise CheckpointError(
                "a manifest of the archive lacks fragments", got=part.path, allowed=f"fragments {owned}"
            )
        if fault := oversized(manifest):
            raise CheckpointError("a manifest of the archive names too large an object", got=f"{part.path}: {fault}")
        return manifest

    def get_object(self, shard: int, found: CheckpointObject) -> bytes:
        """Return an object's bytes; raise `CheckpointError` when they are missing or not those that were archived."""
        return read_object(self.object_store, self._object(shard, found.digest), found)

    def manifests(self, checkpoint: RunCheckpoint) -> list[Manifest]:
        """Return a complete checkpoint's manifests by shard, which must be of one founding; objects are not looked at."""
        manifests = [self.read(checkpoint.parts[shard]) for shard in range(checkpoint.shards)]
        if len({(m.run.nonce, m.run.layout.fingerprint) for m in manifests}) != 1:
            raise CheckpointError("the shards' manifests are of different runs", got=f"checkpoint {checkpoint.number}")
        return manifests

    def verified(self, checkpoint: RunCheckpoint) -> list[Manifest]:
        """Return a complete checkpoint's manifests after reading every object they name."""
        manifests = self.manifests(checkpoint)
        for manifest in manifests:
            for found in manifest.objects.values():
                self.get_object(manifest.shard, found)
        return manifests

    def newest(self) -> tuple[RunCheckpoint, list[Manifest]]:
        """Return the newest checkpoint that is complete and undamaged; warn of each damaged one."""
        found = self._look()
        checkpoints = checkpoints_of(seen.part for seen in found if seen.fault is None)
        for checkpoint in reversed(checkpoints):
            if not checkpoint.complete:
                continue
            try:
                return checkpoint, self.verified(checkpoint)
            except CheckpointError as error:
                log.warning(
                    "archive.checkpoint_damaged",
                    checkpoint=checkpoint.number,
                    founding=checkpoint.founding,
                    reason=str(error),
                )
        incomplete = [
            f"; checkpoint {checkpoint.number} lacks shards {checkpoint.missing}"
            for checkpoint in checkpoints
            if not checkpoint.complete
        ]
        faults = {(seen.fault.what, seen.fault.todo): seen.fault for seen in found if seen.fault is not None}
        refused = [f"; {fault.what}: {fault.got}" for fault in faults.values()]
        raise CheckpointError(
            f"the archive holds no complete checkpoint of run {self.run!r} that can be read",
            got=f"{len(checkpoints)} checkpoints in {self.object_store.where}"
            + "".join(incomplete[-1:] + refused[-REASONS_TOLD:]),
            allowed="a checkpoint of every shard with all its objects",
            todo=" ".join(
                [
                    "check the run id and the archive's URL; `atoll archive show` lists what is there.",
                    *[todo for _, todo in faults if todo is not None],
                ]
            ),
        )

    def _object(self, shard: int, digest: str) -> str:
        return f"{self.run}/shard-{shard}/{digest}"


def _tell(refused: list[Look]) -> None:
    for seen in refused[:REFUSED_TOLD]:
        log.warning(
            "archive.manifest_unreadable",
            reason=on_one_line(str(seen.fault)),
            todo="it counts for nothing. If no other version of Atoll wrote it, remove it"
            + ("; until then no object of its shard is removed" if seen.objects is None else ""),
        )
    if len(refused) > REFUSED_TOLD:
        log.warning(
            "archive.manifest_unreadable",
            more=len(refused) - REFUSED_TOLD,
            todo="`atoll archive show` lists what counts",
        )


def _needed(found: Iterable[Look]) -> set[str] | None:
    needed: set[str] = set()
    for seen in found:
        if seen.objects is None:
            return None
        needed |= seen.objects
    return needed
