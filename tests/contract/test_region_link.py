"""The link of a region: what crosses it, and what becomes of frames and contributions while it is cut."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from atoll.base.errors import BrokerUnavailable
from atoll.bus.nats import region as region_module
from atoll.bus.nats import region_keeper
from atoll.bus.nats.bus import JetStreamBus
from atoll.bus.nats.connection import Connection
from atoll.bus.nats.jetstream_api import ApiRefusal, JetStream
from atoll.bus.nats.region import RegionBus
from atoll.bus.options import BusOptions
from atoll.bus.server import EmbeddedBroker
from atoll.wire.blobs import BlobRef
from atoll.wire.subjects import Subjects
from atoll.wire.traffic import BusStats
from support.bus_contract import MIB, SOON_S, noise
from support.links import LinkProxy
from support.regions import hub, leaf, region, until

pytestmark = pytest.mark.connected
ROOM_BYTES = 64 << 20
OPTIONS = BusOptions(full_s=0.3, gone_s=0.2, patience_s=20.0)
FRAME_BYTES = 8 * MIB


class Regional:
    """A hub, a region behind a relay, and buses at both."""

    def __init__(self, folder: Path, run: str, ends: AsyncExitStack) -> None:
        self._folder, self.run, self._ends = folder, run, ends
        self.subjects = Subjects(run)
        self.hub, self.port = hub(folder / "hub")
        self.link = LinkProxy(self.port)
        self._region = ExitStack()
        self.leaf: EmbeddedBroker

    async def begin(self, *, keeper: bool = True) -> JetStreamBus:
        """Start everything and found a run; return a bus at the hub."""
        self._ends.enter_context(self.hub)
        await self._ends.enter_async_context(self.link)
        self._ends.push_async_callback(asyncio.to_thread, self._region.close)
        await self.begin_region(keeper=keeper)
        bus = await self.bus(self.hub)
        await bus.provision(ROOM_BYTES)
        return bus

    async def begin_region(self, *, keeper: bool = True) -> None:
        await asyncio.to_thread(self._region.close)
        running = region(leaf(self._folder / "eu", self.link.url), keeper=keeper)
        self.leaf = await asyncio.to_thread(self._region.enter_context, running)

    async def bus(self, broker: EmbeddedBroker, **options: Any) -> JetStreamBus:  # noqa: ANN401  (of the bus)
        bus = await JetStreamBus.open(broker.url, self.run, name="test", options=replace(OPTIONS, **options))
        self._ends.push_async_callback(bus.close)
        return bus

    async def learner(self, **options: Any) -> RegionBus:  # noqa: ANN401  (of the bus)
        return RegionBus(await self.bus(self.leaf, **options))

    async def kept(self, kind: str) -> dict[str, Any] | None:
        """Return what the leaf says of a stream of its own."""
        connection = Connection(self.leaf.url, "look", OPTIONS, BusStats())
        try:
            await connection.call(connection.connect(SOON_S))
            near = JetStream(connection, nearby=True)
            return await connection.call(near.api(f"STREAM.INFO.atoll_{self.run}_{kind}"))
        except ApiRefusal:
            return None
        finally:
            await connection.stop()

    async def keeps_nothing(self) -> bool:
        return await self.kept("GL") is None and await self.kept("OUT") is None

    async def frame(self, bus: JetStreamBus, version: int) -> BlobRef:
        ref = await bus.put_blob(self.subjects.global_stem(0, version, "n"), noise(FRAME_BYTES, version))
        await bus.put_record(self.subjects.head(0), b"%d" % version, expected=None)
        return ref

    async def push(self, bus: RegionBus, number: int) -> BlobRef:
        """Contribute as learners do: chunks, and then a manifest."""
        ref = await bus.put_blob(
            self.subjects.contribution_stem("a", number, 1, number, "0" * 16), noise(2 * MIB, number)
        )
        await bus.publish(self.subjects.contribution(0, number, "a"), b"%d" % number, msg_id=f"push-{number}")
        return ref


@pytest.fixture
async def regional(tmp_path: Path, run: str) -> AsyncIterator[Regional]:
    async with AsyncExitStack() as ends:
        yield Regional(tmp_path, run, ends)


async def taken(bus: JetStreamBus, run: str, count: int) -> list[bytes]:
    """Return what the shard finds in its queue, once it is so many different ones and nothing comes behind them."""
    consumer = await bus.consume(Subjects(run).contributions_of(0), durable="shard")
    found: list[bytes] = []
    while (missing := len(set(found)) < count) or not await consumer.drained():
        delivery = await consumer.next(SOON_S if missing else 0.2)
        if delivery is not None:
            found.append(delivery.data)
            await delivery.ack()
    return found


async def test_four_readers_cost_the_link_what_one_costs(regional: Regional) -> None:
    """Every frame crosses once: the readers begin as soon as they hear of the head, while the mirror copies."""
    writer = await regional.begin()
    readers = [await regional.learner() for _ in range(4)]
    carried = []
    for version, some in enumerate(([readers[0]], [readers[0]], readers)):
        before = regional.link.carried_bytes["down"]
        ref = await regional.frame(writer, version)
        found = await asyncio.gather(*(bus.get_blob(ref, FRAME_BYTES) for bus in some))
        assert found == [noise(FRAME_BYTES, version)] * len(some)
        carried.append(regional.link.carried_bytes["down"] - before)
    assert FRAME_BYTES < carried[1] < 1.05 * FRAME_BYTES
    assert carried[2] < 1.05 * carried[1]


async def test_a_full_link_is_not_taken_for_a_cut_one(regional: Regional) -> None:
    """Whatever waits behind chunks: nothing is sent again, nobody reads past the mirror, and the servers stay connected."""
    regional.link = LinkProxy(regional.port, 4e6)
    writer = await regional.begin()
    learners = [await regional.learner() for _ in range(4)]
    await regional.push(learners[0], 0)  # the keeper is there
    before = dict(regional.link.carried_bytes)
    ref = await regional.frame(writer, 0)
    stems = [regional.subjects.contribution_stem(f"l{number}", 0, 1, 1, "0" * 16) for number in range(4)]
    await asyncio.gather(
        *(bus.put_blob(stem, noise(4 * MIB)) for bus, stem in zip(learners, stems, strict=True)),
        *(bus.get_blob(ref, FRAME_BYTES) for bus in learners),
    )
    assert regional.link.carried_bytes["up"] - before["up"] < 1.1 * 16 * MIB
    assert regional.link.carried_bytes["down"] - before["down"] < 1.1 * FRAME_BYTES
    assert regional.link.accepted == 1


@pytest.mark.second_tier
async def test_what_is_sent_during_a_cut_arrives_in_order_and_whole(regional: Regional) -> None:
    """Each manifest's chunks come before it. One that nobody acknowledged comes again (a shard merges it once, by its key)."""
    shard = await regional.begin()
    learner = await regional.learner()
    first = await regional.push(learner, 0)
    regional.link.blackhole("down")  # the hub hears, and nobody hears the hub
    sending = asyncio.create_task(learner.publish(regional.subjects.contribution(0, 1, "a"), b"1", msg_id="push-1"))
    queue = regional.subjects.contributions_of(0)

    async def has_come() -> bool:
        return len(await shard.replay(queue)) == 2

    await until(has_come)
    await regional.link.cut()
    await sending
    refs = [first, *[await regional.push(learner, number) for number in (2, 3)]]
    outbox = await regional.kept("OUT")
    assert outbox is not None
    assert outbox["state"]["messages"] == 7
    regional.link.heal()
    assert list(dict.fromkeys(await taken(shard, regional.run, 4))) == [b"0", b"1", b"2", b"3"]
    for ref, number in zip(refs, (0, 2, 3), strict=True):
        assert await shard.get_blob(ref, 2 * MIB) == noise(2 * MIB, number)
    await regional.push(learner, 4)
    assert await taken(shard, regional.run, 1) == [b"4"]


