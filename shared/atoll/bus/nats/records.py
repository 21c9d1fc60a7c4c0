"""Last values by compare-and-set, and ordered reading of what a stream keeps.

The broker refuses a retried compare-and-set like a foreign one, because it checks the sequence before it looks for
duplicates. So "refused" and "no answer" both mean: read the stored record and compare the nonce. Only a foreign nonce
is a conflict. We read back from the stream's leader; a mirror or replica may be stale. If a later writer has already
replaced our value, that counts as a conflict, since the caller no longer holds the record.
"""

from __future__ import annotations

import base64
import secrets
from typing import Any

from atoll.base.errors import BrokerUnavailable, RecordConflict
from atoll.base.waiting import Unanswered
from atoll.bus.interface import Record
from atoll.bus.nats.jetstream_api import (
    NO_MESSAGE,
    WRONG_SEQUENCE,
    ApiRefusal,
    JetStream,
    JetStreamPatience,
    PublishAck,
)
from atoll.wire.limits import INFO_HEADER, Info, info_text

_PAGE_MESSAGES = 500
_PAGE_BYTES_MAX = 32 << 20


def headers_of(msg_id: str, info: Info | None) -> dict[str, str]:
    """Return the headers of a stored message."""
    headers = {"Nats-Msg-Id": msg_id}
    if info is not None:
        headers[INFO_HEADER] = info_text(info)
    return headers


def conflict(subject: str, expected: int | None, current: int) -> RecordConflict:
    """Return the error for a compare-and-set that another writer has won."""
    return RecordConflict(
        "someone else wrote the record first",
        got=f"revision {current} of {subject}",
        allowed=f"revision {expected}",
        todo="read it again and decide anew",
    )


async def put(
    jetstream: JetStream,
    stream: str,
    record: tuple[str, bytes],
    expected: int | None,
    info: Info | None,
    reconnects: int | None,
) -> int:
    """Write `record` (subject, data) if its revision is `expected` and return the new revision; see `Bus`."""
    subject, data = record
    nonce = secrets.token_hex(12)
    headers = headers_of(nonce, info)
    if expected is not None:
        headers["Nats-Expected-Last-Subject-Sequence"] = str(expected)
    patience = JetStreamPatience(jetstream.connection)
    while True:
        try:
            if reconnects is not None:
                # The count of reconnects holds only while connected: nothing may come between check and sending.
                await jetstream.connection.ready(jetstream.connection.options.try_s)
                _check_connection(subject, reconnects, jetstream.connection.stats.reconnects)
            return await jetstream.store_once(subject, data, headers)
        except (Unanswered, ApiRefusal) as reason:
            refused = isinstance(reason, ApiRefusal)
            if isinstance(reason, ApiRefusal) and reason.err_code != WRONG_SEQUENCE:
                await patience.after(subject, reason)
                continue
            revision, owner = await _read_back(jetstream, stream, subject)
            if owner == nonce:
                return revision
            if refused or (expected is not None and revision != expected):
                raise conflict(subject, expected, revision) from reason
            await patience.after(subject, reason)


def _check_connection(subject: str, stored: int, now: int) -> None:
    """Refuse to send a record if we reconnected after storing what it names."""
    if now != stored:
        raise BrokerUnavailable(
            f"the connection was lost before {subject} was written",
            got=f"reconnect {now}",
            allowed=f"reconnect {stored}, by which everything that the record names was stored",
            todo="nothing: it is stored again, since the broker may have lost power",
        )


async def _read_back(jetstream: JetStream, stream: str, subject: str) -> tuple[int, str]:
    """Return revision and nonce of the leader's record under `subject`."""
    message = await _last(jetstream, stream, subject)
    if message is None:
        return 0, ""
    lines = base64.b64decode(message.get("hdrs", "")).decode("utf-8", "replace").split("\r\n")
    fields = dict(line.split(": ", 1) for line in lines if ": " in line)
    return int(message["seq"]), fields.get("Nats-Msg-Id", "")


async def _last(jetstream: JetStream, stream: str, subject: str) -> dict[str, Any] | None:
    """Return the leader's last message of `subject`, or None."""
    try:
        answer = await jetstream.api(f"STREAM.MSG.GET.{stream}", {"last_by_subj": subject})
    except ApiRefusal as reason:
        if reason.err_code == NO_MESSAGE:
            return None
        raise reason.public(subject) from reason
    message: dict[str, Any] = answer["message"]
    return message


async def get(jetstream: JetStream, stream: str, subject: str) -> Record | None:
    """Return the record as the leader has it."""
    message = await _last(jetstream, stream, subject)
    if message is None:
        return None
    data = base64.b64decode(message.get("data", ""))
    jetstream.connection.stats.messages_down += 1
    jetstream.connection.stats.bytes_down += len(data)
    return Record(subject, data, int(message["seq"]))


async def get_all(jetstream: JetStream, stream: str, subject_filter: str) -> list[Record]:
    """Return the last message of every subject that matches, in subject order."""
    last: dict[str, PublishAck] = {}
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


async def walk(jetstream: JetStream, stream: str, subject_filter: str, *, after: int, limit: int) -> list[PublishAck]:
    """Return stored messages that match, in order, with sequences above `after`; at most `limit`."""
    found: list[PublishAck] = []
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
