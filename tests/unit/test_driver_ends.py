"""What drivers do while the broker is away, and when they are told to end: none goes on unheard, and none cannot be ended."""

from __future__ import annotations

import asyncio

import pytest

from atoll.base.background_tasks import BackgroundTasks
from atoll.base.clock import SystemClock
from atoll.base.errors import AccessDenied, AtollError, BrokerUnavailable
from atoll.bus.memory import MemoryBroker, MemoryBus, MemoryConsumer
from atoll.bus.subscriptions import BufferedSubscription
from atoll.settings.sections import ArchiveSettings
from atoll.wire.subjects import Subjects
from atoll_synchronizer.process import Host
from atoll_synchronizer.region_service import RegionService
from atoll_synchronizer.service import ShardService
from support.small_run import founded

DEADLINE_S = 120.0
RUN = "ends"


class SlowQueueBus(MemoryBus):
    """A bus whose broker needs a moment for a queue's reader."""

    asked: asyncio.Event
    answer: asyncio.Event

    async def consume(self, subject_filter: str, *, durable: str, takeover: bool = False) -> MemoryConsumer:
        self.asked.set()
        await self.answer.wait()
        return await super().consume(subject_filter, durable=durable, takeover=takeover)


class UnheardBus(MemoryBus):
    """A bus that cannot listen to a subject for its first `deaf` times."""

    subject = ""
    deaf = 0
    reason: AtollError = BrokerUnavailable("the connection was lost meanwhile")
    listening: asyncio.Event | None = None

    async def listen(
        self, subject_filter: str, *, len_max: int = 1024, late_s_max: float = 0.0
    ) -> BufferedSubscription:
        if subject_filter == self.subject and self.deaf > 0:
            self.deaf -= 1
            raise self.reason
        if subject_filter == self.subject and self.listening is not None:
            self.listening.set()
        return await super().listen(subject_filter, len_max=len_max, late_s_max=late_s_max)


async def test_a_candidacy_that_is_cancelled_does_not_go_on() -> None:
    broker = MemoryBroker()
    record = await founded(broker, RUN)
    bus = SlowQueueBus(RUN, broker)
    bus.asked, bus.answer = asyncio.Event(), asyncio.Event()
    service = ShardService(bus, record, 0, SystemClock())
    before = asyncio.all_tasks()
    serving = asyncio.create_task(service.serve())
    async with asyncio.timeout(DEADLINE_S):
        await bus.asked.wait()
    serving.cancel()
    await asyncio.gather(serving, return_exceptions=True)
    bus.answer.set()

    assert serving.cancelled()
    assert not service.owning
    assert asyncio.all_tasks() == before


async def test_what_is_begun_after_the_end_is_not_begun() -> None:
    background, begun = BackgroundTasks(print), asyncio.Event()

    async def work() -> None:
        begun.set()

    await background.stop()
    background.spawn(work())
    background.arm("late", 0.0, lambda _: begun.set())
    await asyncio.sleep(0.01)  # not a pace: nothing was begun that could be waited for
    assert not begun.is_set()


async def test_a_host_hears_the_others_although_it_could_not_listen_at_first() -> None:
    """It would hand nothing over, and look at no lease, for good."""
    broker = MemoryBroker()
    record = await founded(broker, RUN)
    bus = UnheardBus(RUN, broker)
    bus.subject, bus.deaf, bus.listening = Subjects(RUN).presence("*"), 2, asyncio.Event()
    serving = asyncio.create_task(Host(bus, record, (0,), SystemClock(), ArchiveSettings()).serve(asyncio.Event()))
    async with asyncio.timeout(DEADLINE_S):
        await bus.listening.wait()
    serving.cancel()
    await asyncio.gather(serving, return_exceptions=True)


async def test_a_host_that_can_hear_nobody_ends_with_the_reason() -> None:
    """Whatever the reason is: without presence it would serve alone among others."""
    broker = MemoryBroker()
    record = await founded(broker, RUN)
    bus = UnheardBus(RUN, broker)
    bus.subject, bus.deaf, bus.reason = Subjects(RUN).presence("*"), 1, AccessDenied("not its subject")
    with pytest.raises(AccessDenied):
        async with asyncio.timeout(DEADLINE_S):
            await Host(bus, record, (0,), SystemClock(), ArchiveSettings()).serve(asyncio.Event())


@pytest.mark.parametrize("deaf", [0, 1_000_000])
async def test_a_region_that_is_told_to_end_ends_while_the_broker_is_away(deaf: int) -> None:
    broker = MemoryBroker()
    record = await founded(broker, RUN)
    bus = UnheardBus(RUN, broker)
    bus.subject, bus.deaf = Subjects(RUN).premerge("eu"), deaf
    stop = asyncio.Event()
    serving = asyncio.create_task(RegionService(bus, record, "eu", SystemClock()).serve(stop))
    await asyncio.sleep(0)
    stop.set()
    async with asyncio.timeout(DEADLINE_S):
        assert await serving == "stopped"
