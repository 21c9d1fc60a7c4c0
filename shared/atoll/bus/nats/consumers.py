"""A durable place in a work queue, read one message at a time.

Each `next` sends a pull request for one message (larger batches stall in nats-py) to a private inbox. A message that
arrives after the caller has given up waits for the next `next`. Closing returns unsettled messages. If a process dies,
the broker delivers its messages again after `ack_wait_s`.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from typing import Any

from nats.aio.msg import Msg

from atoll.base.errors import RecordConflict, SettingsError
from atoll.base.waiting import Unanswered, first_of
from atoll.bus.nats.connection import Connection
from atoll.bus.nats.jetstream_api import ApiRefusal, JetStream, JetStreamPatience, unavailable

_NS = 1_000_000_000
_NO_CONSUMER = 10014
_CONFLICTS = (10100, 10099, 10148, 10013, 10012)
_GRACE_S = 0.25
_CLOSE_S = 2.0


class QueueDelivery:
    """One message that we hold; each verb may be called from the caller's loop."""

    def __init__(self, owner: QueueConsumer, message: Msg) -> None:
        """Wrap `message`; its reply subject says how often it was delivered."""
        self.subject = message.subject
        self.data: bytes = message.data
        self.redelivered = message.metadata.num_delivered > 1
        self.reply = message.reply
        self._owner = owner

    async def ack(self) -> None:
        """Remove the message from the queue, confirmed by the broker."""
        await self._owner.connection.call(self._owner.settle(self))

    async def hold(self) -> None:
        """Put off redelivery by another `ack_wait_s`."""
        await self._owner.connection.call(self._owner.say(self, b"+WPI"))

    async def release(self) -> None:
        """Return it for another delivery."""
        await self._owner.connection.call(self._owner.give_back(self))


