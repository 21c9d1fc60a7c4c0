"""A thread with an event loop of its own, so that what blocks the caller's loop for seconds costs no connection.

The loop is asyncio's own. Over a transport that copies nothing uvloop was measured to be no faster, and is left out.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

from atoll.base.errors import BrokerUnavailable
from atoll.base.waiting import bounded

T = TypeVar("T")
CLOSE_S = 2.0


class NetworkThread:
    """One thread, one loop; public methods are for other loops."""

    def __init__(self, name: str) -> None:
        """Prepare; `start` starts it."""
        self.loop = asyncio.new_event_loop()
        self.stopped = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    async def call(self, work: Coroutine[Any, Any, T]) -> T:
        """Run `work` in the thread's loop and return its result to the caller's."""
        if self.stopped:
            work.close()
            raise BrokerUnavailable("the bus is closed", todo="open a new one")
        try:
            return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, self.loop))
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if self.stopped and (task is None or not task.cancelling()):
                raise BrokerUnavailable("the bus was closed during the call") from None
            raise

    async def stop(self, last: Coroutine[Any, Any, None]) -> None:
        """Run `last`, end every task, the thread and the loop; harmless when repeated."""
        if self.stopped:
            last.close()
            return
        self.stopped = True
        finished = asyncio.run_coroutine_threadsafe(self._wind_up(last), self.loop)
        with contextlib.suppress(TimeoutError):
            await bounded(asyncio.wrap_future(finished), 3 * CLOSE_S)
        self.loop.call_soon_threadsafe(self.loop.stop)
        await asyncio.to_thread(self._thread.join, CLOSE_S)

    async def _wind_up(self, last: Coroutine[Any, Any, None]) -> None:
        """Run `last` and cancel what is left."""
        await last
        mine = asyncio.current_task()
        others = [task for task in asyncio.all_tasks() if task is not mine]
        for task in others:
            task.cancel()
        if others:
            await asyncio.wait(others, timeout=CLOSE_S)

    def _run(self) -> None:
        """Be the thread."""
        asyncio.set_event_loop(self.loop)
        try:
            self.loop.run_forever()
        finally:
            self.loop.close()