async def test_who_has_something_in_the_outbox_sends_nothing_past_it(regional: Regional) -> None:
    """A manifest would arrive before its chunks, and be refused."""
    await regional.begin()
    learner = await regional.learner()
    await regional.push(learner, 0)
    await regional.link.cut()
    ref = await learner.put_blob(regional.subjects.contribution_stem("a", 1, 1, 1, "0" * 16), noise(16 * MIB))
    shard = await regional.bus(regional.hub)
    regional.link.heal()
    await learner.publish(regional.subjects.contribution(0, 1, "a"), b"1", msg_id="push-1")
    assert await taken(shard, regional.run, 2) == [b"0", b"1"]
    assert await shard.get_blob(ref, 16 * MIB) == noise(16 * MIB)


async def test_what_the_hub_has_already_does_not_hold_up_the_outbox(regional: Regional) -> None:
    """Chunks whose answers a cut took go into the outbox, too. The hub keeps the first ones, and what follows comes."""
    shard = await regional.begin()
    learner = await regional.learner()
    await regional.push(learner, 0)
    stem = regional.subjects.contribution_stem("a", 1, 1, 1, "0" * 16)
    ref = await shard.put_blob(stem, noise(2 * MIB, 1))
    await regional.link.cut()
    await learner.put_blob(stem, noise(2 * MIB, 2))
    await learner.publish(regional.subjects.contribution(0, 1, "a"), b"1", msg_id="push-1")
    regional.link.heal()
    assert await taken(shard, regional.run, 2) == [b"0", b"1"]
    assert await shard.get_blob(ref, 2 * MIB) == noise(2 * MIB, 1)


