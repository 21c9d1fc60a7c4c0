"""What the JetStream bus survives, and how it says what it cannot survive."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from atoll.base.errors import BrokerUnavailable, RecordConflict, RunReplaced, SettingsError, StorageFull
from atoll.bus.nats.bus import JetStreamBus
from atoll.bus.nats.consumers import QueueConsumer
from atoll.bus.nats.jetstream_api import ApiError, ApiRefusal
from atoll.bus.options import BusOptions
from atoll.bus.server import EmbeddedBroker
from atoll.bus.streams import GIB
from atoll.run.record import read_run
from atoll.wire.subjects import Subjects
from support.bus_contract import until
from support.links import GreetingServer, LinkProxy

pytestmark = pytest.mark.connected
MIB = 1 << 20
SOON_S = 120.0
ACK_WAIT_S = 3.0
OPTIONS = BusOptions(
    try_s=1.0, total_s=240.0, gone_s=0.2, patience_s=120.0, reconnect_s=0.1, watch_s=0.3, echo_s=0.3, window=4
)
OpenBus = Callable[..., Awaitable[JetStreamBus]]


@pytest.fixture
def fragile(tmp_path: Path) -> Iterator[EmbeddedBroker]:
    """A broker of this test's own, to be broken."""
    with EmbeddedBroker(tmp_path / "broker") as running:
        yield running


@pytest.fixture(params=[True, False], ids=["own_thread", "callers_loop"])
async def open_bus(run: str, request: pytest.FixtureRequest) -> AsyncIterator[OpenBus]:
    opened: list[JetStreamBus] = []

    async def make(url: str, **settings: Any) -> JetStreamBus:  # noqa: ANN401  # passed on as they are
        given = {"name": f"bus-{len(opened)}", "options": OPTIONS, **settings}
        given["options"] = replace(given["options"], own_thread=request.param)
        bytes_max = given.pop("bytes_max", GIB)
        opened.append(await JetStreamBus.open(url, given.pop("run", run), **given))
        if bytes_max:
            await opened[-1].provision(bytes_max)
        return opened[-1]

    yield make
    for bus in opened:
        await bus.close()


async def stream_state(bus: JetStreamBus, stream: str) -> dict[str, int]:
    """Return the broker's own counters of a stream."""
    answer = await bus._connection.call(bus._jetstream.api(f"STREAM.INFO.{stream}"))
    state: dict[str, int] = answer["state"]
    return state


async def test_a_killed_broker_loses_nothing_acknowledged(fragile: EmbeddedBroker, open_bus: OpenBus, run: str) -> None:
    """SIGKILL in the middle of writing: after the restart the writing ends, and every chunk is there once.

    One whose answer was lost was written again, in the place of its equal.
    """
    bus, stem = await open_bus(fragile.url), Subjects(run).global_stem(0, 1, "n")
    data = np.random.default_rng(0).bytes(48 * MIB)
    before = await stream_state(bus, f"atoll_{run}_GL")
    writing = asyncio.create_task(bus.put_blob(stem, data))
    await until(lambda: bus.stats.blob_bytes_up >= 5 * MIB)

    await asyncio.to_thread(fragile.kill)
    assert not writing.done()
    await asyncio.to_thread(fragile.restart)

    ref = await writing
    state = await stream_state(bus, f"atoll_{run}_GL")
    assert data == await bus.get_blob(ref, len(data))
    assert state["messages"] == 48
    assert state["last_seq"] - before["last_seq"] <= 48 + bus.stats.retries
    assert bus.stats.retries > 0


async def test_a_revision_of_a_lost_store_never_fits_a_new_one(tmp_path: Path, open_bus: OpenBus, run: str) -> None:
    """Who read a record before the broker lost its disk cannot write over the record that was made anew."""
    head, revisions = Subjects(run).head(0), []
    for store in ("lost", "new"):
        with EmbeddedBroker(tmp_path / store) as running:
            bus = await open_bus(running.url)
            revisions.append(await bus.put_record(head, store.encode(), expected=0))
            if store == "new":
                with pytest.raises(RecordConflict):
                    await bus.put_record(head, b"of a former life", expected=revisions[0])
            await bus.close()

    assert revisions[0] != revisions[1]


