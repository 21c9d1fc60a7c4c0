"""The background tasks and named timers of one driver, ended together; the first task that fails is reported."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from atoll.base.retry import ended


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
        await ended(list(self._tasks))

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
