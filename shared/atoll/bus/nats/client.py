"""nats-py's client over a transport of our own.

Of nats-py we replace:

* **the parser**, because our transport delivers frames: messages go straight to nats-py's dispatch, every other line to
  nats-py's own parser;
* **handing messages over**: the function given to `hear` is called as soon as a message is read, and must not wait;
* **publishing**: a large payload counts as published when the kernel has all of it. Then the buffer is no longer read, and the
  time-out of a request that carried it begins. A sender that gives up before that must have it copied (`copy_queued`);
* **the queue of a lost connection**: it is dropped. The sender gets an error, and sends again if it matters;
* **the end**: nats-py cancels each of its tasks once, and `asyncio.wait_for` of Python 3.11 loses a cancellation that comes
  together with what it waits for. Such a client connects again for ever, also after its close. `end` leaves no task.

`ws://` and `wss://` keep nats-py's transport. No other file of ours touches a private part of nats-py;
`tests/contract/test_nats_private_parts.py` names these parts and what we expect of each.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import Callable, Iterator
from typing import Any

from nats import errors
from nats.aio.client import Client, Srv
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription
from nats.protocol.parser import Parser

from atoll.base.retry import cancel_all, wait_at_most
from atoll.bus.nats.framing import Frame, Message, read_headers, text_of
from atoll.bus.nats.transport import QUEUE_BYTES, SocketTransport
from atoll.bus.options import BusOptions
from atoll.wire.traffic import BusStats

NO_TLS = "the broker offers no TLS"
LARGE_BYTES = 64 << 10
"""From here on `publish` returns when the kernel has the payload; below, when it is queued (and copied)."""
_PENDING_BYTES = 8 << 20
_PINGS_MAX, _BULK_PINGS_MAX = 2, 1 << 20
_TOKEN = re.compile(r"[!#$%&'*+\-.^_`|~0-9A-Za-z]+")
_NEWLINE = re.compile(r"[\r\n]")


class FrameParser(Parser):
    """Takes what `SocketTransport.read` returns."""

    def __init__(self, client: Client, *, keeps_buffers: bool) -> None:
        super().__init__(client)
        self._keeps_buffers = keeps_buffers

    def payload(self, message: Message) -> bytes | bytearray | memoryview:
        """Return a message's payload as this client wants it."""
        return message.payload if self._keeps_buffers else bytes(message.payload)

    async def parse(self, data: bytes | list[Frame] = b"") -> None:
        """Dispatch frames in order, or bytes as nats-py does."""
        if isinstance(data, bytes):
            await super().parse(data)
            return
        for frame in data:
            if isinstance(frame, Message):
                # nats-py reads only the length of what it dispatches, and an empty header is none.
                payload: Any = self.payload(frame)
                await self.nc._process_msg(frame.sid, frame.subject, frame.reply, payload, frame.header)  # noqa: SLF001
            elif isinstance(frame, bytes):
                await super().parse(frame)
                if self.buf:
                    self.reset()
                    raise errors.ProtocolError("nats: unknown protocol")
            else:
                raise frame