async def test_what_was_heard_last_is_kept_again_after_a_restart(
    fragile: EmbeddedBroker, open_bus: OpenBus, run: str
) -> None:
    """The stream is in memory: the shard makes it anew, and the run record is on its tap again."""
    shard, watcher, subjects = await open_bus(fragile.url), await open_bus(fragile.url), Subjects(run)
    await shard.put_record(subjects.run_record, b"record", expected=0)
    consumer = await shard.consume(subjects.contributions_of(0), durable="shard-0")

    async def kept(beat: bytes) -> list[bytes]:
        async with asyncio.timeout(60.0):
            while True:
                await shard.tell(subjects.beat("a"), beat)
                with contextlib.suppress(RunReplaced, BrokerUnavailable):
                    if found := await watcher.get_records(subjects.beat("*")):
                        return [record.data for record in found]

    assert await kept(b"1") == [b"1"]
    await asyncio.to_thread(fragile.kill)
    await asyncio.to_thread(fragile.restart)
    assert await kept(b"2") == [b"2"]
    tap = await watcher.listen(subjects.tap("gl.run"))
    await shard.put_record(subjects.run_record, b"closing", expected=None)
    async with asyncio.timeout(SOON_S):
        async for heard in tap:  # the founding's may come first
            if heard.data == b"closing":
                break
    await consumer.close()


async def test_everything_survives_a_restart(fragile: EmbeddedBroker, open_bus: OpenBus, run: str) -> None:
    """Feeds, durable consumers, queued messages and records are there again without anybody reopening them."""
    bus, subjects = await open_bus(fragile.url), Subjects(run)
    feed = await bus.listen(subjects.call("*"))
    consumer = await bus.consume(subjects.contributions_of(0), durable="shard-0")
    revision = await bus.put_record(subjects.head(0), b"a", expected=0)
    waiting = asyncio.create_task(consumer.next(SOON_S))

    loop = asyncio.get_running_loop()
    assert bus.stats.away_s(loop.time()) == 0.0
    await asyncio.to_thread(fragile.kill)
    await until(lambda: bus.stats.is_away)
    await asyncio.to_thread(fragile.restart)
    await bus.publish(subjects.contribution(0, 0, "a"), b"x", msg_id="m")
    await bus.tell(subjects.call(0), b"call")

    delivery, core_message = await waiting, await feed.next(SOON_S)
    assert delivery is not None
    assert core_message is not None
    assert (delivery.data, core_message.data) == (b"x", b"call")
    await delivery.ack()
    assert await bus.put_record(subjects.head(0), b"b", expected=revision) > revision
    assert bus.stats.reconnects >= 1
    assert bus.stats.away_s(loop.time()) == bus.stats.away_s(loop.time() + 1.0) > 0.0


async def test_a_lost_acknowledgement_is_no_conflict(broker: EmbeddedBroker, open_bus: OpenBus, run: str) -> None:
    """The broker stored our record but its answer was lost: the retry is refused, read back, and known as ours."""
    async with LinkProxy(broker.port) as link:
        bus, witness, head = await open_bus(link.url), await open_bus(broker.url), Subjects(run).head(0)
        first = await bus.put_record(head, b"a", expected=0)
        link.blackhole("down")
        writing = asyncio.create_task(bus.put_record(head, b"b", expected=first))
        stored = await witness.listen(Subjects(run).tap("gl.head.0"))
        await until(lambda: link.swallowed_bytes > 0)
        await link.cut()
        link.heal()

        revision = await writing

        record = await witness.get_record(head)
        assert record is not None
        assert (b"b", revision) == (record.data, record.revision)
        assert revision == first + 1
        await stored.close()
        await bus.close()


