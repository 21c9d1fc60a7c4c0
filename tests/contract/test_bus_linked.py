"""The contract of a bus, at the end of a simulated link; and what the link adds: time, order, cuts, loss."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator

import pytest

from atoll.base.errors import BrokerUnavailable
from atoll.bus.memory import MemoryBroker, MemoryBus
from atoll.wire.subjects import Subjects
from atoll.wire.traffic import BusStats
from atoll_simulator.links import MESSAGE_BYTES, TOTAL_S, LinkedBus, LinkShape, SimulatedLink
from support.bus_contract import ROOM_BYTES, BusContract, MakeBus, buses
from support.clocks import virtually

RUN = "linked"
SUBJECTS = Subjects(RUN)


@pytest.fixture
async def make_bus(run: str) -> AsyncIterator[MakeBus]:
    """Open buses on one shared broker in memory, each with a link of a millisecond."""
    shared = MemoryBroker(stream_bytes_max=ROOM_BYTES)

    async def made(_: int) -> LinkedBus:
        return LinkedBus(run, shared, SimulatedLink(LinkShape(latency_s=0.001), random.Random(0)))

    async with buses(made) as make:
        yield make


class TestLinkedBus(BusContract):
    """The contract."""


def linked(broker: MemoryBroker, seed: int = 0, **shape: float) -> LinkedBus:
    return LinkedBus(RUN, broker, SimulatedLink(LinkShape(**shape), random.Random(seed)))


def now_s() -> float:
    return asyncio.get_running_loop().time()


def test_a_blob_takes_its_bytes_up_and_down_and_the_latency_of_four_legs() -> None:
    """A megabyte up at 8 Mbit/s takes a second and a bit, down at twice the bandwidth half of that."""
    size = 1_000_000

    async def main() -> tuple[float, float]:
        bus = linked(MemoryBroker(), latency_s=0.25, up_bytes_s=1_000_000.0, down_bytes_s=2_000_000.0)
        ref = await bus.put_blob(SUBJECTS.global_stem(0, 1, "n"), bytes(size))
        stored_s = now_s()
        await bus.get_blob(ref, size)
        return stored_s, now_s() - stored_s

    stored_s, read_s = virtually(main())

    assert stored_s == pytest.approx(0.5 + 1.0 + MESSAGE_BYTES * (1 / 1e6 + 1 / 2e6))
    assert read_s == pytest.approx(0.5 + 0.5 + MESSAGE_BYTES * (1 / 1e6 + 1 / 2e6))


def test_the_wire_of_a_simulated_bus_is_what_its_link_carries() -> None:
    size = 1_000_000

    async def main() -> BusStats:
        bus = linked(MemoryBroker())
        await bus.put_blob(SUBJECTS.global_stem(0, 1, "n"), bytes(size))
        await bus.tell(SUBJECTS.call(0), bytes(100))
        return bus.stats

    stats = virtually(main())

    assert (stats.bytes_up, stats.bytes_down) == (size + 100, 0)
    assert (stats.wire_bytes_up, stats.wire_bytes_down) == (size + 100 + 2 * MESSAGE_BYTES, MESSAGE_BYTES)


def test_a_leg_carries_one_message_after_the_other_and_the_other_leg_is_free() -> None:
    async def main() -> tuple[float, float]:
        broker = MemoryBroker()
        bus, ear = linked(broker, up_bytes_s=1e6), MemoryBus(RUN, broker)
        feed = await ear.listen(SUBJECTS.beat("*"))
        storing = asyncio.create_task(bus.put_blob(SUBJECTS.global_stem(0, 1, "n"), bytes(3_000_000)))
        await asyncio.sleep(0)
        began_s = now_s()
        await bus.tell(SUBJECTS.beat("a"), b"alive")
        await feed.next(10.0)
        behind_s = now_s() - began_s
        ref = await storing
        reading = asyncio.create_task(bus.get_blob(ref, 3_000_000))
        began_s = now_s()
        await bus.tell(SUBJECTS.beat("a"), b"alive")
        await feed.next(10.0)
        beside_s = now_s() - began_s
        await reading
        return behind_s, beside_s

    behind_s, beside_s = virtually(main())

    assert behind_s == pytest.approx(3.0, rel=1e-3)
    assert beside_s < 0.01


def test_messages_arrive_in_the_order_they_left_in() -> None:
    """First in, first out: twenty at-most-once messages of different sizes."""

    async def main() -> list[int]:
        broker = MemoryBroker()
        bus, ear = linked(broker, latency_s=0.1, up_bytes_s=1000.0), linked(broker, latency_s=0.2, down_bytes_s=500.0)
        feed = await ear.listen(SUBJECTS.call("*"))
        for number in range(20):
            await bus.tell(SUBJECTS.call(number), bytes((number * 7) % 20))
        return [
            int(core_message.subject.rpartition(".")[2]) for _ in range(20) if (core_message := await feed.next(100.0))
        ]

    assert virtually(main()) == list(range(20))


def test_a_request_outlives_a_cut_and_what_was_on_its_way_is_sent_again() -> None:
    """Cut in the middle of a transfer for five seconds: it begins anew when the link is back, and happens once."""

    async def main() -> tuple[float, int, int]:
        broker, loop = MemoryBroker(), asyncio.get_running_loop()
        bus = linked(broker, up_bytes_s=1e6)
        loop.call_later(0.5, bus.link.cut, "storm")
        loop.call_later(5.5, bus.link.heal, "storm")
        await bus.publish(SUBJECTS.event("a", "b"), bytes(900_000), msg_id="m")
        entries = await MemoryBus(RUN, broker).replay(SUBJECTS.event("*", "*"))
        return now_s(), len(entries), bus.stats.wire_bytes_up

    took_s, entries, carried = virtually(main())

    assert took_s == pytest.approx(6.4, rel=1e-3)
    assert entries == 1
    assert carried == 2 * (900_000 + MESSAGE_BYTES)


def test_a_request_gives_up_where_the_real_adapter_would() -> None:
    """A link that stays cut for a minute: the broker is unavailable. Two reasons must both be healed."""

    async def main() -> float:
        loop, bus = asyncio.get_running_loop(), linked(MemoryBroker())
        bus.link.cut("storm")
        bus.link.cut("night")
        loop.call_later(3.0, bus.link.heal, "storm")
        with pytest.raises(BrokerUnavailable, match="does not answer"):
            await bus.get_record(SUBJECTS.head(0))
        return now_s()

    assert virtually(main()) == TOTAL_S


def test_core_messages_are_lost_at_their_rate_in_a_cut_and_when_nobody_is_left() -> None:
    """A third of a thousand at-most-once messages, by the link's own dice; all of them while it is cut."""

    async def heard(seed: int) -> tuple[int, int]:
        broker = MemoryBroker()
        bus, ear = linked(broker, seed, loss=1 / 3), MemoryBus(RUN, broker)
        feed = await ear.listen(SUBJECTS.beat("*"))

        async def count() -> int:
            for _ in range(1000):
                await bus.tell(SUBJECTS.beat("a"), b"")
            return [await feed.next(0.1) is None for _ in range(1001)].index(True)

        whole = await count()
        bus.link.cut("storm")
        return whole, await count()

    first, cut = virtually(heard(1))

    assert 600 < first < 730
    assert cut == 0
    assert virtually(heard(1)) == (first, 0)
    assert virtually(heard(2)) != (first, 0)