async def test_what_waits_outlives_the_broker_of_the_region(regional: Regional) -> None:
    shard = await regional.begin()
    learner = await regional.learner()
    await regional.push(learner, 0)
    await regional.link.cut()
    await regional.push(learner, 1)
    await regional.begin_region()
    regional.link.heal()
    assert await taken(shard, regional.run, 2) == [b"0", b"1"]


async def test_a_mirror_that_does_not_get_on_is_not_waited_for(
    regional: Regional, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When the link is back it tries again after up to two minutes; the learner reads the hub."""
    monkeypatch.setattr(region_module, "STALE_S", 0.5)
    writer = await regional.begin()
    learner = await regional.learner()
    assert await learner.get_blob(await regional.frame(writer, 0), FRAME_BYTES) == noise(FRAME_BYTES, 0)
    near = JetStream((bus := await regional.bus(regional.leaf)).connection, nearby=True)
    name = f"atoll_{regional.run}_GL"
    stuck = {**region_keeper.mirror_config(name, "", ROOM_BYTES, "then"), "mirror": {"name": "none"}}
    await bus.connection.call(near.api(f"STREAM.DELETE.{name}"))
    await bus.connection.call(near.api(f"STREAM.CREATE.{name}", stuck))
    assert await learner.get_blob(await regional.frame(writer, 1), FRAME_BYTES) == noise(FRAME_BYTES, 1)


async def test_frames_that_the_mirror_has_are_read_during_a_cut(regional: Regional) -> None:
    writer = await regional.begin()
    learner, other = await regional.learner(), await regional.learner()
    ref = await regional.frame(writer, 0)
    await learner.get_blob(ref, FRAME_BYTES)
    await regional.link.cut()
    assert await other.get_blob(ref, FRAME_BYTES) == noise(FRAME_BYTES, 0)
    assert await other.reach(0.5) is False


async def test_a_region_follows_a_run_that_is_founded_anew_and_forgets_one_that_is_removed(
    regional: Regional, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(region_keeper, "LOOK_AT_HUB_S", 0.1)
    writer = await regional.begin()
    learner = await regional.learner()
    await learner.get_blob(await regional.frame(writer, 0), FRAME_BYTES)
    mirror = await regional.kept("GL")
    assert mirror is not None
    await writer.remove_run()
    await writer.provision(ROOM_BYTES)
    assert await learner.get_blob(await regional.frame(writer, 1), FRAME_BYTES) == noise(FRAME_BYTES, 1)
    async with asyncio.timeout(SOON_S):
        while not (now := await regional.kept("GL")) or now["created"] == mirror["created"]:
            await learner.get_blob(await regional.frame(writer, 1), FRAME_BYTES)
    await writer.remove_run()
    await until(regional.keeps_nothing)


async def test_a_run_that_nobody_wants_is_given_up(regional: Regional, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(region_keeper, "LOOK_AT_HUB_S", 0.1)
    monkeypatch.setattr(region_keeper, "UNWANTED_S", 1.0)
    writer = await regional.begin()
    learner = await regional.learner()
    await learner.get_blob(await regional.frame(writer, 0), FRAME_BYTES)
    await until(regional.keeps_nothing)


async def test_a_leaf_without_a_keeper_is_a_way_to_the_hub(regional: Regional) -> None:
    writer = await regional.begin(keeper=False)
    learner = await regional.learner(total_s=1.0)
    ref = await regional.frame(writer, 0)
    assert await learner.get_blob(ref, FRAME_BYTES) == noise(FRAME_BYTES, 0)
    await regional.link.cut()
    with pytest.raises(BrokerUnavailable):
        await regional.push(learner, 0)


async def test_who_comes_while_the_hub_is_away_is_told_so(regional: Regional) -> None:
    await regional.begin()
    await regional.link.cut()
    with pytest.raises(BrokerUnavailable, match="leaf of a region"):
        await regional.learner(patience_s=0.5)