async def test_a_lost_acknowledgement_and_a_rival_is_a_conflict(
    broker: EmbeddedBroker, open_bus: OpenBus, run: str
) -> None:
    """Our request never arrived and somebody else wrote: the reading back finds a foreign nonce."""
    async with LinkProxy(broker.port) as link:
        bus, rival, head = await open_bus(link.url), await open_bus(broker.url), Subjects(run).head(0)
        first = await bus.put_record(head, b"a", expected=0)
        link.blackhole("up")
        writing = asyncio.create_task(bus.put_record(head, b"mine", expected=first))
        await until(lambda: link.swallowed_bytes > 0)
        await rival.put_record(head, b"theirs", expected=first)
        await link.cut()
        link.heal()

        with pytest.raises(RecordConflict):
            await writing
        await bus.close()


async def test_a_record_of_a_former_connection_is_not_sent(broker: EmbeddedBroker, open_bus: OpenBus, run: str) -> None:
    """What it names was acknowledged before the connection was lost, and a power cut may have taken it."""
    async with LinkProxy(broker.port) as link:
        bus = await open_bus(link.url)
        stored = bus.stats.reconnects
        await link.cut()
        link.heal()
        await until(lambda: bus.stats.reconnects > stored)
        subject = f"atoll.{run}.gl.head.0"

        with pytest.raises(BrokerUnavailable, match="the connection was lost before"):
            await bus.put_record(subject, b"x", expected=0, reconnects=stored)
        assert await bus.get_record(subject) is None
        assert await bus.put_record(subject, b"x", expected=0, reconnects=bus.stats.reconnects) > 0


async def test_a_frozen_broker_is_waited_for(fragile: EmbeddedBroker, open_bus: OpenBus, run: str) -> None:
    """SIGSTOP for five seconds: the loop stays free, the watchdog acts, and every record is written exactly once.

    What has an id may be stored twice, since the broker forgets ids within moments: a chunk in the place of its equal, an
    event a second time, which its readers skip.
    """
    bus, subjects = await open_bus(fragile.url), Subjects(run)
    before = await stream_state(bus, f"atoll_{run}_GL")
    first = await bus.put_record(subjects.head(0), b"a", expected=0)
    loop = asyncio.get_running_loop()

    os.kill(fragile.pid, signal.SIGSTOP)
    loop.call_later(5.2, os.kill, fragile.pid, signal.SIGCONT)
    writing = asyncio.create_task(bus.put_record(subjects.head(0), b"b", expected=first))
    storing = asyncio.create_task(bus.put_blob(subjects.global_stem(0, 1, "n"), bytes(6 * MIB)))
    telling = asyncio.create_task(bus.publish(subjects.event("a", "b"), b"x", msg_id="m"))
    revision, ref, _ = await asyncio.gather(writing, storing, telling)

    record = await bus.get_record(subjects.head(0))
    assert record is not None
    assert (b"b", revision) == (record.data, record.revision)
    assert bytes(6 * MIB) == await bus.get_blob(ref, 6 * MIB)
    assert {stored.data for stored in await bus.replay(subjects.event("*", ">"))} == {b"x"}
    assert (await stream_state(bus, f"atoll_{run}_GL"))["messages"] - before["messages"] == 6 + 1


async def test_a_silent_link_is_cut_by_the_watchdog(broker: EmbeddedBroker, open_bus: OpenBus, run: str) -> None:
    """A link that swallows everything looks connected; the missing echo ends it, and the feed goes on."""
    async with LinkProxy(broker.port) as link:
        bus, subjects = await open_bus(link.url), Subjects(run)
        feed = await bus.listen(subjects.call("*"))
        link.blackhole("down")
        await until(lambda: not bus._connection._up.is_set())
        link.heal()
        await until(lambda: bus.stats.reconnects > 0)

        await bus.tell(subjects.call(1), b"again")

        core_message = await feed.next(SOON_S)
        assert core_message is not None
        assert core_message.data == b"again"
        await bus.close()


