"""What both adapters agree on about blobs, message sizes and `info`: arithmetic and refusals, no traffic."""

from __future__ import annotations

import json
import re

from atoll.wire.limits import INFO_BYTES_MAX, MESSAGE_BYTES_MAX, Buffer, Info
from atoll.wire.blobs import BlobRef
from atoll.base.errors import PeerMisbehaved, ProtocolMisuse

CHUNKS_MAX = 1 << 16
_STEM = re.compile(r"[A-Za-z0-9_-]+(\.[A-Za-z0-9_-]+)*")


def check_ref(ref: BlobRef, size_bytes_max: int) -> None:
    """Refuse a reference that no correct peer would write, before anything is read or allocated."""
    if ref.size_bytes > size_bytes_max:
        raise PeerMisbehaved(
            "a blob is larger than allowed", got=ref.size_bytes, allowed=f"up to {size_bytes_max} bytes"
        )
    if not 0 <= ref.chunks <= min(CHUNKS_MAX, max(0, ref.size_bytes)) or (ref.chunks == 0) != (ref.size_bytes == 0):
        raise PeerMisbehaved("a blob's chunks do not fit its size", got=f"{ref.chunks} chunks, {ref.size_bytes} bytes")
    if not _STEM.fullmatch(ref.stem):
        raise PeerMisbehaved("a blob's stem is not a subject", got=repr(ref.stem)[:200])


def check_size(subject: str, data: Buffer) -> None:
    """Refuse a message that would make the broker hang up."""
    if len(data) > MESSAGE_BYTES_MAX:
        raise ProtocolMisuse(
            "a message is too large",
            got=f"{len(data)} bytes on {subject}",
            allowed=f"up to {MESSAGE_BYTES_MAX}",
            todo="store it with put_blob and send where it lies",
        )


def info_text(info: Info) -> str:
    """Return `info` as compact JSON on one line."""
    text = json.dumps(dict(info), separators=(",", ":"))
    if len(text) > INFO_BYTES_MAX:
        raise ProtocolMisuse("info is too large", got=len(text), allowed=f"up to {INFO_BYTES_MAX} bytes")
    return text
