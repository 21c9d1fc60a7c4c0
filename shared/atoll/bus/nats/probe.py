"""Questions of a doctor to a broker: what we may do there, what time it is there, and how much passes in a second.

Nothing that is asked leaves a trace. A publication carries the name of a stream that does not exist as the one it expects: the
broker first looks whether we may publish there, then the stream refuses to store it. Bytes that measure the link go from one
connection of ours to another one, on a subject that nobody else may hear. Those of a region turn back at its leaf. So what
measures the link to the hub is the body of a question that needs none: the hub answers it all the same.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final

from nats.aio.msg import Msg

from atoll.base.errors import AccessDenied, BusError, EnvironmentFault
from atoll.base.retry import Unanswered, bounded
from atoll.bus.nats.bus import JetStreamBus
from atoll.bus.nats.connection import Connection
from atoll.bus.nats.jetstream_api import ApiRefusal, JetStream
from atoll.bus.regions import is_region

NO_SUCH_STREAM: Final = "none-of-this-name"
PIECE_BYTES: Final = 128 << 10
PIECES_MAX: Final = 32
SENDING_S: Final = 4.0
DRAINING_S: Final = 12.0
COPIES: Final = 2
"""Each piece comes back so often: so the way back can be seen to be faster than the way there."""
ECHOES: Final = 5
HUB_PIECE_BYTES: Final = 32 << 10
HUB_PIECES_MAX: Final = 128


@dataclass(frozen=True, slots=True)
class LinkMeasured:
    """One look at a link: the shortest echo in seconds, and bits per second each way; those down are what we saw at least."""

    echo_s: float
    up_bits_per_s: float
    down_bits_per_s: float
    bytes_moved: int


@dataclass(frozen=True, slots=True)
class HubLinkMeasured:
    """One look at the link of a region: the shortest echo of the hub in seconds, and bits per second to it."""

    echo_s: float
    up_bits_per_s: float
    bytes_moved: int


@dataclass(frozen=True, slots=True)
class BrokerTime:
    """The broker's clock less ours, in seconds, and by how much that may be wrong."""

    ahead_s: float
    within_s: float


