"""What an island's driver tells its machine: each outcome of a push by its right name, with the ledgers to show for it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable

import msgspec
import numpy as np
import pytest

from atoll.base.clock import SystemClock
from atoll.base.errors import RunReplaced, RunWentBack
from atoll.bus.memory import MemoryBroker, MemoryBus
from atoll.client.driver import PUSHES_AT_ONCE, AdoptableFragment, HeldFragment, IslandDriver, StepReport
from atoll.client.membership import publish_origin
from atoll.model.layout import TensorSpec, plan_layout
from atoll.model.pytrees import leaves_of
from atoll.protocol.events import CallHeard, FragmentFetched, HeadHeard
from atoll.protocol.island import Island
from atoll.protocol.settings import ProtocolSettings
from atoll.run.heads import GlobalFragment, fetch_frame, read_head
from atoll.wire.limits import Info
from atoll.wire.messages import Member, RunRecord, encode
from atoll.wire.subjects import Subjects
from support.links import unique_run

SIZE, TOKENS = 6, 10
DEADLINE_S = 120.0


class PushingBus(MemoryBus):
    """A bus that takes no contribution while it is `broken`."""

    broken = False

    async def publish(self, subject: str, data: bytes, *, msg_id: str, info: Info | None = None) -> None:
        if self.broken:
            raise RuntimeError("no way through")
        await super().publish(subject, data, msg_id=msg_id, info=info)


class DriverScene:
    """One learner's driver on a founded run of one fragment."""

    def __init__(self, bus: PushingBus, driver: IslandDriver) -> None:
        self.bus, self.driver = bus, driver

    @property
    def machine(self) -> Island:
        return self.driver.machine

    def step(self, value: float) -> list[AdoptableFragment]:
        """Take a step that leaves `value` everywhere, adopt, and return what was adopted."""
        params = {"w": np.full(SIZE, value, np.float32)}
        adopted = self.driver.end_step(TOKENS, params)
        self.driver.go_on(params, adopted, StepReport())
        return adopted

    def fetched(self, version: int) -> None:
        self.driver._fetched[0] = HeldFragment(GlobalFragment(0, version, np.zeros(SIZE, np.float32)))
        self.driver._on_fact(FragmentFetched(at_s=0.0, fragment=0, version=version))

    def called(self, version: int) -> None:
        self.driver._on_fact(CallHeard(at_s=0.0, fragment=0, version=version, attempt=1))

    async def settled(self) -> None:
        """Wait until no push is in flight."""
        await self.until(lambda: not self.machine.in_flight)

    async def until(self, holds: Callable[[], bool]) -> None:
        async with asyncio.timeout(DEADLINE_S):
            while not holds():  # noqa: ASYNC110  (the driver sets no event)
                await asyncio.sleep(0)


@pytest.fixture
async def scene(request: pytest.FixtureRequest) -> AsyncIterator[DriverScene]:
    """A learner at version 0, of a run with the settings that the parameter names."""
    name = unique_run()
    bus, subjects = PushingBus(name, MemoryBroker()), Subjects(name)
    layout = plan_layout([TensorSpec("w", (SIZE,), "float32")], 1)
    protocol = ProtocolSettings(fragments=1, shards=1, interval_steps=4, **getattr(request, "param", {})).check()
    run = RunRecord(run=name, founder="a", nonce="0" * 16, founded_at_s=0.0, layout=layout, protocol=protocol)
    await bus.put_record(subjects.run_record, encode(run), expected=0)
    await publish_origin(bus, run, {0: np.zeros(SIZE, np.float32)})
    head = await read_head(bus, run, 0)
    assert head is not None
    member = Member(learner="a", incarnation=1, nonce="n", host="h", pid=1, claimed_at_s=0.0)
    driver = IslandDriver(bus, run, member, {0: await fetch_frame(bus, run, head)}, SystemClock())
    yield DriverScene(bus, driver)
    await driver.stop()
    await bus.close()


async def test_a_push_that_nothing_takes_is_no_refusal(scene: DriverScene) -> None:
    """Its tokens are open again while the learner is on the same version, and superseded once it is on another."""
    scene.step(1.0)
    scene.bus.broken = True
    scene.called(0)
    await scene.settled()
    assert (scene.machine.open, scene.machine.refused_local, scene.machine.superseded) == (TOKENS, 0, 0)

    scene.called(0)
    scene.fetched(1)
    scene.step(2.0)
    await scene.settled()

    machine = scene.machine
    assert (machine.pushed, machine.refused_local, machine.superseded, machine.open) == (0, 0, 2 * TOKENS, 0)


