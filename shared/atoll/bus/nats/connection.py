"""One lasting connection to a broker: a client, a supervisor and a watchdog, in one loop. nats-py runs here and nowhere else.

* `call` carries a coroutine from any loop into this one and its result back;
* `request` fails at once with `Unanswered` when the connection is lost, instead of waiting for its time-out (`Answers`);
* `subscribe` registers interest that survives reconnects and rebuilt connections;
* `branch` is another connection in the same loop: for bulk, so that nothing small waits behind megabytes, or for a crowd of
  messages that may be a little late, so that many of them cost one awakening.

Three things end a connection, and each has its remedy. A lost socket: nats-py reconnects for ever. A protocol error (an
oversized message, say) closes nats-py for good: the *supervisor* builds a new client and subscribes again. A peer that holds
the socket open but answers nothing, or a client whose read loop has died: the *watchdog* notices that its echo does not come
back and aborts the socket. The echo is a message to ourselves and not a PING, because a PONG that arrives after its time-out
kills the read loop of nats-py 2.16.

A request's time-out counts from the moment when its last byte is with the kernel. On a bulk branch everything queues behind
megabytes in buffers that we cannot see. There a time-out counts from the last *movement* (bytes sent or received, answers to
others), because resending only lengthens the queue.
"""

from __future__ import annotations

import asyncio
import contextlib
import heapq
import itertools
import os
import re
import secrets
import socket
import ssl
from collections.abc import Callable, Coroutine, Iterator
from typing import Any, Final, Self, TypeVar
from urllib.parse import urlsplit

import nats.errors
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription

from atoll.base import logs
from atoll.base.background_tasks import LoopThread
from atoll.base.errors import AccessDenied, BrokerUnavailable
from atoll.base.retry import Unanswered, cancel_all, wait_at_most
from atoll.bus.nats.client import NO_TLS, WireClient, lasting
from atoll.bus.nats.framing import NOBODY, STATUS
from atoll.bus.options import BusOptions, Credentials, addresses
from atoll.wire.limits import Buffer
from atoll.wire.traffic import BusStats