class WireClient(Client):
    """A client whose bytes are counted in `stats`; with `keeps_buffers`, large payloads arrive as `bytearray`.

    Its sockets request `congestion` from the kernel, if that is not empty, and rest `rest_s` after reads. If it `must_encrypt`,
    it leaves a broker that offers no TLS.
    """

    def __init__(
        self,
        stats: BusStats,
        *,
        keeps_buffers: bool = False,
        congestion: str = "",
        rest_s: float = 0.0,
        must_encrypt: bool = False,
    ) -> None:
        super().__init__()
        self._must_encrypt = must_encrypt
        self._stats = stats
        self._congestion = congestion
        self._rest_s = rest_s
        self._ps: FrameParser = FrameParser(self, keeps_buffers=keeps_buffers)
        self._hearers: dict[int, Callable[[Msg], None]] = {}
        self._complaining: set[asyncio.Future[None]] = set()
        self._reconnections: set[asyncio.Task[Any]] = set()
        self._closings: set[asyncio.Task[Any]] = set()
        self._is_ending = False
        self.wire: SocketTransport | None = None
        """Our transport; None before the first connection and with nats-py's own."""

    async def hear(self, subject: str, on_message: Callable[[Msg], None]) -> Subscription:
        """Subscribe to `subject`; each message is handed over as soon as it is read, across reconnects."""
        subscription = await self.subscribe(subject)
        self._hearers[subscription._id] = on_message  # noqa: SLF001
        while not subscription._pending_queue.empty():  # noqa: SLF001
            on_message(subscription._pending_queue.get_nowait())  # noqa: SLF001
        return subscription

    def sends_at_once(self, payload_size: int) -> bool:
        """Return whether `publish` would not wait: neither for room, nor until a large payload is gone."""
        return payload_size < LARGE_BYTES and self.wire is not None and self.wire.queued <= QUEUE_BYTES

    def copy_queued(self, payload: Any) -> None:  # noqa: ANN401  # any buffer of bytes
        """Copy what is queued of `payload`, whose publishing was given up."""
        if self.wire is not None:
            self.wire.copy_queued(payload)

    def _remove_sub(self, sid: int, max_msgs: int = 0) -> None:
        self._hearers.pop(sid, None)
        super()._remove_sub(sid, max_msgs)

    async def _process_msg(self, sid: int, subject: bytes, reply: bytes, data: bytes, headers: bytes) -> None:
        if not self._hand_over(sid, subject, reply, data, headers):
            await super()._process_msg(sid, subject, reply, data, headers)

    def _take_message(self, message: Message) -> bool:
        if message.sid not in self._hearers:
            return False
        payload: Any = self._ps.payload(message)
        return self._hand_over(message.sid, message.subject, message.reply, payload, message.header)

    def _hand_over(self, sid: int, subject: bytes, reply: bytes, data: bytes, headers: bytes) -> bool:
        on_message = self._hearers.get(sid)
        if on_message is None:
            return False
        try:
            on_message(self._build_message(sid, subject, reply, data, read_headers(headers)))
        except Exception as error:  # noqa: BLE001  (whatever it is, the next message must be read)
            complaining = asyncio.ensure_future(self._error_cb(error))
            self._complaining.add(complaining)
            complaining.add_done_callback(self._complaining.discard)
        return True

    async def _process_headers(self, headers: bytes) -> dict[str, str] | None:
        return read_headers(headers)

    def _build_message(
        self,
        sid: int,
        subject: bytes,
        reply: bytes,
        data: bytes,
        headers: dict[str, str] | None,
    ) -> Msg:
        """Return a message also where its subjects are no text: a broker takes any bytes, and nats-py would read no further."""
        return Msg(self, text_of(subject), text_of(reply), data, headers, _sid=sid)

    @property
    def domain(self) -> str:
        """Return the JetStream domain of the server, as it said in its greeting; empty for none."""
        return str(self._server_info.get("domain") or "")

    def abort(self) -> None:
        """Drop the socket and its unsent data without waiting; a polite close would wait for ever."""
        if self.wire is not None:
            self.wire.abort()

    async def end(self, within_s: float) -> None:
        """Close, politely for `within_s`, and return once no task of this client is left and no socket."""
        self._is_ending = True
        try:
            with contextlib.suppress(TimeoutError, errors.Error, OSError):
                await wait_at_most(self.close(), within_s)
        finally:
            self.abort()
        await cancel_all(self._tasks())
        while not all(task.done() for task in self._tasks()):
            await cancel_all(self._tasks())  # one that connected again has begun others before it ended

    def _tasks(self) -> list[asyncio.Task[Any]]:
        lasting = (self._reading_task, self._ping_interval_task, self._flusher_task)
        return [*self._reconnections, *self._closings, *(task for task in lasting if task is not None)]

    async def _close(self, status: int, do_cbs: bool = True) -> None:  # noqa: FBT001, FBT002  (nats-py's)
        with _present_in(self._closings):
            await super()._close(status, do_cbs)

    async def _connect_to_server(self, s: Srv) -> None:
        """Use a fresh transport of ours for every attempt, and end what the last one has begun."""
        if self._is_ending:
            raise asyncio.CancelledError  # the one that was lost
        # Where a broker goes away just after its greeting nats-py forgets these: each would ping beside those that follow.
        for task in (self._reading_task, self._ping_interval_task, self._flusher_task):
            if task is not None:
                task.cancel()
        if s.uri.scheme not in ("ws", "wss"):
            self.abort()
            self._transport = self.wire = SocketTransport(
                self._stats, self._congestion, self._rest_s, self._take_message
            )
        await super()._connect_to_server(s)

    def _connect_command(self) -> bytes:
        """Say who we are, unless the broker has left out TLS: nats-py would go on in plain text, whatever the address says."""
        if self._must_encrypt and not self._server_info.get("tls_required"):
            raise errors.Error(NO_TLS)
        return super()._connect_command()

    async def _attempt_reconnect(self) -> None:
        """Drop the queue of the lost connection; subscriptions are sent anew from their list."""
        self._pending, self._pending_data_size = [], 0
        self.abort()
        earlier = list(self._reconnections)
        with _present_in(self._reconnections):
            await cancel_all(earlier)  # one that goes on would take the sockets of this one
            self.abort()  # and may have put another in place meanwhile
            await super()._attempt_reconnect()

    async def _send_ping(self, future: asyncio.Future[Any] | None = None) -> None:
        """Send pending data first: otherwise nats-py's ping overtakes it, and its pong proves nothing about it."""
        if self.wire is not None:
            self.wire.writelines(self._pending)
            self._pending, self._pending_data_size = [], 0
        await super()._send_ping(future)

    async def _send_publish(
        self,
        subject: str,
        reply: str,
        payload: Any,  # noqa: ANN401  # any buffer of bytes
        payload_size: int,
        headers: dict[str, Any] | None,
    ) -> None:
        wire = self.wire
        if wire is None:
            await super()._send_publish(subject, reply, bytes(payload), payload_size, headers)
            return
        if not subject:
            raise errors.BadSubjectError
        if not self.is_connected:
            raise errors.ConnectionReconnectingError
        if headers is None:
            head = f"PUB {subject} {reply} {payload_size}\r\n".encode()
        else:
            block = header_block(headers)
            head = f"HPUB {subject} {reply} {len(block)} {len(block) + payload_size}\r\n".encode() + block
        large = payload_size >= LARGE_BYTES
        await wire.room()
        if wire is not self._transport or not self.is_connected:
            raise errors.ConnectionReconnectingError
        # What nats-py has kept for its flusher was sent earlier.
        if large:
            wire.writelines([*self._pending, head, payload, b"\r\n"])
        else:
            wire.write(b"".join((*self._pending, head, payload, b"\r\n")))
        self._pending, self._pending_data_size = [], 0
        self.stats["out_msgs"] += 1
        self.stats["out_bytes"] += payload_size
        if large:
            await wire.wait_sent(wire.accepted)


