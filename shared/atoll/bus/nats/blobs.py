"""Blobs over JetStream: written with a window of pieces in flight, read back by subject.

A piece's subject is `stem.<i>`, and its stream keeps one message per subject, so writing twice replaces equal by equal.
The message id carries a nonce of the upload: a retry is a duplicate, a second upload is not (an id remembered from before
a purge would make the broker acknowledge pieces it no longer has). The reader asks for explicit subjects, a bounded number
at a time, so that no limit on matching subjects and no wildcard surprise stands in its way.

The window follows the link. Pieces that are acknowledged late have waited behind our own: sending more at once fills
queues, until an acknowledgement takes so long that the piece is sent again for nothing. So a slow answer closes the
window by one, a prompt one opens it.
"""

from __future__ import annotations

import asyncio

from atoll.base.errors import BlobGone
from atoll.base.waiting import all_of
from atoll.bus.nats.jetstream_api import JetStream
from atoll.wire.blobs import Download, Portion, Upload

_PAGE_BYTES_MAX = 32 << 20
_GONE_PAUSE_S = 0.1
_SLOW = 0.2
_PROMPT = 0.1


class UploadWindow:
    """How many pieces may be in flight, `most` at most; `patience_s` is when an answer counts as lost."""

    def __init__(self, most: int, patience_s: float) -> None:
        """Begin with half of it."""
        self.size = max(1, most // 2)
        self._most = most
        self._patience_s = patience_s
        self._out = 0
        self._changed = asyncio.Event()

    async def enter(self) -> None:
        """Wait for room and take it."""
        while self._out >= self.size:
            self._changed.clear()
            await self._changed.wait()
        self._out += 1

    def leave(self, took_s: float) -> None:
        """Give room back after an answer that took so long."""
        if took_s > _SLOW * self._patience_s:
            self.size = max(1, self.size - 1)
        elif took_s < _PROMPT * self._patience_s:
            self.size = min(self._most, self.size + 1)
        self._out -= 1
        self._changed.set()


async def write(jetstream: JetStream, stem: str, upload: Upload) -> None:
    """Store what is missing of `upload` under `stem`, all of it acknowledged."""
    options, loop = jetstream.connection.options, jetstream.connection.loop
    window = UploadWindow(options.window, options.try_s)
    missing = upload.missing()
    queue = iter(missing)

    async def writer() -> None:
        for number in queue:
            piece = await upload.made(number)
            subject = f"{stem}.{number}"
            await window.enter()
            began_s = loop.time()
            try:
                await jetstream.store(subject, piece, {"Nats-Msg-Id": f"{subject}:{upload.nonce}"})
            finally:
                window.leave(loop.time() - began_s)
            jetstream.connection.stats.blob_bytes_up += len(piece)
            upload.stored(number)

    await all_of([writer() for _ in range(min(options.window, len(missing)))])


async def read_page(jetstream: JetStream, stream: str, download: Download, page: list[int]) -> Portion:
    """Return the pieces with these numbers; raise `BlobGone` if some stay missing."""
    loop = jetstream.connection.loop
    missing = {download.subject(number): number for number in page}
    found: Portion = []
    deadline = loop.time() + jetstream.connection.options.gone_s
    while missing:
        answer = await jetstream.page(
            stream, {"multi_last": list(missing), "batch": len(missing), "max_bytes": _PAGE_BYTES_MAX}
        )
        jetstream.connection.stats.blob_bytes_down += sum(len(message.data) for message in answer.messages)
        found += [
            (missing.pop(message.subject), message.data) for message in answer.messages if message.subject in missing
        ]
        if missing and not answer.messages:
            if loop.time() >= deadline:
                first = next(iter(missing))
                raise BlobGone(
                    "chunks of a blob are missing", got=f"{len(missing)} of {download.ref.chunks}, first {first}"
                )
            await asyncio.sleep(_GONE_PAUSE_S)
    return found
