"""JetStream as verbs over one connection: ask its API, store until acknowledged, read stored messages in bulk.

Storing repeats the same message under the same id until the broker acknowledges it or a bound is reached. Reading uses batched
direct get: one request, many messages, and no consumer stays behind on the server.

**Records** are last values by compare-and-set. The broker refuses a retried compare-and-set like a foreign one, because it
checks the sequence before it looks for duplicates. So "refused" and "no answer" both mean: read the stored record from the
stream's leader and compare the nonce. A later writer that has replaced our value counts as a conflict, since the caller no
longer holds the record. (A cluster answers a repeated compare-and-set as a duplicate, with the revision of the first. While
another write of the subject is on its way, it refuses without saying whose: we ask again.)

**Many at a time, and not stale.** A batched get is answered by any copy of the stream, and a copy that has just started may lag
far behind; a member whose record is not seen is a stranger. So the leader is asked first for the number of its newest message
that matches. A copy stores in order, so one that has that message has all before it; what it lacks is read from the leader.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import secrets
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import msgspec
from nats.aio.msg import Msg

from atoll.base.clock import unix_s
from atoll.base.errors import AtollError, BrokerUnavailable, ProtocolMisuse, RunReplaced
from atoll.base.parsing import convert, parsed
from atoll.base.retry import Unanswered, pause_s, wait_at_most
from atoll.bus.interface import STORED_AT, Record, StoredEvent
from atoll.bus.nats.connection import Connection
from atoll.bus.nats.framing import DESCRIPTION, STATUS
from atoll.bus.regions import HUB_DOMAIN, is_region
from atoll.bus.streams import no_room, queue_full, record_conflict
from atoll.wire.limits import Buffer

WRONG_SEQUENCE = 10071
NO_MESSAGE = 10037
STREAM_EXISTS = 10058
_STORE_FAILED = 10077
_NO_ROOM = (10023, 10047)
NO_SYSTEM = 10008
# Of a cluster between two leaders: no leader for it, the same id or the same subject is being written, a node is away.
_BETWEEN_LEADERS = (10009, 10158, 10164, 10118, 10119)
NO_STREAM = 10059
_PAUSE_FIRST_S = 0.05
_PAUSE_MAX_S = 2.0
_PAUSE_OF_NODES_MAX_S = 0.5  # an election is over at any moment, and what fails meanwhile fails at once
LEAVE_S = 4.0
_PAGE_MESSAGES = 500
_PAGE_BYTES_MAX = 32 << 20
FAR_TRY_S = 30.0

T = TypeVar("T")


class ApiError(msgspec.Struct, frozen=True):
    """The three parts of a JetStream error."""

    code: int = 0
    err_code: int = 0
    description: str = ""


class ApiRefusal(Exception):
    """A refusal from JetStream."""

    def __init__(self, error: ApiError) -> None:
        self.code, self.err_code, self.description = error.code, error.err_code, error.description
        super().__init__(f"{self.code}/{self.err_code} {self.description}")

    @property
    def is_full(self) -> bool:
        """Return whether there is no room for now. A purge says so in words only."""
        return self.err_code == _STORE_FAILED or self.err_code in _NO_ROOM or "no space left" in self.description

    @property
    def is_kept_first(self) -> bool:
        """Return whether the subject has all that it takes, so that the broker keeps what it has."""
        return self.err_code == _STORE_FAILED and "per subject" in self.description

    @property
    def is_passing(self) -> bool:
        """Return whether the same request may succeed later."""
        return self.is_full or self.code in (429, 503) or self.err_code in _BETWEEN_LEADERS

    def public(self, subject: str) -> AtollError:
        """Return the error for a caller of the bus."""
        if self.is_kept_first:
            return queue_full(subject, self.description)
        if self.is_full:
            return no_room(f"{subject}: {self.description}")
        if self.is_passing:
            return BrokerUnavailable("JetStream cannot serve now", got=str(self), todo="look at the broker's log")
        if self.err_code == NO_STREAM:
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


@contextlib.contextmanager
def public_errors(subject: str, silence: str = "") -> Iterator[None]:
    """Raise what a caller of the bus knows in place of what JetStream refuses, or does not answer: then `silence`."""
    try:
        yield
    except ApiRefusal as reason:
        raise reason.public(subject) from reason
    except Unanswered as reason:
        raise BrokerUnavailable(silence, got=reason) if silence else unavailable(subject, 0.0, reason) from reason


class JetStreamPatience:
    """The pauses of `atoll.base.retry`, with jitter, up to `total_s` (or `full_s` while the stream is full).

    A node of a cluster that is cut off from its peers still answers echoes, but no JetStream request. So a client whose
    requests go wrong for `LEAVE_S` at one node goes on at another. While a leader is elected that is in vain, and harmless.
    """

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._lost = connection.lost
        self._options = connection.options
        self._loop = connection.loop
        self._began = self._here_s = self._loop.time()
        self._pause_max_s = _PAUSE_MAX_S if connection.nodes == 1 else _PAUSE_OF_NODES_MAX_S
        self.attempts = 0

    async def after(self, subject: str, reason: Unanswered | ApiRefusal) -> None:
        """Sleep and return if `subject` may be tried again, else raise the public error for `reason`."""
        waited_s = self._loop.time() - self._began
        if isinstance(reason, ApiRefusal):
            if not reason.is_passing or waited_s >= (self._options.full_s if reason.is_full else self._options.total_s):
                raise reason.public(subject) from reason
        elif waited_s >= self._options.total_s:
            raise unavailable(subject, waited_s, reason) from reason
        self._connection.stats.retries += 1
        self.attempts += 1
        await self._leave(isinstance(reason, ApiRefusal) and reason.is_full)
        await asyncio.sleep(pause_s(self.attempts, _PAUSE_FIRST_S, self._pause_max_s, jitter=0.5))

    async def _leave(self, is_full: bool) -> None:  # noqa: FBT001
        """Go on at another node if this one has served us nothing for too long; a stream that is full is so everywhere."""
        if self._connection.lost is not self._lost or is_full:
            self._lost, self._here_s = self._connection.lost, self._loop.time()
        elif self._connection.nodes > 1 and self._loop.time() - self._here_s >= LEAVE_S:
            await self._connection.cut()


@dataclass(frozen=True, slots=True)
class Page:
    """One answer to a batched get; `pending` messages that match were left for the next page."""

    messages: list[StoredEvent]
    pending: int
    up_to: int
    too_many: bool = False


class JetStream:
    """The verbs. Every method runs in the connection's loop."""

    def __init__(self, connection: Connection, *, nearby: bool = False) -> None:
        """Speak through `connection`: behind a leaf (`atoll.bus.regions`) with the hub, or `nearby` with the leaf itself."""
        self.connection = connection
        self._nearby = nearby

    @property
    def root(self) -> str:
        """Return how the subjects of the API begin."""
        return f"$JS.{HUB_DOMAIN}.API" if self._is_far else "$JS.API"

    @property
    def _is_far(self) -> bool:
        return not self._nearby and is_region(self.connection.domain)

    async def request(
        self,
        subject: str,
        payload: Buffer,
        headers: dict[str, str] | None = None,
        attempts: int = 0,
        timeout_s: float | None = None,
    ) -> dict[str, Any]:
        """Send a request, which was sent `attempts` times before, and return JetStream's answer.

        Raises `ApiRefusal` or `Unanswered`.
        """
        message = await self.connection.request(subject, payload, headers, timeout_s, attempts)
        try:
            answer = parsed(message.data, dict[str, Any])
            refusal = None if answer.get("error") is None else convert(answer["error"], ApiError)
        except msgspec.MsgspecError:
            raise Unanswered(f"not a JetStream answer on {subject}") from None
        if refusal is not None:
            raise ApiRefusal(refusal)
        return answer

    async def api(self, call: str, body: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Return the answer of the API to `call`, tried until the patience ends; raise `ApiRefusal` for a plain no."""
        patience = JetStreamPatience(self.connection)
        subject = f"{self.root}.{call}"
        payload = json.dumps(body).encode() if body is not None else b""
        while True:
            try:
                return await self.request(subject, payload, attempts=patience.attempts)
            except (Unanswered, ApiRefusal) as reason:
                if isinstance(reason, ApiRefusal) and not reason.is_passing:
                    raise
                await patience.after(subject, reason)

    async def stream_info(self, stream: str) -> dict[str, Any] | None:
        """Return what the API says of a stream, None if there is none; as `api`."""
        try:
            return await self.api(f"STREAM.INFO.{stream}")
        except ApiRefusal as reason:
            if reason.err_code != NO_STREAM:
                raise
            return None

    async def list_streams(self, call: Literal["LIST", "NAMES"], **body: str) -> list[Any]:
        """Return what the API says of all streams, page by page; as `api`."""
        found: list[Any] = []
        total = 1
        while len(found) < total:
            page = await self.api(f"STREAM.{call}", {"offset": len(found), **body})
            streams = page.get("streams") or []
            found += streams
            total = int(page.get("total", 0)) if streams else 0
        return found

    async def store(self, subject: str, payload: Buffer, headers: dict[str, str], *, first_wins: bool = False) -> None:
        """Publish under the id in `headers` until acknowledged.

        With `first_wins` it counts as stored where the broker keeps another: readers find out by the digest. Behind a leaf a
        message waits for the link where we see no bytes move, and sending it again would only fill the link.
        """
        patience = JetStreamPatience(self.connection)
        timeout_s = FAR_TRY_S if self._is_far else None
        while True:
            try:
                await self.request(subject, payload, headers, patience.attempts, timeout_s)
            except (Unanswered, ApiRefusal) as reason:
                if not (first_wins and isinstance(reason, ApiRefusal) and reason.is_kept_first):
                    await patience.after(subject, reason)
                    continue
            self.connection.stats.bytes_up += len(payload)
            return

    async def newest_there(self, stream: str, subject: str, *, once: bool = False) -> StoredEvent | None:
        """Return the newest message of a subject as a copy of the stream has it, None if it has none.

        It is tried until the patience ends, or `once`.
        """
        patience, body = JetStreamPatience(self.connection), json.dumps({"last_by_subj": subject}).encode()
        while True:
            try:
                # A branch for bulk may not be connected yet, and only then knows whether it speaks through a leaf.
                await self.connection.ready(self.connection.try_s(patience.attempts))
                where = f"{self.root}.DIRECT.GET.{stream}"
                return self._stored_event(
                    await self.connection.request(where, body, attempts=patience.attempts), subject
                )
            except Unanswered as reason:
                if once:
                    raise
                await patience.after(f"{self.root}.DIRECT.GET.{stream}", reason)

    def _stored_event(self, message: Msg, subject: str) -> StoredEvent | None:
        headers = message.headers or {}
        if headers.get(STATUS) == "404":
            return None
        sequence = headers.get("Nats-Sequence", "")
        if (
            STATUS in headers
            or headers.get("Nats-Subject") != subject
            or not (sequence.isascii() and sequence.isdigit())
        ):
            raise Unanswered(f"direct get of {subject}: {headers.get(STATUS, '')} {headers.get(DESCRIPTION, '')}")
        self.connection.stats.bytes_down += len(message.data)
        return StoredEvent(int(sequence), subject, message.data, unix_s(headers.get(STORED_AT, "")))

    async def page(self, stream: str, body: Mapping[str, Any]) -> Page:
        """Return one page of a batched direct get, whole or not at all (tried until the patience ends)."""
        patience = JetStreamPatience(self.connection)
        while True:
            try:
                return await self.request_page(stream, body, patience.attempts)
            except Unanswered as reason:
                await patience.after(f"{self.root}.DIRECT.GET.{stream}", reason)

    async def request_page(self, stream: str, body: Mapping[str, Any], attempts: int = 0) -> Page:
        """Ask for a page through a private inbox and collect until the end-of-batch marker; raise `Unanswered` without one."""
        connection = self.connection
        ended: asyncio.Future[Mapping[str, str]] = connection.loop.create_future()
        messages: list[StoredEvent] = []

        def collect(message: Msg) -> None:
            headers = message.headers or {}
            sequence = headers.get("Nats-Sequence", "")
            if STATUS in headers and not ended.done():
                ended.set_result(headers)
            elif sequence.isascii() and sequence.isdigit() and headers.get("Nats-Subject"):
                stored_s = unix_s(headers.get(STORED_AT, ""))
                messages.append(StoredEvent(int(sequence), headers["Nats-Subject"], message.data, stored_s))

        inbox, subject = connection.admission.inbox(), f"{self.root}.DIRECT.GET.{stream}"
        key = await connection.subscribe(inbox, collect, confirm=False)
        try:
            with connection.admission.denial(subject) as denied:
                lost = connection.lost
                await connection.send(subject, json.dumps(body).encode(), reply=inbox)
                # On a slow link even one message may take longer than a try; what counts is that bytes move.
                end = await wait_at_most(ended, connection.try_s(attempts), lost, denied, moves=connection.movement())
        except TimeoutError:
            if denied.done():
                raise connection.admission.denial_error(subject) from None
            raise Unanswered(f"batched get from {stream} stalled") from None
        finally:
            await connection.unsubscribe(key)
        status = end.get(STATUS, "")
        if status == "413":
            return Page([], 0, 0, too_many=True)
        if status not in ("204", "404"):
            raise Unanswered(f"batched get from {stream}: {status} {end.get(DESCRIPTION, '')}")
        connection.stats.bytes_down += sum(len(message.data) for message in messages)
        try:
            return Page(messages, int(end.get("Nats-Num-Pending", 0)), int(end.get("Nats-UpTo-Sequence", 0)))
        except ValueError:
            raise Unanswered(f"batched get from {stream}: an end that is none of JetStream's") from None


def read_field(answer: Mapping[str, Any], kind: type[T], *names: str) -> T:
    """Return a part of an answer, by the names that lead to it; raise `Unanswered` if it has none: anybody may send one."""
    found: Any = answer
    for name in names:
        found = found.get(name) if isinstance(found, dict) else None
    try:
        return convert(found, kind)
    except msgspec.MsgspecError:
        raise Unanswered(f"an answer without its {'.'.join(names)}") from None


class StoredRecord(msgspec.Struct, frozen=True):
    """A stored message as JetStream answers with it: sequence, subject, payload, headers, and when it was stored."""

    seq: int
    subject: str = ""
    data: bytes = b""
    hdrs: bytes = b""
    time: str = ""


async def put_record(
    jetstream: JetStream,
    stream: str,
    record: tuple[str, bytes],
    headers: dict[str, str],
    expected: int | None,
    reconnects: int | None,
) -> int:
    """Write `record` (subject, data) if its revision is `expected` and return the new revision, as `Bus.put_record`."""
    (subject, data), connection = record, jetstream.connection
    nonce = secrets.token_hex(12)
    headers = {"Nats-Msg-Id": nonce, **headers}
    if expected is not None:
        headers["Nats-Expected-Last-Subject-Sequence"] = str(expected)
    patience = JetStreamPatience(connection)
    while True:
        try:
            if reconnects is not None:
                # The count of reconnects holds only while connected: nothing may come between check and sending.
                await connection.ready(connection.options.try_s)
                if connection.reconnects != reconnects:
                    raise BrokerUnavailable(
                        f"the connection was lost before {subject} was written",
                        got=f"reconnect {connection.reconnects}",
                        allowed=f"reconnect {reconnects}, by which everything that the record names was stored",
                        todo="nothing: it is stored again, since the broker may have lost power",
                    )
            answer = await jetstream.request(subject, data, headers, patience.attempts)
            revision = read_field(answer, int, "seq")
        except (Unanswered, ApiRefusal) as reason:
            refused = isinstance(reason, ApiRefusal)
            if isinstance(reason, ApiRefusal) and reason.err_code != WRONG_SEQUENCE:
                await patience.after(subject, reason)
                continue
            there, owner = await last_record(jetstream, stream, subject) or (Record(subject, b"", 0), "")
            if owner == nonce:
                return there.revision
            if refused or (expected is not None and there.revision != expected):
                raise record_conflict(subject, there.revision, expected) from reason
            await patience.after(subject, reason)
        else:
            connection.stats.bytes_up += len(data)
            return revision


def headers_of(message: StoredRecord) -> dict[str, str]:
    """Return the headers of a stored message."""
    lines = message.hdrs.decode("utf-8", "replace").split("\r\n")
    return dict(line.split(": ", 1) for line in lines if ": " in line)


async def last_record(jetstream: JetStream, stream: str, subject: str) -> tuple[Record, str] | None:
    """Return the record as the leader has it, and its writer's nonce; None if there is none."""
    message = await stored_message(jetstream, stream, {"last_by_subj": subject})
    if message is None:
        return None
    headers = headers_of(message)
    jetstream.connection.stats.bytes_down += len(message.data)
    return Record(subject, message.data, message.seq), headers.get("Nats-Msg-Id", "")


async def stored_message(jetstream: JetStream, stream: str, which: Mapping[str, Any]) -> StoredRecord | None:
    """Return the message that is meant as the stream's leader has it; None if there is none."""
    patience = JetStreamPatience(jetstream.connection)
    while True:
        try:
            answer = await jetstream.api(f"STREAM.MSG.GET.{stream}", which)
            return read_field(answer, StoredRecord, "message")
        except ApiRefusal as reason:
            if reason.err_code == NO_MESSAGE:
                return None
            raise reason.public(str(which.get("last_by_subj", stream))) from reason
        except Unanswered as reason:
            await patience.after(stream, reason)


async def newest_sequence(jetstream: JetStream, stream: str, subject_filter: str) -> int:
    """Return the number of the newest message that matches, as the stream's leader has it; 0 if there is none."""
    message = await stored_message(jetstream, stream, {"last_by_subj": subject_filter})
    return 0 if message is None else message.seq


async def last_records(jetstream: JetStream, stream: str, subject_filter: str) -> list[Record]:
    """Return the last message of every subject that matches, in subject order."""
    last: dict[str, StoredEvent] = {}
    ask: dict[str, Any] = {"multi_last": [subject_filter], "batch": _PAGE_MESSAGES, "max_bytes": _PAGE_BYTES_MAX}
    known_to_leader = await newest_sequence(jetstream, stream, subject_filter)
    while known_to_leader:
        page = await jetstream.page(stream, ask)
        last.update((message.subject, message) for message in page.messages)
        if page.too_many or not page.messages or page.pending == 0:
            break
        ask = {**ask, "seq": page.messages[-1].sequence + 1, "up_to_seq": page.up_to}
    if max((message.sequence for message in last.values()), default=0) < known_to_leader:
        # Walking the messages goes past a copy that lags behind. The broker also serves at most 1024 subjects at once.
        every = await walk(jetstream, stream, subject_filter, after=0, limit=1 << 31)
        last = {message.subject: message for message in every}
    return [Record(subject, last[subject].data, last[subject].sequence) for subject in sorted(last)]


async def walk(jetstream: JetStream, stream: str, subject_filter: str, *, after: int, limit: int) -> list[StoredEvent]:
    """Return stored messages that match, in order, with sequences above `after`; at most `limit`."""
    found: list[StoredEvent] = []
    known_to_leader = await newest_sequence(jetstream, stream, subject_filter)
    while len(found) < limit and after < known_to_leader:
        page = await jetstream.page(
            stream,
            {
                "seq": after + 1,
                "next_by_subj": subject_filter,
                "batch": min(_PAGE_MESSAGES, limit - len(found)),
                "max_bytes": _PAGE_BYTES_MAX,
            },
        )
        messages = page.messages or await _next(jetstream, stream, subject_filter, after)
        if not messages:
            break
        found += messages
        after = messages[-1].sequence
    return found


async def _next(jetstream: JetStream, stream: str, subject_filter: str, after: int) -> list[StoredEvent]:
    message = await stored_message(jetstream, stream, {"seq": after + 1, "next_by_subj": subject_filter})
    return [] if message is None else [StoredEvent(message.seq, message.subject, message.data, unix_s(message.time))]
