"""Last values by compare-and-set, and ordered reading of what a stream keeps.

The broker refuses a retried compare-and-set like a foreign one, because it checks the sequence before it looks for
duplicates. So "refused" and "no answer" both mean: read the stored record and compare the nonce. Only a foreign nonce
is a conflict. We read back from the stream's leader; a mirror or replica may be stale. If a later writer has already
replaced our value, that counts as a conflict, since the caller no longer holds the record.
"""

from __future__ import annotations

import secrets
from typing import Any

import msgspec

from atoll.base.errors import BrokerUnavailable, RecordConflict
from atoll.base.retry import Unanswered
from atoll.bus.interface import Record, StoredEvent
from atoll.bus.nats.jetstream_api import NO_MESSAGE, WRONG_SEQUENCE, ApiRefusal, JetStream, JetStreamPatience, told

_PAGE_MESSAGES = 500
_PAGE_BYTES_MAX = 32 << 20


class StoredRecord(msgspec.Struct, frozen=True):
    """A stored message as JetStream answers with it: sequence, payload and headers."""

    seq: int
    data: bytes = b""
    hdrs: bytes = b""


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
                if connection.stats.reconnects != reconnects:
                    raise BrokerUnavailable(
                        f"the connection was lost before {subject} was written",
                        got=f"reconnect {connection.stats.reconnects}",
                        allowed=f"reconnect {reconnects}, by which everything that the record names was stored",
                        todo="nothing: it is stored again, since the broker may have lost power",
                    )
            revision = told(await jetstream.once(subject, data, headers), int, "seq")
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
            connection.stats.messages_up += 1
            connection.stats.bytes_up += len(data)
            return revision


async def last(jetstream: JetStream, stream: str, subject: str) -> tuple[Record, str] | None:
    """Return the record as the leader has it, and its writer's nonce; None if there is none."""
    patience = JetStreamPatience(jetstream.connection)
    while True:
        try:
            answer = await jetstream.api(f"STREAM.MSG.GET.{stream}", {"last_by_subj": subject})
            message = told(answer, StoredRecord, "message")
            break
        except ApiRefusal as reason:
            if reason.err_code == NO_MESSAGE:
                return None
            raise reason.public(subject) from reason
        except Unanswered as reason:
            await patience.after(subject, reason)
    lines = message.hdrs.decode("utf-8", "replace").split("\r\n")
    headers = dict(line.split(": ", 1) for line in lines if ": " in line)
    jetstream.connection.stats.messages_down += 1
    jetstream.connection.stats.bytes_down += len(message.data)
    return Record(subject, message.data, message.seq), headers.get("Nats-Msg-Id", "")


async def get_all(jetstream: JetStream, stream: str, subject_filter: str) -> list[Record]:
    """Return the last message of every subject that matches, in subject order."""
    last: dict[str, StoredEvent] = {}
    ask: dict[str, Any] = {"multi_last": [subject_filter], "batch": _PAGE_MESSAGES, "max_bytes": _PAGE_BYTES_MAX}
    while True:
        page = await jetstream.page(stream, ask)
        if page.too_many:
            # The broker serves at most 1024 subjects this way; walking the messages has no such bound.
            every = await walk(jetstream, stream, subject_filter, after=0, limit=1 << 31)
            last = {message.subject: message for message in every}
            break
        last.update((message.subject, message) for message in page.messages)
        if not page.messages or page.pending == 0:
            break
        ask = {**ask, "seq": page.messages[-1].sequence + 1, "up_to_seq": page.up_to}
    return [Record(subject, last[subject].data, last[subject].sequence) for subject in sorted(last)]


async def walk(jetstream: JetStream, stream: str, subject_filter: str, *, after: int, limit: int) -> list[StoredEvent]:
    """Return stored messages that match, in order, with sequences above `after`; at most `limit`."""
    found: list[StoredEvent] = []
    while len(found) < limit:
        page = await jetstream.page(
            stream,
            {
                "seq": after + 1,
                "next_by_subj": subject_filter,
                "batch": min(_PAGE_MESSAGES, limit - len(found)),
                "max_bytes": _PAGE_BYTES_MAX,
            },
        )
        found += page.messages
        if not page.messages:
            break
        after = page.messages[-1].sequence
        if page.pending == 0:
            break
    return found
