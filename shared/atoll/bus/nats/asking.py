"""Questions whose answers come on a subject of their own, and not to an inbox.

An answer to an inbox passes every door, because an inbox is any subject. Where the answer comes from a region, the hub would
have to let the region's broker write to the inboxes of shards: it could then answer for JetStream, too. So it names
a subject that only who is asked may write on (`atoll.keys.rights`), and nobody has used before.
"""

from __future__ import annotations

import asyncio

import nats.errors
from nats.aio.msg import Msg

from atoll.base.retry import Unanswered, bounded
from atoll.bus.nats.connection import Connection
from atoll.bus.nats.headers import NOBODY, STATUS


async def asked(connection: Connection, subject: str, data: bytes, answer_at: str, timeout_s: float) -> Msg:
    """Return the first message on `answer_at` after a question, in the connection's loop.

    Raises:
        Unanswered: none came in time, nobody listens, or the connection was lost.
        AccessDenied: we may not ask there, or not hear the answer.
    """
    first: asyncio.Future[Msg] = connection.loop.create_future()

    def hear(message: Msg) -> None:
        if not first.done():
            first.set_result(message)

    heard = await connection.subscribe(answer_at, hear)
    try:
        with connection.admission.denial(subject) as denied:
            await connection.send(subject, data, answer_at, timeout_s=timeout_s)
            message = await bounded(first, timeout_s, connection.lost, denied)
    except (nats.errors.Error, TimeoutError, OSError) as error:
        if denied.done():
            raise connection.admission.denied(subject) from None
        raise Unanswered(f"{type(error).__name__} on {subject}") from error
    finally:
        await connection.unsubscribe(heard)
    if (message.headers or {}).get(STATUS) == NOBODY:
        raise Unanswered(f"nobody listens on {subject}")
    return message
