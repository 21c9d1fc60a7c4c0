"""A socket under nats-py that copies nothing large: payloads are sent from and received into their final memory.

**In**, the loop receives into the room that a `Framer` offers; for a large payload this is the buffer that the reader gets. A
message that is not handed over at once, and what is behind it, waits until nats-py's read loop takes it, and a reader that
falls behind stops the socket. **Out**, the loop gets small neighbours joined and large pieces in slices, the next only when
the last is with the kernel. A loop keeps what it cannot send at once, as a copy or, from Python 3.12 on, as a view; from then
on we give it a copy of the slice.

Every byte has a position in the order of sending. `accepted` counts queued bytes, `sent` those that the kernel has. To wait for
room, or until a payload is no longer ours, is to wait for a position: no sender queues while more than `QUEUE_BYTES` wait.

An awakening costs more than a small message. A transport with a `rest_s` leaves the socket alone that long after each read
that emptied it; under a flood no read empties the socket, so nothing piles up at the broker. Under TLS the loop's own layer
encrypts, and the counters count its input: 0.1 % less than what the wire carries.
"""

from __future__ import annotations

import asyncio
import contextlib
import heapq
import itertools
import socket
import ssl
import sys
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any
from urllib.parse import ParseResult

from nats.aio.transport import Transport

from atoll.bus.nats.framing import Frame, Framer, Message
from atoll.wire.limits import Buffer
from atoll.wire.traffic import BusStats

QUEUE_BYTES = 8 << 20
"""Bytes that may wait to be sent before further senders wait too."""
_READ_AHEAD_BYTES = 32 << 20
_JOINED_BYTES = 4 << 10
_SLICE_BYTES = 512 << 10
_UNSENT_BYTES = 512 << 10
_LOOP_KEEPS_VIEWS = sys.version_info >= (3, 12)