async def test_a_subscription_without_confirmation_is_not_kept(broker: EmbeddedBroker, open_bus: OpenBus) -> None:
    """Nobody has its key: the broker would send for ever what nobody reads, after each reconnect again."""
    async with LinkProxy(broker.port) as link:
        bus = await open_bus(link.url, options=replace(OPTIONS, try_s=0.2, watch_s=SOON_S))
        before = dict(bus._connection._subscriptions)
        link.blackhole("down")

        with pytest.raises(BrokerUnavailable, match="cannot listen"):
            await bus.listen("a.b")
        assert await bus.ask("a.b", b"?", timeout_s=0.1, answer_at="a.c") is None
        listening = asyncio.create_task(bus.listen("a.d"))
        await until(lambda: len(bus._connection._subscriptions) > len(before))
        listening.cancel()
        with pytest.raises(asyncio.CancelledError):
            await listening

        await until(lambda: bus._connection._subscriptions == before)
        await bus.close()


async def test_a_buffer_is_its_owners_once_writing_was_cancelled(fragile: EmbeddedBroker, run: str) -> None:
    """What is still queued of it is a copy: bytes that are written later into the buffer are never sent."""
    options, subjects = replace(OPTIONS, try_s=SOON_S, watch_s=SOON_S, own_thread=False), Subjects(run)
    bus = await JetStreamBus.open(fragile.url, run, name="x", options=options)
    await bus.provision(GIB)
    await bus.put_blob(subjects.global_stem(0, 0, "n"), bytes(MIB))
    bulk, buffer = bus._connection._branches[0], bytearray(b"a" * MIB)

    async def reusing() -> None:
        try:
            await bus.put_blob(subjects.global_stem(0, 0, "mine"), buffer)
        finally:
            buffer[:] = b"b" * MIB

    os.kill(fragile.pid, signal.SIGSTOP)
    others: list[asyncio.Task[Any]] = []
    while bulk.queued < 4 * MIB:  # the kernel may take some of it yet, and none of what comes after it
        others.append(asyncio.create_task(bus.put_blob(subjects.global_stem(0, len(others), "o"), bytes(MIB))))
        await asyncio.sleep(0.01)
    wire = bulk._client.wire if bulk._client else None
    assert wire is not None
    mine = asyncio.create_task(reusing())
    await until(lambda: any(piece.obj is buffer for piece in wire._queue))
    mine.cancel()
    with pytest.raises(asyncio.CancelledError):
        await mine
    os.kill(fragile.pid, signal.SIGCONT)
    await asyncio.gather(*others)
    await bus.put_blob(subjects.global_stem(0, 0, "last"), bytes(MIB))  # stored after everything before it
    sent = await bus.replay(f"{subjects.global_stem(0, 0, 'mine')}.*")
    await bus.close()

    assert [bytes(each.data) for each in sent] == [b"a" * MIB]


async def test_an_opening_that_is_cancelled_leaves_nothing_open(fragile: EmbeddedBroker, run: str) -> None:
    """Whenever that is: `wait_for` of Python 3.11 may lose the cancellation, and nats-py would connect for nobody."""
    for steps in range(40):
        opening = asyncio.create_task(
            JetStreamBus.open(fragile.url, run, name="x", options=replace(OPTIONS, own_thread=False))
        )
        for _ in range(steps):
            await asyncio.sleep(0)
        opening.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await (await opening).close()

        assert asyncio.all_tasks() == {asyncio.current_task()}, f"cancelled after {steps} steps"


