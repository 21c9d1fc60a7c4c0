"""JetStream as three verbs over one connection: store until acknowledged, ask its API, read stored messages in bulk.

Storing repeats the same message under the same id until the broker acknowledges it or a bound is reached, so a lost
acknowledgement costs a duplicate that the broker drops. Reading uses batched direct get: one request, many messages,
and no consumer stays behind on the server. The server does not cut off a reader that stalls.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from nats.aio.msg import Msg

from atoll.base.errors import AtollError, BrokerUnavailable, ProtocolMisuse, QueueFull, RunReplaced, StorageFull
from atoll.base.retry import Pauses
from atoll.base.waiting import Unanswered, first_of
from atoll.bus.nats.connection import Connection
from atoll.wire.limits import Buffer

WRONG_SEQUENCE = 10071
NO_MESSAGE = 10037
STREAM_EXISTS = 10058
_STORE_FAILED = 10077
_NO_ROOM = (10023, 10047)
_NO_STREAM = 10059
_PAUSE_FIRST_S = 0.05
_PAUSE_MAX_S = 2.0


class ApiRefusal(Exception):
    """A refusal from JetStream."""

    def __init__(self, error: Mapping[str, Any]) -> None:
        """Keep the three parts of a JetStream error."""
        self.code = int(error.get("code", 0))
        self.err_code = int(error.get("err_code", 0))
        self.description = str(error.get("description", ""))
        super().__init__(f"{self.code}/{self.err_code} {self.description}")

    @property
    def is_full(self) -> bool:
        """Return whether there is no room for now. A purge says so in words only."""
        return self.err_code == _STORE_FAILED or self.err_code in _NO_ROOM or "no space left" in self.description

    @property
    def is_passing(self) -> bool:
        """Return whether the same request may succeed later."""
        return self.is_full or self.code in (429, 503)

    def public(self, subject: str) -> AtollError:
        """Return the error for a caller of the bus."""
        if self.err_code == _STORE_FAILED and "per subject" in self.description:
            return QueueFull("the queue holds its bound for this subject", got=subject, allowed=self.description)
        if self.is_full:
            return StorageFull(
                "the stream has no room",
                got=f"{subject}: {self.description}",
                todo="raise stream_bytes_max, free the disk, or let consumers catch up",
            )
        if self.is_passing:
            return BrokerUnavailable("JetStream cannot serve now", got=str(self), todo="look at the broker's log")
        if self.err_code == _NO_STREAM:
            return RunReplaced(
                "the broker has no streams of this run",
                got=f"{subject}: {self}",
                todo="was the broker's store lost? rebuild the run from its archive (atoll synchronizer --restore); otherwise "
                "check --run and --broker",
            )
        return ProtocolMisuse("JetStream refused", got=f"{subject}: {self}")


def unavailable(subject: str, waited_s: float, reason: object) -> BrokerUnavailable:
    """Return the error for a call that outlived its patience."""
    return BrokerUnavailable(
        f"the broker gave no answer on {subject}",
        got=f"{reason} after {waited_s:.1f} s",
        todo="check that the broker runs, that its streams exist and that the network lets us through",
    )


class JetStreamPatience:
    """The pauses of `atoll.base.retry`, with jitter, up to `total_s` (or `full_s` while the stream is full)."""

    def __init__(self, connection: Connection) -> None:
        """Start now."""
        self._options = connection.options
        self._stats = connection.stats
        self._loop = connection.loop
        self._began = self._loop.time()
        self._pauses = Pauses(_PAUSE_FIRST_S, _PAUSE_MAX_S, jitter=0.5)

    @property
    def waited_s(self) -> float:
        """Return seconds since the start."""
        return self._loop.time() - self._began

    async def after(self, subject: str, reason: Unanswered | ApiRefusal) -> None:
        """Sleep and return if `subject` may be tried again, else raise the public error for `reason`."""
        if isinstance(reason, ApiRefusal):
            if not reason.is_passing:
                raise reason.public(subject) from reason
            if self.waited_s >= (self._options.full_s if reason.is_full else self._options.total_s):
                raise reason.public(subject) from reason
        elif self.waited_s >= self._options.total_s:
            raise unavailable(subject, self.waited_s, reason) from reason
        self._stats.retries += 1
        await asyncio.sleep(self._pauses.next_s())


@dataclass(frozen=True, slots=True)
class PublishAck:
    """One stored message as a direct get returns it."""

    sequence: int
    subject: str
    data: bytes


@dataclass(frozen=True, slots=True)
class Page:
    """One answer to a batched get; `pending` messages that match were left for the next page."""

    messages: list[PublishAck]
    pending: int
    up_to: int
    too_many: bool = False


class JetStream:
    """The three verbs. Every method runs in the connection's loop."""

    def __init__(self, connection: Connection) -> None:
        """Speak through `connection`."""
        self.connection = connection

    async def api(self, call: str, body: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Return the answer of `$JS.API.<call>`, tried until the patience ends; raise `ApiRefusal` for a plain no."""
        patience = JetStreamPatience(self.connection)
        subject = f"$JS.API.{call}"
        payload = json.dumps(body).encode() if body is not None else b""
        while True:
            try:
                return self.answer(await self.connection.request(subject, payload))
            except Unanswered as reason:
                await patience.after(subject, reason)
            except ApiRefusal as reason:
                if not reason.is_passing:
                    raise
                await patience.after(subject, reason)

    async def ask(self, call: str, body: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Do as `api`, but raise a plain no as the caller's error."""
        try:
            return await self.api(call, body)
        except ApiRefusal as reason:
            raise reason.public(call) from reason

    @staticmethod
    def answer(message: Msg) -> dict[str, Any]:
        """Decode an API answer or a publish acknowledgement."""
        try:
            answer: dict[str, Any] = json.loads(message.data)
        except ValueError:
            raise Unanswered(f"not a JetStream answer on {message.subject}") from None
        if "error" in answer:
            raise ApiRefusal(answer["error"])
        return answer

    async def store_once(self, subject: str, payload: Buffer, headers: dict[str, str]) -> int:
        """Publish once and return the sequence; raise `ApiRefusal` or `Unanswered`."""
        answer = self.answer(await self.connection.request(subject, payload, headers))
        self.connection.stats.messages_up += 1
        self.connection.stats.bytes_up += len(payload)
        return int(answer["seq"])

    async def store(self, subject: str, payload: Buffer, headers: dict[str, str]) -> int:
        """Publish under the id in `headers` until acknowledged and return the sequence."""
        patience = JetStreamPatience(self.connection)
        while True:
            try:
                return await self.store_once(subject, payload, headers)
            except (Unanswered, ApiRefusal) as reason:
                await patience.after(subject, reason)

    async def page(self, stream: str, body: Mapping[str, Any]) -> Page:
        """Return one page of a batched direct get, whole or not at all (tried until the patience ends)."""
        patience = JetStreamPatience(self.connection)
        while True:
            try:
                return await self._page_once(stream, body)
            except Unanswered as reason:
                await patience.after(f"$JS.API.DIRECT.GET.{stream}", reason)

    async def _page_once(self, stream: str, body: Mapping[str, Any]) -> Page:
        """Ask for a page through a private inbox and collect until the end-of-batch marker."""
        done: asyncio.Future[Msg] = self.connection.loop.create_future()
        messages: list[PublishAck] = []

        def collect(message: Msg) -> None:
            headers = message.headers or {}
            if "Nats-Sequence" in headers and "Status" not in headers:
                messages.append(PublishAck(int(headers["Nats-Sequence"]), headers["Nats-Subject"], message.data))
            elif not done.done():
                done.set_result(message)

        inbox = self.connection.inbox()
        key = await self.connection.subscribe(inbox, collect, confirm=False)
        lost = self.connection.lost
        try:
            await self.connection.send(f"$JS.API.DIRECT.GET.{stream}", json.dumps(body).encode(), reply=inbox)
            moves = self.connection.movement()
            while not done.done():
                # On a slow link even one message may take longer than a try; what counts is that bytes move.
                await first_of(self.connection.options.try_s, done, lost)
                if not done.done() and (lost.done() or not moves()):
                    raise Unanswered(f"batched get from {stream} stalled")
        finally:
            await self.connection.unsubscribe(key)
        return self._page_of(messages, done.result().headers or {}, stream)

    def _page_of(self, messages: list[PublishAck], end: Mapping[str, str], stream: str) -> Page:
        """Read the end-of-batch marker."""
        status = end.get("Status", "")
        if status == "413":
            return Page([], 0, 0, too_many=True)
        if status not in ("204", "404"):
            raise Unanswered(f"batched get from {stream}: {status} {end.get('Description', '')}")
        self.connection.stats.messages_down += len(messages)
        self.connection.stats.bytes_down += sum(len(message.data) for message in messages)
        return Page(messages, int(end.get("Nats-Num-Pending", 0)), int(end.get("Nats-UpTo-Sequence", 0)))