class SocketTransport(Transport, asyncio.BufferedProtocol):
    """One TCP connection, perhaps under TLS, for one of nats-py's attempts to connect; belongs to the running loop."""

    def __init__(
        self,
        stats: BusStats,
        congestion: str = "",
        rest_s: float = 0.0,
        take: Callable[[Message], bool] = lambda _: False,
    ) -> None:
        """Count in `stats`; request a congestion control from the kernel, if one is named; rest after reads.

        `take` is offered each message that no frame waits before, and returns whether it has taken it.
        """
        self._stats = stats
        self._congestion = congestion
        self._rest_s = rest_s
        self._take = take
        self._resting: asyncio.TimerHandle | None = None
        self._offered = 0
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._framer = Framer()
        self._news = asyncio.Event()
        self._reading = True
        self._queue: deque[memoryview] = deque()
        self._scheduled = False
        self._writable = True
        self._flying = 0
        self._waiters: list[tuple[int, int, asyncio.Future[None]]] = []
        self._order = itertools.count()
        self._over: asyncio.Future[None] = self._loop.create_future()
        self._closing = False
        self._error: Exception | None = None
        self.accepted = 0
        self.sent = 0
        self.received = 0

    # -- what nats-py requires of a transport -------------------------------------------------------------------------

    async def connect(self, uri: ParseResult, buffer_size: int, connect_timeout: float) -> None:
        """Connect without TLS."""
        del buffer_size
        connecting = self._loop.create_connection(lambda: self, uri.hostname or "", uri.port or 0)
        await self._within(connecting, connect_timeout)

    async def connect_tls(
        self, uri: str | ParseResult, ssl_context: ssl.SSLContext, buffer_size: int, connect_timeout: float
    ) -> None:
        """Continue under TLS; `uri` is the name that the certificate must have, or holds it."""
        del buffer_size
        hostname = uri if isinstance(uri, str) else uri.hostname
        if self._transport is None or self._over.done():
            raise ConnectionResetError("not connected")
        upgrading = self._loop.start_tls(self._transport, self, ssl_context, server_hostname=hostname)
        try:
            upgraded = await self._within(upgrading, connect_timeout)
        except BaseException:
            # The loop's TLS layer has taken our place under the socket, and reports no end of what never began.
            self.connection_lost(None)
            raise
        if upgraded is None:
            raise ConnectionResetError("the connection was lost while TLS was agreed")
        self._adopt(upgraded)

    def write(self, payload: Buffer) -> None:
        """Queue one piece."""
        self.writelines([payload])

    def writelines(self, payload: Sequence[Buffer]) -> None:
        """Queue pieces that must stay together, in order."""
        for piece in payload:
            if len(piece):
                self._queue.append(memoryview(piece))
                self.accepted += len(piece)
        self._push_soon()

    async def drain(self) -> None:
        """Send what the socket takes at once, then wait until there is room for more."""
        self._push()
        await self.room()

    async def read(self, buffer_size: int) -> list[Frame]:  # type: ignore[override]  # our parser takes frames
        """Return the frames that are there, at least one unless the connection has ended."""
        del buffer_size
        await self._arrival()
        frames = self._framer.take()
        self._continue()
        return frames

    async def readline(self) -> bytes:
        """Return one line, empty at the end."""
        await self._arrival()
        return self._framer.take_line() or b""

    def close(self) -> None:
        """Close once everything that is queued has been sent."""
        self._closing = True
        self._push()

    async def wait_closed(self) -> None:
        """Return once the connection is gone."""
        if self._transport is not None:
            await asyncio.shield(self._over)

    def at_eof(self) -> bool:
        """Return whether nothing is left to read."""
        return self._over.done() and not self._framer.frames

    def __bool__(self) -> bool:
        # nats-py replaces a transport that is false with one of its own.
        return True

    # -- what we require beyond that ----------------------------------------------------------------------------------

    @property
    def queued(self) -> int:
        """Return how many bytes the kernel has not taken."""
        return self.accepted - self.sent

    async def room(self) -> None:
        """Return once less than `QUEUE_BYTES` wait."""
        while self.accepted - self.sent > QUEUE_BYTES:
            await self.wait_sent(self.accepted - QUEUE_BYTES)
        if self._over.done():
            raise ConnectionResetError("not connected")

    async def wait_sent(self, position: int) -> None:
        """Return once the kernel has everything before `position`; `ConnectionResetError` if it never will."""
        if self.sent < position:
            if self._over.done():
                raise ConnectionResetError("not connected")
            waiter = self._loop.create_future()
            heapq.heappush(self._waiters, (position, next(self._order), waiter))
            await waiter

    def copy_queued(self, payload: Buffer) -> None:
        """Copy the queued rest of `payload`, so that its owner may change it."""
        mine = memoryview(payload).obj
        for place, piece in enumerate(self._queue):
            if piece.obj is mine:
                self._queue[place] = memoryview(bytes(piece))

    def abort(self) -> None:
        """Drop the connection and what is queued."""
        if self._transport is not None and not self._over.done():
            self._transport.abort()

    # -- what the loop calls on a protocol ----------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begin."""
        kernel = transport.get_extra_info("socket")
        if kernel is not None and hasattr(socket, "TCP_NOTSENT_LOWAT"):
            # We cannot see bytes that wait in the kernel: let them wait here, where progress is measured.
            kernel.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, _UNSENT_BYTES)
        if kernel is not None and self._congestion and hasattr(socket, "TCP_CONGESTION"):
            with contextlib.suppress(OSError):  # the kernel lacks it or forbids it: then the system's own
                kernel.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, self._congestion.encode())
        self._adopt(transport)

    def get_buffer(self, sizehint: int) -> memoryview:
        """Return where the next bytes go."""
        del sizehint
        room = self._framer.room()
        self._offered = len(room)
        return room

    def buffer_updated(self, nbytes: int) -> None:
        """Cut what has arrived; a reader that is far behind stops the socket."""
        self.received += nbytes
        self._stats.wire_bytes_down += nbytes
        behind = bool(self._framer.frames)
        self._framer.filled(nbytes)
        if not behind:
            self._framer.offer(self._take)
        if self._rest_s and nbytes < self._offered and self._resting is None:
            self._resting = self._loop.call_later(self._rest_s, self._rested)
        if self._must_stop() and self._reading and self._transport is not None:
            self._reading = False
            self._transport.pause_reading()
        if self._framer.frames:
            self._news.set()

    def eof_received(self) -> None:
        """Let the loop close."""

    def connection_lost(self, exc: Exception | None) -> None:
        """Wake all waiters."""
        self._error = exc
        self._queue.clear()
        if self._resting is not None:
            self._resting.cancel()
        if not self._over.done():
            self._over.set_result(None)
        self._news.set()
        for _, _, waiter in self._waiters:
            if not waiter.done():
                waiter.set_exception(ConnectionResetError("the connection was lost"))
        self._waiters.clear()

    def pause_writing(self) -> None:
        """Stop giving data: the loop still keeps the last piece."""
        self._writable = False

    def resume_writing(self) -> None:
        """Continue: the kernel has it."""
        self._writable = True
        # Not from here: if sending fails inside the loop's own sending, it ends the connection twice.
        self._push_soon()

    # -- inside -------------------------------------------------------------------------------------------------------

    def _adopt(self, transport: Any) -> None:  # noqa: ANN401  # uvloop's transports do not derive from asyncio's
        self._transport = transport
        # With a bound of 0 the TLS layer of Python 3.11 takes an empty buffer for a full one.
        transport.set_write_buffer_limits(high=1, low=0)

    async def _within(self, work: Any, timeout_s: float) -> Any:  # noqa: ANN401  # whatever the loop returns
        try:
            async with asyncio.timeout(timeout_s):
                return await work
        except BaseException:
            self.abort()
            raise

    def _must_stop(self) -> bool:
        return self._resting is not None or self._framer.waiting_bytes > _READ_AHEAD_BYTES

    def _rested(self) -> None:
        self._resting = None
        self._continue()

    def _continue(self) -> None:
        if not self._reading and not self._must_stop() and self._transport is not None and not self._over.done():
            self._reading = True
            self._transport.resume_reading()

    async def _arrival(self) -> None:
        while not self._framer.frames and not self._over.done():
            self._news.clear()
            await self._news.wait()

    def _push_soon(self) -> None:
        if not self._scheduled:
            self._scheduled = True
            self._loop.call_soon(self._push)

    def _push(self) -> None:
        self._scheduled = False
        if self._transport is None or self._over.done() or self._transport.is_closing():
            return
        while self._writable and not self._transport.is_closing():  # a write that fails closes it
            self.sent += self._flying
            self._flying = 0
            if not self._queue:
                break
            piece = self._next_piece()
            self._flying = len(piece)
            self._stats.wire_bytes_up += self._flying
            self._transport.write(bytes(piece) if _LOOP_KEEPS_VIEWS else piece)
        while self._waiters and self._waiters[0][0] <= self.sent:
            waiter = heapq.heappop(self._waiters)[2]
            if not waiter.done():
                waiter.set_result(None)
        if self._closing and not self._queue:
            # Not from here: a loop that has just emptied its buffer would end the connection twice.
            self._loop.call_soon(self._transport.close)

    def _next_piece(self) -> Buffer:
        first = self._queue.popleft()
        if len(first) >= _JOINED_BYTES:
            if len(first) > _SLICE_BYTES:
                self._queue.appendleft(first[_SLICE_BYTES:])
            return first[:_SLICE_BYTES]
        if not self._queue:
            return first
        parts, size = [first], len(first)
        while self._queue and len(self._queue[0]) < _JOINED_BYTES and size < _SLICE_BYTES:
            parts.append(self._queue.popleft())
            size += len(parts[-1])
        return b"".join(parts)
