"""A loop that is faster than the run believes is held and told, and all that it reports is believed."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from structlog.testing import capture_logs

from atoll.base.errors import AtollError
from atoll.bus.interface import Bus
from atoll.bus.memory import MemoryBroker, MemoryBus
from atoll.client import join as joining
from atoll.client.join import HELD_S_MAX, IslandHandle, join
from atoll.client.step_hook import StepHook
from atoll.protocol.claims import HELD_AHEAD_S, HELD_SHARE
from atoll.protocol.settings import ProtocolSettings
from support.clocks import HandClock

ALLOWED = 4.0
STEP_S = 0.01


class HeldLoop:
    """A loop of `STEP_S` a step, by a clock that its pauses turn."""

    def __init__(self, run: str, monkeypatch: pytest.MonkeyPatch) -> None:
        """Join a run that allows `ALLOWED` steps a second; no shard serves it."""
        self.clock, self.pauses_s = HandClock(), list[float]()
        monkeypatch.setattr(joining, "time", SimpleNamespace(sleep=self._sleep))

        async def opened() -> Bus:
            return MemoryBus(run, MemoryBroker())

        protocol = ProtocolSettings(fragments=1, shards=1, steps_per_s_max=ALLOWED)
        self.params: dict[str, Any] = {"w": np.zeros((4, 2), np.float32)}
        self.island: IslandHandle = join(opened, run=run, learner="a", params=self.params, protocol=protocol)
        self.island._clock = self.clock

    def _sleep(self, pause_s: float) -> None:
        self.pauses_s.append(pause_s)
        self.clock.now_s += pause_s

    def steps(self, count: int) -> float:
        began_s = self.clock.now_s
        for _ in range(count):
            self.clock.now_s += STEP_S
            self.params = self.island.step(self.params, tokens=2)
        return self.clock.now_s - began_s


@pytest.fixture
def loop(run: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[HeldLoop]:
    made = HeldLoop(run, monkeypatch)
    yield made
    made.island._abandon()


def test_a_fast_loop_is_held_to_what_the_run_believes_and_told_so_once(loop: HeldLoop) -> None:
    """In words: what it takes, what is allowed, which setting; what it may be ahead comes first, unheld."""
    ahead = int(HELD_SHARE * ALLOWED * HELD_AHEAD_S)
    with capture_logs() as lines:
        assert loop.steps(ahead) == pytest.approx(ahead * STEP_S)
        assert loop.pauses_s == []
        took_s = loop.steps(200)

    assert ahead + 200 <= 1 + HELD_SHARE * ALLOWED * (HELD_AHEAD_S + ahead * STEP_S + took_s)
    assert took_s == pytest.approx(200 / (HELD_SHARE * ALLOWED), rel=0.05)
    assert max(loop.pauses_s) <= HELD_S_MAX
    assert loop.island.inside_s == pytest.approx(sum(loop.pauses_s), rel=0.01)
    [told] = [line for line in lines if line["event"] == "learner.held"]
    assert told["allowed"] == ALLOWED
    assert told["steps_per_s"] == pytest.approx(1.0 / STEP_S, rel=0.05)
    assert "protocol.steps_per_s_max" in told["todo"]


def test_what_a_slow_stretch_leaves_is_not_saved_up(loop: HeldLoop) -> None:
    loop.steps(150)
    loop.clock.now_s += 3600.0
    held_s = loop.steps(300)

    assert 1 + HELD_SHARE * ALLOWED * (HELD_AHEAD_S + held_s) >= 300


def test_a_held_loop_hears_at_once_that_it_cannot_go_on(loop: HeldLoop) -> None:
    loop.steps(200)
    loop.pauses_s.clear()
    loop.island.session.driver.failure = AtollError("the island cannot go on")
    with pytest.raises(AtollError, match="cannot go on"):
        loop.steps(1)

    assert loop.pauses_s == []


def test_a_held_loop_that_should_end_is_held_no_longer_than_a_moment(
    loop: HeldLoop, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where steps are allowed to be few, whoever stops a learner does not wait for the next one."""
    loop.steps(200)
    monkeypatch.setattr(StepHook, "done", True)
    loop.pauses_s.clear()
    loop.steps(1)

    assert len(loop.pauses_s) == 1
