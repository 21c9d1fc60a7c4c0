"""JetStream over connections that carry nothing but chunks, so that heartbeats and records never wait behind them.

Chunks that are written and chunks that are read have lanes of their own: a request for a page is small and would wait behind
what is written. A lane is opened when a chunk first wants it: who only reads records holds one connection to the broker.
A call stays on its lane, retries included, and calls take the lanes in turn. With no lanes at all, chunks go where all
else goes.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from typing import Any

from atoll.bus.nats.connection import Connection
from atoll.bus.nats.jetstream_api import JetStream, Page
from atoll.wire.limits import Buffer


class BulkConnections(JetStream):
    """The verbs for chunks, on `options.bulk_connections` branches of a connection; in the connection's loop."""

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
        """Return the lanes of one direction in turn, for ever."""
        lanes = [JetStream(self.connection.branch()) for _ in range(self.connection.options.bulk_connections)]
        return itertools.cycle(lanes or [JetStream(self.connection)])
