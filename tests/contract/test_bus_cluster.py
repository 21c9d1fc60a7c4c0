"""The bus over a cluster of three nodes with three copies of everything: the contract, and what it bears.

Every bus of the contract knows all nodes and is connected to another one than the bus before, so a test mostly writes at one
node and reads at another.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from structlog.testing import capture_logs

from atoll.base.errors import SettingsError
from atoll.base.retry import Unanswered
from atoll.bus.nats.bus import JetStreamBus
from atoll.bus.nats.jetstream_api import Page
from atoll.bus.options import BusOptions, addresses
from atoll.bus.server import EmbeddedBroker, LocalCluster
from atoll.bus.streams import GIB
from atoll.wire.blobs import BlobRef
from atoll.wire.subjects import Subjects
from support.bus_contract import ROOM_BYTES, BusContract, MakeBus, buses, until
from support.relayed_cluster import RelayedCluster

pytestmark = [pytest.mark.connected]
MIB = 1 << 20
SOON_S = 60.0
STEADY = 3
CUT_OFF_S = 6.0
OPTIONS = BusOptions(full_s=0.3, gone_s=0.2, patience_s=60.0, replicas=3)
PATIENT = replace(OPTIONS, full_s=60.0, total_s=240.0, reconnect_s=0.1)
OpenBus = Callable[..., Awaitable[JetStreamBus]]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    with LocalCluster(tmp_path_factory.mktemp("cluster"), 3) as running:
        yield running


def turned(url: str, by: int) -> str:
    """Return the addresses in another order: a client is at the first that answers."""
    nodes = addresses(url)
    return ",".join(nodes[by % len(nodes) :] + nodes[: by % len(nodes)])


@pytest.fixture
async def make_bus(cluster: LocalCluster, run: str) -> AsyncIterator[MakeBus]:
    """Open buses of one run, each at a node of its own choice."""

    def opened(number: int) -> Awaitable[JetStreamBus]:
        return JetStreamBus.open(turned(cluster.url, number), run, name=f"bus-{number}", options=OPTIONS)

    async with buses(opened, ROOM_BYTES) as make:
        yield make


@pytest.mark.cluster_faults
class TestClusteredBus(BusContract):
    """The contract."""


@pytest.fixture
async def open_bus(cluster: LocalCluster, run: str) -> AsyncIterator[OpenBus]:
    opened: list[JetStreamBus] = []

    async def make(url: str = "", options: BusOptions = PATIENT) -> JetStreamBus:
        given = url or turned(cluster.url, len(opened))
        bus = await JetStreamBus.open(given, run, name=f"bus-{len(opened)}", options=options)
        opened.append(bus)
        await bus.provision(GIB)
        return bus

    yield make
    for bus in opened:
        await bus.close()


async def freeze(pid: int) -> None:
    """Stop a process, and return when every thread of it stands still."""
    os.kill(pid, signal.SIGSTOP)
    threads = Path(f"/proc/{pid}/task").iterdir
    await until(lambda: all((each / "stat").read_text().rpartition(")")[2].split()[0] == "T" for each in threads()))


async def described(bus: JetStreamBus, stream: str) -> dict[str, Any]:
    return await bus._connection.call(bus._jetstream.api(f"STREAM.INFO.{stream}"))


async def caught_up(bus: JetStreamBus) -> None:
    """Wait until every copy of every stream has all: before that, losing another node may stop the stream."""

    async def whole() -> bool:
        told = [(await described(bus, plan.name))["cluster"] for plan in bus._needed]
        copies = [copy for one in told for copy in one["replicas"]]
        return all(copy["current"] and not copy.get("lag") and not copy.get("offline") for copy in copies)

    async with asyncio.timeout(SOON_S):
        seen = 0
        while seen < STEADY:
            seen = seen + 1 if await whole() else 0
            await asyncio.sleep(0.3)


async def test_every_stream_has_its_copies(open_bus: OpenBus, run: str) -> None:
    bus, subjects = await open_bus(), Subjects(run)
    await bus.consume(subjects.contributions_of(0), durable="shard-0")

    copies = [(await described(bus, plan.name))["config"]["num_replicas"] for plan in bus._needed]
    consumer = await bus._connection.call(bus._jetstream.api(f"CONSUMER.INFO.atoll_{run}_UPM.shard-0"))

    assert copies == [3] * len(bus._needed)
    assert len(consumer["cluster"]["replicas"]) == 2


@pytest.mark.cluster_faults
async def test_one_copy_on_a_cluster_is_told(open_bus: OpenBus) -> None:
    """Once, to who founds the run: afterwards nobody can make more copies. Three copies, or one server, are no news."""
    with capture_logs() as lines:
        await open_bus(options=replace(PATIENT, replicas=1))
    assert [line["event"] for line in lines if line["log_level"] == "warning"] == ["run.one_copy"]


@pytest.mark.second_tier
async def test_nodes_die_in_turn_and_nothing_acknowledged_is_lost(
    cluster: LocalCluster, open_bus: OpenBus, run: str
) -> None:
    """Blobs, events and a record are written while each node is killed once: all is there afterwards, nothing twice."""
    bus, reader, subjects = await open_bus(), await open_bus(), Subjects(run)
    data = np.random.default_rng(0).bytes(2 * MIB)
    told: list[int] = []
    refs = []
    ending = asyncio.Event()
    revision = await bus.put_record(subjects.head(0), b"-1", expected=0)

    async def write() -> int:
        nonlocal revision
        number = 0
        while not ending.is_set():
            await bus.publish(subjects.event("round", "shard-0"), str(number).encode(), msg_id=f"e{number}")
            told.append(number)
            revision = await bus.put_record(subjects.head(0), str(number).encode(), expected=revision)
            if number % 50 == 0:
                refs.append(await bus.put_blob(subjects.global_stem(0, number, "n"), data))
            number += 1
            await asyncio.sleep(0.01)
        return number

    writing = asyncio.create_task(write())
    for node in cluster.nodes:
        before = len(told)
        await until(lambda before=before: len(told) > before + 12)  # type: ignore[misc]
        await asyncio.to_thread(node.kill)
        at_kill = len(told)
        await until(lambda at_kill=at_kill: len(told) > at_kill + 12)  # type: ignore[misc]
        await asyncio.to_thread(node.restart)
        await caught_up(reader)
    ending.set()
    written = await writing

    events = await reader.replay(subjects.event("*", "*"), limit=1 << 20)
    record = await reader.get_record(subjects.head(0))
    assert [int(event.data) for event in events] == list(range(written))
    assert record is not None
    assert (int(record.data), record.revision) == (written - 1, revision)
    for ref in refs:
        assert await reader.get_blob(ref, len(data)) == data


@pytest.mark.cluster_faults
async def test_a_queue_outlives_every_node_and_delivers_each_message(
    cluster: LocalCluster, open_bus: OpenBus, run: str
) -> None:
    """A consumer goes on while nodes die: every published message comes, is settled once, and the queue is drained."""
    sender, receiver, subjects = await open_bus(), await open_bus(), Subjects(run)
    consumer = await receiver.consume(subjects.contributions_of(0), durable="shard-0", takeover=True)
    count, taken = 300, set[str]()

    async def send() -> None:
        for number in range(count):
            await sender.publish(subjects.contribution(0, number, "a"), str(number).encode(), msg_id=f"m{number}")
            await asyncio.sleep(0.01)

    async def take() -> None:
        while len(taken) < count or not await consumer.drained():
            delivery = await consumer.next(0.5)
            if delivery is not None:
                assert delivery.data.decode() not in taken or delivery.redelivered
                taken.add(delivery.data.decode())
                await delivery.ack()

    sending, taking = asyncio.create_task(send()), asyncio.create_task(take())
    for number, node in enumerate(cluster.nodes):
        await until(lambda number=number: len(taken) > number * 60)  # type: ignore[misc]
        await asyncio.to_thread(node.kill)
        await asyncio.sleep(0.5)
        await asyncio.to_thread(node.restart)
        await caught_up(sender)
    async with asyncio.timeout(SOON_S):
        await asyncio.gather(sending, taking)

    assert taken == {str(number) for number in range(count)}


async def stored_since(writer: JetStreamBus, subjects: Subjects, revision: int) -> BlobRef:
    await writer.put_record(subjects.head(0), b"new", expected=revision)
    await writer.put_record(subjects.head(1), b"other", expected=0)
    await writer.publish(subjects.event("round", "a"), b"1", msg_id="e1")
    return await writer.put_blob(subjects.global_stem(0, 1, "n"), bytes(3 * MIB))


async def seen_by(reader: JetStreamBus, subjects: Subjects, ref: BlobRef) -> tuple[list[bytes], list[bytes], bool]:
    """Return what a reader sees of that: records, events, and whether the blob is whole."""
    records = [record.data for record in await reader.get_records(subjects.head("*"))]
    events = [event.data for event in await reader.replay(subjects.event("*", "*"))]
    return records, events, await reader.get_blob(ref, 4 * MIB) == bytes(3 * MIB)


async def test_copies_that_lag_behind_hide_nothing(open_bus: OpenBus, run: str) -> None:
    """Every copy answers as one that misses the latest: the leader is asked for that, for records, events and pieces."""
    writer, reader, subjects = await open_bus(), await open_bus(options=replace(PATIENT, gone_s=0.0)), Subjects(run)
    revision = await writer.put_record(subjects.head(0), b"old", expected=0)
    await writer.publish(subjects.event("round", "a"), b"0", msg_id="e0")

    async def lag() -> None:
        real = reader._jetstream.page

        async def page(stream: str, body: Mapping[str, Any]) -> Page:
            answer = await real(stream, body)
            old = [message for message in answer.messages if message.data in (b"old", b"0")]
            return replace(answer, messages=old, pending=0)

        for jetstream in (reader._jetstream, next(reader._bulk.reading)):
            jetstream.page = page  # type: ignore[method-assign]

    await reader._connection.call(lag())
    ref = await stored_since(writer, subjects, revision)

    assert await seen_by(reader, subjects, ref) == ([b"new", b"other"], [b"0", b"1"], True)


@pytest.mark.cluster_faults
async def test_a_node_that_was_frozen_hides_nothing(cluster: LocalCluster, open_bus: OpenBus, run: str) -> None:
    """A client of a node that has slept asks it before its copies have caught up, and reads what the others stored."""
    writer, subjects = await open_bus(",".join(node.url for node in cluster.nodes[:2])), Subjects(run)
    sleeper = cluster.nodes[2]
    reader = await open_bus(sleeper.url)
    revision = await writer.put_record(subjects.head(0), b"old", expected=0)
    await writer.publish(subjects.event("round", "a"), b"0", msg_id="e0")

    await freeze(sleeper.pid)
    try:
        ref = await stored_since(writer, subjects, revision)
    finally:
        os.kill(sleeper.pid, signal.SIGCONT)

    assert await seen_by(reader, subjects, ref) == ([b"new", b"other"], [b"0", b"1"], True)


@pytest.mark.cluster_faults
async def test_a_frozen_node_is_left(cluster: LocalCluster, open_bus: OpenBus, run: str) -> None:
    """The node that serves a client holds the socket open and says nothing: the client goes on at another."""
    bus, subjects = await open_bus(), Subjects(run)
    revision = await bus.put_record(subjects.head(0), b"0", expected=0)
    assert bus._connection._client is not None
    at = bus._connection._client.connected_url
    assert at is not None
    sleeper = next(node for node in cluster.nodes if node.port == at.port)

    await freeze(sleeper.pid)
    try:
        async with asyncio.timeout(SOON_S):
            await bus.put_record(subjects.head(0), b"1", expected=revision)
        assert bus.stats.reconnects == 1
    finally:
        os.kill(sleeper.pid, signal.SIGCONT)
    await caught_up(bus)


@pytest.mark.cluster_faults
async def test_a_leader_without_its_followers_acknowledges_nothing(
    cluster: LocalCluster, open_bus: OpenBus, run: str
) -> None:
    """Cut off from both others it stores nothing for good: what waits is acknowledged once they are back, and is there once."""
    probe, subjects = await open_bus(), Subjects(run)
    revision = await probe.put_record(subjects.head(0), b"0", expected=0)
    name = (await described(probe, f"atoll_{run}_GL"))["cluster"]["leader"]
    leader = next(node for node in cluster.nodes if node.name == name)
    bus = await open_bus(leader.url)
    others = [node.pid for node in cluster.nodes if node is not leader]

    for pid in others:
        await freeze(pid)
    try:
        writing = asyncio.create_task(bus.put_record(subjects.head(0), b"1", expected=revision))
        publishing = asyncio.create_task(bus.publish(subjects.event("round", "a"), b"e", msg_id="e"))
        await asyncio.sleep(CUT_OFF_S)
        assert not writing.done()
        assert not publishing.done()
    finally:
        for pid in others:
            os.kill(pid, signal.SIGCONT)
    async with asyncio.timeout(SOON_S):
        written, _ = await asyncio.gather(writing, publishing)
    await caught_up(probe)

    record = await probe.get_record(subjects.head(0))
    assert record is not None
    assert (record.data, record.revision) == (b"1", written)
    assert [event.data for event in await probe.replay(subjects.event("*", "*"))] == [b"e"]


@pytest.mark.cluster_faults
async def test_an_empty_node_takes_the_place_of_a_lost_one(cluster: LocalCluster, open_bus: OpenBus, run: str) -> None:
    """Its disk is gone: a node of the same number begins with nothing, gets its copies, and another may die then."""
    bus, subjects = await open_bus(), Subjects(run)
    ref = await bus.put_blob(subjects.global_stem(0, 1, "n"), bytes(3 * MIB))
    await bus.put_record(subjects.head(0), b"x", expected=0)
    lost, other = cluster.nodes[0], cluster.nodes[1]
    await asyncio.to_thread(lost.stop)
    shutil.rmtree(lost.store_dir)
    await asyncio.to_thread(lost.start)

    await caught_up(bus)
    await asyncio.to_thread(other.kill)
    reader = await open_bus(",".join(node.url for node in (lost, cluster.nodes[2])))
    record = await reader.get_record(subjects.head(0))
    blob = await reader.get_blob(ref, 4 * MIB)
    await asyncio.to_thread(other.restart)

    assert (None if record is None else record.data, blob) == (b"x", bytes(3 * MIB))


@pytest.mark.cluster_faults
async def test_a_client_goes_on_at_another_node(cluster: LocalCluster, open_bus: OpenBus, run: str) -> None:
    """The node that serves it dies: the next call goes to another, chunks too, and feeds are heard again."""
    bus, teller, subjects = await open_bus(), await open_bus(), Subjects(run)
    feed = await bus.listen(subjects.call("*"))
    ref = await bus.put_blob(subjects.global_stem(0, 1, "n"), bytes(2 * MIB))
    assert await bus.get_blob(ref, 2 * MIB) == bytes(2 * MIB)

    for node in cluster.nodes:
        reconnects = bus.stats.reconnects
        await asyncio.to_thread(node.kill)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(1.0):
                await until(lambda reconnects=reconnects: bus.stats.reconnects > reconnects)  # type: ignore[misc]
        assert await bus.get_blob(ref, 2 * MIB) == bytes(2 * MIB)
        async with asyncio.timeout(SOON_S):
            heard = None
            while heard is None:
                await teller.tell(subjects.call(0), b"call")
                heard = await feed.next(0.2)
        await asyncio.to_thread(node.restart)
        await caught_up(teller)

    assert bus.stats.reconnects >= 1


async def test_more_copies_than_nodes_is_told(broker: EmbeddedBroker, run: str) -> None:
    bus = await JetStreamBus.open(broker.url, run, name="bus", options=replace(OPTIONS, peers_s=0.2))
    with pytest.raises(SettingsError, match=r"(?s)fewer nodes than the 3 copies.*a single server.*broker\.replicas"):
        await bus.provision(GIB)
    await bus.close()


async def test_a_cluster_of_too_few_nodes_is_told(tmp_path: Path, run: str) -> None:
    cluster = LocalCluster(tmp_path / "two", 3)
    try:
        for node in cluster.nodes[:2]:
            await asyncio.to_thread(node.start)
        url = ",".join(node.url for node in cluster.nodes[:2])
        bus = await JetStreamBus.open(url, run, name="bus", options=replace(OPTIONS, peers_s=0.5))
        with pytest.raises(SettingsError, match=r"(?s)fewer nodes than the 3 copies.*start the other nodes"):
            await bus.provision(GIB)
        await bus.close()
    finally:
        await asyncio.to_thread(cluster.stop)


@pytest.mark.cluster_faults
async def test_a_queues_reader_brings_leaders_together(cluster: LocalCluster, open_bus: OpenBus, run: str) -> None:
    """On the first node by name that has everything; another one's death elects nobody anew."""
    bus, subjects = await open_bus(), Subjects(run)
    await bus.put_record(subjects.head(0), b"a", expected=0)
    for shard in (0, 1):
        await bus.consume(subjects.contributions_of(shard), durable=f"shard-{shard}")
    names, first = [plan.name for plan in bus._needed], cluster.nodes[0].name

    async def leaders() -> set[str]:
        told = [await bus._connection.call(bus._jetstream.api(f"STREAM.INFO.{name}")) for name in names]
        queue = next(name for name in names if name.endswith("_UPM"))
        readers = await bus._connection.call(bus._jetstream.api(f"CONSUMER.LIST.{queue}", {"offset": 0}))
        return {str((each.get("cluster") or {}).get("leader")) for each in (*told, *readers["consumers"])}

    async with asyncio.timeout(SOON_S):
        while await leaders() != {first}:  # noqa: ASYNC110  (only the broker knows)
            await asyncio.sleep(0.1)
    await asyncio.to_thread(cluster.nodes[1].kill)
    assert await leaders() == {first}
    await asyncio.to_thread(cluster.nodes[1].restart)
    # A handover of which no answer comes is no reason to look no more.
    once, lost = bus._jetstream.request, list[str]()

    async def unanswered(subject: str, *rest: Any, **more: Any) -> dict[str, Any]:  # noqa: ANN401  (as what it stands for)
        if "STEPDOWN" in subject and not lost:
            lost.append(subject)
            raise Unanswered("no answer")
        return await once(subject, *rest, **more)

    bus._jetstream.request = unanswered  # type: ignore[method-assign]
    await asyncio.to_thread(cluster.nodes[0].kill)
    await asyncio.to_thread(cluster.nodes[0].restart)
    async with asyncio.timeout(SOON_S):
        while not lost or await leaders() != {first}:  # noqa: ASYNC110  (only the broker knows)
            await asyncio.sleep(0.1)


@pytest.mark.cluster_faults
async def test_a_client_leaves_a_node_that_is_cut_off(tmp_path: Path, run: str) -> None:
    """Such a node answers echoes and no request; the client's writing goes on at another while the cut lasts."""
    with RelayedCluster(tmp_path) as relayed:
        bus = await JetStreamBus.open(relayed.url, run, name="bus", options=PATIENT)
        try:
            await bus.provision(GIB)
            revision = await bus.put_record(Subjects(run).head(0), b"a", expected=0)
            client = bus._connection._client
            assert client is not None
            [here] = [node.node.node for node in relayed.nodes if client.connected_url.port == node.port]  # type: ignore[union-attr]
            with relayed.cut_off(here):
                # Whoever comes now, and meets that node first, goes on to another.
                urls = sorted(relayed.url.split(","), key=lambda url: not url.endswith(f":{client.connected_url.port}"))  # type: ignore[union-attr]
                newcomer = await JetStreamBus.open(",".join(urls), run, name="newcomer", options=PATIENT)
                assert await newcomer.get_record(Subjects(run).head(0)) is not None
                await newcomer.close()
                for _ in range(50):
                    revision = await bus.put_record(Subjects(run).head(0), b"b", expected=revision)
        finally:
            await bus.close()
