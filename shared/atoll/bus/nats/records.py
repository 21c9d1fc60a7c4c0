"""Last values by compare-and-set, and ordered reading of what a stream keeps.

The broker refuses a retried compare-and-set like a foreign one, because it checks the sequence before it looks for
duplicates. So "refused" and "no answer" both mean: read the stored record and compare the nonce. Only a foreign nonce
is a conflict. We read back from the stream's leader. If a later writer has already replaced our value, that counts as a
conflict, since the caller no longer holds the record. (A cluster answers a repeated compare-and-set as a duplicate, with the
revision of the first. While another write of the subject is on its way, it refuses without saying whose: we ask again.)

**Many at a time, and not stale.** A batched get is answered by any copy of the stream, and a copy that has just started may lag
far behind. A decision by such a reading must not rest on old records: a member whose record is not seen is a stranger. So the
leader is asked first for the number of its newest message that matches. A copy stores in order, so one that has that message
has all before it; what it lacks is read from the leader, one by one.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from typing import Any

import msgspec

from atoll.base.clock import unix_s
from atoll.base.errors import BrokerUnavailable, RecordConflict
from atoll.base.retry import Unanswered
from atoll.bus.interface import Record, StoredEvent
from atoll.bus.nats.jetstream_api import (
    NO_MESSAGE,
    WRONG_SEQUENCE,
    ApiRefusal,
    JetStream,
    JetStreamPatience,
    read_field,
)

_PAGE_MESSAGES = 500
_PAGE_BYTES_MAX = 32 << 20


class StoredRecord(msgspec.Struct, frozen=True):
    """A stored message as JetStream answers with it: sequence, subject, payload, headers, and when it was stored."""

    seq: int
    subject: str = ""
    data: bytes = b""
    hdrs: bytes = b""
    time: str = ""


async def put(
    jetstream: JetStream,
    stream: str,
    record: tuple[str, bytes],
    headers: dict[str, str],
    expected: int | None,
    reconnects: int | None,
) -> int:
    """Write `record` (subject, data) if its revision is `expected` and return the new revision; see `Bus`."""
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
            answer = await jetstream.once(subject, data, headers, patience.attempts)
            revision = read_field(answer, int, "seq")
        except (Unanswered, ApiRefusal) as reason:
            refused = isinstance(reason, ApiRefusal)
            if isinstance(reason, ApiRefusal) and reason.err_code != WRONG_SEQUENCE:
                await patience.after(subject, reason)
                continue
            there, owner = await last(jetstream, stream, subject) or (Record(subject, b"", 0), "")
            if owner == nonce:
                return there.revision
            if refused or (expected is not None and there.revision != expected):
                raise RecordConflict(
                    "someone else wrote the record first",
                    got=f"revision {there.revision} of {subject}",
                    allowed=f"revision {expected}",
                    todo="read it again and decide anew",
                ) from reason
            await patience.after(subject, reason)
        else:
            connection.stats.bytes_up += len(data)
            return revision


def headers_of(message: StoredRecord) -> dict[str, str]:
    """Return the headers of a stored message."""
    lines = message.hdrs.decode("utf-8", "replace").split("\r\n")
    return dict(line.split(": ", 1) for line in lines if ": " in line)


async def last(jetstream: JetStream, stream: str, subject: str) -> tuple[Record, str] | None:
    """Return the record as the leader has it, and its writer's nonce; None if there is none."""
    message = await stored(jetstream, stream, {"last_by_subj": subject})
    if message is None:
        return None
    headers = headers_of(message)
    jetstream.connection.stats.bytes_down += len(message.data)
    return Record(subject, message.data, message.seq), headers.get("Nats-Msg-Id", "")


async def stored(jetstream: JetStream, stream: str, which: Mapping[str, Any]) -> StoredRecord | None:
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


async def newest(jetstream: JetStream, stream: str, subject_filter: str) -> int:
    """Return the number of the newest message that matches, as the stream's leader has it; 0 if there is none."""
    message = await stored(jetstream, stream, {"last_by_subj": subject_filter})
    return 0 if message is None else message.seq


async def get_all(jetstream: JetStream, stream: str, subject_filter: str) -> list[Record]:
    """Return the last message of every subject that matches, in subject order."""
    last: dict[str, StoredEvent] = {}
    ask: dict[str, Any] = {"multi_last": [subject_filter], "batch": _PAGE_MESSAGES, "max_bytes": _PAGE_BYTES_MAX}
    known_to_leader = await newest(jetstream, stream, subject_filter)
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
    known_to_leader = await newest(jetstream, stream, subject_filter)
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
    """Return the next message that matches as the leader has it; none if it was removed meanwhile."""
    message = await stored(jetstream, stream, {"seq": after + 1, "next_by_subj": subject_filter})
    return [] if message is None else [StoredEvent(message.seq, message.subject, message.data, unix_s(message.time))]
