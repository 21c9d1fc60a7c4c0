"""A simulated process: tasks that are generators, a clock of its own, and what a crash and a freeze do to both.

A task yields what it waits for and is resumed with what came of it:

    a number      so many seconds by the process's own clock
    a `Wish`      anything else that arranges for the task to be resumed: an answer of the broker, an item of a `Mailbox`

Everything that reaches a process from outside passes `Task.resume` or `Process.tell`. That is where a dead process hears
nothing, and where a frozen one keeps what comes until it thaws and then finds it all at once, in no particular order.
Between any two actions the process passes a *boundary* (`Process.boundary`), where the storm may kill or freeze it.

Tasks may have no `finally`: a killed process does not tidy up.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Generator
from typing import Any, Protocol, TypeAlias

from atoll_simulator.engine import Engine

NEVER = 1 << 60

Work: TypeAlias = Generator["float | Wish", Any, Any]


class Wish(Protocol):
    """What a task waits for."""

    def arrange(self, task: Task, turn: int) -> None:
        """See to it that `task` is resumed, in its turn `turn`."""


class Clock:
    """A monotonic clock: it began somewhere, runs fast or slow by a constant `rate`, and may jump ahead."""

    def __init__(self, engine: Engine, ahead_s: float, rate: float) -> None:
        """Begin `ahead_s` ahead of the engine."""
        self._engine = engine
        self._ahead_s = ahead_s
        self.rate = rate

    @property
    def now_s(self) -> float:
        """Return what the process reads, seconds."""
        return self._engine.now_s * self.rate + self._ahead_s

    def jump(self, by_s: float) -> None:
        """Step ahead: a virtual machine was suspended, or its host was."""
        self._ahead_s += by_s


class Scope:
    """Tasks that end together."""

    def __init__(self) -> None:
        """Begin with none."""
        self.live = True

    def stop(self) -> None:
        """End every task of this scope: none is resumed again."""
        self.live = False


class Task:
    """One generator of a process; `turn` counts its resumptions, so that an answer that came too late is not heard."""

    __slots__ = ("process", "scope", "turn", "work")

    def __init__(self, process: Process, work: Work, scope: Scope) -> None:
        """Begin at the first line with the first `resume`."""
        self.process = process
        self.work = work
        self.scope = scope
        self.turn = 0

    def resume(self, turn: int, value: object = None, error: Exception | None = None) -> None:
        """Go on with `value` (or the raised `error`) unless this turn is over, until the task waits again."""
        process = self.process
        if turn != self.turn or not self.scope.live or not process.alive:
            return
        if process.frozen:
            process.backlog.append((self.resume, (turn, value, error)))
            return
        process.boundary()
        if not process.alive or process.frozen:
            if process.frozen:
                process.backlog.append((self.resume, (turn, value, error)))
            return
        self.turn += 1
        try:
            wish = self.work.send(value) if error is None else self.work.throw(error)
        except StopIteration:
            return
        if isinstance(wish, float | int):
            process.engine.after(wish / process.clock.rate, self.resume, self.turn)
        else:
            wish.arrange(self, self.turn)


class Process:
    """One operating-system process: alive or dead, frozen or not."""

    def __init__(self, name: str, engine: Engine, clock: Clock) -> None:
        """Be alive, with no task."""
        self.name = name
        self.engine = engine
        self.clock = clock
        self.alive = True
        self.frozen = False
        self.backlog: list[tuple[Callable[..., object], tuple[Any, ...]]] = []
        self.actions_left = NEVER
        self.on_doom: Callable[[Process], None] = Process.crash
        self.scope = Scope()

    def spawn(self, work: Work, scope: Scope | None = None) -> None:
        """Begin a task, and go on with it until it waits for the first time."""
        Task(self, work, scope or self.scope).resume(0)

    def tell(self, call: Callable[..., object], *arguments: Any) -> None:  # noqa: ANN401  (passed on)
        """Let something from outside reach the process: later if it is frozen, never if it is dead."""
        if not self.alive:
            return
        if self.frozen:
            self.backlog.append((call, arguments))
        else:
            call(*arguments)

    def boundary(self) -> None:
        """Pass from one action to the next; now and then the storm waits there."""
        self.actions_left -= 1
        if self.actions_left <= 0:
            self.actions_left = NEVER
            self.on_doom(self)

    def crash(self) -> None:
        """Die: nothing of this process happens any more."""
        self.alive = self.frozen = False
        self.backlog.clear()

    def freeze(self) -> None:
        """Stop as under SIGSTOP: time goes on, and so does what was sent already."""
        self.frozen = self.alive

    def thaw(self, dice: random.Random) -> None:
        """Go on with stale state; what came meanwhile is all there at once."""
        if not (self.alive and self.frozen):
            return
        self.frozen = False
        waiting, self.backlog = self.backlog, []
        dice.shuffle(waiting)
        for call, arguments in waiting:
            self.tell(call, *arguments)


class Mailbox:
    """Items for one task of a process; a task waits with `yield mailbox.get(...)`."""

    def __init__(self, process: Process) -> None:
        """Begin empty."""
        self.items: deque[Any] = deque()
        self._process = process
        self._waiting: tuple[Task, int] | None = None

    def put(self, item: object) -> None:
        """Add an item, and wake who waits for one."""
        self.items.append(item)
        if self._waiting is not None:
            (task, turn), self._waiting = self._waiting, None
            if task.turn == turn and task.scope.live:
                task.resume(turn)

    def get(self, timeout_s: float | None = None) -> Generator[float | Wish, Any, Any]:
        """Return the next item, or None when none came within `timeout_s`; to be used with `yield from`."""
        if not self.items:
            yield _Waiting(self, timeout_s)
        return self.items.popleft() if self.items else None

    def expect(self, task: Task, turn: int) -> None:
        """Remember who waits."""
        self._waiting = (task, turn)


class _Waiting:
    """The wish for an item of a mailbox."""

    __slots__ = ("_mailbox", "_timeout_s")

    def __init__(self, mailbox: Mailbox, timeout_s: float | None) -> None:
        self._mailbox = mailbox
        self._timeout_s = timeout_s

    def arrange(self, task: Task, turn: int) -> None:
        """Wait for an item, but no longer than the time-out."""
        self._mailbox.expect(task, turn)
        if self._timeout_s is not None:
            task.process.engine.after(self._timeout_s / task.process.clock.rate, task.resume, turn)
