"""Simulated operating-system processes, and the event loop that runs all of them in virtual time.

A process is a group of tasks with clocks of its own. The loop passes through `ProcessLoop._turn` before every callback of
a process, which is every point at which a coroutine goes on after an `await`. There a process may crash or freeze:

    crash   none of its callbacks runs any more, and no `finally` does: the dead do not tidy up
    freeze  its callbacks wait, in their order, until it thaws; time and everybody else go on

`time()` and all timers of a process follow its own monotonic clock, which drifts and may jump ahead. A timer that was armed
before a jump is not moved by it, as with a machine that was suspended: the process notices the jump when it next looks.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import heapq
import random
from collections.abc import Callable
from typing import Any

from atoll.base.errors import ProtocolMisuse
from atoll_simulator.loop import WALL_S, ProcessTasks, VirtualLoop, _group

NEVER = 1 << 60
THREAD_S = 0.004
BUSY_SHARE, BUSY_S = 0.03, 0.6
"""Some work in threads is late by more than a learner's step: the machine is busy."""
OUTSIDE = contextvars.Context()
"""The context of everything that belongs to no process: the network, the broker, the storm."""


class Process(ProcessTasks):
    """One process: alive or dead, frozen or not, with a monotonic and a wall clock of its own."""

    def __init__(self, name: str, loop: ProcessLoop, ahead_s: float = 0.0, rate: float = 1.0) -> None:
        super().__init__()
        self.name = name
        self.loop = loop
        self.frozen = False
        self.backlog: list[asyncio.Handle] = []
        self.acts = 0
        self.doom_at = NEVER
        self.on_doom: Callable[[Process], None] = Process.kill
        self._ahead_s = ahead_s
        self._wall_ahead_s = 0.0
        self.rate = rate

    @property
    def alive(self) -> bool:
        return not self.dead

    def reading(self, now_s: float) -> float:
        """Return what its monotonic clock shows at a true time."""
        return now_s * self.rate + self._ahead_s

    def monotonic(self) -> float:
        return self.reading(self.loop.now_s)

    def wall(self) -> float:
        return WALL_S + self.loop.now_s * self.rate + self._wall_ahead_s

    def jump(self, by_s: float) -> None:
        self._ahead_s += by_s

    def step_wall(self, by_s: float) -> None:
        self._wall_ahead_s += by_s

    def add(self, task: asyncio.Task[Any]) -> None:
        self.tasks[task] = None
        task.add_done_callback(self._forget, context=OUTSIDE)

    def _forget(self, task: asyncio.Task[Any]) -> None:
        self.tasks.pop(task, None)

    def kill(self) -> None:
        self.dead, self.frozen = True, False
        self.backlog.clear()

    def freeze(self) -> None:
        self.frozen = self.alive

    def thaw(self) -> None:
        """Go on with what has become due meanwhile."""
        self.frozen = False
        waiting, self.backlog = self.backlog, []
        self.loop.go_on(waiting)

    def bury(self) -> None:
        """Close what is left of the tasks, at the end of a schedule: before, they might touch what still lives."""
        self.on_doom = Process.kill
        for task in list(self.tasks):
            # It is meant to be dropped, and nobody needs to hear of it.
            setattr(task, "_log_destroy_pending", False)  # noqa: B010
            coroutine = task.get_coro()
            with contextlib.suppress(BaseException):
                if coroutine is not None:
                    coroutine.close()
        self.tasks.clear()