OVERTAKEN: Final = 16
_DIGITS: Final = 16
_DRAWN: Final = 256
T = TypeVar("T")
OnMessage = Callable[[Msg], None]
"""Called in the read loop: it must not wait, and not take long."""
Movement = tuple[int, int, int]
"""Bytes sent, bytes received, and answers."""
MOVED: Final = (1 << 10, 1 << 10, 1)
"""So much movement is more than echoes and pings."""
REPORT_EVERY_S: Final = 5.0
_CLOSE_S: Final = 2.0
_LATE_ECHOES_MAX: Final = 3
SHUT_S: Final = 5.0
ASK_FOR_ONE: Final = (
    "give the file that its operator made for you (broker.identity or ATOLL_BROKER__IDENTITY; in a loop of your own also "
    "JoinOptions(identity=...)); of a run of `atoll up` give the folder (--out DIR), "
    "or DIR/keys/identities/operator.toml to a verb without that option"
)
OTHER_TIME: Final = (9, 10)
"""OpenSSL's codes for a certificate that does not hold yet, and one that has ended; its authority's among them."""
_UNAUTHORISED: Final = "authorization violation"
_EXPIRED: Final = "authentication expired"
_DENIED: Final = re.compile(r"permissions violation for (publish|subscription) to \"?([^\"\s]+)")
_log = logs.get(__name__)


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
            await wait_at_most(building, patience_s, self.admission.shut)
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
        before = self.moved()

        def moves() -> bool:
            nonlocal before
            last, before = before, self.moved()
            return any(abs(now - then) >= least for now, then, least in zip(before, last, MOVED, strict=True))

        return moves

    def moved(self) -> Movement:
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
                await wait_at_most(self._up.wait(), max(0.0, timeout_s))
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
                await self._finish_sending(client, payload, sending, timeout_s, moves)
                message = await self._answers.within(answer, timeout_s, moves)
            if message is not None and (message.headers or {}).get(STATUS) == NOBODY:
                raise nats.errors.NoRespondersError
        except (nats.errors.Error, TimeoutError, OSError) as error:
            raise Unanswered(f"{type(error).__name__} on {subject}") from error
        finally:
            self._answers.forget(reply)
        if message is None:
            raise self.admission.denial_error(subject)
        self._order.note_answer(number)
        return message

    async def request_at(self, answer_at: str, subject: str, payload: bytes, timeout_s: float) -> Msg:
        """Return the first message on `answer_at` after a question on `subject`.

        For an answer from a region: a region's broker that may write to the inboxes of shards could answer for JetStream, too.
        So the asker names a subject that only the asked one may write on (`atoll.keys.rights`), and nobody has used before.
        Raises `Unanswered`, or `AccessDenied` if we may not ask there, or not hear the answer.
        """
        first: asyncio.Future[Msg] = self.loop.create_future()

        def settle(message: Msg) -> None:
            if not first.done():
                first.set_result(message)

        key = await self.subscribe(answer_at, settle)
        try:
            with self.admission.denial(subject) as denied:
                await self.send(subject, payload, answer_at, timeout_s=timeout_s)
                message = await wait_at_most(first, timeout_s, self.lost, denied)
        except (nats.errors.Error, TimeoutError, OSError) as error:
            if denied.done():
                raise self.admission.denial_error(subject) from None
            raise Unanswered(f"{type(error).__name__} on {subject}") from error
        finally:
            await self.unsubscribe(key)
        if (message.headers or {}).get(STATUS) == NOBODY:
            raise Unanswered(f"nobody listens on {subject}")
        return message

    async def send(self, subject: str, payload: Buffer, reply: str = "", *, timeout_s: float | None = None) -> None:
        """Send at most once; raise `Unanswered` when not connected within `timeout_s` or stalled for `try_s`."""
        client = await self.ready(self.options.try_s if timeout_s is None else timeout_s)
        try:
            sending = client.publish(subject, payload, reply=reply)  # type: ignore[arg-type]
            await self._finish_sending(
                client, payload, sending, self.options.try_s, self.movement() if self.is_bulk else None
            )
        except (nats.errors.Error, TimeoutError, OSError) as error:
            raise Unanswered(f"{type(error).__name__} on {subject}") from error

    async def _finish_sending(
        self,
        client: WireClient,
        payload: Buffer,
        sending: Coroutine[Any, Any, None],
        timeout_s: float,
        moves: Callable[[], bool] | None,
    ) -> None:
        at_once = client.sends_at_once(len(payload))
        try:
            await (sending if at_once else wait_at_most(sending, timeout_s, self.lost, moves=moves))
        except BaseException:
            # The publishing itself ends later, and the caller may write into his buffer at once.
            client.copy_queued(payload)
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
        with self.admission.denial(subject) as denied:
            await self.echo(self.options.try_s)
        if denied.done():
            raise self.admission.denial_error(subject)

    async def unsubscribe(self, key: int) -> None:
        """Remove a subscription."""
        _, _, subscription = self._subscriptions.pop(key, ("", None, None))
        if subscription is not None:
            with contextlib.suppress(nats.errors.Error, TimeoutError, OSError):
                await wait_at_most(subscription.unsubscribe(), _CLOSE_S)

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
        self.admission.note_entry()
        self._up.set()

    def _callbacks(self, client: WireClient) -> dict[str, Any]:
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
        if not self.admission.take_error(error):
            self.complaints.note(error)

    def _mark_down(self) -> None:
        if self._up.is_set():
            _log.warning("bus.disconnected", bus=self._name, error=self.complaints.text)
            self.stats.lose(self.url, id(self), self.loop.time())
        self._up.clear()
        self._answers.lose()
        if not self.lost.done():
            self.lost.set_result(None)
        self.lost = self.loop.create_future()

    def _mark_up(self) -> None:
        self.complaints.forget()
        self.admission.note_entry()
        self.stats.regain(id(self), self.loop.time())
        self._up.set()
        if self._was_up:
            self._trunk.reconnects += 1
            self.stats.reconnects += 1
            _log.info("bus.reconnected", bus=self._name, reconnects=self.stats.reconnects)
        self._was_up = True

    async def _supervise(self) -> None:
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
        self._stopped = True
        self.stats.regain(id(self), self.loop.time())
        await cancel_all(self._tasks)
        await asyncio.gather(*(client.end(_CLOSE_S) for client in self._clients))