@contextlib.contextmanager
def _present_in(tasks: set[asyncio.Task[Any]]) -> Iterator[None]:
    """Keep the present task in `tasks`, unless it is there: nats-py forgets its own before they have ended."""
    task = asyncio.current_task()
    added = {task} - tasks if task is not None else set()
    tasks |= added
    try:
        yield
    finally:
        tasks -= added


def lasting(name: str, options: BusOptions, *, is_bulk: bool) -> dict[str, Any]:
    """Return what nats-py is told of a connection that lasts."""
    return {
        "name": name,
        "connect_timeout": options.connect_s,
        "dont_randomize": True,  # the first node leads (`leaders`), so the death of another is not noticed
        "max_reconnect_attempts": -1,
        "reconnect_time_wait": options.reconnect_s,
        "ping_interval": 10,
        "max_outstanding_pings": _BULK_PINGS_MAX if is_bulk else _PINGS_MAX,
        "pending_size": _PENDING_BYTES,
        "flush_timeout": 30,
    }


def header_block(headers: dict[str, Any]) -> bytes:
    """Return the header block of a message; `BadHeaderError` for a name that is no token."""
    lines = ["NATS/1.0"]
    for key, value in headers.items():
        name = key.strip()
        if name and not _TOKEN.fullmatch(name):
            raise errors.BadHeaderError(name)
        if name:
            lines.append(f"{name}: {_NEWLINE.sub(' ', value.strip())}")
    return ("\r\n".join(lines) + "\r\n\r\n").encode()
