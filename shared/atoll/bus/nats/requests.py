"""The requests of one connection that wait for their answers: one inbox, a future for each, and the order of the answers.

A round of a tiny fragment is some twenty requests, so what one costs is what the round costs. With nats-py's requests each has
two tasks, two timers and a queue on its way back; here it is one future and one timer. Everything that ends a request settles
that future: its answer, the broker's refusal (`Admission.denial`), the loss of the connection, the time-out.

Nobody may guess where an answer is awaited, also not from the subjects of earlier ones: every request has a subject of its own
below the inbox, of random digits. They are drawn many at a time, because a draw is a call of the kernel.

On a slow link a request waits for as long as bytes move: its payload, or those before it, may still be on their way. But an
answer can be lost while everything else moves, for example where nodes of a cluster lose their routes and make them anew. A
stream answers in the order in which it was asked. So a request whose answer is missing while `OVERTAKEN` later ones have
theirs is sent again after its first try, as on a link where nothing moves. (Requests to several streams may overtake each other
by a few; and one that is sent twice is stored once.)
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import os
from collections.abc import Callable
from typing import Final

from nats.aio.msg import Msg

from atoll.base.retry import Unanswered

OVERTAKEN: Final = 16
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


class AnswerOrder:
    """The requests of one connection, numbered in the order of sending; `answers` counts those that have one."""

    def __init__(self) -> None:
        """Begin without requests."""
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