async def test_what_is_not_finite_is_refused_at_home_and_what_is_stored_is_pushed(scene: DriverScene) -> None:
    scene.step(np.nan)
    scene.called(0)
    await scene.settled()
    assert (scene.machine.pushed, scene.machine.refused_local) == (0, TOKENS)
    await scene.until(lambda: scene.machine.intervals[0].ready is not None)

    scene.step(3.0)
    scene.step(4.0)
    scene.called(0)
    await scene.settled()

    assert (scene.machine.pushed, scene.machine.refused_local, scene.machine.superseded) == (TOKENS, TOKENS, TOKENS)


async def test_a_fragment_whose_frame_cannot_be_read_is_asked_for_again(scene: DriverScene) -> None:
    await scene.bus.purge(f"{scene.driver.subjects.prefix}.gl.head.>")
    for version in (1, 2):
        scene.driver._on_fact(HeadHeard(at_s=0.0, fragment=0, version=version))
        assert scene.machine.intervals[0].fetching
        await scene.until(lambda: not scene.machine.intervals[0].fetching)
    assert scene.machine.intervals[0].ready is None


@pytest.mark.parametrize("scene", [{"adoption": "carry"}], indirect=True)
async def test_progress_is_carried_from_the_snapshot_that_was_pushed(scene: DriverScene) -> None:
    scene.step(1.0)
    scene.fetched(1)
    scene.called(0)
    assert scene.step(2.0) == []

    await scene.settled()

    (adopted,) = scene.step(3.0)
    assert adopted.carry_from is not None
    assert (adopted.frame.version, adopted.carry_from.tolist()) == (1, [1.0] * SIZE)
    assert scene.step(4.0) == []
    assert not scene.driver._kept


def test_a_push_that_waits_keeps_the_leaves_of_its_fragment_alone() -> None:
    """Each of many that wait for a slow uplink would otherwise keep a whole model in memory."""
    layout = plan_layout([TensorSpec("a", (SIZE,), "float32"), TensorSpec("b", (SIZE,), "float32")], 2)
    leaves = {"a": np.zeros(SIZE, np.float32), "b": np.ones(SIZE, np.float32), "local": np.zeros(3, np.float32)}

    assert [set(leaves_of(layout, leaves, p)) for p in range(2)] == [{"a"}, {"b"}]


async def test_a_broker_that_is_away_takes_no_place_of_pushes_to_another(scene: DriverScene) -> None:
    record = msgspec.structs.replace(scene.driver.run, bulk=("nats://x:1",))
    driver = IslandDriver(scene.bus, record, scene.driver.member, {}, SystemClock())
    home, beside = driver._pushing

    for _ in range(PUSHES_AT_ONCE):
        await beside.acquire()
    assert beside.locked()
    assert not home.locked()


async def test_a_failure_ends_the_wait_for_the_last_push(scene: DriverScene) -> None:
    """Nothing becomes durable any more, so whoever drains need not wait for its time to be up."""
    assert not scene.driver.left.is_set()
    scene.driver._fail(RunReplaced("another founding"))

    assert scene.driver.left.is_set()
    assert isinstance(scene.driver.failure, RunReplaced)


async def test_a_learner_whose_anchors_are_above_the_heads_fails_in_words(scene: DriverScene) -> None:
    """The broker's store went back: all that it sends from now on would be refused, and it would train on for nothing."""
    driver = scene.driver
    await scene.bus.put_record(driver.subjects.member("a"), encode(driver.member), expected=0)
    driver._proof_wanted.set()
    resync = asyncio.create_task(driver._resync())
    await scene.until(lambda: not driver._proof_wanted.is_set())
    assert driver.failure is None
    driver._anchors[0] = HeldFragment(GlobalFragment(0, 139, driver._anchors[0].frame.values))
    driver._proof_wanted.set()
    await scene.until(lambda: driver.failure is not None)
    await resync

    assert isinstance(driver.failure, RunWentBack)
    assert "version 139 or later" in str(driver.failure)