async def test_closing_leaves_nothing_open_where_a_broker_reads_nothing(
    fragile: EmbeddedBroker, open_bus: OpenBus, run: str
) -> None:
    """Each connection with bytes to send may have to wait, and all do so at once. See `_no_task_left`."""
    options, subjects = replace(OPTIONS, try_s=SOON_S, watch_s=SOON_S, bulk_connections=4), Subjects(run)
    bus = await open_bus(fragile.url, options=options)
    for number in range(4):
        await bus.put_blob(subjects.global_stem(0, number, "n"), bytes(MIB))
    connections = [bus._connection, *bus._connection._branches]
    clients = [each._client for each in connections if each._client is not None]

    os.kill(fragile.pid, signal.SIGSTOP)
    writing: list[asyncio.Task[Any]] = []
    while any(each.queued == 0 for each in connections[1:]):
        writing.append(asyncio.create_task(bus.put_blob(subjects.global_stem(0, len(writing), "o"), bytes(MIB))))
        await asyncio.sleep(0.01)
    await bus.close()
    os.kill(fragile.pid, signal.SIGCONT)
    found = await asyncio.gather(*writing, return_exceptions=True)

    assert isinstance(found[-1], BrokerUnavailable)
    assert all(each.is_closed for each in clients)


async def test_closing_that_is_cancelled_leaves_nothing_open(
    broker: EmbeddedBroker, open_bus: OpenBus, run: str
) -> None:
    """Wherever that is, also before the connection's turn; who closes again waits for the end."""
    for steps in range(12):
        bus = await open_bus(broker.url)
        await bus.consume(Subjects(run).contributions_of(0), durable="x")
        client = bus._connection._client
        assert client is not None
        closing = asyncio.create_task(bus.close())
        for _ in range(steps):
            await asyncio.sleep(0)
        if closing.cancel():
            with contextlib.suppress(asyncio.CancelledError):
                await closing
        await bus.close()

        assert client.is_closed


async def test_two_who_wait_at_one_queue_are_both_told_of_a_lost_connection(
    fragile: EmbeddedBroker, open_bus: OpenBus, run: str
) -> None:
    bus, subjects = await open_bus(fragile.url), Subjects(run)
    queue = await bus.consume(subjects.contributions_of(0), durable="x")
    stays, goes = (asyncio.create_task(queue.next(SOON_S / 4)) for _ in range(2))
    await until(lambda: len(queue._waiting) == 2)
    goes.cancel()
    await until(lambda: len(queue._waiting) == 1)

    await asyncio.to_thread(fragile.kill)
    await asyncio.to_thread(fragile.restart)
    await bus.publish(subjects.contribution(0, 0, "m"), b"x", msg_id="m")
    delivery = await stays

    assert delivery is not None
    assert delivery.data == b"x"


async def test_a_protocol_error_is_survived(broker: EmbeddedBroker, open_bus: OpenBus, run: str) -> None:
    """The broker hangs up for good on an oversized message; the supervisor builds a new connection with its feeds."""
    bus, subjects = await open_bus(broker.url), Subjects(run)
    feed = await bus.listen(subjects.call("*"))
    client = bus._connection._client
    assert client is not None

    with contextlib.suppress(ConnectionResetError):
        await bus._connection.call(client.publish(subjects.call(0), bytes(client.max_payload), headers={"a": "b" * 99}))
    await until(lambda: bus.stats.reconnects > 0)
    await bus.tell(subjects.call(1), b"again")

    core_message = await feed.next(SOON_S)
    assert core_message is not None
    assert core_message.data == b"again"


async def test_an_outage_has_an_end(fragile: EmbeddedBroker, open_bus: OpenBus, run: str) -> None:
    """A broker that stays away is reported after `total_s`; core messages are dropped meanwhile, requests unanswered."""
    bus = await open_bus(fragile.url, options=replace(OPTIONS, total_s=0.5, try_s=0.3))
    await asyncio.to_thread(fragile.kill)
    await until(lambda: not bus._connection._up.is_set())

    await bus.tell(Subjects(run).call(0), b"lost")

    assert bus.stats.core_messages_dropped == 1
    assert await bus.ask(Subjects(run).call(0), b"?", timeout_s=0.1) is None
    with pytest.raises(BrokerUnavailable, match="no answer"):
        await bus.publish(Subjects(run).event("a", "b"), b"x", msg_id="m")


