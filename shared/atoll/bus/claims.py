"""What both adapters agree on about blobs, message sizes and `info`: arithmetic and refusals, no traffic."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Sequence

import xxhash

from atoll.bus.interface import INFO_BYTES_MAX, MESSAGE_BYTES_MAX, BlobRef, Buffer, Info
from atoll.errors import BlobCorrupt, PeerMisbehaved, ProtocolMisuse

CHUNKS_MAX = 1 << 16
_INLINE_BYTES = 4 << 20
_STEM = re.compile(r"[A-Za-z0-9_-]+(\.[A-Za-z0-9_-]+)*")


def flat(payload: Buffer) -> memoryview:
    """Return `payload` as one dimension of bytes, without a copy."""
    view = memoryview(payload)
    return view if view.ndim == 1 and view.format == "B" else view.cast("B")


def cut(stem: str, view: memoryview, chunk_bytes: int) -> list[tuple[str, memoryview]]:
    """Return subject and bytes of every chunk of `view`; an empty blob has none."""
    starts = range(0, len(view), chunk_bytes)
    return [(f"{stem}.{i}", view[start : start + chunk_bytes]) for i, start in enumerate(starts)]


async def digest_of(data: Buffer) -> str:
    """Return the xxh3-128 of `data` in hex; large data are hashed in a worker thread."""
    if len(data) <= _INLINE_BYTES:
        return str(xxhash.xxh3_128_hexdigest(data))
    return str(await asyncio.to_thread(xxhash.xxh3_128_hexdigest, data))


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


async def assemble(ref: BlobRef, chunks: Sequence[Buffer]) -> bytes:
    """Join the chunks of `ref` and check size and digest; raise `BlobCorrupt`."""
    size = sum(len(chunk) for chunk in chunks)
    if size != ref.size_bytes:
        raise BlobCorrupt("a blob has another size than announced", got=size, allowed=ref.size_bytes)
    whole = b"".join(chunks) if size <= _INLINE_BYTES else await asyncio.to_thread(b"".join, chunks)
    digest = await digest_of(whole)
    if digest != ref.digest:
        raise BlobCorrupt("a blob's bytes do not match their digest", got=digest, allowed=f"{ref.digest} at {ref.stem}")
    return whole


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
