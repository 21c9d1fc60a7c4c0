"""A durable place in a work queue.

A `next` that finds nothing here sends a pull request for up to `_BATCH` messages to a private inbox; as long as one stands, no
other is sent. A delivery that arrives waits for the next `next` or `arrived`. Closing returns unsettled messages; those of a
process that dies are delivered again after `ack_wait_s`. Anybody who learns the inbox may send to it: a message that is no
delivery of JetStream's, by the subject on which it is settled, is dropped.
"""
# ruff: noqa: D102  (a method without a docstring is the one of `Consumer` or `Delivery`)

from __future__ import annotations

import asyncio
import contextlib
import json
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec
from nats.aio.msg import Msg

from atoll.base.errors import RecordConflict, SettingsError
from atoll.base.retry import Unanswered
from atoll.bus.interface import QueueTurns
from atoll.bus.nats.connection import Connection
from atoll.bus.nats.framing import DESCRIPTION, STATUS
from atoll.bus.nats.jetstream_api import (
    ApiRefusal,
    JetStream,
    JetStreamPatience,
    newest_sequence,
    public_errors,
    read_field,
)

_NS = 1_000_000_000
_NO_CONSUMER = 10014
_CONFLICTS = (10100, 10099, 10148, 10013, 10012)
_GRACE_S = 0.25
_CLOSE_S = 2.0
_BATCH = 256
_BATCH_BYTES = 4 << 20
_ACK_LEVELS = (9, 11, 12)


@dataclass(slots=True)
class QueueDelivery:
    """One message that we hold; each verb may be called from the caller's loop. `reply` is where we settle it."""

    owner: QueueConsumer
    subject: str
    data: bytes
    redelivered: bool
    reply: str

    async def ack(self) -> None:
        connection = self.owner.connection
        patience = JetStreamPatience(connection)
        while True:
            try:
                await connection.call(connection.request(self.reply, b"+ACK", attempts=patience.attempts))
            except Unanswered as reason:
                await patience.after(self.subject, reason)
            else:
                self.owner.unsettled.pop(_place(self.reply), None)
                return

    async def drop(self) -> None:
        await self.owner.connection.call(self.owner.settle(self.reply, b"+ACK"))

    async def hold(self) -> None:
        await self.owner.connection.call(self.owner.say(self.reply, b"+WPI"))

    async def release(self) -> None:
        await self.owner.connection.call(self.owner.settle(self.reply, b"-NAK"))


@dataclass(slots=True)
class PullRequest:
    """A pull request that stands: its `token` is where the broker says its end, unless it ends `until_s` or with its batch.

    It also ends with the connection on which it was sent, once that is `lost`.
    """

    token: str
    until_s: float
    lost: asyncio.Future[None]
    left: int = _BATCH


class _Reader(msgspec.Struct):
    name: str
    config: dict[str, Any]


