"""The contract of a bus, over a real nats-server."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest

from atoll.base.errors import BlobGone, StorageFull
from atoll.bus.nats.bus import JetStreamBus
from atoll.bus.nats.jetstream_api import JetStream
from atoll.bus.options import BusOptions
from atoll.bus.server import EmbeddedBroker
from atoll.wire.blobs import SMALL_BYTES, Cut, Upload
from atoll.wire.subjects import Subjects
from support.bus_contract import ROOM_BYTES, BusContract, MakeBus, buses

pytestmark = pytest.mark.connected
STANDS_S = 30.0
OPTIONS = BusOptions(full_s=0.3, gone_s=0.2)


@pytest.fixture(params=[True, False], ids=["own_thread", "callers_loop"])
async def make_bus(broker: EmbeddedBroker, run: str, request: pytest.FixtureRequest) -> AsyncIterator[MakeBus]:
    """Open buses of one run on the session's broker, in either kind of loop."""
    options = replace(OPTIONS, own_thread=request.param)
    async with buses(
        lambda number: JetStreamBus.open(broker.url, run, name=f"bus-{number}", options=options), ROOM_BYTES
    ) as make:
        yield make


class TestJetStreamBus(BusContract):
    """The contract."""


async def test_a_reader_has_one_pull_request_at_a_time(make_bus: MakeBus, run: str) -> None:
    """One that stands delivers what comes; when time or a lost connection has ended it, the next `next` sends another."""
    bus, subjects = await make_bus(), Subjects(run)
    assert isinstance(bus, JetStreamBus)
    queue = await bus.consume(subjects.contributions_of(0), durable="reader")

    async def waiting() -> int:
        told = await bus._connection.call(bus._jetstream.api(f"CONSUMER.INFO.{queue._stream}.reader"))
        return int(told["num_waiting"])

    for number in range(3):
        await bus.publish(subjects.contribution(0, number, "m"), b"x", msg_id=f"{number}")
        delivery = await queue.next(STANDS_S)
        assert delivery is not None
        await delivery.ack()
    assert await waiting() == 1

    assert await queue.next(0.01) is None
    assert await waiting() == 1
    await bus._connection.call(bus._connection.cut())
    await bus.publish(subjects.contribution(0, 3, "m"), b"y", msg_id="3")
    delivery = await queue.next(STANDS_S)

    assert delivery is not None
    assert delivery.data == b"y"


async def test_who_closes_a_queue_says_nothing_where_a_stranger_points(make_bus: MakeBus, run: str) -> None:
    """What came to the reader's inbox and is no delivery of JetStream's is not settled: its reply may be any subject."""
    bus, stranger, subjects = await make_bus(), await make_bus(), Subjects(run)
    assert isinstance(bus, JetStreamBus)
    assert isinstance(stranger, JetStreamBus)
    queue = await bus.consume(subjects.contributions_of(0), durable="reader")
    heard = await stranger.listen("elsewhere.*")

    there = stranger._connection
    await there.call(there.send(f"{queue._inbox}.1", b"x", "elsewhere.head"))
    assert await stranger.reach(STANDS_S)
    assert await bus.reach(STANDS_S)
    assert len(queue._arrived) == 1
    await queue.close()
    await bus.tell("elsewhere.end", b"end")

    first = await heard.next(STANDS_S)
    assert first is not None
    assert (first.subject, first.data) == ("elsewhere.end", b"end")


async def test_a_small_blob_travels_with_what_is_small(make_bus: MakeBus, run: str) -> None:
    bus, subjects = await make_bus(), Subjects(run)
    assert isinstance(bus, JetStreamBus)
    ref = await bus.put_blob(subjects.delta_stem(0, 1, "a"), b"small")

    assert await bus.get_blob(ref, SMALL_BYTES) == b"small"
    assert bus._connection._branches == []
    await bus.purge(f"{ref.stem}.*")
    with pytest.raises(BlobGone):
        await bus.get_blob(ref, SMALL_BYTES)
    large = await bus.put_blob(subjects.delta_stem(0, 2, "a"), bytes(SMALL_BYTES + 1))
    assert await bus.get_blob(large, 2 * SMALL_BYTES) == bytes(SMALL_BYTES + 1)
    assert len(bus._connection._branches) == 2


async def test_a_broker_that_has_not_counted_a_message_yet_hides_nothing(
    make_bus: MakeBus, run: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reader's state may lag behind the stream by a message that just came; what was there before is settled."""
    bus, subjects = await make_bus(), Subjects(run)
    queue = await bus.consume(subjects.contributions_of(0), durable="reader")
    await bus.publish(subjects.contribution(0, 0, "a"), b"0", msg_id="m0")
    first = await queue.next(STANDS_S)
    assert first is not None
    assert not await queue.drained()
    await first.ack()
    await bus.publish(subjects.contribution(0, 1, "a"), b"1", msg_id="m1")
    asked = JetStream.api

    async def behind(jetstream: JetStream, call: str, body: Any = None) -> dict[str, Any]:  # noqa: ANN401
        answer = await asked(jetstream, call, body)
        return answer | {"num_pending": 0, "num_ack_pending": 0} if "CONSUMER.INFO" in call else answer

    monkeypatch.setattr(JetStream, "api", behind)

    assert await queue.drained()
    assert not await queue.drained()


async def test_the_seconds_of_an_upload_are_counted(make_bus: MakeBus, run: str) -> None:
    bus, subjects, began_s = await make_bus(), Subjects(run), time.monotonic()
    upload = Upload(Cut(bytes(5 << 20)))
    await bus.put_blob(subjects.global_stem(0, 1, "n"), upload)
    assert 0.0 < upload.busy_s <= time.monotonic() - began_s
    upload = Upload(Cut(bytes(ROOM_BYTES - (2 << 20))))
    with pytest.raises(StorageFull):
        await bus.put_blob(subjects.global_stem(1, 1, "n"), upload)
    failed_s = upload.busy_s
    assert failed_s > 0.0
    await bus.purge(f"{subjects.global_stem(0, 1, 'n')}.*")
    await bus.put_blob(subjects.global_stem(1, 1, "n"), upload)
    assert upload.busy_s > failed_s
