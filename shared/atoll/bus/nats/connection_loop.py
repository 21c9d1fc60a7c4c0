"""The loop in which a connection does its work: that of a thread of its own, or the one that opened it.

A thread of its own keeps a connection alive while its caller blocks his loop for seconds: a command line, a test, a tour. Each
call then crosses from loop to loop and back, two futures, two awakenings and two hand-overs of the interpreter's lock: some
100 us for a message that costs 6 us to send. Shards and islands make a dozen calls a round, and do nothing long in their
loops; so their connections live there (`BusOptions.own_thread`).

Closing ends every call that is under way, in either place, with `BrokerUnavailable`. In the caller's own loop the calls are
part of his tasks, so these are cancelled, and the cancellation is taken back where the call was made. Closing is a task of its
own: it goes on when its caller is cancelled, for nobody calls it again.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from atoll.base.errors import BrokerUnavailable
from atoll.base.loop_thread import LoopThread
from atoll.base.retry import bounded

T = TypeVar("T")


class ConnectionLoop:
    """Carries calls into the loop of a connection and its branches, until it is closed."""

    def __init__(self, name: str, *, own_thread: bool) -> None:
        """Start a thread, or take the running loop."""
        self._thread = LoopThread(f"bus-{name}") if own_thread else None
        self.loop = asyncio.get_running_loop() if self._thread is None else self._thread.loop
        self._callers: set[asyncio.Task[Any]] = set()
        self._closing: asyncio.Task[None] | None = None

    async def call(self, work: Coroutine[Any, Any, T]) -> T:
        """Run `work` in the connection's loop and return its result to the caller's."""
        if self._closing is not None:
            work.close()
            raise BrokerUnavailable("the bus is closed", todo="open a new one")
        task = asyncio.current_task()
        if self._thread is None:
            return await (work if task is None or task in self._callers else self._called_here(work, task))
        try:
            return await asyncio.wrap_future(self._thread.submit(work))
        except asyncio.CancelledError:
            if self._closing is not None and (task is None or not task.cancelling()):
                raise _closed_meanwhile() from None
            raise

    async def _called_here(self, work: Coroutine[Any, Any, T], task: asyncio.Task[Any]) -> T:
        """Do `work` in the caller's own task."""
        self._callers.add(task)
        try:
            return await work
        except asyncio.CancelledError:
            if task not in self._callers and not task.uncancel():
                raise _closed_meanwhile() from None
            raise
        finally:
            self._callers.discard(task)

    async def close(self, shut_down: Callable[[], Coroutine[Any, Any, None]], within_s: float) -> None:
        """End all calls and `shut_down` the connection in its loop; whoever closes again waits for the same."""
        if self._closing is None:
            callers = self._callers - {asyncio.current_task()}
            self._callers -= callers
            self._closing = asyncio.create_task(self._close(shut_down, within_s))
            for task in callers:
                task.cancel()
        if not self._closing.done():
            await asyncio.shield(self._closing)

    async def _close(self, shut_down: Callable[[], Coroutine[Any, Any, None]], within_s: float) -> None:
        """Shut down, and end the thread."""
        try:
            with contextlib.suppress(TimeoutError):
                work = shut_down() if self._thread is None else asyncio.wrap_future(self._thread.submit(shut_down()))
                await bounded(work, within_s)
        finally:
            if self._thread is not None:
                await asyncio.to_thread(self._thread.stop)


def _closed_meanwhile() -> BrokerUnavailable:
    return BrokerUnavailable("the bus was closed during the call")