class QueueConsumer:
    """A `Consumer` over JetStream; built by `open_consumer`."""

    def __init__(self, jetstream: JetStream, stream: str, config: dict[str, Any], *, takeover: bool) -> None:
        """Remember what to create and where to pull; after a takeover a lost consumer is never created again."""
        self._takeover = takeover
        self.connection: Connection = jetstream.connection
        self._jetstream = jetstream
        self._stream = stream
        self._config = config
        self._inbox = self.connection.inbox()
        self._key = 0
        self._pulls = 0
        self._arrived: asyncio.Queue[Msg] = asyncio.Queue(config["max_ack_pending"])
        self._unsettled: dict[str, QueueDelivery] = {}
        self._closed = False

    async def next(self, timeout_s: float) -> QueueDelivery | None:
        """Return the next message, or None if none came within `timeout_s`."""
        return await self.connection.call(self._next(timeout_s))

    async def drained(self) -> bool:
        """Return whether the broker reports nothing queued and nothing unsettled; see `Consumer`."""
        return await self.connection.call(self._drained())

    async def close(self) -> None:
        """Stop reading and return unsettled messages."""
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
                raise self._removed(reason) from reason
            if reason.err_code in _CONFLICTS:
                raise SettingsError(
                    "this durable consumer cannot read the queue",
                    got=f"{name}: {reason.description}",
                    allowed="one durable name per filter, filters that do not overlap",
                    todo="use the same name and filter as before",
                ) from reason
            raise reason.public(self._config["filter_subject"]) from reason
        if not self._key:
            self._key = await self.connection.subscribe(f"{self._inbox}.*", self._on_message)

    def _removed(self, reason: ApiRefusal) -> RecordConflict:
        """Return the error for a queue that another reader has taken over meanwhile."""
        return RecordConflict("somebody else reads this queue", got=f"{self._config['durable_name']}: {reason}")

    async def _drained(self) -> bool:
        try:
            answer = await self._jetstream.api(f"CONSUMER.INFO.{self._stream}.{self._config['durable_name']}")
        except ApiRefusal as reason:
            if reason.err_code == _NO_CONSUMER and self._takeover:
                raise self._removed(reason) from reason
            return False
        return int(answer["num_pending"]) == 0 and int(answer["num_ack_pending"]) == 0

    def _on_message(self, message: Msg) -> None:
        """Queue an arriving message; beyond the bound it is delivered again later."""
        with contextlib.suppress(asyncio.QueueFull):
            self._arrived.put_nowait(message)

    async def _next(self, timeout_s: float) -> QueueDelivery | None:
        """Pull until a message comes or the time is up."""
        loop = self.connection.loop
        deadline = loop.time() + timeout_s
        patience = JetStreamPatience(self.connection)
        while True:
            while not self._arrived.empty():
                if (delivery := self._take(self._arrived.get_nowait())) is not None:
                    return delivery
            left = deadline - loop.time()
            if left <= 0 or self._closed:
                return None
            try:
                arrived = await self._pull(left)
            except Unanswered as reason:
                if deadline - loop.time() <= 0:
                    return None
                await patience.after(self._stream, reason)
                continue
            if arrived is not None and (delivery := self._take(arrived)) is not None:
                return delivery

    async def _pull(self, left_s: float) -> Msg | None:
        """Ask for one message and return what arrives within `left_s`, or None."""
        self._pulls += 1
        token = f"{self._inbox}.{self._pulls}"
        lost = self.connection.lost
        body = json.dumps({"batch": 1, "expires": max(int(left_s * _NS), 1_000_000)}).encode()
        await self.connection.send(
            f"$JS.API.CONSUMER.MSG.NEXT.{self._stream}.{self._config['durable_name']}", body, reply=token
        )
        getting = asyncio.ensure_future(self._arrived.get())
        taken = False
        deadline = self.connection.loop.time() + left_s + _GRACE_S
        try:
            while True:
                await first_of(deadline - self.connection.loop.time(), getting, lost)
                if not getting.done():
                    if lost.done():
                        raise Unanswered("connection lost while pulling")
                    return None
                message = getting.result()
                status = (message.headers or {}).get("Status")
                if status is None:
                    taken = True
                    return message
                if message.subject == token:
                    if status in ("408", "404"):
                        return None
                    if status == "503" or "Deleted" in (message.headers or {}).get("Description", ""):
                        await self._restore()
                    raise Unanswered(f"pull answered {status}")
                getting = asyncio.ensure_future(self._arrived.get())
        finally:
            # If the caller gives up at the moment of arrival, keep the message: it would be away until ack_wait_s ends.
            if not getting.cancel() and not taken:
                self._on_message(getting.result())

    async def _restore(self) -> None:
        """Create the reader again, unless it took over: then the reader that removed it has the queue now."""
        if not self._takeover:
            await self.create()

    def _take(self, message: Msg) -> QueueDelivery | None:
        """Turn a message into a delivery; None for a status line of an older pull."""
        if (message.headers or {}).get("Status") or not message.reply:
            return None
        delivery = QueueDelivery(self, message)
        self._unsettled[delivery.reply] = delivery
        self.connection.stats.messages_down += 1
        self.connection.stats.bytes_down += len(message.data)
        return delivery

    async def settle(self, delivery: QueueDelivery) -> None:
        """Acknowledge and wait for the broker's confirmation, until the patience ends."""
        patience = JetStreamPatience(self.connection)
        while True:
            try:
                await self.connection.request(delivery.reply, b"+ACK")
            except Unanswered as reason:
                await patience.after(delivery.subject, reason)
            else:
                self._unsettled.pop(delivery.reply, None)
                return

    async def say(self, delivery: QueueDelivery, word: bytes) -> None:
        """Send a status about `delivery`; if it is lost, redelivery follows after silence."""
        with contextlib.suppress(Unanswered):
            await self.connection.send(delivery.reply, word, timeout_s=0.0)

    async def give_back(self, delivery: QueueDelivery) -> None:
        """Ask for redelivery now."""
        self._unsettled.pop(delivery.reply, None)
        await self.say(delivery, b"-NAK")

    async def _close(self) -> None:
        """Unsubscribe, then return all held messages."""
        await self.connection.unsubscribe(self._key)
        while not self._arrived.empty():
            self._take(self._arrived.get_nowait())
        held = list(self._unsettled.values())
        for delivery in held:
            await self.give_back(delivery)
        if held:
            with contextlib.suppress(Unanswered):
                await self.connection.echo(_CLOSE_S)


async def open_consumer(
    jetstream: JetStream, stream: str, subject_filter: str, durable: str, *, takeover: bool
) -> QueueConsumer:
    """Create or resume `durable` on `stream` (in the connection's loop); `takeover` removes earlier readers."""
    options = jetstream.connection.options
    if takeover:
        await _remove_readers(jetstream, stream, subject_filter)
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
    try:
        await consumer.create()
    except Unanswered as reason:
        raise unavailable(subject_filter, 0.0, reason) from reason
    return consumer


async def _remove_readers(jetstream: JetStream, stream: str, subject_filter: str) -> None:
    """Remove every durable reader of exactly this filter."""
    try:
        found = (await jetstream.api(f"CONSUMER.LIST.{stream}", {"offset": 0})).get("consumers") or []
        for name in [each["name"] for each in found if each["config"].get("filter_subject") == subject_filter]:
            await jetstream.api(f"CONSUMER.DELETE.{stream}.{name}")
    except ApiRefusal as reason:
        if reason.err_code != _NO_CONSUMER:
            raise reason.public(subject_filter) from reason