async def test_a_consumer_that_dies_gives_back_by_silence(broker: EmbeddedBroker, open_bus: OpenBus, run: str) -> None:
    """Without close or ack the message comes again after `ack_wait_s`; holding puts that off."""
    options, subjects = replace(OPTIONS, ack_wait_s=ACK_WAIT_S), Subjects(run)
    bus = await open_bus(broker.url, options=options)
    await bus.publish(subjects.contribution(0, 0, "a"), b"x", msg_id="m")
    dead = await bus.consume(subjects.contributions_of(0), durable="shard-0")
    heir = await bus.consume(subjects.contributions_of(0), durable="shard-0")
    held = await dead.next(SOON_S)
    assert held is not None

    clock, delivery = asyncio.get_running_loop().time, None
    held_s = clock()
    for _ in range(4):
        former_s, held_s = held_s, clock()
        await held.hold()
        delivery = await heir.next(0.8)
        if delivery is not None:  # a machine that stood still for so long held it too late
            assert clock() - former_s >= ACK_WAIT_S, "it came again although it was held"
            break
    delivery = delivery or await heir.next(SOON_S)

    assert delivery is not None
    assert delivery.redelivered


async def test_what_is_delivered_again_and_again_is_held_once(
    broker: EmbeddedBroker, open_bus: OpenBus, run: str
) -> None:
    """Each delivery is settled elsewhere; after an outage all of them come again, and only the last one counts."""
    subjects = Subjects(run)
    bus = await open_bus(broker.url, options=replace(OPTIONS, ack_wait_s=0.3))
    await bus.publish(subjects.contribution(0, 0, "a"), b"x", msg_id="m")
    queue = await bus.consume(subjects.contributions_of(0), durable="shard-0")
    deliveries = [await queue.next(SOON_S) for _ in range(3)]
    last = deliveries[-1]
    assert last is not None
    assert last.redelivered

    assert isinstance(queue, QueueConsumer)
    assert len(queue.unsettled) == 1
    await last.ack()
    assert not queue.unsettled
    assert await queue.drained()


async def test_starters_may_race(broker: EmbeddedBroker, open_bus: OpenBus) -> None:
    """Five services that provision at once all succeed, and so does a sixth later."""
    buses = await asyncio.gather(*(open_bus(broker.url, name=f"s{i}") for i in range(5)))
    await open_bus(broker.url)

    assert (await stream_state(buses[0], buses[0]._plans[0].name))["messages"] == 0


async def test_bounds_are_those_of_the_first_founder(broker: EmbeddedBroker, open_bus: OpenBus) -> None:
    first = await open_bus(broker.url, bytes_max=64 * MIB)
    await open_bus(broker.url, bytes_max=32 * MIB)

    found = await first._connection.call(first._jetstream.api(f"STREAM.INFO.{first._plans[0].name}"))
    assert found["config"]["max_bytes"] == 64 * MIB


async def test_streams_of_somebody_else_are_refused_by_name(broker: EmbeddedBroker, open_bus: OpenBus) -> None:
    bus = await open_bus(broker.url, bytes_max=0)
    foreign = {"name": bus._plans[0].name, "subjects": list(bus._plans[0].subjects), "storage": "memory"}
    await bus._connection.call(bus._jetstream.api(f"STREAM.CREATE.{bus._plans[0].name}", foreign))

    with pytest.raises(SettingsError, match="storage: 'memory' instead of 'file'"):
        await bus.provision(GIB)


async def test_who_reads_leaves_nothing_behind(broker: EmbeddedBroker, open_bus: OpenBus) -> None:
    bus = await open_bus(broker.url, bytes_max=0)

    assert await read_run(bus, Subjects(bus.subjects.run)) is None
    with pytest.raises(RunReplaced):
        await bus.get_record(Subjects(bus.subjects.run).lease(0))
    names = await bus._connection.call(bus._jetstream.api("STREAM.NAMES", {"subject": f"{bus.subjects.prefix}.>"}))
    assert not names.get("streams")