class Admission:
    """Our credentials at one broker, and what it refused. Everything runs in the connection's loop.

    A broker refuses in three ways. At the door it answers "Authorization Violation" and hangs up; or its certificate is not
    one that we believe, and we hang up. Inside, what somebody has no right to is dropped, and the reason comes as an error of
    the whole connection, which names the subject and no request. nats-py hands all of these to one callback.

    Here they become `AccessDenied`: for the request on that subject, at once; for everything, once the door has been shut for
    `SHUT_S` (a broker that restarts, or takes over a new roll, may shut it for a moment). The first connection is refused once
    every node has refused it in turn, and once more: the roll of one of them may be older, and a server that takes over a new
    roll refuses a client that is just coming in.
    """

    def __init__(self, url: str, credentials: Credentials | None, loop: asyncio.AbstractEventLoop) -> None:
        self._url = url
        self._credentials = credentials
        self._loop = loop
        self._waiting: dict[str, set[asyncio.Future[Any]]] = {}
        self._refusals_max = 2 * len(addresses(url))
        self._shut_times = 0
        self._shut_since_s: float | None = None
        self._reason: AccessDenied | None = None
        self.shut: asyncio.Future[None] = loop.create_future()
        """Done once the broker has refused us at every door."""

    @property
    def must_encrypt(self) -> bool:
        """Return whether nothing may be sent in plain text."""
        return self._credentials is not None or self._url.startswith("tls:")

    def options(self) -> dict[str, Any]:
        """Return what nats-py needs to know of our credentials."""
        mine = self._credentials
        return {} if mine is None else {"nkeys_seed_str": mine.seed, "inbox_prefix": mine.inbox, "tls": mine.tls()}

    def inbox(self) -> str:
        """Return a new subject for answers to us."""
        prefix = "_INBOX" if self._credentials is None else self._credentials.inbox
        return f"{prefix}.{secrets.token_hex(11)}"

    @contextlib.contextmanager
    def denial(self, subject: str, settles: asyncio.Future[Any] | None = None) -> Iterator[asyncio.Future[Any]]:
        """Yield a future that is done, with None, as soon as the broker refuses us `subject`: `settles`, or a new one."""
        denied = self._loop.create_future() if settles is None else settles
        waiting = self._waiting.setdefault(subject.lower(), set())  # nats-py tells subjects in lower case
        waiting.add(denied)
        try:
            yield denied
        finally:
            waiting.discard(denied)
            if not waiting:
                self._waiting.pop(subject.lower(), None)

    def denial_error(self, subject: str) -> AccessDenied:
        """Return the error for a subject that was refused."""
        return AccessDenied(
            "the broker does not let this identity do that",
            got=f"{subject} as {self._who()}",
            todo="ask the broker's operator which identity may (`atoll keys list`)",
        )

    def take_error(self, error: Exception) -> bool:
        """Take note of what nats-py complains about; return whether a caller waits for just that and will tell it."""
        text = str(error).lower()
        if (refused := _DENIED.search(text)) is not None:
            waiting = self._waiting.get(refused[2], set())
            for each in waiting:
                if not each.done():
                    each.set_result(None)
            return bool(waiting)
        if (reason := self._at_the_door(error, text)) is not None:
            self._reason = reason
            self._shut_times += 1
            if self._shut_since_s is None:
                self._shut_since_s = self._loop.time()
            if self._shut_times >= self._refusals_max and not self.shut.done():
                self.shut.set_result(None)
        return False

    def note_entry(self) -> None:
        """Take note that the broker has let us in."""
        self._shut_since_s = self._reason = None
        self._shut_times = 0
        if self.shut.done():
            self.shut = self._loop.create_future()

    def check(self, patience_s: float = SHUT_S) -> None:
        """Raise `AccessDenied` if the door has been shut to us for so long."""
        if self._reason is not None and self._loop.time() - (self._shut_since_s or 0.0) >= patience_s:
            raise self._reason

    def _at_the_door(self, error: Exception, text: str) -> AccessDenied | None:
        mine = self._credentials
        if _UNAUTHORISED in text or _EXPIRED in text:
            return AccessDenied(
                f"the broker at {self._url} does not let us in",
                got=self._who(),
                allowed="an identity on its roll"
                if mine is None
                else "an identity that is not revoked, not in another region, and whose key has not ended",
                todo=ASK_FOR_ONE
                if mine is None
                else "ask its operator: `atoll keys list` says where it is, and `atoll keys rotate` makes a new key",
            )
        if isinstance(error, ssl.SSLCertVerificationError):
            if error.verify_code in OTHER_TIME:
                return AccessDenied(
                    f"the certificate of the broker at {self._url} does not hold at this time",
                    got=error.verify_message,
                    allowed="a certificate that holds by this machine's clock",
                    todo="look at this machine's clock (`atoll doctor` tells it); if it is right, the operator makes another",
                )
            return AccessDenied(
                f"the broker at {self._url} cannot prove that it is ours",
                got=error.verify_message,
                allowed="a certificate for this host, of an authority that the system knows"
                if mine is None
                else "a certificate for this host, of the authority in our identity",
                todo="check the address; the broker's operator names its hosts with `atoll keys certificate`"
                if mine is not None
                else ASK_FOR_ONE,
            )
        if NO_TLS.lower() in text:
            return AccessDenied(
                f"the broker at {self._url} offers no TLS, so we tell it nothing",
                got="plain text",
                allowed="TLS, with an identity or a tls:// address",
                todo="check the address; an open broker takes nats:// and no identity",
            )
        return None

    def _who(self) -> str:
        return "nobody (no identity)" if self._credentials is None else f"identity {self._credentials.name!r}"


