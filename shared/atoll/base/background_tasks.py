"""Coroutines in the background: tasks and timers of one driver, and a thread with an event loop of its own.

An island's coroutines run in such a thread while the caller's thread trains. A bus may do its network work in one: a caller
that blocks its own loop for seconds then loses no connection. The loop is asyncio's own: over our transport, which copies
nothing, uvloop was measured to be no faster.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

from atoll.base.retry import cancel_all

T = TypeVar("T")

CANCEL_S = 2.0
STOP_S = 10.0


class BackgroundTasks:
    """Tasks and timers on the running loop; `on_failure` hears the exception of a task that failed."""

    def __init__(self, on_failure: Callable[[BaseException], None]) -> None:
        self._on_failure = on_failure
        self._timers: dict[str, asyncio.TimerHandle] = {}
        self._tasks: dict[asyncio.Task[None], None] = {}  # in the order in which they began
        self._stopped = False

    def spawn(self, *works: Coroutine[Any, Any, None]) -> None:
        """Run each of `works` in the background; after `stop` nothing is begun."""
        for work in works:
            if self._stopped:
                work.close()
                continue
            task = asyncio.get_running_loop().create_task(work)
            self._tasks[task] = None
            task.add_done_callback(self._on_done)

    def arm(self, name: str, wait_s: float, call: Callable[[str], None]) -> None:
        """Call `call(name)` after `wait_s`; arming a name again moves it, and after `stop` nothing is armed."""
        armed = self._timers.pop(name, None)
        if armed is not None:
            armed.cancel()
        if self._stopped:
            return
        self._timers[name] = asyncio.get_running_loop().call_later(max(0.0, wait_s), self._fire, name, call)

    async def stop(self) -> None:
        """End every task and timer for good; harmless when repeated."""
        self._stopped = True
        for handle in self._timers.values():
            handle.cancel()
        await cancel_all(list(self._tasks))

    def _fire(self, name: str, call: Callable[[str], None]) -> None:
        self._timers.pop(name, None)
        try:
            call(name)
        except Exception as error:  # noqa: BLE001  (asyncio would log it and go on, with a timer that never comes again)
            self._on_failure(error)

    def _on_done(self, task: asyncio.Task[None]) -> None:
        self._tasks.pop(task, None)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._on_failure(error)


class LoopThread:
    """Starts at once; `submit` runs a coroutine there, `stop` ends the loop and the thread. Several islands may share."""

    def __init__(self, name: str) -> None:
        self.loop = asyncio.new_event_loop()
        self._is_stopping = False
        self._thread = threading.Thread(target=self._serve, name=name, daemon=True)
        self._thread.start()

    def submit(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Run `work` on the loop and return its future."""
        return asyncio.run_coroutine_threadsafe(work, self.loop)

    def stop(self) -> None:
        """Cancel what still runs on the loop, end it, wait for the thread; idempotent."""
        if not self._is_stopping:
            self._is_stopping = True  # once: a second stop would end what the first one waits for
            with contextlib.suppress(RuntimeError):  # its loop has been left, and is closed
                self.loop.call_soon_threadsafe(self.loop.stop)
        self.join(STOP_S)

    def join(self, timeout_s: float) -> None:
        """Wait for the thread's end."""
        self._thread.join(timeout_s)

    def _serve(self) -> None:
        asyncio.set_event_loop(self.loop)
        try:
            self.loop.run_forever()
            unfinished = asyncio.all_tasks(self.loop)
            for task in unfinished:
                task.cancel()
            if unfinished:
                # Not longer than this: nats-py may swallow a cancellation while a send is stalled.
                self.loop.run_until_complete(asyncio.wait(unfinished, timeout=CANCEL_S))
            self.loop.run_until_complete(self.loop.shutdown_asyncgens())
            self.loop.run_until_complete(self.loop.shutdown_default_executor())
        finally:
            self.loop.close()
