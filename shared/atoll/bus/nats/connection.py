"""One lasting connection to a broker: a client, a supervisor and a watchdog, in one loop (`connection_loop`).

nats-py runs here and nowhere else, over a transport of ours (`client`, `transport`). The rest of the adapter sees:

* `call` carries a coroutine from any loop into this one and its result back;
* `request` fails at once with `Unanswered` when the connection is lost, instead of waiting for its time-out (`answers`);
* `subscribe` registers interest that survives reconnects and rebuilt connections;
* `branch` is another connection in the same loop: for bulk, so that nothing small waits behind megabytes, or for a crowd of
  messages that may be a little late, so that many of them cost one awakening.

Three things end a connection, and each has its remedy. A lost socket: nats-py reconnects for ever. A protocol error
(an oversized message, say) closes nats-py for good: the *supervisor* builds a new client and subscribes again. A peer
that holds the socket open but answers nothing, or a client whose read loop has died: the *watchdog* notices that its
echo does not come back and aborts the socket. The echo is a message to ourselves and not a PING, because a PONG that
arrives after its time-out kills the read loop of nats-py 2.16.

A request's time-out counts from the moment when its last byte is with the kernel. On a bulk branch everything, echoes
and answers too, queues behind megabytes in buffers that we cannot see. There a time-out counts from the last *movement*
(bytes sent or received, answers to others), because resending only lengthens the queue.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

import nats.errors
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription

from atoll.base import logs
from atoll.base.retry import Unanswered, bounded, ended
from atoll.bus.addresses import addresses
from atoll.bus.nats.admission import Admission
from atoll.bus.nats.answer_order import AnswerOrder
from atoll.bus.nats.answers import Answers
from atoll.bus.nats.client import WireClient, lasting
from atoll.bus.nats.complaints import Complaints
from atoll.bus.nats.connection_loop import ConnectionLoop
from atoll.bus.nats.headers import NOBODY, STATUS
from atoll.bus.nats.watchdog import movement_of, watch
from atoll.bus.options import BusOptions
from atoll.wire.limits import Buffer
from atoll.wire.traffic import BusStats

T = TypeVar("T")
OnMessage = Callable[[Msg], None]
"""Called in the read loop: it must not wait, and not take long."""
_log = logs.get(__name__)
_CLOSE_S = 2.0


class Connection:
    """A supervised nats-py client. Public coroutines but `call` and `stop` run in its loop."""

    def __init__(
        self,
        url: str,
        name: str,
        options: BusOptions,
        stats: BusStats,
        *,
        trunk: Connection | None = None,
        rest_s: float = 0.0,
    ) -> None:
        """Prepare; `connect` makes the connection. With a `trunk` it shares the trunk's loop.

        After a read that emptied the socket the connection reads nothing for `rest_s`.
        """
        self.url = url
        self.nodes = len(addresses(url))
        self.options = options
        self.stats = stats
        self.reconnects, self._trunk, self._stopped = 0, trunk or self, False
        self._place: ConnectionLoop = trunk._place if trunk else ConnectionLoop(name, own_thread=options.own_thread)  # noqa: SLF001
        self.loop = self._place.loop
        self._name = name
        self._rest_s, self._order = rest_s, AnswerOrder()
        self.is_bulk = trunk is not None and not rest_s
        self._branches: list[Connection] = []
        self._client: WireClient | None = None
        self._clients: list[WireClient] = []
        """The present one, and those before it that have not ended."""
        self._up = asyncio.Event()
        self._broken = asyncio.Event()
        self.lost: asyncio.Future[None] = self.loop.create_future()
        """Done once the present connection is lost."""
        self.admission = Admission(url, options.credentials, self.loop)
        self._answers = Answers(self.loop, self.admission.inbox())
        self._subscriptions: dict[int, tuple[str, OnMessage, Subscription | None]] = {
            0: (self._answers.subjects, self._answers.hear, None)
        }
        self._next_key = 0
        self._tasks: list[asyncio.Task[None]] = []
        self._was_up = False
        self.complaints: Complaints = Complaints(name, None if trunk is None else trunk.complaints)

    # -- from any loop ------------------------------------------------------------------------------------------------

    def call(self, work: Coroutine[Any, Any, T]) -> Coroutine[Any, Any, T]:
        """Run `work` in the connection's loop and return its result to the caller's."""
        return self._place.call(work)

    async def stop(self) -> None:
        """Close the connection and its branches, end the thread and free the loop; harmless when repeated."""
        await self._place.close(self._shut_down, 3 * _CLOSE_S)

    # -- in the connection's loop -------------------------------------------------------------------------------------

    @property
    def is_up(self) -> bool:
        """Return whether requests can be sent."""
        return self._up.is_set()

    @property
    def queued(self) -> int:
        """Return how many bytes wait for the kernel."""
        return self._client.wire.queued if self._client and self._client.wire else 0

    @property
    def max_payload(self) -> int:
        """Return the size limit of one message at the broker, headers included, in bytes."""
        return self._client.max_payload if self._client else 0

    @property
    def version(self) -> tuple[int, int]:
        """Return the broker's version, major and minor."""
        version = self._client.connected_server_version if self._client else None
        return (version.major, version.minor) if version else (0, 0)

    @property
    def domain(self) -> str:
        """Return the JetStream domain of the server that we are connected to, empty for none."""
        return self._client.domain if self._client else ""

    async def connect(self, patience_s: float) -> None:
        """Connect for the first time; `TimeoutError` after `patience_s`, `AccessDenied` as soon as we are refused."""
        building = asyncio.create_task(self._build())
        self._tasks = [building]
        try:
            await bounded(building, patience_s, self.admission.shut)
        except TimeoutError:
            self.admission.check(0.0)
            raise
        self._was_up = True
        self._tasks = [asyncio.create_task(self._supervise()), asyncio.create_task(watch(self))]

    def branch(self, rest_s: float = 0.0) -> Connection:
        """Return another connection in the same loop that connects by itself: for bulk, or for what may be `rest_s` late."""
        name = f"{self._name}-{'crowd' if rest_s else 'bulk'}-{len(self._branches)}"
        branch = Connection(self.url, name, self.options, self.stats, trunk=self, rest_s=rest_s)
        self._branches.append(branch)
        branch._broken.set()  # the supervisor builds what is broken
        branch._tasks = [asyncio.create_task(branch._supervise()), asyncio.create_task(watch(branch))]
        return branch

    def movement(self) -> Callable[[], bool]:
        """Return a function that says whether anything but an echo went or came since its last call."""
        return movement_of(self)

    def moved(self) -> tuple[int, int, int]:
        """Return bytes sent and received on the present socket, and answers."""
        wire = self._client.wire if self._client is not None else None
        return (wire.sent, wire.received, self._order.answers) if wire is not None else (0, 0, self._order.answers)

    def try_s(self, attempts: int) -> float:
        """Return how long a request waits that was made `attempts` times before."""
        return self.options.tries_s(attempts, self.nodes)

    async def ready(self, timeout_s: float) -> WireClient:
        """Return the client once it is connected; raise `Unanswered` after `timeout_s`."""
        if not self._up.is_set():
            try:
                await bounded(self._up.wait(), max(0.0, timeout_s))
            except TimeoutError:
                self.admission.check()
                raise Unanswered(f"not connected: {self.complaints.text}") from None
        if self._client is None:
            raise Unanswered("not connected")
        return self._client

    async def request(
        self,
        subject: str,
        payload: Buffer = b"",
        headers: dict[str, str] | None = None,
        timeout_s: float | None = None,
        attempts: int = 0,
    ) -> Msg:
        """Return the first answer, or raise `Unanswered` at the time-out or when the connection is lost.

        Without a time-out of its own a request may take as long to send as the link needs; then it has `try_s`.
        """
        number = self._order.begin()
        moves = self._order.while_due(number, self.movement()) if timeout_s is None else None
        timeout_s = self.try_s(attempts) if timeout_s is None else timeout_s
        client = await self.ready(timeout_s)
        reply, answer = self._answers.expect()
        try:
            with self.admission.denial(subject, answer):
                sending = client.publish(subject, payload, reply, headers)  # type: ignore[arg-type]
                await self._sent(client, payload, sending, timeout_s, moves)
                message = await self._answers.within(answer, timeout_s, moves)
            if message is not None and (message.headers or {}).get(STATUS) == NOBODY:
                raise nats.errors.NoRespondersError
        except (nats.errors.Error, TimeoutError, OSError) as error:
            raise Unanswered(f"{type(error).__name__} on {subject}") from error
        finally:
            self._answers.forget(reply)
        if message is None:
            raise self.admission.denied(subject)
        self._order.answered(number)
        return message

    async def send(self, subject: str, payload: Buffer, reply: str = "", *, timeout_s: float | None = None) -> None:
        """Send at most once; raise `Unanswered` when not connected within `timeout_s` or stalled for `try_s`."""
        client = await self.ready(self.options.try_s if timeout_s is None else timeout_s)
        try:
            sending = client.publish(subject, payload, reply=reply)  # type: ignore[arg-type]
            await self._sent(client, payload, sending, self.options.try_s, self.movement() if self.is_bulk else None)
        except (nats.errors.Error, TimeoutError, OSError) as error:
            raise Unanswered(f"{type(error).__name__} on {subject}") from error

    async def _sent(
        self,
        client: WireClient,
        payload: Buffer,
        sending: Coroutine[Any, Any, None],
        timeout_s: float,
        moves: Callable[[], bool] | None,
    ) -> None:
        """Publish; if that has to wait, for no longer than `timeout_s` without movement or the loss of the connection."""
        at_once = client.sends_at_once(len(payload))
        try:
            await (sending if at_once else bounded(sending, timeout_s, self.lost, moves=moves))
        except BaseException:
            # The publishing itself ends later, and the caller may write into his buffer at once.
            client.own(payload)
            raise

    async def subscribe(self, subject: str, on_message: OnMessage, *, confirm: bool = True) -> int:
        """Hear `subject` until `unsubscribe`; with `confirm`, return once the broker has registered it."""
        client = await self.ready(self.options.try_s)
        self._next_key += 1
        key = self._next_key
        # Registered before it is sent: if the client is replaced meanwhile, the new one subscribes to it.
        self._subscriptions[key] = (subject, on_message, None)
        try:
            self._subscriptions[key] = (subject, on_message, await client.hear(subject, on_message))
            if confirm:
                await self._confirm(subject)
        except BaseException:
            await self.unsubscribe(key)  # no caller has the key
            raise
        return key

    async def _confirm(self, subject: str) -> None:
        """Return once the broker has registered what was sent to `subject`; raise `AccessDenied` if it refused that."""
        with self.admission.denial(subject) as denied:
            await self.echo(self.options.try_s)
        if denied.done():
            raise self.admission.denied(subject)

    async def unsubscribe(self, key: int) -> None:
        """Remove a subscription."""
        _, _, subscription = self._subscriptions.pop(key, ("", None, None))
        if subscription is not None:
            with contextlib.suppress(nats.errors.Error, TimeoutError, OSError):
                await bounded(subscription.unsubscribe(), _CLOSE_S)

    async def echo(self, timeout_s: float) -> None:
        """Return once a message has gone to the broker and back; the broker has then read everything sent before."""
        subject, back = self._answers.expect()
        try:
            await self.send(subject, b"", timeout_s=timeout_s)
            await self._answers.within(back, timeout_s, None)
        except TimeoutError:
            raise Unanswered("no echo") from None
        finally:
            self._answers.forget(subject)

    async def _build(self) -> None:
        """Connect a fresh client, subscribe it to all that is registered, and declare it up."""
        client = WireClient(
            self.stats,
            keeps_buffers=self.is_bulk,
            congestion=self.options.bulk_congestion if self.is_bulk else "",
            rest_s=self._rest_s,
            must_encrypt=self.admission.must_encrypt,
        )
        self._client = client
        self._clients.append(client)
        for former in self._clients[:-1]:
            former.abort()
            await former.end(_CLOSE_S)
        self._clients = [client]
        options = lasting(self._name, self.options, is_bulk=self.is_bulk) | self.admission.options()
        await client.connect(addresses(self.url), **options, **self._callbacks(client))
        for key in list(self._subscriptions):
            subject, on_message, _ = self._subscriptions[key]
            self._subscriptions[key] = (subject, on_message, await client.hear(subject, on_message))
        self.complaints.forget()
        self.admission.entered()
        self._up.set()

    def _callbacks(self, client: WireClient) -> dict[str, Any]:
        """Return the callbacks for nats-py; those of a replaced client are ignored."""

        async def on_error(error: Exception) -> None:
            self._note(error)
            if client.is_connecting or client.is_reconnecting:
                # nats-py forgets the socket of an attempt that failed; without this it stays open until collected.
                client.abort()

        async def on_disconnected() -> None:
            if client is self._client and not self._stopped:
                self._mark_down()

        async def on_reconnected() -> None:
            if client is self._client:
                self._mark_up()

        async def on_closed() -> None:
            if client is self._client and not self._stopped:
                self._broken.set()

        return {
            "error_cb": on_error,
            "disconnected_cb": on_disconnected,
            "reconnected_cb": on_reconnected,
            "closed_cb": on_closed,
        }

    def _note(self, error: Exception) -> None:
        """Take note of what nats-py complains about, unless a caller waits for just that and will tell it."""
        if not self.admission.heard(error):
            self.complaints.note(error)

    def _mark_down(self) -> None:
        """Fail everything that waits on the lost connection."""
        if self._up.is_set():
            _log.warning("bus.disconnected", bus=self._name, error=self.complaints.text)
            self.stats.lose(self.url, id(self), self.loop.time())
        self._up.clear()
        self._answers.lose()
        if not self.lost.done():
            self.lost.set_result(None)
        self.lost = self.loop.create_future()

    def _mark_up(self) -> None:
        """Allow requests again."""
        self.complaints.forget()
        self.admission.entered()
        self.stats.regain(id(self), self.loop.time())
        self._up.set()
        if self._was_up:
            self._trunk.reconnects += 1
            self.stats.reconnects += 1
            _log.info("bus.reconnected", bus=self._name, reconnects=self.stats.reconnects)
        self._was_up = True

    async def _supervise(self) -> None:
        """Replace the client whenever nats-py has closed it for good."""
        while True:
            await self._broken.wait()
            self._broken.clear()
            self._mark_down()
            try:
                await self._build()
            except Exception as error:  # noqa: BLE001  # for any error the only remedy is another client
                self._note(error)
                if self._client is not None:
                    self._client.abort()
                await asyncio.sleep(self.options.reconnect_s)
                self._broken.set()
            else:
                self._mark_up()

    async def cut(self) -> None:
        """Abort the socket and connect again."""
        if self._client is not None:
            _log.warning("bus.watchdog", bus=self._name)
            self._client.abort()
            await self._client.force_reconnect()

    async def _shut_down(self) -> None:
        """Close this connection and its branches, side by side: each may have to wait for a broker that reads nothing."""
        await asyncio.gather(*(each._close() for each in (self, *self._branches)))  # noqa: SLF001  # our own kind

    async def _close(self) -> None:
        """End what makes clients, then close the last one; a broker that does not let it go is left."""
        self._stopped = True
        self.stats.regain(id(self), self.loop.time())
        await ended(self._tasks)
        await asyncio.gather(*(client.end(_CLOSE_S) for client in self._clients))
