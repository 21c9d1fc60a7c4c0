"""A bounded live feed of core messages that another thread may fill.

If the reader falls behind, the feed drops the oldest core messages of the subject that fills it, and counts them: a flood of
one subject pushes out nothing of others. It holds about `len_max` messages or `BYTES_MAX`, whichever is less. Filling never
waits and never fails. Iterating lets the loop go on after every `RUN_LENGTH` messages, and for longer the longer those took,
so a flood costs a loop at most about half of its time.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Awaitable, Callable

from atoll.base.fair_queue import FairQueue
from atoll.bus.interface import CoreMessage
from atoll.wire.traffic import BusStats

RUN_LENGTH = 16
BYTES_MAX = 64 << 20


class BufferedSubscription:
    """One subscription; it counts lost core messages in `stats`, and calls `on_close` once when the reader closes."""

    def __init__(
        self, len_max: int, stats: BusStats, on_close: Callable[[BufferedSubscription], Awaitable[None]]
    ) -> None:
        least_bytes = max(1, BYTES_MAX // max(1, len_max))
        self._waiting = FairQueue[CoreMessage](
            BYTES_MAX, lambda message: message.subject, lambda message: max(least_bytes, len(message.data))
        )
        self._stats = stats
        self._on_close = on_close
        self._loop, self._thread = asyncio.get_running_loop(), threading.get_ident()
        self._lock = threading.Lock()
        self._news = asyncio.Event()
        self._woken = False
        self._ended = False

    def push(self, core_message: CoreMessage) -> None:
        """Append a core message, from any thread."""
        with self._lock:
            if self._ended:
                return
            self._stats.core_messages_dropped += self._waiting.append(core_message)
            if not self._woken and not self._loop.is_closed():
                self._woken = True  # until the reader has looked
                self._wake()

    def end(self) -> None:
        """Let the reader take the rest and then stop, from any thread."""
        with self._lock:
            self._ended = True
            if not self._loop.is_closed():
                self._wake()

    def _wake(self) -> None:
        """Wake the reader; from its own thread that needs no call of the kernel."""
        if threading.get_ident() == self._thread:
            self._news.set()
        else:
            self._loop.call_soon_threadsafe(self._news.set)

    def _take(self) -> CoreMessage | None:
        with self._lock:
            if self._waiting:
                return self._waiting.pop()
            if not self._ended:
                self._woken = False
                self._news.clear()
            return None

    async def next(self, timeout_s: float) -> CoreMessage | None:
        """Return the next core message, or None if none came within `timeout_s` or the feed has ended."""
        deadline = self._loop.time() + timeout_s
        while (core_message := self._take()) is None:
            left = deadline - self._loop.time()
            if self._ended or left <= 0:
                return None
            try:
                async with asyncio.timeout(left):
                    await self._news.wait()
            except TimeoutError:
                return self._take()
        return core_message

    async def __aiter__(self) -> AsyncIterator[CoreMessage]:
        began_s, taken = self._loop.time(), 0
        while True:
            core_message = self._take()
            if core_message is not None:
                yield core_message
                taken += 1
                if taken % RUN_LENGTH == 0:
                    await asyncio.sleep(self._loop.time() - began_s)
                    began_s = self._loop.time()
            elif self._ended:
                return
            else:
                await self._news.wait()
                began_s, taken = self._loop.time(), 0

    async def close(self) -> None:
        """Stop listening; unread core messages are dropped."""
        with self._lock:
            first, self._ended = not self._ended, True
            self._waiting.clear()
        self.end()
        if first:
            await self._on_close(self)