class QueueConsumer:
    """A `Consumer` over JetStream; built by `open_consumer`."""

    def __init__(self, jetstream: JetStream, stream: str, config: dict[str, Any], *, takeover: bool) -> None:
        self._takeover = takeover
        self.connection: Connection = jetstream.connection
        self._jetstream = jetstream
        self._stream = stream
        self._config = config
        self._inbox = self.connection.admission.inbox()
        self._key = 0
        self._pulls = 0
        self._standing: PullRequest | None = None
        self._arrived: deque[Msg] = deque()  # the broker sends no more than `max_ack_pending`
        self._waiting: set[Callable[[], None]] = set()
        self.unsettled: dict[str, str] = {}
        """Where each message that we hold is settled, by its place in the stream: of several deliveries the last counts."""
        self._newest_then = 0
        self._turns = QueueTurns()
        self._closed = False

    async def next(self, timeout_s: float) -> QueueDelivery | None:
        return await self.connection.call(self._next(timeout_s))

    async def arrived(self, most: int) -> list[QueueDelivery]:
        return await self.connection.call(self._take(most))

    @property
    def turns(self) -> int:
        return self._turns.count

    async def drained(self) -> bool | None:
        try:
            return await self.connection.call(self._is_drained())
        except Unanswered:  # what came was no answer of JetStream's
            return None

    async def close(self) -> None:
        if not self._closed:
            self._closed = True
            await self.connection.call(self._close())

    # -- in the connection's loop -------------------------------------------------------------------------------------

    async def create(self) -> None:
        """Create or resume the durable consumer and hear the inbox."""
        name = self._config["durable_name"]
        try:
            await self._jetstream.api(
                f"CONSUMER.DURABLE.CREATE.{self._stream}.{name}",
                {"stream_name": self._stream, "config": self._config},
            )
        except ApiRefusal as reason:
            if reason.err_code in _CONFLICTS and self._takeover:
                raise self._removal_error(reason) from reason
            if reason.err_code in _CONFLICTS:
                raise SettingsError(
                    "this durable consumer cannot read the queue",
                    got=f"{name}: {reason.description}",
                    allowed="one durable name per filter, filters that do not overlap",
                    todo="use the same name and filter as before",
                ) from reason
            raise reason.public(self._config["filter_subject"]) from reason
        if not self._key:
            self._key = await self.connection.subscribe(f"{self._inbox}.*", self._hear)

    def _removal_error(self, reason: ApiRefusal) -> RecordConflict:
        return RecordConflict("somebody else reads this queue", got=f"{self._config['durable_name']}: {reason}")

    async def _is_drained(self) -> bool:
        try:
            answer = await self._jetstream.api(f"CONSUMER.INFO.{self._stream}.{self._config['durable_name']}")
        except ApiRefusal as reason:
            if reason.err_code == _NO_CONSUMER and self._takeover:
                raise self._removal_error(reason) from reason
            return False
        floor = read_field(answer, int, "ack_floor", "stream_seq")
        empty = read_field(answer, int, "num_pending") == 0 and read_field(answer, int, "num_ack_pending") == 0
        # The consumer may not have counted yet what is queued. The stream's leader knows it.
        if empty and await newest_sequence(self._jetstream, self._stream, self._config["filter_subject"]) <= floor:
            self._turns.see(floor, floor)
            return True
        last = read_field(await self._jetstream.api(f"STREAM.INFO.{self._stream}"), int, "state", "last_seq")
        before, self._newest_then = self._newest_then, last
        self._turns.see(last, floor)
        return 0 < before <= floor

    async def _next(self, timeout_s: float) -> QueueDelivery | None:
        loop = self.connection.loop
        deadline = loop.time() + timeout_s
        patience = JetStreamPatience(self.connection)
        while True:
            left = deadline - loop.time()
            if not self._arrived and (left <= 0 or self._closed):
                return None
            try:
                message = self._arrived.popleft() if self._arrived else await self._pull(left)
            except Unanswered as reason:
                if deadline - loop.time() <= 0:
                    return None
                await patience.after(self._stream, reason)
                continue
            if message is not None and (delivery := self._delivery(message)) is not None:
                return delivery

    async def _take(self, most: int) -> list[QueueDelivery]:
        found: list[QueueDelivery] = []
        while len(found) < most and self._arrived:
            delivery = self._delivery(self._arrived.popleft())
            if delivery is not None:
                found.append(delivery)
        return found

    def _delivery(self, message: Msg) -> QueueDelivery | None:
        # With a subject on which it is settled it is a delivery, whatever its writer put into its headers.
        attempts, standing = _attempts(message.reply), self._standing
        if standing is not None:
            standing.left -= attempts is not None
            if message.subject == standing.token or standing.left <= 0:
                self._standing = None
        if attempts is None:
            return None
        delivery = QueueDelivery(self, message.subject, message.data, attempts > 1, message.reply)
        self.unsettled[_place(message.reply)] = message.reply
        self.connection.stats.bytes_down += len(message.data)
        return delivery

    async def _pull(self, left_s: float) -> Msg | None:
        standing = await self._ask(left_s)
        deadline = min(self.connection.loop.time() + left_s, standing.until_s) + _GRACE_S
        while True:
            if not self._arrived:
                await self._arrival(deadline - self.connection.loop.time(), standing.lost)
            if not self._arrived:
                if standing.lost.done():
                    raise Unanswered("connection lost while pulling")
                return None
            message = self._arrived.popleft()
            status = (message.headers or {}).get(STATUS)
            if message.reply or status is None:  # only a delivery has a reply
                return message
            if message.subject == standing.token:
                self._standing = None
                if status in ("408", "404"):
                    return None
                deleted = status == "503" or "Deleted" in (message.headers or {}).get(DESCRIPTION, "")
                if deleted and not self._takeover:  # after a takeover the reader that removed ours has the queue
                    await self.create()
                raise Unanswered(f"pull answered {status}")

    def _hear(self, message: Msg) -> None:
        self._arrived.append(message)
        for wake in self._waiting:
            wake()

    async def _arrival(self, wait_s: float, lost: asyncio.Future[None]) -> None:
        loop = self.connection.loop
        news: asyncio.Future[None] = loop.create_future()

        def wake(_lost: object = None) -> None:
            if not news.done():
                news.set_result(None)

        self._waiting.add(wake)
        lost.add_done_callback(wake)  # of this waiter alone: a future forgets all callbacks that are equal
        timer = loop.call_later(max(0.0, wait_s), wake)
        try:
            await news
        finally:
            timer.cancel()
            lost.remove_done_callback(wake)
            self._waiting.discard(wake)

    async def _ask(self, left_s: float) -> PullRequest:
        now_s, lost = self.connection.loop.time(), self.connection.lost
        standing = self._standing
        if standing is not None and standing.lost is lost and now_s < standing.until_s:
            return standing
        self._pulls += 1
        standing = PullRequest(f"{self._inbox}.{self._pulls}", now_s + left_s, lost)
        wanted = {"batch": _BATCH, "max_bytes": _BATCH_BYTES, "expires": max(int(left_s * _NS), 1_000_000)}
        where = f"{self._jetstream.root}.CONSUMER.MSG.NEXT.{self._stream}.{self._config['durable_name']}"
        await self.connection.send(where, json.dumps(wanted).encode(), reply=standing.token)
        self._standing = standing
        return standing

    async def say(self, reply: str, word: bytes) -> None:
        """Send a status about a delivery; if it is lost, redelivery follows after silence."""
        with contextlib.suppress(Unanswered):
            await self.connection.send(reply, word, timeout_s=0.0)

    async def settle(self, reply: str, word: bytes) -> None:
        """Let go of a delivery: it is done with, or is to be delivered again now."""
        self.unsettled.pop(_place(reply), None)
        await self.say(reply, word)

    async def _close(self) -> None:
        await self.connection.unsubscribe(self._key)
        await self._take(len(self._arrived))
        held = list(self.unsettled.values())
        for reply in held:
            await self.settle(reply, b"-NAK")
        if held:
            with contextlib.suppress(Unanswered):
                await self.connection.echo(_CLOSE_S)