class Answers:
    """The answers that are awaited below `inbox`. Everything runs in the connection's loop.

    A request costs one future and one timer, where nats-py has two tasks, two timers and a queue. Everything that ends a
    request settles that future: its answer, the broker's refusal (`Admission.denial`), the loss of the connection, the
    time-out.

    Nobody may guess where an answer is awaited: every request has a subject of its own below the inbox, of random digits. They
    are drawn many at a time, because a draw is a call of the kernel.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, inbox: str) -> None:
        self.subjects = f"{inbox}.*"
        self._loop = loop
        self._inbox = inbox
        self._waiting: dict[str, asyncio.Future[Msg | None]] = {}
        self._drawn = ""

    def expect(self) -> tuple[str, asyncio.Future[Msg | None]]:
        """Return the subject for the answer to a new request, and its future; `forget` it in the end."""
        if not self._drawn:
            self._drawn = os.urandom(_DIGITS // 2 * _DRAWN).hex()
        digits, self._drawn = self._drawn[:_DIGITS], self._drawn[_DIGITS:]
        subject = f"{self._inbox}.{digits}"
        answer: asyncio.Future[Msg | None] = self._loop.create_future()
        self._waiting[subject] = answer
        return subject, answer

    def hear(self, message: Msg) -> None:
        """Settle the request whose answer has come; what nobody waits for is dropped."""
        answer = self._waiting.get(message.subject)
        if answer is not None and not answer.done():
            answer.set_result(message)

    def lose(self) -> None:
        """Fail everything that waits: the connection is lost."""
        for answer in self._waiting.values():
            if not answer.done():
                answer.set_exception(Unanswered("the connection was lost"))

    def forget(self, subject: str) -> None:
        """Wait no longer."""
        answer = self._waiting.pop(subject)
        if not answer.cancel() and not answer.cancelled():
            answer.exception()  # read, so that asyncio does not report one that came too late

    async def within(
        self, answer: asyncio.Future[Msg | None], timeout_s: float, moves: Callable[[], bool] | None
    ) -> Msg | None:
        """Return what settles `answer`; raise `TimeoutError` after `timeout_s`, and again so long while `moves` says so."""
        timers: list[asyncio.TimerHandle] = []

        def look() -> None:
            if moves is not None and moves():
                timers[0] = self._loop.call_later(timeout_s, look)
            elif not answer.done():
                answer.set_exception(TimeoutError())

        timers.append(self._loop.call_later(timeout_s, look))
        try:
            return await answer
        finally:
            timers[0].cancel()


class AnswerOrder:
    """The requests of one connection, numbered in the order of sending; `answers` counts those that have one.

    On a slow link a request waits for as long as bytes move. But an answer can be lost while everything else moves, for example
    where nodes of a cluster make their routes anew. A stream answers in the order in which it was asked. So a request whose
    answer is missing while `OVERTAKEN` later ones have theirs is sent again after its first try. (Requests to several streams
    may overtake each other by a few.)
    """

    def __init__(self) -> None:
        self.answers = 0
        self._numbers = itertools.count()
        self._newest: list[int] = []

    def begin(self) -> int:
        """Return the number of a new request."""
        return next(self._numbers)

    def note_answer(self, number: int) -> None:
        """Note that a request has its answer."""
        self.answers += 1
        heapq.heappush(self._newest, number)
        if len(self._newest) > OVERTAKEN:
            heapq.heappop(self._newest)

    def is_overtaken(self, number: int) -> bool:
        """Return whether so many later requests have their answers that this one's is lost."""
        return len(self._newest) == OVERTAKEN and self._newest[0] > number

    def while_due(self, number: int, moves: Callable[[], bool]) -> Callable[[], bool]:
        """Return a function that says whether it is worth waiting on for an answer: bytes move, and it is not overtaken."""
        return lambda: moves() and not self.is_overtaken(number)


