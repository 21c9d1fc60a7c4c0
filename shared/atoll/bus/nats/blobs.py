"""Blobs over JetStream: written with a window of pieces in flight, read back by subject.

A piece's subject is `stem.<i>`, and its stream keeps one message per subject, so writing twice replaces equal by equal.
The message id carries a nonce of the upload: a retry is a duplicate, a second upload is not. (If an id were remembered
from before a purge, the broker would acknowledge pieces that it no longer has.) The reader requests explicit subjects,
a bounded number at a time, so that it depends on no wildcard and no limit on matching subjects.

The window follows the link. A late acknowledgement means that the piece waited behind our own. Sending more at once
then fills queues, until an acknowledgement takes so long that the piece is sent again for nothing. So a slow answer
closes the window by one, and a prompt one opens it.

Pieces travel over connections that carry nothing else (`BulkConnections`), so that heartbeats and records never wait
behind them. The caller's `Upload` yields the pieces: this module does not know how a piece is made.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import Awaitable, Callable, Iterator, Mapping
from typing import Any

from atoll.base.errors import BlobGone
from atoll.base.waiting import all_of
from atoll.bus.nats.connection import Connection
from atoll.bus.nats.jetstream_api import JetStream, Page
from atoll.wire.blobs import Download, Portion, Upload
from atoll.wire.limits import Buffer

Store = Callable[[str, Buffer, dict[str, str]], Awaitable[int]]
_PAGE_BYTES_MAX = 32 << 20
_GONE_PAUSE_S = 0.1
_SLOW = 0.2
_PROMPT = 0.1


class UploadWindow:
    """The number of pieces that may be in flight, at most `most`; an answer counts as lost after `patience_s`."""

    def __init__(self, most: int, patience_s: float) -> None:
        """Start with half of it."""
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
        """Return room after an answer that took so long."""
        if took_s > _SLOW * self._patience_s:
            self.size = max(1, self.size - 1)
        elif took_s < _PROMPT * self._patience_s:
            self.size = min(self._most, self.size + 1)
        self._out -= 1
        self._changed.set()


class BulkConnections(JetStream):
    """The verbs for chunks, on `options.bulk_connections` branches of a connection; in the connection's loop.

    Writing and reading have connections of their own: a page request is small and would wait behind written chunks. A
    connection is opened at its first use, so a process that only reads records holds one connection to the broker. A
    call stays on its connection, retries included, and calls take the connections in turn. With none at all, chunks use
    the main connection.
    """

    def __init__(self, connection: Connection) -> None:
        """Open nothing yet."""
        super().__init__(connection)
        self._up: Iterator[JetStream] | None = None
        self._down: Iterator[JetStream] | None = None

    async def store(self, subject: str, payload: Buffer, headers: dict[str, str]) -> int:
        """Publish until acknowledged; see `JetStream`."""
        self._up = self._up or self._open()
        return await next(self._up).store(subject, payload, headers)

    async def page(self, stream: str, body: Mapping[str, Any]) -> Page:
        """Return one page; see `JetStream`."""
        self._down = self._down or self._open()
        return await next(self._down).page(stream, body)

    def _open(self) -> Iterator[JetStream]:
        """Yield the connections of one direction in turn, for ever."""
        lanes = [JetStream(self.connection.branch()) for _ in range(self.connection.options.bulk_connections)]
        return itertools.cycle(lanes or [JetStream(self.connection)])


async def write(store: Store, connection: Connection, stem: str, upload: Upload) -> None:
    """`store` the missing pieces of `upload` under `stem`, in the running loop, until all are acknowledged."""
    options, now_s = connection.options, asyncio.get_running_loop().time
    window, turn = UploadWindow(options.window, options.try_s), asyncio.Lock()

    async with contextlib.aclosing(upload.pieces()) as pieces:

        async def writer() -> None:
            while True:
                async with turn:
                    made = await anext(pieces, None)
                if made is None:
                    return
                (number, piece), subject = made, f"{stem}.{made[0]}"
                await window.enter()
                began_s = now_s()
                try:
                    await store(subject, piece, {"Nats-Msg-Id": f"{subject}:{upload.nonce}"})
                finally:
                    window.leave(now_s() - began_s)
                connection.stats.blob_bytes_up += len(piece)
                upload.stored(number)

        await all_of([writer() for _ in range(min(options.window, len(upload.missing())))])


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
