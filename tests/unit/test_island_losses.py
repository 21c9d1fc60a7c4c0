"""A loss that is late, or that cannot be read, costs a learner neither its heartbeats nor its pushes nor its loop."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import jax.numpy as jnp
import pytest

from atoll.base.background_tasks import LoopThread
from atoll.base.errors import AtollError, Quarantined, RunReplaced
from atoll.bus.interface import Record
from atoll.bus.memory import MemoryBroker, MemoryBus
from atoll.client import driver
from atoll.client.driver import LossReader
from atoll.client.join import IslandHandle, join
from atoll.client.options import JoinOptions
from atoll.protocol.settings import ProtocolSettings
from atoll.wire.messages import Beat, decode
from atoll.wire.subjects import Subjects

DEADLINE_S = 240.0


class Late:
    """A scalar whose value comes when the test says so, or is an error."""

    def __init__(self, value: float, *, fails: bool = False) -> None:
        self.there = threading.Event()
        self._value = value
        self._fails = fails

    def __float__(self) -> float:
        assert self.there.wait(DEADLINE_S), "nobody freed the value"
        if self._fails:
            raise RuntimeError("INTERNAL: device lost")
        return self._value


class ScriptedBus(MemoryBus):
    """A bus whose at-most-once messages fail when told, and that says when heads were read."""

    fails = False

    def __init__(self, run: str, broker: MemoryBroker) -> None:
        super().__init__(run, broker)
        self.read = threading.Event()

    async def tell(self, subject: str, data: bytes) -> None:
        """Send, or fail as no bus should."""
        if self.fails:
            raise RuntimeError("a bug")
        await super().tell(subject, data)

    async def get_records(self, subject_filter: str) -> list[Record]:
        self.read.set()
        return await super().get_records(subject_filter)


class LossScene:
    """A learner on an in-memory broker, and its heartbeats as others hear them."""

    def __init__(self, home: LoopThread) -> None:
        broker = MemoryBroker()
        self.home = home
        self.bus, self._ear = ScriptedBus("r", broker), MemoryBus("r", broker)
        self._feed = home.submit(self._ear.listen(Subjects("r").beat("a"))).result(DEADLINE_S)

    async def opener(self) -> ScriptedBus:
        return self.bus

    def joined(self) -> IslandHandle:
        protocol = ProtocolSettings(fragments=1, shards=1, silence_s=1.0)
        return join(
            self.opener,
            run="r",
            learner="a",
            params={"w": jnp.zeros(8)},
            protocol=protocol,
            options=JoinOptions(home=self.home),
        )

    def beat(self, step: int, *, with_loss: bool = False) -> Beat:
        """Return the first heartbeat to come that tells of `step`."""

        async def heard() -> Beat:
            async for core_message in self._feed:
                said = decode(Beat, core_message.data)
                if said.step >= step and (said.loss is not None or not with_loss):
                    return said
            raise AssertionError("no heartbeats any more")

        return self.home.submit(asyncio.wait_for(heard(), DEADLINE_S)).result(2 * DEADLINE_S)


@contextmanager
def scene() -> Iterator[LossScene]:
    home = LoopThread("test-losses")
    try:
        yield LossScene(home)
    finally:
        home.stop()


def test_a_loss_that_is_late_holds_nothing_up() -> None:
    """Heartbeats go on with the last loss that is known, the learner's ledgers close, and the loss is told once it is there."""
    loss = Late(3.0)
    with scene() as there:
        island = there.joined()
        params = island.step(island.params, tokens=1, loss=5.0)
        assert there.beat(1).loss == 5.0
        params = island.step(params, tokens=1, loss=loss)

        late = [there.beat(2).loss for _ in range(3)]
        told = there.home.submit(asyncio.sleep(0)).result(DEADLINE_S)
        assert late == [5.0, 5.0, 5.0]
        assert told is None

        loss.there.set()
        params = island.step(params, tokens=1, loss=loss)
        while there.beat(3).loss != 3.0:
            pass
        last = Late(1.0)
        island.step(params, tokens=1, loss=last)
        island.close()
        left = island.session.driver.left.is_set()
        last.there.set()
        assert left


def test_a_loss_that_cannot_be_read_is_no_number_and_no_end() -> None:
    """The heart beats on without a loss; who has such a loss lends nothing, and the next loss is told again."""
    loss = Late(0.0, fails=True)
    loss.there.set()
    with scene() as there:
        island = there.joined()
        params = island.step(island.params, tokens=1, loss=loss)
        assert there.beat(1).loss is None
        assert there.beat(1).loss is None
        assert not island.session._training_progress().healthy
        params = island.step(params, tokens=1, loss=2.0)
        assert there.beat(2, with_loss=True).loss == 2.0
        island.step(params, tokens=1, loss=2.0)
        island.close()


async def test_losses_are_read_one_at_a_time() -> None:
    reader, first = LossReader(), Late(1.0)
    assert await reader.read(None) is None
    assert await reader.read(first) is None
    second = Late(2.0)
    asked = [asyncio.create_task(reader.read(second)) for _ in range(2)]
    await asyncio.sleep(0)
    first.there.set()
    assert await asyncio.gather(*asked) == [1.0, 1.0]
    second.there.set()
    assert await reader.read(second) == 2.0


def test_a_heart_that_stops_ends_the_learner() -> None:
    """A fault of ours in the heartbeat is the learner's failure: it must not train on unheard."""
    with scene() as there:
        island = there.joined()

        async def over() -> None:
            (heart,) = (task for task in asyncio.all_tasks() if "_beat_for_ever" in repr(task.get_coro()))
            there.bus.fails = True
            await asyncio.wait({heart}, timeout=DEADLINE_S)
            await asyncio.sleep(0)

        there.home.submit(over()).result(2 * DEADLINE_S)
        with pytest.raises(AtollError, match="a bug"):
            island.step(island.params, tokens=1, loss=1.0)
        island.close()


def test_a_failure_outlives_the_next_look_at_the_records(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever takes longer over a step than between two looks must learn of it all the same."""
    monkeypatch.setattr(driver, "RESYNC_S", 0.01)
    with scene() as there:
        island = there.joined()
        failure = Quarantined("nobody listens to us any more")
        island.session.driver.failure = failure
        for _ in range(2):
            there.bus.read.clear()
            assert there.bus.read.wait(DEADLINE_S)
        assert island.session.driver.failure is failure
        with pytest.raises(Quarantined):
            island.close()
        island.close()


def test_a_failure_during_the_drain_is_raised_at_once() -> None:
    """Nobody waits out a minute for pushes that can be durable no more, and the reason is told, not the time."""
    with scene() as there:
        island = there.joined()
        island.step(island.params, tokens=1, loss=1.0)
        learner = island.session.driver

        def fails_instead() -> None:
            learner._loop.call_soon_threadsafe(learner._fail, RunReplaced("another founding"))

        learner.order_drain = fails_instead  # type: ignore[method-assign]
        with pytest.raises(RunReplaced, match="another founding"):
            island.close(drain_s=10 * DEADLINE_S)
