"""In which order what a process of a region writes reaches the hub: a manifest never before its chunks.

While the link of a region is cut, what its processes write goes into the outbox of the leaf, and a keeper forwards it. Once
something of this process is there, or on its way there, all that follows goes there, too. When the outbox is empty and nothing
is on its way into it, all has been forwarded, and the process writes directly again. An outbox that is found empty says nothing
while chunks travel to the leaf, nor if some have begun to travel while it was asked.
"""

from __future__ import annotations

import contextlib
from collections.abc import Awaitable, Callable, Iterator


class OutboxOrder:
    """Whether what a process writes now must go into the outbox."""

    def __init__(self, waiting: Callable[[], Awaitable[int | None]]) -> None:
        """Begin with nothing in the outbox. `waiting` returns how many messages it holds, None if nobody says."""
        self._waiting = waiting
        self._holds_ours = False
        self._entered = self._entering = 0  # writes that have begun to enter, and those of them that have not ended

    async def must_wait(self) -> bool:
        """Return whether something that this process wrote before may still be in the outbox, or is on its way there."""
        if self._holds_ours and not self._entering:
            entered, waiting = self._entered, await self._waiting()
            if waiting == 0 and self._entered == entered:
                self._holds_ours = False
        return self._holds_ours

    @contextlib.contextmanager
    def entering(self) -> Iterator[None]:
        """Say that the block writes into the outbox."""
        self._holds_ours = True
        self._entered += 1
        self._entering += 1
        try:
            yield
        finally:
            self._entering -= 1
