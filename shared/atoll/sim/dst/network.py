"""The links between processes and the broker: every message is late, may be lost, doubled, overtaken or cut off.

A request whose answer was lost has taken effect: its sender learns nothing, after `TRY_S`. All traffic goes over the
broker, so a partition is a link that is cut: towards the broker, from it, or both.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from typing import Any

from atoll.sim.dst.faults import SLOW_S, Faults
from atoll.sim.dst.process import Process, Task
from atoll_simulator.engine import Engine

TRY_S = 2.0


class Unanswered(Exception):
    """No answer came in time; the request may have taken effect."""


class Refused(Exception):
    """The broker said no; subclasses say why."""


class Network:
    """Carries messages between processes and the one broker; `broker_up` says whether anybody listens there."""

    def __init__(self, engine: Engine, dice: random.Random, faults: Faults, tally: Counter[str]) -> None:
        """Begin with every link whole."""
        self.engine = engine
        self.faults = faults
        self.tally = tally
        self.broker_up = True
        self.cut_up: set[Process] = set()
        self.cut_down: set[Process] = set()
        self._dice = dice

    def heal(self, calm: Faults) -> None:
        """Mend every link; from now on messages are lost as `calm` says."""
        self.faults = calm
        self.cut_up.clear()
        self.cut_down.clear()

    def delay_s(self) -> float:
        """Draw how long one message takes."""
        chance = self._dice.random
        if self.faults.slow and chance() < self.faults.slow:
            return chance() * SLOW_S
        return self._dice.expovariate(1.0) * self.faults.delay_s

    def ask(self, task: Task, turn: int, call: Callable[..., object], arguments: tuple[Any, ...]) -> None:
        """Send a request of `task`; it is resumed with the answer, or with `Unanswered`, in its turn `turn`."""
        process = task.process
        process.boundary()
        if not process.alive:
            return
        sent_s = self.engine.now_s
        if process in self.cut_up or self._lost(self.faults.lost_requests):
            self.tally["requests lost"] += 1
            self.engine.after(TRY_S, task.resume, turn, None, Unanswered())
            return
        self.engine.after(self.delay_s(), self._arrive, task, turn, sent_s, call, arguments)
        if self._lost(self.faults.duplicates):
            self.tally["requests doubled"] += 1
            self.engine.after(self.delay_s(), self._arrive, task, turn, sent_s, call, arguments)

    def up(self, process: Process, call: Callable[..., object], *arguments: Any) -> None:  # noqa: ANN401  (passed on)
        """Send an at-most-once message to the broker: `call` happens there, or never."""
        process.boundary()
        if not process.alive:
            return
        if process in self.cut_up or self._lost(self.faults.lost_whispers):
            self.tally["at-most-once messages lost"] += 1
            return
        self.engine.after(self.delay_s(), self._hear, call, arguments)
        if self._lost(self.faults.duplicates):
            self.engine.after(self.delay_s(), self._hear, call, arguments)

    def down(self, process: Process, call: Callable[..., object], *arguments: Any) -> None:  # noqa: ANN401  (passed on)
        """Send an at-most-once message of the broker to a process."""
        if process in self.cut_down or self._lost(self.faults.lost_whispers):
            self.tally["at-most-once messages lost"] += 1
            return
        self.engine.after(self.delay_s(), process.tell, call, *arguments)
        if self._lost(self.faults.duplicates):
            self.tally["at-most-once messages doubled"] += 1
            self.engine.after(self.delay_s(), process.tell, call, *arguments)

    def _lost(self, share: float) -> bool:
        return share > 0.0 and self._dice.random() < share

    def _hear(self, call: Callable[..., object], arguments: tuple[Any, ...]) -> None:
        if self.broker_up:
            call(*arguments)

    def _arrive(
        self, task: Task, turn: int, sent_s: float, call: Callable[..., object], arguments: tuple[Any, ...]
    ) -> None:
        """Let a request take effect at the broker, and send the answer back."""
        left_s = sent_s + TRY_S - self.engine.now_s
        if not self.broker_up:
            self.engine.after(min(left_s, 0.2), task.resume, turn, None, Unanswered())
            return
        value: object = None
        error: Exception | None = None
        try:
            value = call(*arguments)
        except Refused as refused:
            error = refused
        if task.process in self.cut_down or self._lost(self.faults.lost_answers):
            self.tally["answers lost"] += 1
            self.engine.after(left_s, task.resume, turn, None, Unanswered())
            return
        wait_s = self.delay_s()
        if wait_s > left_s:
            self.engine.after(left_s, task.resume, turn, None, Unanswered())
        else:
            self.engine.after(wait_s, task.resume, turn, value, error)
