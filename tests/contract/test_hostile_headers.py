"""Headers are the writer's: none of them speaks for the broker, stops a reader, or stays in a queue."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from atoll.base.errors import BrokerUnavailable
from atoll.base.retry import Unanswered
from atoll.bus.nats import client
from atoll.bus.nats.bus import JetStreamBus
from atoll.bus.nats.framing import DESCRIPTION, STATUS, read_headers
from atoll.bus.nats.jetstream_api import JetStream
from atoll.bus.nats.provision import make_live_stream
from atoll.bus.server import EmbeddedBroker
from atoll.bus.streams import GIB
from atoll.wire.subjects import Subjects
from support.attacks import HostileConnection, HostileMessage
from support.bus_contract import SOON_S
from support.locked_brokers import LockedBroker

HOSTILE = (
    b"NATS/1.0\r\nStatus: 500\r\n\r\n",
    b"NATS/1.0\r\nstatus: 204\r\nDescription: EOB\r\n\r\n",
    b"NATS/1.0 204 EOB\r\n\r\n",
    b"NATS/1.0 500 broken\r\nStatus: 413\r\n\r\n",
    b"NATS/1.0\r\nStatus: 100\r\n\r\n",
    b"NATS/1.0 \xff\xff\xff\r\n\r\n",
    b"NATS/1.0",
    b"NATS/1.0 ",
    b"\xff\xfe: \xfd\r\n:\r\n\r\n",
    b"NATS/1.0\r\nNats-Stream: other\r\nNats-Subject: x\r\nNats-Sequence: 1\r\nNats-Num-Pending: 9\r\n\r\n",
)
ENDS_AN_OPEN_SERVER = b"x"
"""nats-server 2.15 ends when it republishes what it has stored with so short a block. Through a locked door, where it passes an
import, it does no harm."""


@pytest.fixture
async def bus(broker: EmbeddedBroker, run: str) -> AsyncIterator[JetStreamBus]:
    made = await JetStreamBus.open(broker.url, run, name="test")
    await made.provision(GIB)
    yield made
    await made.close()


@pytest.fixture
def stranger(broker: EmbeddedBroker) -> Iterator[HostileConnection]:
    made = HostileConnection(broker.url)
    yield made
    made.close()


@pytest.mark.connected
async def test_stored_headers_end_no_batch(bus: JetStreamBus, stranger: HostileConnection, run: str) -> None:
    s = Subjects(run)
    for number, header in enumerate(HOSTILE):
        stranger.put(HostileMessage(s.member(f"m{number:02}"), b"{}", block=header))
        stranger.put(HostileMessage(s.event("left", "m"), b"{}", block=header))
    await bus.put_record(s.member("z"), b"honest", expected=0)
    await bus.publish(s.event("left", "z"), b"honest", msg_id="1")

    members = await bus.get_records(s.member("*"))
    assert [record.subject for record in members] == [
        *(s.member(f"m{n:02}") for n in range(len(HOSTILE))),
        s.member("z"),
    ]
    events = await bus.replay(s.event("left", "*"))
    assert [event.data for event in events] == [b"{}"] * len(HOSTILE) + [b"honest"]


@pytest.mark.connected
async def test_queued_headers_are_deliveries_like_others(
    bus: JetStreamBus, stranger: HostileConnection, run: str
) -> None:
    """They are handed to the reader, who settles them: nothing stays, and the queue is proven to be empty."""
    s = Subjects(run)
    for number, header in enumerate(HOSTILE):
        stranger.put(HostileMessage(s.contribution(0, number, "m"), b"{}", block=header))
    stranger.put(HostileMessage(s.contribution(0, 0, "m") + "\udcff", b"{}", block=b"NATS/1.0\r\n\r\n"))
    await bus.publish(s.contribution(0, 0, "z"), b"honest", msg_id="1")
    queue = await bus.consume(s.contributions_of(0), durable="reader")

    taken: list[bytes] = []
    while len(taken) < len(HOSTILE) + 2:
        delivery = await queue.next(SOON_S)
        assert delivery is not None, taken
        await delivery.ack()
        taken.append(delivery.data)
    assert taken[-1] == b"honest"
    while not await queue.drained():
        assert await queue.next(0.1) is None


@pytest.mark.connected
async def test_no_header_passes_a_locked_door_and_does_harm(
    tmp_path: Path, run: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    s = Subjects(run)
    with LockedBroker(tmp_path) as locked:
        locked.add(run, "m")
        locked.add(run, "shard", "synchronizer")
        shard = await locked.bus(run, locked.identity(run, "shard"))
        await shard.provision(GIB)
        mallory = await locked.bus(run, locked.identity(run, "m"))
        for number, header in enumerate((*HOSTILE, ENDS_AN_OPEN_SERVER)):
            monkeypatch.setattr(client, "header_block", lambda _, header=header: header)
            for subject in (s.event("left", "m"), s.contribution(0, number, "m"), s.member("m")):
                asked = mallory._connection.request(subject, b"{}", {"a": "b"}, timeout_s=SOON_S)
                with contextlib.suppress(Unanswered):
                    await mallory._connection.call(asked)
        monkeypatch.undo()
        await shard.publish(s.event("left", "z"), b"honest", msg_id="1")
        assert [event.data for event in await shard.replay(s.event("left", "*"))][-1] == b"honest"
        assert len(await shard.get_records(s.member("*"))) <= 1
        queue = await shard.consume(s.contributions_of(0), durable="reader")
        while not await queue.drained():
            if (delivery := await queue.next(0.1)) is not None:
                await delivery.ack()
        for each in (mallory, shard):
            assert each.stats.reconnects == 0
            await each.close()


@pytest.mark.connected
async def test_a_message_with_any_header_stops_no_listener(
    bus: JetStreamBus, stranger: HostileConnection, run: str
) -> None:
    s = Subjects(run)
    feed = await bus.listen(s.beat("*"))
    before = bus.stats.reconnects
    for header in HOSTILE:
        stranger.put(HostileMessage(s.beat("m"), b"{}", block=header))
    await bus.tell(s.beat("z"), b"honest")

    heard = [await feed.next(SOON_S) for _ in range(len(HOSTILE) + 1)]
    assert heard[-1] is not None
    assert heard[-1].data == b"honest"
    assert bus.stats.reconnects == before
    await feed.close()


@pytest.mark.connected
@pytest.mark.parametrize(
    "answer",
    [
        {},
        {"config": 7, "consumers": [7], "purged": "x", "ack_floor": [], "num_pending": 0},
        {"consumers": [{}], "ack_floor": {"stream_seq": "x"}, "num_pending": 0, "num_ack_pending": 0},
    ],
    ids=["empty", "of other kinds", "of other parts"],
)
async def test_an_answer_that_is_none_of_jetstreams_is_an_error_of_ours(
    bus: JetStreamBus, run: str, monkeypatch: pytest.MonkeyPatch, answer: dict[str, object]
) -> None:
    """Who learns where an answer is awaited may send one; no shard and no learner may end of it."""
    subjects = Subjects(run)
    queue = await bus.consume(subjects.contributions_of(0), durable="reader")

    async def forged(*_: object, **__: object) -> dict[str, object]:
        return answer

    monkeypatch.setattr(JetStream, "request", forged)

    assert not await queue.drained()
    assert await bus.purge(subjects.global_stem(0, 1, "n")) == 0
    with pytest.raises(BrokerUnavailable):
        await bus.provision(GIB)
    with contextlib.suppress(BrokerUnavailable):
        await bus.consume(subjects.contributions_of(0), durable="other", takeover=True)
    with pytest.raises(Unanswered):
        await make_live_stream(bus._jetstream, run)


def test_the_broker_speaks_on_the_first_line_only() -> None:
    """And never in what a stream has stored."""
    assert read_headers(b"") is None
    assert read_headers(b"NATS/1.0 404 No Messages\r\n\r\n") == {STATUS: "404", DESCRIPTION: "No Messages"}
    end = read_headers(b"NATS/1.0 204 EOB\r\nNats-Num-Pending: 3\r\n\r\n")
    assert end == {STATUS: "204", DESCRIPTION: "EOB", "Nats-Num-Pending": "3"}
    assert read_headers(b"NATS/1.0\r\nStatus: 204\r\nA: b\r\nA: c:d\r\n\r\n") == {"A": "c:d"}
    assert read_headers(b"NATS/1.0 204 EOB\r\nNats-Stream: s\r\n\r\n") == {"Nats-Stream": "s"}
    for block in HOSTILE:
        assert STATUS not in (read_headers(block + b"\r\nNats-Stream: s\r\n\r\n") or {})


@pytest.mark.parametrize("block", HOSTILE)
def test_no_header_raises(block: bytes) -> None:
    assert isinstance(read_headers(block), dict)