class BrokerProbe:
    """Asks through an open bus."""

    def __init__(self, bus: JetStreamBus) -> None:
        """Use the connection of `bus`, which stays open."""
        self._connection: Connection = bus._connection  # noqa: SLF001  (the same room)
        self._jetstream = JetStream(self._connection)

    @property
    def in_region(self) -> bool:
        """Return whether the broker is the leaf of a region; then JetStream's answers are the hub's."""
        return is_region(self._connection.domain)

    async def may_store(self, subject: str) -> bool | None:
        """Return whether the broker takes a message on `subject` from us; None if nobody stores such messages (yet)."""
        try:
            await self._connection.call(
                self._jetstream.once(subject, b"", {"Nats-Expected-Stream": NO_SUCH_STREAM}, attempts=0)
            )
        except AccessDenied:
            return False
        except ApiRefusal:
            return True
        except Unanswered:
            return None
        return True

    async def may_hear(self, subject: str) -> bool:
        """Return whether the broker lets us subscribe to `subject`."""

        def drop(_message: Msg) -> None:
            """Nothing is wanted."""

        try:
            key = await self._connection.call(self._connection.subscribe(subject, drop))
        except AccessDenied:
            return False
        await self._connection.call(self._connection.unsubscribe(key))
        return True

    async def stream(self, name: str) -> dict[str, Any] | None:
        """Return what the broker says of a stream; None if there is none, or we may not ask."""
        try:
            return await self._connection.call(self._jetstream.once(f"{self._jetstream.root}.STREAM.INFO.{name}", b""))
        except (AccessDenied, ApiRefusal, Unanswered):
            return None

    async def time(self, name: str, wall: Callable[[], float]) -> BrokerTime | None:
        """Return how the broker's clock differs from `wall`, from what it says of a stream; None if it says nothing."""
        before_s = wall()
        told = await self.stream(name)
        after_s = wall()
        try:
            there_s = datetime.fromisoformat(str((told or {}).get("ts"))).timestamp()
        except ValueError:
            return None
        return BrokerTime(there_s - (before_s + after_s) / 2, (after_s - before_s) / 2)

    async def link(self) -> LinkMeasured | None:
        """Move a few megabytes there and back, for some seconds at most; None if the broker does not answer meanwhile."""
        try:
            return await self._connection.call(self._measure_link())
        except (Unanswered, BusError, EnvironmentFault):
            return None

    async def hub_link(self) -> HubLinkMeasured | None:
        """Move a few megabytes to the hub of our region, for some seconds at most; None if it does not answer meanwhile."""
        try:
            return await self._connection.call(self._measure_hub_link())
        except (Unanswered, BusError, EnvironmentFault):
            return None

    async def _measure_hub_link(self) -> HubLinkMeasured:
        """Ask the more questions at once the more were answered: a slow link must not be full of ours for long."""
        loop, asking = self._connection.loop, set[asyncio.Task[float]]()
        echo_s = min([await self._asked_s(b"") for _ in range(ECHOES)])
        began_s, sent, answered = loop.time(), 0, 0
        try:
            while asking or not sent:
                while sent < HUB_PIECES_MAX and len(asking) <= answered and loop.time() - began_s < SENDING_S:
                    asking.add(asyncio.create_task(self._asked_s(bytes(HUB_PIECE_BYTES))))
                    sent += 1
                done, asking = await asyncio.wait(asking, return_when=asyncio.FIRST_COMPLETED)
                answered += len([task.result() for task in done])
        finally:
            for task in asking:
                task.cancel()
        bytes_moved = HUB_PIECE_BYTES * answered
        return HubLinkMeasured(echo_s, 8 * bytes_moved / max(1e-6, loop.time() - began_s - echo_s), bytes_moved)

    async def _asked_s(self, body: bytes) -> float:
        """Return how long JetStream took to answer what it is, asked with a body that it does not read."""
        began_s = self._connection.loop.time()
        with contextlib.suppress(ApiRefusal):
            await self._jetstream.once(f"{self._jetstream.root}.INFO", body, timeout_s=DRAINING_S)
        return self._connection.loop.time() - began_s

    async def _measure_link(self) -> LinkMeasured:
        loop, main = self._connection.loop, self._connection
        echo_s = min([await self._echo_s() for _ in range(ECHOES)])
        subject, arrived = main.admission.inbox(), list[float]()
        wanted = asyncio.Event()
        expected = PIECES_MAX * COPIES

        def on_message(_message: Msg) -> None:
            arrived.append(loop.time())
            if len(arrived) >= expected:
                wanted.set()

        keys = [await main.subscribe(subject, on_message) for _ in range(COPIES)]
        sender = main.branch()
        try:
            await sender.ready(main.options.try_s)
            await sender.echo(main.options.try_s)
            began_s, sent = loop.time(), 0
            while sent < PIECES_MAX and loop.time() - began_s < SENDING_S:
                await sender.send(subject, bytes(PIECE_BYTES))
                sent += 1
            await sender.echo(DRAINING_S)
            up_s = max(1e-6, loop.time() - began_s - echo_s)
            expected = sent * COPIES
            if len(arrived) < expected:
                with contextlib.suppress(TimeoutError):
                    await bounded(wanted.wait(), DRAINING_S)
        finally:
            for key in keys:
                await main.unsubscribe(key)
        down_s = max(1e-6, arrived[-1] - arrived[0]) if len(arrived) > 1 else float("inf")
        bits = 8 * PIECE_BYTES
        return LinkMeasured(
            echo_s, bits * sent / up_s, bits * (len(arrived) - 1) / down_s, PIECE_BYTES * (sent + len(arrived))
        )

    async def _echo_s(self) -> float:
        began_s = self._connection.loop.time()
        await self._connection.echo(self._connection.options.try_s)
        return self._connection.loop.time() - began_s