def _attempts(reply: str) -> int | None:
    # `$JS.ACK.<stream>.<consumer>.<delivered>.…`, with two levels more before the stream where the broker has a domain.
    levels = reply.split(".")
    if levels[:2] != ["$JS", "ACK"] or len(levels) not in _ACK_LEVELS:
        return None
    delivered = levels[4] if len(levels) == _ACK_LEVELS[0] else levels[6]
    return int(delivered) if delivered.isascii() and delivered.isdigit() else None


async def open_consumer(
    jetstream: JetStream, stream: str, subject_filter: str, durable: str, *, takeover: bool
) -> QueueConsumer:
    """Create or resume `durable` on `stream` (in the connection's loop); `takeover` removes earlier readers."""
    options = jetstream.connection.options
    consumer = QueueConsumer(
        jetstream,
        stream,
        {
            "durable_name": durable,
            "ack_policy": "explicit",
            "deliver_policy": "all",
            "replay_policy": "instant",
            "filter_subject": subject_filter,
            "ack_wait": int(options.ack_wait_s * _NS),
            "max_ack_pending": options.ack_pending_max,
            "max_deliver": -1,
        },
        takeover=takeover,
    )
    with public_errors(subject_filter):
        if takeover:
            await _remove_readers(jetstream, stream, subject_filter)
        await consumer.create()
    return consumer


async def _remove_readers(jetstream: JetStream, stream: str, subject_filter: str) -> None:
    # A cluster lists only the readers that have a leader now, and names the others as missing: those may be of our filter.
    patience = JetStreamPatience(jetstream.connection)
    try:
        answer = await jetstream.api(f"CONSUMER.LIST.{stream}", {"offset": 0})
        while missing := answer.get("missing"):
            await patience.after(stream, Unanswered(f"consumers without a leader: {missing}"))
            answer = await jetstream.api(f"CONSUMER.LIST.{stream}", {"offset": 0})
        found = read_field({"consumers": answer.get("consumers") or []}, list[_Reader], "consumers")
        for name in [each.name for each in found if each.config.get("filter_subject") == subject_filter]:
            await jetstream.api(f"CONSUMER.DELETE.{stream}.{name}")
    except ApiRefusal as reason:
        if reason.err_code != _NO_CONSUMER:
            raise reason.public(subject_filter) from reason


def _place(reply: str) -> str:
    levels = reply.split(".")
    return levels[5] if len(levels) == _ACK_LEVELS[0] else levels[7]
