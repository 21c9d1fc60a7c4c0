"""One run's checkpoints in an object store. A crash between any two writes leaves complete checkpoints complete.

A run checkpoint is written in this order: objects; the manifest; then retired manifests are removed; then the objects that
only those named. An object's name is the digest of its content, and an object belongs to one shard, so two shards never
write or remove the same one. A new owner removes old objects that no manifest names (an interrupted checkpoint left them).
They must be so old that no writer can still be about to name them. While any manifest is unreadable, no object is removed.

A manifest of a locked run is signed for its name by a shard, and a reader with an identity takes no other. It names its objects
by BLAKE2b-256, so whoever has the store can remove a checkpoint, and not change one.
Every call here may block.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterator

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
    parts_of,
    retired,
)
from atoll.archive.object_store import ArchiveStore
from atoll.base.errors import CheckpointError, PeerMisbehaved, ProtocolMisuse
from atoll.base.logs import get
from atoll.base.parsing import parsed
from atoll.bus.signed import Signatures
from atoll.wire.messages import RunRecord
from atoll.wire.signature_line import without_signature
from atoll.wire.subjects import Subjects
from atoll.wire.version import SCHEMA

log = get(__name__)

ORPHAN_AGE_S = 6 * 3600.0


class CheckpointStore:
    """The run checkpoints of `run` in an object store."""

    def __init__(self, object_store: ArchiveStore, run: str, signatures: Signatures | None = None) -> None:
        """Read nothing yet. With `signatures` manifests are signed, and those that nobody signed are not believed."""
        self.object_store = object_store
        self.run = run
        self._subjects = Subjects(run)
        self._signatures = signatures

    # --- writing ----------------------------------------------------------------------------------------------------

    def put_object(self, shard: int, data: bytes) -> CheckpointObject:
        """Store an object durably and return its name."""
        found = CheckpointObject(_digest(data), len(data))
        self.object_store.put(self._object(shard, found.digest), data)
        return found

    def objects(self, shard: int) -> set[CheckpointObject]:
        """Return the objects of one shard that are there."""
        found = self.object_store.names(f"{self.run}/shard-{shard}")
        return {CheckpointObject(name.path.rpartition("/")[2], name.size_bytes) for name in found}

    def publish(self, manifest: Manifest) -> None:
        """Make one shard's part of a checkpoint visible; every object that it names is stored already."""
        text = msgspec.json.encode(manifest)
        if self._signatures is not None:
            text = self._signatures.signed(self._subjects.archived(manifest.path), text)
        data = _digest(text).encode() + b"\n" + text
        if len(data) > MANIFEST_BYTES_MAX:
            raise ProtocolMisuse(
                "a manifest is larger than any reader takes", got=len(data), allowed=MANIFEST_BYTES_MAX
            )
        self.object_store.put(manifest.path, data)

    def reopen(self, run: RunRecord, parts: list[Part], number: int, shard: int, epoch: int) -> None:
        """Record that `shard` goes on from checkpoint `number` in `epoch` if `parts` hold a final manifest of a former one."""
        origin = founding(run)
        if any(p.final and (p.founding, p.shard) == (origin, shard) and p.epoch < epoch for p in parts):
            self.object_store.put(opening(run, number, shard, epoch), b"{}")

    def retire(self, shard: int, keep: int, origin: str) -> int:
        """Remove what `keep` complete checkpoints no longer need of one shard's objects; return how many were removed.

        `origin` is the founding that the shard serves. A log line reports what prevents the removal.
        """
        parts = self.parts()
        self._say_what_is_wrong(parts, shard, origin)
        going = retired(parts, shard, keep, origin)
        if not going:
            return 0
        gone = {part.path for part in going}
        staying = [part for part in parts if part.shard == shard and part.path not in gone]
        candidates = {digest for part in going for digest in self._objects_of(part) or ()}
        needed = self._needed(staying)
        self.object_store.remove(sorted(gone))
        garbage = [] if needed is None else sorted(candidates - needed)
        self.object_store.remove([self._object(shard, digest) for digest in garbage])
        return len(garbage)

    def _say_what_is_wrong(self, parts: list[Part], shard: int, origin: str) -> None:
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
        """Remove old objects of one shard that no manifest names; return how many: none while one cannot be read."""
        needed = self._needed([part for part in self.parts() if part.shard == shard])
        if needed is None:
            return 0
        before_s = time.time() - ORPHAN_AGE_S
        found = self.object_store.names(f"{self.run}/shard-{shard}")
        garbage = [
            name.path for name in found if name.written_at_s < before_s and name.path.rpartition("/")[2] not in needed
        ]
        self.object_store.remove(garbage)
        return len(garbage)

    # --- reading ----------------------------------------------------------------------------------------------------

    def parts(self) -> list[Part]:
        """Return every manifest's name."""
        return parts_of(name.path for name in self.object_store.names(f"{self.run}/checkpoints"))

    def checkpoints(self) -> list[RunCheckpoint]:
        """Return every checkpoint, oldest first."""
        return checkpoints_of(self.parts())

    def read(self, part: Part) -> Manifest:
        """Return a manifest; raise `CheckpointError` when it is not what its name says."""
        digest, _, text = self.object_store.get(part.path, MANIFEST_BYTES_MAX).partition(b"\n")
        if digest != _digest(text).encode():
            raise CheckpointError("a manifest of the archive is damaged", got=part.path, allowed="bytes of its digest")
        try:
            manifest = parsed(self._opened(part.path, text), Manifest)
        except msgspec.MsgspecError as error:
            raise CheckpointError("a manifest of the archive is damaged", got=f"{part.path}: {error}") from error
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
        return manifest

    def _opened(self, path: str, text: bytes) -> bytes:
        """Return a manifest without its signature, which is checked if we can."""
        if self._signatures is None:
            return without_signature("Manifest", text)
        try:
            return self._signatures.opened(self._subjects.archived(path), text)
        except PeerMisbehaved as error:
            raise CheckpointError(
                "a manifest of the archive is not believed",
                got=f"{path}: {error.what}, {error.got}",
                allowed="one that a shard of this run signed",
                todo="if the archive is of an open run and you trust it: `atoll archive sign`",
            ) from error

    def get_object(self, shard: int, found: CheckpointObject) -> bytes:
        """Return an object's bytes; raise `CheckpointError` when they are missing or not those that were archived."""
        path = self._object(shard, found.digest)
        data = self.object_store.get(path, found.size_bytes)
        if len(data) != found.size_bytes or _digest(data) != found.digest:
            raise CheckpointError("an object of the archive is damaged", got=path, allowed="bytes that match its name")
        return data

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
        """Return the newest checkpoint that is complete and undamaged; log a warning for each damaged one.

        Raises:
            CheckpointError: there is none.
        """
        checkpoints = self.checkpoints()
        for checkpoint in self._newest_first(checkpoints):
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
            f"checkpoint {checkpoint.number} lacks shards {checkpoint.missing}"
            for checkpoint in checkpoints
            if not checkpoint.complete
        ]
        raise CheckpointError(
            f"the archive holds no complete checkpoint of run {self.run!r} that can be read",
            got=f"{len(checkpoints)} checkpoints in {self.object_store.where}"
            + "".join(f"; {text}" for text in incomplete[-1:]),
            allowed="a checkpoint of every shard with all its objects",
            todo="check the run id and the archive's URL; `atoll archive show` lists what is there",
        )

    def _newest_first(self, checkpoints: list[RunCheckpoint]) -> Iterator[RunCheckpoint]:
        return (checkpoint for checkpoint in reversed(checkpoints) if checkpoint.complete)

    def _needed(self, parts: list[Part]) -> set[str] | None:
        """Return the digests that manifests name, None when one of them may name anything."""
        needed: set[str] = set()
        for part in parts:
            objects = self._objects_of(part)
            if objects is None:
                return None
            needed |= objects
        return needed

    def _objects_of(self, part: Part) -> set[str] | None:
        """Return the digests that a manifest names, or None if we cannot read it.

        Another version of Atoll may be able to read it, so its objects must stay.
        """
        if part.opened:
            return set()
        try:
            return set(self.read(part).objects)
        except CheckpointError as error:
            log.warning("archive.manifest_unreadable", reason=str(error), todo="its objects are kept")
            return None

    def _object(self, shard: int, digest: str) -> str:
        return f"{self.run}/shard-{shard}/{digest}"


def _digest(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=32).hexdigest()