def test_a_question_waits_once_for_its_answer() -> None:
    async def main() -> tuple[bytes | None, float]:
        broker = MemoryBroker()
        bus = linked(broker, latency_s=0.75)
        await MemoryBus(RUN, broker).listen(SUBJECTS.control("all"))
        return await bus.ask(SUBJECTS.control("all"), b"?", timeout_s=1.0), asyncio.get_running_loop().time()

    assert virtually(main()) == (None, 1.0)


def test_nothing_is_taken_from_a_queue_through_a_cut_link() -> None:
    async def main() -> tuple[object, object]:
        broker = MemoryBroker()
        bus, other = linked(broker, latency_s=0.1), MemoryBus(RUN, broker)
        consumer = await bus.consume(SUBJECTS.contributions_of(0), durable="d")
        await other.publish(SUBJECTS.contribution(0, 0, "a"), b"1", msg_id="m")
        bus.link.cut("storm")
        while_cut = await consumer.next(1.0)
        bus.link.heal("storm")
        delivery = await consumer.next(1.0)
        assert delivery is not None
        await delivery.ack()
        return while_cut, await consumer.drained()

    assert virtually(main()) == (None, True)


def test_the_dead_say_and_take_nothing_and_their_heir_gets_it_all() -> None:
    """A severed bus gives nothing back by itself; whoever takes the queue over is delivered what the dead one held."""

    async def main() -> tuple[bytes, bool]:
        broker = MemoryBroker()
        dead, heir = linked(broker, latency_s=0.1), linked(broker, latency_s=0.1)
        consumer = await dead.consume(SUBJECTS.contributions_of(0), durable="first", takeover=True)
        await heir.publish(SUBJECTS.contribution(0, 0, "a"), b"1", msg_id="m")
        assert await consumer.next(1.0) is not None
        dead.sever()
        await consumer.close()
        await dead.close()
        with pytest.raises(BrokerUnavailable, match="dead"):
            await dead.get_record(SUBJECTS.head(0))
        again = await (await heir.consume(SUBJECTS.contributions_of(0), durable="second", takeover=True)).next(1.0)
        assert again is not None
        return again.data, again.redelivered

    assert virtually(main()) == (b"1", False)
