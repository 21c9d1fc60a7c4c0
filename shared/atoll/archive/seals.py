"""Small texts of an archive: each is behind its own digest, and in a locked run signed for its name by a shard.

The digest, on a line of its own, tells damage. A signature tells who wrote the text, and that it was meant for this path.
"""

from __future__ import annotations

from typing import TypeVar

import msgspec

from atoll.archive.checkpoints import MANIFEST_BYTES_MAX, CheckpointObject, digest_of_bytes
from atoll.archive.object_store import ArchiveStore
from atoll.base.errors import CheckpointError, PeerMisbehaved
from atoll.base.parsing import parsed
from atoll.bus.interface import Signatures
from atoll.wire.messages import SIGNATURE, without_signature
from atoll.wire.subjects import Subjects

T = TypeVar("T")


class Seals:
    """Writes and opens the texts of one run; with `signatures` they are signed, and those that nobody signed are refused."""

    def __init__(self, object_store: ArchiveStore, run: str, signatures: Signatures | None = None) -> None:
        self._object_store = object_store
        self._subjects = Subjects(run)
        self._signatures = signatures
        self.locked = signatures is not None
        """Whether only signed texts are believed."""

    def signed(self, path: str, text: bytes) -> bytes:
        """Return a text with its signature, if we can sign."""
        return text if self._signatures is None else self._signatures.sign(self._subjects.archived(path), text)

    def closed(self, path: str, text: bytes) -> bytes:
        """Return a text with its signature, behind its digest: what is stored at `path`."""
        text = self.signed(path, text)
        return digest_of_bytes(text).encode() + b"\n" + text

    def decoded(self, path: str, kind: type[T], what: str) -> T:
        """Return the struct whose text is at `path`; raise `CheckpointError` if `what` is damaged, or not believed."""
        try:
            return parsed(self.read(path), kind)
        except msgspec.MsgspecError as error:
            raise CheckpointError(f"{what} is damaged", got=f"{path}: {error}") from error

    def read(self, path: str, bytes_max: int = MANIFEST_BYTES_MAX) -> bytes:
        """Return a text without digest and signature, both of which are checked; raise `CheckpointError` if they are wrong."""
        digest, _, text = self._object_store.get(path, bytes_max).partition(b"\n")
        if digest != digest_of_bytes(text).encode():
            raise CheckpointError("a manifest of the archive is damaged", got=path, allowed="bytes of its digest")
        return self.opened(path, text)

    def opened(self, path: str, text: bytes) -> bytes:
        """Return a text without its signature, which is checked if we can."""
        if self._signatures is None:
            return without_signature("Manifest", text)
        try:
            return self._signatures.verify(self._subjects.archived(path), text)
        except PeerMisbehaved as error:
            was = "was it signed with other keys?"
            if SIGNATURE not in text:
                was = "did an open run write it, or an earlier version of Atoll?"
            raise CheckpointError(
                "a manifest of the archive is not believed",
                got=f"{path}: {error.what}, {error.got}",
                allowed="one that a shard of this run signed",
                todo=f"{was} if so, and if you trust the archive as it is: `atoll archive sign`. If not: who can write there?",
            ) from error


def read_object(object_store: ArchiveStore, path: str, found: CheckpointObject) -> bytes:
    """Return an object's bytes; raise `CheckpointError` when they are missing or not those that were archived."""
    data = object_store.get(path, found.size_bytes)
    if CheckpointObject.of(data) != found:
        raise CheckpointError("an object of the archive is damaged", got=path, allowed="bytes that match its name")
    return data
