"""An event loop whose time is virtual: when nothing is ready, its time jumps to the next timer.

Production services run on it unchanged. What makes a run a function of its seed: time passes only when every task waits for it,
work for a worker thread is done here and now, and calls due at the same moment run in the order in which they were asked for.
There is no selector, so nothing that needs a socket, a pipe or another process works. With nothing ready and no timer left no
task can ever go on: that is an error. A `ProcessTasks` holds the tasks of one simulated process: a kill ends them together.
"""

from __future__ import annotations

import asyncio
import contextvars
import heapq
import itertools
from asyncio import events
from collections import deque
from collections.abc import Callable, Coroutine
from typing import Any, Final

from atoll.base.errors import ProtocolMisuse
from atoll.base.logs import get

log = get(__name__)

WALL_S: Final = 1_767_225_600.0
"""The wall clock of every simulated run begins here: 2026-01-01 00:00 UTC."""

_group: contextvars.ContextVar[ProcessTasks | None] = contextvars.ContextVar("group", default=None)


class ProcessTasks:
    """The tasks of one simulated process, in the order in which they began."""

    def __init__(self) -> None:
        self.tasks: dict[asyncio.Task[Any], None] = {}
        self.dead = False

    def spawn(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """Begin a task of this group; tasks that it starts belong to the group as well."""
        context = contextvars.copy_context()
        context.run(_group.set, self)
        return asyncio.get_running_loop().create_task(work, context=context)

    def add(self, task: asyncio.Task[Any]) -> None:
        """Take a task in; a group that was killed ends it at once."""
        self.tasks[task] = None
        task.add_done_callback(self.tasks.pop)
        if self.dead:
            task.cancel()

    def kill(self) -> None:
        """End all tasks, now and for ever."""
        self.dead = True
        for task in list(self.tasks):
            task.cancel()


class VirtualLoop(asyncio.AbstractEventLoop):
    """See the module; give the class to `asyncio.Runner` as its `loop_factory`."""

    def __init__(self) -> None:
        self._now_s = 0.0
        self._ready: deque[asyncio.Handle] = deque()
        self._timers: list[tuple[float, int, asyncio.TimerHandle]] = []
        self._order = itertools.count()
        self._running = self._stopping = self._closed = self._debug = False
        self._handler: Callable[[asyncio.AbstractEventLoop, dict[str, Any]], object] | None = None

    # --- time ---------------------------------------------------------------------------------------------------------

    def time(self) -> float:
        """Return the virtual seconds since the loop was made."""
        return self._now_s

    def call_soon(
        self, callback: Callable[..., object], *args: object, context: contextvars.Context | None = None
    ) -> asyncio.Handle:
        """Call after all calls that are ready already."""
        handle = asyncio.Handle(callback, args, self, context)
        self._ready.append(handle)
        return handle

    # All of a run lives in one thread; a signal handler may append to a deque as well.
    call_soon_threadsafe = call_soon

    def call_later(
        self, delay: float, callback: Callable[..., object], *args: object, context: contextvars.Context | None = None
    ) -> asyncio.TimerHandle:
        """Call `delay` virtual seconds from now."""
        return self.call_at(self._now_s + delay, callback, *args, context=context)

    def call_at(
        self, when: float, callback: Callable[..., object], *args: object, context: contextvars.Context | None = None
    ) -> asyncio.TimerHandle:
        """Call at a virtual time; calls due at the same time run in the order in which they were asked for."""
        handle = asyncio.TimerHandle(when, callback, args, self, context)
        heapq.heappush(self._timers, (when, next(self._order), handle))
        return handle

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        """Leave it in the queue: the loop skips it when its time comes."""

    # --- running ------------------------------------------------------------------------------------------------------

    def run_forever(self) -> None:
        """Make the due calls, and advance time, until `stop`."""
        if self._running or self._closed:
            raise RuntimeError("this loop is running already, or closed")
        self._running = True
        events._set_running_loop(self)  # noqa: SLF001  (meant for event loops, which this is)
        try:
            while True:
                self._turn()
                if self._stopping:
                    break
        finally:
            self._running = self._stopping = False
            events._set_running_loop(None)  # noqa: SLF001

    def _turn(self) -> None:
        timers = self._timers
        while timers and timers[0][2].cancelled():
            heapq.heappop(timers)
        if not self._ready and not self._stopping:
            if not timers:
                raise ProtocolMisuse("nothing is left to happen, and somebody still waits")
            self._now_s = max(self._now_s, timers[0][0])
        while timers and timers[0][0] <= self._now_s:
            handle = heapq.heappop(timers)[2]
            if not handle.cancelled():
                self._ready.append(handle)
        for _ in range(len(self._ready)):
            ready = self._ready.popleft()
            if not ready.cancelled():
                ready._run()  # noqa: SLF001  (what an event loop does with its handles)

    def run_until_complete(self, future: Any) -> Any:  # noqa: ANN401  (any awaitable, as asyncio says)
        """Run until `future` is done and return its result."""
        task = asyncio.ensure_future(future, loop=self)
        task.add_done_callback(self._on_complete)
        try:
            self.run_forever()
        except BaseException:
            if task.done() and not task.cancelled():
                task.exception()  # an interrupt: it goes to the caller, so nobody need be told once more
            raise
        finally:
            task.remove_done_callback(self._on_complete)
        if not task.done():
            raise RuntimeError("the loop stopped before the future was done")
        return task.result()

    def _on_complete(self, done: asyncio.Future[Any]) -> None:
        """Stop, unless an interrupt has left `run_forever` already: the next run must not end at once."""
        if done.cancelled() or not isinstance(done.exception(), KeyboardInterrupt | SystemExit):
            self.stop()

    def stop(self) -> None:
        """Return from `run_forever` after this turn."""
        self._stopping = True

    def is_running(self) -> bool:
        """Return whether the loop runs."""
        return self._running

    def is_closed(self) -> bool:
        """Return whether it was closed."""
        return self._closed

    def close(self) -> None:
        """Forget all pending calls."""
        self._closed = True
        self._ready.clear()
        self._timers.clear()

    async def shutdown_asyncgens(self) -> None:
        """Do nothing: generators here hold nothing that outlives their tasks."""

    async def shutdown_default_executor(self, timeout: float | None = None) -> None:  # noqa: ASYNC109  (asyncio's signature)
        """Do nothing: there is no executor."""

    # --- what tasks need ----------------------------------------------------------------------------------------------

    def create_future(self) -> asyncio.Future[Any]:
        """Return a future of this loop."""
        return asyncio.Future(loop=self)

    def create_task(self, coro: Any, **options: Any) -> asyncio.Task[Any]:  # noqa: ANN401
        """Begin a task; it belongs to the group of the task that begins it."""
        context: contextvars.Context | None = options.get("context")
        task: asyncio.Task[Any] = asyncio.Task(coro, loop=self, **options)
        group = _group.get() if context is None else context.get(_group)
        if group is not None:
            group.add(task)
        return task

    def run_in_executor(self, executor: object, func: Callable[..., Any], *args: object) -> asyncio.Future[Any]:
        """Do the work here and now, in no virtual time, and return a future that is done."""
        del executor
        done = self.create_future()
        try:
            done.set_result(func(*args))
        except Exception as error:  # noqa: BLE001  (whatever the work raises belongs to whoever awaits it)
            done.set_exception(error)
        return done

    def get_debug(self) -> bool:
        """Return whether asyncio's debug mode is on."""
        return self._debug

    def set_debug(self, enabled: bool) -> None:  # noqa: FBT001  (asyncio's signature)
        """Turn asyncio's debug mode on or off."""
        self._debug = enabled

    def set_exception_handler(
        self, handler: Callable[[asyncio.AbstractEventLoop, dict[str, Any]], object] | None
    ) -> None:
        """Let `handler` receive exceptions that no task awaits."""
        self._handler = handler

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        """Report a failure that no task awaits."""
        if self._handler is not None:
            self._handler(self, context)
            return
        log.error("loop.exception", reason=context.get("message"), error=repr(context.get("exception")))


class LoopClock:
    """A `Clock` that reads the time of a loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop

    def monotonic(self) -> float:
        """Return the loop's time."""
        return self._loop.time()

    def wall(self) -> float:
        """Return the loop's time as if it had begun at `WALL_S`."""
        return WALL_S + self._loop.time()
