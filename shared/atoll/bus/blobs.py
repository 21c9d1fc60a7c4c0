"""Large bytes as chunks in a stream: written with a window of chunks in flight, read back by subject.

A chunk's subject is `stem.<i>`, and its stream keeps one message per subject, so writing twice replaces equal by equal.
The message id carries a nonce of the call: a retry is a duplicate, a second `put_blob` is not (an id remembered from
before a purge would make the broker acknowledge chunks it no longer has). The reader asks for explicit subjects, a
bounded number at a time, so that no limit on matching subjects and no wildcard surprise stands in its way.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Coroutine, Iterator
from typing import Any

from atoll.bus.claims import cut
from atoll.bus.interface import BlobRef
from atoll.bus.stored import JetStream
from atoll.errors import BlobCorrupt, BlobGone

_PAGE_CHUNKS = 16
_PAGE_BYTES_MAX = 32 << 20
_READERS = 2
_GONE_PAUSE_S = 0.1


async def write(jetstream: JetStream, stem: str, view: memoryview) -> int:
    """Store `view` under `stem` and return the number of chunks, all acknowledged."""
    options = jetstream.connection.options
    chunks = cut(stem, view, options.chunk_bytes)
    nonce = secrets.token_hex(6)
    queue = iter(chunks)

    async def writer() -> None:
        for subject, chunk in queue:
            await jetstream.store(subject, chunk, {"Nats-Msg-Id": f"{subject}:{nonce}"})

    await _all_of([writer() for _ in range(min(options.window, len(chunks)))])
    return len(chunks)


async def read(jetstream: JetStream, stream: str, ref: BlobRef) -> list[bytes]:
    """Return the chunks of `ref` in order; raise `BlobGone` if some stay missing, `BlobCorrupt` if too much."""
    found: dict[str, bytes] = {}
    subjects = [f"{ref.stem}.{i}" for i in range(ref.chunks)]
    pages = iter([subjects[i : i + _PAGE_CHUNKS] for i in range(0, len(subjects), _PAGE_CHUNKS)])
    await _all_of([_read_pages(jetstream, stream, pages, found, ref) for _ in range(_READERS)])
    return [found[subject] for subject in subjects]


async def _read_pages(
    jetstream: JetStream, stream: str, pages: Iterator[list[str]], found: dict[str, bytes], ref: BlobRef
) -> None:
    """Fill `found` from the pages that no other reader has taken."""
    loop = jetstream.connection.loop
    for page in pages:
        missing = page
        deadline = loop.time() + jetstream.connection.options.gone_s
        while missing:
            answer = await jetstream.page(
                stream, {"multi_last": missing, "batch": len(missing), "max_bytes": _PAGE_BYTES_MAX}
            )
            found.update((message.subject, message.data) for message in answer.messages)
            if sum(map(len, found.values())) > ref.size_bytes:
                raise BlobCorrupt("a blob is longer than announced", got=ref.stem, allowed=ref.size_bytes)
            missing = [subject for subject in missing if subject not in found]
            if missing and not answer.messages:
                if loop.time() >= deadline:
                    raise BlobGone(
                        "chunks of a blob are missing", got=f"{len(missing)} of {ref.chunks}, first {missing[0]}"
                    )
                await asyncio.sleep(_GONE_PAUSE_S)


async def _all_of(work: list[Coroutine[Any, Any, None]]) -> None:
    """Run all to the end; on the first failure stop the others and raise it."""
    tasks = [asyncio.ensure_future(each) for each in work]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
