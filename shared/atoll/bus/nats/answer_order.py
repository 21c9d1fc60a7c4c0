"""Whether the answer to a request is lost or only late, by the answers to those that were sent after it.

On a slow link a request waits for as long as bytes move: its payload, or those before it, may still be on their way. But an
answer can be lost while everything else moves, for example where nodes of a cluster lose their routes and make them anew. A
stream answers in the order in which it was asked. So a request whose answer is missing while `OVERTAKEN` later ones have
theirs is sent again after its first try, as on a link where nothing moves. (Requests to several streams may overtake each other
by a few; and one that is sent twice is stored once.)
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable
from typing import Final

OVERTAKEN: Final = 16


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

    def answered(self, number: int) -> None:
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