async def test_two_filters_under_one_name_are_refused(broker: EmbeddedBroker, open_bus: OpenBus, run: str) -> None:
    bus, subjects = await open_bus(broker.url), Subjects(run)
    await bus.consume(subjects.contributions_of(0), durable="shard-0")

    with pytest.raises(SettingsError, match="durable"):
        await bus.consume(subjects.contributions_of(0), durable="other")


async def test_a_broker_without_room_says_so(tmp_path: Path, open_bus: OpenBus) -> None:
    """Streams whose bounds exceed what the broker may store cannot be created; the error says what was wanted, and the cure."""
    told = r"(?s)no room for the bounds of the streams of.*wanted 5\.9 GB.*max_file.*atoll runs"
    with EmbeddedBroker(tmp_path / "small", bytes_max=64 * MIB) as small, pytest.raises(StorageFull, match=told):
        await open_bus(small.url, options=replace(OPTIONS, full_s=0.1))


async def test_who_joins_needs_no_room_for_what_exists(tmp_path: Path, open_bus: OpenBus) -> None:
    """A hub whose room is all promised once refused the restart of a run's own processes."""
    with EmbeddedBroker(tmp_path / "small", bytes_max=6 * GIB) as small:
        await open_bus(small.url)
        with pytest.raises(StorageFull):
            await open_bus(small.url, run="another", options=replace(OPTIONS, full_s=0.1))
        bus = await open_bus(small.url)
        assert await bus.get_record(Subjects(bus.subjects.run).lease(0)) is None


async def test_nobody_there_is_said_in_time(open_bus: OpenBus) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        url = f"nats://127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(BrokerUnavailable, match=f"no broker answers at {url}"):
            await open_bus(url, options=replace(OPTIONS, patience_s=0.5))


async def test_an_old_broker_is_refused(open_bus: OpenBus) -> None:
    """Below 2.12 the message says what was got and what is allowed."""
    async with GreetingServer("2.9.10") as old:
        with pytest.raises(BrokerUnavailable, match=r"(?s)too old.*2\.9.*2\.12"):
            await open_bus(old.url)


async def test_a_broker_for_small_messages_is_refused(open_bus: OpenBus) -> None:
    async with GreetingServer("2.15.1", max_payload=MIB) as small:
        with pytest.raises(BrokerUnavailable, match=f"(?s){MIB}.*{MIB + 65536}"):
            await open_bus(small.url)


async def test_jetstream_off_is_refused(open_bus: OpenBus, tmp_path: Path) -> None:
    """A broker without JetStream is told apart from no broker."""
    with (
        EmbeddedBroker(tmp_path / "plain", bytes_max=0) as plain,
        pytest.raises(BrokerUnavailable, match="JetStream does not answer"),
    ):
        await open_bus(plain.url)


def test_a_purge_that_a_full_disk_refuses_is_a_full_disk() -> None:
    """nats-server says so in words only; taken for a mistake of ours, it would end the process."""
    words = "write msgs/4.blk: no space left on device"
    refused = ApiRefusal(ApiError(code=500, err_code=10051, description=words))

    assert refused.is_passing
    assert isinstance(refused.public("a.stream"), StorageFull)


async def test_what_several_addresses_say_is_said_once(broker: EmbeddedBroker, open_bus: OpenBus) -> None:
    """Attempts go round the nodes of a cluster four times a second: the trouble of each is logged once."""
    connection = (await open_bus(broker.url))._connection
    for _ in range(3):
        connection._note(ConnectionRefusedError("one"))
        connection._note(ConnectionRefusedError("two"))
    assert connection.complaints.text == "ConnectionRefusedError: one; ConnectionRefusedError: two"
