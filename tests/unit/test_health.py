"""Health by a file: what is alive keeps it fresh, `atoll health` reads its age."""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import jax.numpy as jnp
import pytest
from typer.testing import CliRunner

from atoll.base.clock import SystemClock
from atoll.base.errors import BrokerUnavailable
from atoll.base.health import live, show_life, silent_s
from atoll.bus.memory import MemoryBroker, MemoryBus
from atoll.cli.main import build
from atoll.client.join import join
from atoll.client.options import JoinOptions
from atoll.protocol.settings import ProtocolSettings

DEADLINE_S = 60.0


@pytest.fixture(autouse=True)
def _wall_jumps() -> None:
    """A file's age is told by the machine's time of day."""


def test_a_touched_file_is_fresh_and_an_old_one_is_not(tmp_path: Path) -> None:
    file = tmp_path / "health"
    show_life(file)
    assert silent_s(file, SystemClock()) < 60.0
    os.utime(file, (1.0, 1.0))
    assert silent_s(file, SystemClock()) > 1e6


async def test_a_living_loop_touches_at_once(tmp_path: Path) -> None:
    life = asyncio.create_task(live(tmp_path / "health"))
    await asyncio.sleep(0)
    assert (tmp_path / "health").exists()
    life.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await life
    assert life.cancelled()


async def test_a_loop_that_no_broker_answers_shows_no_life(tmp_path: Path) -> None:
    asked = asyncio.Event()
    answers: Iterator[bool | BrokerUnavailable] = iter([False, BrokerUnavailable("cut off"), True])

    async def reaches(within_s: float) -> bool:
        assert within_s > 0.0
        answer = next(answers)
        asked.set()
        if isinstance(answer, BrokerUnavailable):
            raise answer
        return answer

    file = tmp_path / "health"
    for shown in (False, False, True):
        life = asyncio.create_task(live(file, reaches))
        async with asyncio.timeout(DEADLINE_S):
            await asked.wait()
        asked.clear()
        await asyncio.sleep(0)
        life.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await life
        assert file.exists() == shown


@pytest.mark.parametrize(("age", "code"), [(0.0, 0), (100.0, 1)])
def test_the_verb_leaves_with_the_answer(tmp_path: Path, age: float, code: int) -> None:
    """0 when fresh, 1 when stale."""
    file = tmp_path / "health"
    file.touch()
    then_s = SystemClock().wall() - age
    os.utime(file, (then_s, then_s))

    assert CliRunner().invoke(build(), ["health", "--file", str(file)]).exit_code == code


class CutBus(MemoryBus):
    """A bus that takes everything, and whose broker answers nothing until the test says so."""

    answers = False
    told = 0

    async def tell(self, subject: str, data: bytes) -> None:
        await super().tell(subject, data)
        self.told += 1

    async def reach(self, timeout_s: float) -> bool:
        return self.answers and await super().reach(timeout_s)


def test_a_learner_that_is_cut_off_is_not_healthy(tmp_path: Path) -> None:
    """What it sends lies in a buffer for minutes; `atoll health` once called it healthy all that time."""
    bus, file = CutBus("r", MemoryBroker()), tmp_path / "health"

    async def opener() -> CutBus:
        return bus

    def wait(holds: Callable[[], bool]) -> None:
        until_s = time.monotonic() + DEADLINE_S
        while not holds() and time.monotonic() < until_s:
            time.sleep(0.01)

    agreed = ProtocolSettings(fragments=1, shards=1, silence_s=0.5)
    island = join(
        opener, run="r", learner="a", params={"w": jnp.zeros(4)}, protocol=agreed, options=JoinOptions(health_file=file)
    )
    told = bus.told
    wait(lambda: bus.told > told + 4)
    cut_off = file.exists()
    bus.answers = True
    wait(file.exists)

    assert not cut_off
    assert file.exists()
    island.close()