class ProcessLoop(VirtualLoop):
    """A virtual loop with processes. `dice` decides how long work in threads takes."""

    def __init__(self, dice: random.Random) -> None:
        super().__init__()
        self._dice = dice
        self.callbacks = 0
        self.slow_threads = 0.0

    @property
    def now_s(self) -> float:
        return self._now_s

    def time(self) -> float:
        """Return what the clock of the running process shows, outside of all processes the true time."""
        process = _group.get()
        return process.reading(self._now_s) if isinstance(process, Process) else self._now_s

    def call_later(
        self, delay: float, callback: Callable[..., object], *args: object, context: contextvars.Context | None = None
    ) -> asyncio.TimerHandle:
        """Call after `delay` by the clock of the running process."""
        process = _group.get()
        rate = process.rate if isinstance(process, Process) else 1.0
        return self._arm(self._now_s + delay / rate, callback, args, context)

    def call_at(
        self, when: float, callback: Callable[..., object], *args: object, context: contextvars.Context | None = None
    ) -> asyncio.TimerHandle:
        """Call when the clock of the running process shows `when`."""
        return self.call_later(when - self.time(), callback, *args, context=context)

    def at(self, when_s: float, callback: Callable[..., object], *args: object) -> asyncio.TimerHandle:
        """Call at a true time, outside of all processes."""
        return self._arm(when_s, callback, args, OUTSIDE)

    def after(self, delay_s: float, callback: Callable[..., object], *args: object) -> asyncio.TimerHandle:
        """Call after true seconds, outside of all processes."""
        return self._arm(self._now_s + delay_s, callback, args, OUTSIDE)

    def go_on(self, handles: list[asyncio.Handle]) -> None:
        self._ready.extend(handles)

    def _arm(
        self,
        when_s: float,
        callback: Callable[..., object],
        args: tuple[object, ...],
        context: contextvars.Context | None,
    ) -> asyncio.TimerHandle:
        handle = asyncio.TimerHandle(when_s, callback, args, self, context)
        heapq.heappush(self._timers, (when_s, next(self._order), handle))
        return handle

    def run_in_executor(self, executor: object, func: Callable[..., Any], *args: object) -> asyncio.Future[Any]:
        """Do the work now or somewhat later, as a thread would, and say so somewhat later."""
        if self.slow_threads <= 0.0 or self._dice.random() >= self.slow_threads:
            return super().run_in_executor(executor, func, *args)
        done, late_s = self.create_future(), self._dice.random() * THREAD_S
        if self._dice.random() < BUSY_SHARE:
            late_s += self._dice.random() * BUSY_S
        if self._dice.random() < 0.5:  # the work is done at once, and heard of later
            self.call_later(late_s, _settle, done, super().run_in_executor(None, func, *args))
        else:
            self.call_later(late_s, self._work, done, func, args)
        return done

    def _work(self, done: asyncio.Future[Any], func: Callable[..., Any], args: tuple[object, ...]) -> None:
        _settle(done, super().run_in_executor(None, func, *args))

    def _turn(self) -> None:
        """As the virtual loop's, but a callback runs only if its process is there to run it."""
        timers, ready = self._timers, self._ready
        while timers and timers[0][2].cancelled():
            heapq.heappop(timers)
        if not ready and not self._stopping:
            if not timers:
                raise ProtocolMisuse("nothing is left to happen, and somebody still waits")
            self._now_s = max(self._now_s, timers[0][0])
        while timers and timers[0][0] <= self._now_s:
            handle = heapq.heappop(timers)[2]
            if not handle.cancelled():
                ready.append(handle)
        for _ in range(len(ready)):
            call: Any = ready.popleft()
            if call._cancelled:
                continue
            process = call._context.get(_group)
            if process is not None and not self._may_run(process, call):
                continue
            self.callbacks += 1
            call._run()

    def _may_run(self, process: Any, handle: asyncio.Handle) -> bool:  # noqa: ANN401  (a process)
        """Return whether a callback runs now; where the storm waits for this one, the process crashes or freezes first."""
        if process.dead:
            return False
        if not process.frozen:
            process.acts += 1
            if process.acts >= process.doom_at:
                process.doom_at = NEVER
                OUTSIDE.copy().run(process.on_doom, process)
        if process.frozen:
            process.backlog.append(handle)
            return False
        return not process.dead


def _settle(done: asyncio.Future[Any], worked: asyncio.Future[Any]) -> None:
    error = worked.exception()
    if done.done():
        return
    if error is not None:
        done.set_exception(error)
    else:
        done.set_result(worked.result())
