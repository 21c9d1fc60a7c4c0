"""A learner's link, one direction: core messages that may be lost, small messages, and large ones that wait in line.

A *core message* (a call, news of a head, a report) takes latency, or is lost for good. A *small* message (a question,
an answer, a farewell) that is lost is sent again after a pause, as often as it takes. A *large* one (a contribution, a
frame) shares the bandwidth by waiting in line: a later one arrives later, and a lost one takes its own time on the line
again. Small ones pass the line, as they do if packets of several streams take turns.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from typing import Any

from atoll_simulator.engine import Engine
from atoll_simulator.fleet.parameters import Exchange

BITS_PER_GBIT = 1e9


class FleetLink:
    """One direction between a learner and the hub."""

    def __init__(self, engine: Engine, exchange: Exchange, dice: random.Random) -> None:
        """Begin idle."""
        self._engine = engine
        self._dice = dice
        self._latency_s = exchange.latency_s
        self._loss = exchange.loss
        self._retry_s = exchange.retry_s
        self._bytes_s = exchange.gbit_s * BITS_PER_GBIT / 8.0
        self._free_s = 0.0
        self._line: deque[tuple[float, float]] = deque()
        self._busy_s = 0.0
        self.lost = 0

    def sent_bytes(self) -> float:
        """Return the bytes that have left by now, also in vain; messages still in line do not count."""
        now_s = self._engine.now_s
        while self._line and self._line[0][1] <= now_s:
            began_s, ended_s = self._line.popleft()
            self._busy_s += ended_s - began_s
        under_way_s = max(0.0, now_s - self._line[0][0]) if self._line else 0.0
        return (self._busy_s + under_way_s) * self._bytes_s

    def core_message(self, call: Callable[..., object], *arguments: Any) -> None:  # noqa: ANN401  (passed on)
        """Make `call(*arguments)` at the other end, or never."""
        if self._dice.random() < self._loss:
            self.lost += 1
            return
        self._engine.after(self._latency_s, call, *arguments)

    def ask(self, call: Callable[..., object], *arguments: Any) -> None:  # noqa: ANN401  (passed on)
        """Make `call(*arguments)` at the other end, a latency later and a pause more for each time it is lost."""
        wait_s = self._latency_s
        while self._dice.random() < self._loss:
            self.lost += 1
            wait_s += self._retry_s
        self._engine.after(wait_s, call, *arguments)

    def send(self, size_bytes: float, call: Callable[..., object], *arguments: Any) -> None:  # noqa: ANN401  (passed on)
        """Make `call(*arguments)` at the other end when `size_bytes` have arrived there."""
        now_s = self._engine.now_s
        on_line_s = size_bytes / self._bytes_s
        self.sent_bytes()  # forgets what has left, so that the line keeps only what waits
        done_s = max(now_s, self._free_s) + on_line_s
        self._line.append((done_s - on_line_s, done_s))
        while self._dice.random() < self._loss:
            self.lost += 1
            done_s += self._retry_s + on_line_s
            self._line.append((done_s - on_line_s, done_s))
        self._free_s = done_s
        self._engine.after(done_s - now_s + self._latency_s, call, *arguments)
