"""One connection to the monitor's HTTP server, with bounds on what its other end can hold.

A place is held by a connection in one of two ways: the server works on an answer, or the server waits for the other end, which
sends no whole request or fetches no answer. Every wait is bounded:

    no whole request within `REQUEST_S` of the connection, or of the answer before    closed
    nothing fetched of an answer for `STALLED_S` while the buffers are full           closed
    more than `CONNECTIONS_MAX` connections                                           the longest wait of all is closed

By the last rule strangers who hold connections never keep anybody out: a whole request comes with its connection, while theirs
waits. uvicorn's own bounds count connections and refuse newcomers, which is what such a stranger wants. h11 bounds headers.
"""

from __future__ import annotations

import asyncio
from typing import Any, Final

from uvicorn.protocols.http.h11_impl import H11Protocol

from atoll.base.logs import get

log = get(__name__)

CONNECTIONS_MAX: Final = 256
REQUEST_S: Final = 10.0
STALLED_S: Final = 60.0
HEADERS_BYTES_MAX: Final = 16 << 10


class BoundedConnection(H11Protocol):
    """uvicorn's connection, which waits for its other end within bounds."""

    def __init__(self, *given: Any, **named: Any) -> None:  # noqa: ANN401  (as uvicorn makes it)
        """Make uvicorn's; nothing is waited for yet."""
        super().__init__(*given, **named)
        self._waiting_since_s: float | None = None
        self._end: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn's
        """Wait for a request, and make room for it."""
        super().connection_made(transport)
        self._wait()
        if len(self.connections) > CONNECTIONS_MAX:
            self._close_longest_wait()

    def connection_lost(self, exc: Exception | None) -> None:
        """Wait no more."""
        self._work()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Take a part of a request; the wait ends with the whole of it."""
        super().data_received(data)
        if self._is_answering():
            self._work()

    def on_response_complete(self) -> None:
        """Wait until the answer is fetched and the next request is here, unless it is already."""
        super().on_response_complete()
        if not self._is_answering():
            self._wait()

    def pause_writing(self) -> None:
        """Wait until the other end has fetched what is in the buffers."""
        super().pause_writing()
        self._wait()

    def resume_writing(self) -> None:
        """Go on with the answer; if this was all of it, wait for the rest of the buffers and for the next request."""
        super().resume_writing()
        if self._is_answering():
            self._work()
        else:
            self._wait()

    def _is_answering(self) -> bool:
        """Return whether a whole request is here, and its answer is not complete."""
        return self.cycle is not None and not self.cycle.more_body and not self.cycle.response_complete

    def _wait(self) -> None:
        self._work()
        self._waiting_since_s = self.loop.time()
        bound_s = STALLED_S if self.transport.get_write_buffer_size() else REQUEST_S
        self._end = self.loop.call_later(bound_s, self._give_up)

    def _work(self) -> None:
        self._waiting_since_s = None
        if self._end is not None:
            self._end.cancel()
            self._end = None

    def _give_up(self) -> None:
        """Close at once: what is in the buffers is dropped, because closing in peace would wait for the other end again."""
        if self._is_answering():
            log.info("viewer.stalled", path=self.scope["path"])
        # Counted no more from here on: the loop tells of the end later, and newcomers are counted before that.
        self.connections.discard(self)
        self.transport.abort()

    def _close_longest_wait(self) -> None:
        waiting = [
            (each._waiting_since_s, each)  # noqa: SLF001  (ours)
            for each in self.connections
            if isinstance(each, BoundedConnection) and each is not self and each._waiting_since_s is not None  # noqa: SLF001
        ]
        if waiting:
            min(waiting, key=lambda one: one[0])[1]._give_up()  # noqa: SLF001  (ours)
