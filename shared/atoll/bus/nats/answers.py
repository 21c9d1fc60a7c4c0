"""The requests of one connection that wait for their answers: one inbox, and a future for each.

A round of a tiny fragment is some twenty requests, so what one costs is what the round costs. With nats-py's requests each has
two tasks, two timers and a queue on its way back; here it is one future and one timer. Everything that ends a request settles
that future: its answer, the broker's refusal (`Admission.denial`), the loss of the connection, the time-out.

Nobody may guess where an answer is awaited, also not from the subjects of earlier ones: every request has a subject of its own
below the inbox, of random digits. They are drawn many at a time, because a draw is a call of the kernel.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from typing import Final

from nats.aio.msg import Msg

from atoll.base.retry import Unanswered

_DIGITS: Final = 16
_DRAWN: Final = 256


class Answers:
    """The answers that are awaited below `inbox`. Everything runs in the connection's loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop, inbox: str) -> None:
        """Wait for nothing yet."""
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