class ConnectionLoop:
    """The loop in which a connection and its branches do their work: of a thread of its own, or the one that opened it.

    A thread of its own keeps a connection alive while its caller blocks its loop for seconds. Each call then crosses from
    loop to loop and back: some 100 us for a message that costs 6 us to send. Shards and islands do nothing long in their
    loops, so their connections live there (`BusOptions.own_thread`).

    Closing ends every call that is under way, in either place, with `BrokerUnavailable`. In the caller's own loop the calls are
    part of its tasks, so these are cancelled, and the cancellation is taken back where the call was made. Closing is a task of
    its own: it goes on when its caller is cancelled, for nobody calls it again.
    """

    def __init__(self, name: str, *, own_thread: bool) -> None:
        self._thread = LoopThread(f"bus-{name}") if own_thread else None
        self.loop = asyncio.get_running_loop() if self._thread is None else self._thread.loop
        self._callers: set[asyncio.Task[Any]] = set()
        self._closing: asyncio.Task[None] | None = None

    async def call(self, work: Coroutine[Any, Any, T]) -> T:
        """Run `work` in the connection's loop and return its result to the caller's."""
        if self._closing is not None:
            work.close()
            raise BrokerUnavailable("the bus is closed", todo="open a new one")
        task = asyncio.current_task()
        if self._thread is None:
            return await (work if task is None or task in self._callers else self._call_here(work, task))
        try:
            return await asyncio.wrap_future(self._thread.submit(work))
        except asyncio.CancelledError:
            if self._closing is not None and (task is None or not task.cancelling()):
                raise _closed_meanwhile() from None
            raise

    async def _call_here(self, work: Coroutine[Any, Any, T], task: asyncio.Task[Any]) -> T:
        self._callers.add(task)
        try:
            return await work
        except asyncio.CancelledError:
            if task not in self._callers and not task.uncancel():
                raise _closed_meanwhile() from None
            raise
        finally:
            self._callers.discard(task)

    async def close(self, shut_down: Callable[[], Coroutine[Any, Any, None]], within_s: float) -> None:
        """End all calls and `shut_down` the connection in its loop; whoever closes again waits for the same."""
        if self._closing is None:
            callers = self._callers - {asyncio.current_task()}
            self._callers -= callers
            self._closing = asyncio.create_task(self._close(shut_down, within_s))
            for task in callers:
                task.cancel()
        if not self._closing.done():
            await asyncio.shield(self._closing)

    async def _close(self, shut_down: Callable[[], Coroutine[Any, Any, None]], within_s: float) -> None:
        try:
            with contextlib.suppress(TimeoutError):
                work = shut_down() if self._thread is None else asyncio.wrap_future(self._thread.submit(shut_down()))
                await wait_at_most(work, within_s)
        finally:
            if self._thread is not None:
                await asyncio.to_thread(self._thread.stop)


