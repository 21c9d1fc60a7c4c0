"""Blobs over JetStream: written with a window of pieces in flight, read back by subject.

A piece's subject is `stem.<i>`, and its stream keeps one message per subject: writing twice replaces equal by equal, or is
refused where the first writer wins, which counts as stored. So pieces carry no message id, of which a broker would remember
millions (and acknowledge a piece that was purged since). The reader requests explicit subjects, a bounded number at a time.

The window follows the link: a slow answer closes it by one, a prompt one opens it. Sending more while answers are late only
fills queues, until a piece is sent again for nothing. Pieces travel over connections that carry nothing else
(`bulk_connections`), so that heartbeats and records never wait behind them.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from atoll.base.errors import BlobGone
from atoll.base.retry import Unanswered, all_of
from atoll.bus.interface import StoredEvent
from atoll.bus.nats.connection import Connection
from atoll.bus.nats.jetstream_api import JetStream, stored_message
from atoll.bus.regions import is_region
from atoll.wire.blobs import Download, Portion, Upload

_PAGE_BYTES_MAX = 32 << 20
_PAGES_AT_ONCE = 4
_GONE_PAUSE_S = 0.1
_SLOW = 0.2
_PROMPT = 0.1
_FIRST_OF_REGION = 2


class UploadWindow:
    """The number of pieces that may be in flight, at most `most`; an answer counts as lost after `patience_s`."""

    def __init__(self, most: int, patience_s: float, most_at_first: int = 1 << 30) -> None:
        self.size = max(1, min(most // 2, most_at_first))
        self._most = most
        self._patience_s = patience_s
        self._out = 0
        self._since_s = 0.0
        self.busy_s = 0.0
        """Seconds in which any piece was in flight."""
        self._changed = asyncio.Event()

    async def enter(self, now_s: Callable[[], float]) -> None:
        """Wait for room and take it."""
        while self._out >= self.size:
            self._changed.clear()
            await self._changed.wait()
        if not self._out:
            self._since_s = now_s()
        self._out += 1

    def leave(self, took_s: float, now_s: float) -> None:
        """Return room after an answer that took so long."""
        if took_s > _SLOW * self._patience_s:
            self.size = max(1, self.size - 1)
        elif took_s < _PROMPT * self._patience_s:
            self.size = min(self._most, self.size + 1)
        self._out -= 1
        if not self._out:
            self.busy_s += now_s - self._since_s
        self._changed.set()


def bulk_connections(connection: Connection) -> Iterator[JetStream]:
    """Yield the connections that carry chunks in one direction, in turn, for ever; in the connection's loop.

    They are `options.bulk_connections` branches of `connection`, opened at the first use, or `connection` itself. Writing and
    reading have connections of their own: a page request would wait behind written chunks.
    """
    branches = [JetStream(connection.branch()) for _ in range(connection.options.bulk_connections)]
    yield from itertools.cycle(branches or [JetStream(connection)])


@dataclass(frozen=True, slots=True)
class BulkTraffic:
    """The connections that carry chunks of all blobs of a bus, each way, and the room for pages on their way here.

    Pages that we do not take in time pile up at the server, and a locked one cuts off who lets more than
    `atoll.keys.doors.PENDING_MAX` pile up.
    """

    writing: Iterator[JetStream]
    reading: Iterator[JetStream]
    pages: asyncio.Semaphore

    @classmethod
    def of(cls, connection: Connection) -> BulkTraffic:
        """Return that of a connection; nothing is opened before its first use."""
        return cls(bulk_connections(connection), bulk_connections(connection), asyncio.Semaphore(_PAGES_AT_ONCE))

    def nearby(self) -> BulkTraffic:
        """Return the same connections for what the leaf of a region keeps itself."""
        reading = (JetStream(each.connection, nearby=True) for each in self.reading)
        return BulkTraffic(self.writing, reading, self.pages)


async def write(bulk: Iterator[JetStream], connection: Connection, stem: str, upload: Upload) -> None:
    """Store the missing pieces of `upload` under `stem`, in the connection's loop, until all are acknowledged."""
    options, now_s = connection.options, connection.loop.time
    # All of a region share one connection to the hub, and nothing overtakes what is on it.
    in_region = is_region(connection.domain)
    most_at_first = _FIRST_OF_REGION if in_region else options.window
    window, turn = UploadWindow(options.window, options.try_s, most_at_first), asyncio.Lock()

    async with contextlib.aclosing(upload.pieces()) as pieces:

        async def writer() -> None:
            while True:
                async with turn:
                    made = await anext(pieces, None)
                if made is None:
                    return
                (number, piece), subject = made, f"{stem}.{made[0]}"
                await window.enter(now_s)
                began_s = now_s()
                try:
                    await next(bulk).store(subject, piece, {}, first_wins=True)
                finally:
                    ended_s = now_s()
                    window.leave(ended_s - began_s, ended_s)
                connection.stats.blob_bytes_up += len(piece)
                upload.stored.add(number)

        writers = min(options.window, len(upload.missing()))
        try:
            await (writer() if writers == 1 else all_of([writer() for _ in range(writers)]))
        finally:
            # A region's own broker is near, and what crosses the region's link is not seen here.
            upload.busy_s += 0.0 if in_region else window.busy_s


async def read_there(
    jetstream: JetStream, stream: str, subjects: list[str], *, once: bool = False
) -> list[StoredEvent]:
    """Return what a copy of the stream has of these subjects, each once; with `once` nothing if it does not answer."""
    asked = {"multi_last": subjects, "batch": len(subjects), "max_bytes": _PAGE_BYTES_MAX}
    try:
        if len(subjects) == 1:
            newest = await jetstream.newest_there(stream, subjects[0], once=once)
            there = [] if newest is None else [newest]
        else:
            page = await (jetstream.request_page(stream, asked) if once else jetstream.page(stream, asked))
            found = {message.subject: message for message in page.messages}
            there = [found[subject] for subject in subjects if subject in found]
    except Unanswered:
        return []
    jetstream.connection.stats.blob_bytes_down += sum(len(message.data) for message in there)
    return there


async def read_page(
    bulk: Iterator[JetStream], connection: Connection, stream: str, download: Download, page: list[int]
) -> Portion:
    """Return the pieces with these numbers; raise `BlobGone` if some stay missing.

    Any copy of the stream answers, and one that lags behind lacks what is there. Only the leader can say that a piece is
    gone.
    """
    missing = {f"{download.ref.stem}.{number}": number for number in page}
    found: Portion = []
    deadline = connection.loop.time() + connection.options.gone_s
    while missing:
        messages = await read_there(next(bulk), stream, list(missing))
        found += [(missing.pop(message.subject), message.data) for message in messages]
        if missing and not messages:
            if connection.loop.time() >= deadline:
                first = next(iter(missing))
                there = await stored_message(next(bulk), stream, {"last_by_subj": first})
                if there is None:
                    raise BlobGone(
                        "chunks of a blob are missing", got=f"{len(missing)} of {download.ref.chunks}, first {first}"
                    )
                connection.stats.blob_bytes_down += len(there.data)
                found.append((missing.pop(first), there.data))
                continue
            await asyncio.sleep(_GONE_PAUSE_S)
    return found