def _closed_meanwhile() -> BrokerUnavailable:
    return BrokerUnavailable("the bus was closed during the call")


class Complaints:
    """The complaints of nats-py about one connection since it was connected last; `text` has them all.

    A bus has several connections to one broker, so a complaint is logged by the first that has it, and not again until one of
    them is connected. A socket that ended is no complaint of its own: the line `bus.disconnected` says it.
    """

    def __init__(self, bus: str, of_trunk: Self | None = None) -> None:
        self._bus = bus
        self.said: set[str] = set() if of_trunk is None else of_trunk.said
        self.text = ""

    def note(self, error: Exception) -> None:
        """Keep a complaint, and log it if nobody has."""
        said = f"{type(error).__name__}: {error}".strip()
        if said in self.text:
            return
        self.text = f"{self.text}; {said}".removeprefix("; ")
        if said not in self.said and not isinstance(error, nats.errors.UnexpectedEOF):
            self.said.add(said)
            _log.warning("bus.error", bus=self._bus, error=said)

    def forget(self) -> None:
        """Begin anew: the connection stands."""
        self.text = ""
        self.said.clear()


async def watch(connection: Connection) -> None:
    """Cut `connection` after three echoes in a row that did not come back; for ever.

    On a connection for bulk an echo is late only if meanwhile nothing came in and nothing was sent of a queue that still
    stands. The broker counts as away from the first echo that is late (`BusStats.lose`).
    """
    failures, silent_s = 0, 0.0
    clock = asyncio.get_running_loop().time
    watch_s, echo_s = connection.options.watch_of(connection.nodes)
    while True:
        await asyncio.sleep(watch_s)
        if not connection.is_up:
            failures = 0
            continue
        before, asked_s = connection.moved(), clock()
        try:
            await wait_at_most(connection.echo(echo_s), 2 * echo_s)
            failures = 0
        except (Unanswered, TimeoutError, nats.errors.Error):
            silent_s = silent_s if failures else asked_s
            failures = 0 if connection.is_bulk and _is_busy(connection, before) else failures + 1
        if failures:
            connection.stats.lose(connection.url, id(connection), silent_s)
        elif connection.is_up:
            connection.stats.regain(id(connection), clock())
        if failures >= _LATE_ECHOES_MAX:
            failures = 0
            await connection.cut()


def _is_busy(connection: Connection, before: Movement) -> bool:
    sent, received, answers = connection.moved()
    came = received - before[1] >= MOVED[1] or answers != before[2]
    return came or (sent != before[0] and connection.queued > 0)


@contextlib.contextmanager
def report_waiting(url: str, patience_s: float) -> Iterator[None]:
    """Log every few seconds for how long the first connection is still tried, and why in vain so far.

    A broker that does not answer may be starting, and the name of a container comes with the container.
    """
    hosts = [urlsplit(each).hostname or "" for each in addresses(url)]

    async def report() -> None:
        for waited in range(1, int(patience_s / REPORT_EVERY_S) + 1):
            await asyncio.sleep(REPORT_EVERY_S)
            unknown = await _unknown_hosts(hosts)
            why = f"no name server knows {', '.join(unknown)}" if unknown else "no broker answers there"
            left_s = max(0.0, patience_s - waited * REPORT_EVERY_S)
            _log.warning("bus.waiting", hosts=", ".join(hosts), why=why, still_trying_for_s=left_s)

    reporting = asyncio.ensure_future(report())
    try:
        yield
    finally:
        reporting.cancel()


async def _unknown_hosts(hosts: list[str]) -> list[str]:
    """Return the hosts that do not exist; a name server that does not answer says nothing about a host."""
    loop, unknown = asyncio.get_running_loop(), []
    for host in hosts:
        try:
            await loop.getaddrinfo(host, None)
        except socket.gaierror as error:
            unknown += [host] if error.errno == socket.EAI_NONAME else []
    return unknown
