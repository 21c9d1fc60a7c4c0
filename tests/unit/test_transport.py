"""The socket under nats-py: bounded, counted, and never reading a buffer that is not its own any more."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from urllib.parse import urlparse

import pytest

from atoll.bus.nats.framing import Message
from atoll.bus.nats.transport import QUEUE_BYTES, SocketTransport
from atoll.wire.limits import Buffer
from atoll.wire.traffic import BusStats

MIB = 1 << 20
SOON_S = 120.0


@dataclass
class Peer:
    """The other end: reads while `reading` is set, and keeps what came."""

    server: asyncio.Server | None = None
    reading: asyncio.Event = field(default_factory=asyncio.Event)
    came: bytearray = field(default_factory=bytearray)
    writers: list[asyncio.StreamWriter] = field(default_factory=list)

    @property
    def port(self) -> int:
        assert self.server is not None
        return int(self.server.sockets[0].getsockname()[1])

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.writers.append(writer)
        await self.reading.wait()
        while piece := await reader.read(MIB):
            self.came += piece
        writer.transport.abort()

    async def accepted(self) -> asyncio.StreamWriter:
        """Return the way back to the first that connected, once there is one."""
        async with asyncio.timeout(SOON_S):
            while not self.writers:  # noqa: ASYNC110  # the server sets no event
                await asyncio.sleep(0.001)
        return self.writers[0]

    async def until(self, size: int) -> None:
        self.reading.set()
        async with asyncio.timeout(SOON_S):
            while len(self.came) < size:  # noqa: ASYNC110  # bytes set no event
                await asyncio.sleep(0.001)


@pytest.fixture
async def peer() -> AsyncIterator[Peer]:
    made = Peer()
    made.server = await asyncio.start_server(made.serve, "127.0.0.1", 0)
    yield made
    made.reading.set()
    for writer in made.writers:
        writer.transport.abort()
    made.server.close()
    await made.server.wait_closed()


@pytest.fixture
async def wire(peer: Peer) -> AsyncIterator[SocketTransport]:
    made = SocketTransport(BusStats())
    await made.connect(urlparse(f"nats://127.0.0.1:{peer.port}"), 0, SOON_S)
    yield made
    made.abort()
    await made.wait_closed()


async def test_pieces_arrive_in_order_and_are_counted(peer: Peer, wire: SocketTransport) -> None:
    large = bytes(range(256)) * (12 << 10)
    pieces: list[Buffer] = [
        b"head",
        bytearray(large),
        b"\r\n",
        b"",
        memoryview(large)[5 : MIB + 7],
        b"x" * 4095,
        b"y" * 4096,
        b"end",
    ]

    peer.reading.set()
    for piece in pieces:
        wire.write(piece)
    await wire.wait_sent(wire.accepted)

    told = b"".join(pieces)
    await peer.until(len(told))
    assert bytes(peer.came) == told
    assert (wire.accepted, wire.sent, wire.queued) == (len(told), len(told), 0)
    assert wire._stats.wire_bytes_up == len(told)


async def test_a_slow_reader_holds_the_writers_back(peer: Peer, wire: SocketTransport) -> None:
    """Sixty-four writers of a mebibyte: no more is queued than the bound and one message, and all of it arrives."""

    async def publish() -> None:
        await wire.room()
        wire.writelines([bytes(MIB)])

    writers = [asyncio.create_task(publish()) for _ in range(64)]
    await asyncio.sleep(0.2)

    done = sum(writer.done() for writer in writers)
    assert wire.queued <= QUEUE_BYTES + MIB
    assert done < 64
    await peer.until(64 * MIB)
    await asyncio.gather(*writers)
    assert wire.queued == 0


async def test_a_buffer_is_its_owners_again_once_it_is_gone_or_given_up(peer: Peer, wire: SocketTransport) -> None:
    """What the owner writes into it afterwards nobody receives; a bytearray may even shrink."""
    first, second = bytearray(b"a" * MIB), bytearray(b"b" * 32 * MIB)
    peer.reading.set()
    wire.writelines([first])
    await wire.wait_sent(wire.accepted)
    first[:] = b"X" * MIB
    wire.writelines([second])
    wire._push()
    assert wire.queued > 0

    wire.copy_queued(second)
    second[:] = b"X" * 32 * MIB

    await peer.until(33 * MIB)
    assert peer.came.count(b"X") == 0


async def test_a_lost_connection_is_told_to_all_who_wait(wire: SocketTransport) -> None:
    """Readers see the end; whoever waits for room or for a position gets an error, and so does who comes later."""
    wire.writelines([bytes(QUEUE_BYTES + 32 * MIB)])
    room, gone = asyncio.create_task(wire.room()), asyncio.create_task(wire.wait_sent(wire.accepted))
    reading = asyncio.create_task(wire.read(0))
    await asyncio.sleep(0.05)

    wire.abort()

    assert await reading == []
    for waiting in (room, gone):
        with pytest.raises(ConnectionResetError):
            await waiting
    assert wire.at_eof()
    assert await wire.readline() == b""
    with pytest.raises(ConnectionResetError):
        await wire.drain()


async def test_closing_sends_what_is_queued(peer: Peer, wire: SocketTransport) -> None:
    wire.writelines([b"z" * 16 * MIB])
    wire.close()
    await asyncio.sleep(0.05)

    await peer.until(16 * MIB)
    await wire.wait_closed()

    assert len(peer.came) == 16 * MIB


async def test_a_reader_that_falls_behind_stops_the_socket(peer: Peer, wire: SocketTransport) -> None:
    message, count = b"MSG a 1 %d\r\n" % MIB + bytes(MIB) + b"\r\n", 128
    writer = await peer.accepted()
    peer.reading.set()
    for _ in range(count):
        writer.write(message)
    await asyncio.sleep(0.5)

    assert wire._framer.waiting_bytes <= 34 * MIB
    found = 0
    async with asyncio.timeout(SOON_S):
        while found < count:
            found += sum(isinstance(frame, Message) for frame in await wire.read(0))
    assert wire.received == count * len(message) == wire._stats.wire_bytes_down


async def test_a_transport_that_rests_reads_many_messages_at_once(peer: Peer) -> None:
    """Two hundred messages, one by one, cost few reads; a flood is read without a rest, and none of it is lost."""
    rest_s, message, flood = 0.2, b"MSG a 1 1\r\nx\r\n", 1 << 16
    made = SocketTransport(BusStats(), rest_s=rest_s)
    reads = rests = 0

    def counted(nbytes: int, update: Callable[[int], None] = made.buffer_updated) -> None:
        nonlocal reads, rests
        reads += 1
        resting = made._resting
        update(nbytes)
        rests += made._resting is not resting

    made.buffer_updated = counted  # type: ignore[method-assign]
    await made.connect(urlparse(f"nats://127.0.0.1:{peer.port}"), 0, SOON_S)
    writer = await peer.accepted()

    async def taken(count: int) -> None:
        found = 0
        async with asyncio.timeout(SOON_S):
            while found < count:
                found += sum(isinstance(frame, Message) for frame in await made.read(0))

    reading = asyncio.create_task(taken(200))
    began_s = asyncio.get_running_loop().time()
    for _ in range(200):
        writer.write(message)
        await asyncio.sleep(0.002)
    await reading
    took_s = asyncio.get_running_loop().time() - began_s
    assert 1 <= reads <= 2 + took_s / rest_s

    reads = rests = 0
    writer.write(message * flood)
    await taken(flood)
    # A read that fills its buffer has not emptied the socket: the next one follows at once.
    assert rests < reads
    made.abort()
    await made.wait_closed()


async def test_nobody_there_is_an_error_of_the_system() -> None:
    probe = await asyncio.start_server(lambda *_: None, "127.0.0.1", 0)
    port = probe.sockets[0].getsockname()[1]
    probe.close()
    await probe.wait_closed()

    with pytest.raises(OSError, match="onnect"):
        await SocketTransport(BusStats()).connect(urlparse(f"nats://127.0.0.1:{port}"), 0, SOON_S)


async def test_an_end_is_told_once(peer: Peer, wire: SocketTransport) -> None:
    """Closing with much still to be sent: all of it arrives, and the loop has nothing to complain of."""
    complaints: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: complaints.append(context))
    wire.writelines([bytes(32 * MIB)])
    wire.close()
    await peer.until(32 * MIB)
    await wire.wait_closed()
    await asyncio.sleep(0)
    await asyncio.sleep(0)

    assert complaints == []
    assert len(peer.came) == 32 * MIB


async def test_a_peer_that_goes_away_ends_the_connection_once() -> None:
    """The kernel takes one more piece, and refuses the next: what is left is not counted as sent, and nobody complains."""
    complaints: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: complaints.append(context))
    with socket.create_server(("127.0.0.1", 0)) as server:
        wire = SocketTransport(BusStats())
        await wire.connect(urlparse(f"nats://127.0.0.1:{server.getsockname()[1]}"), 0, SOON_S)
        peer, _ = server.accept()
    wire.write(bytes(32 * MIB))
    before = -1
    while before < wire.sent:
        before = wire.sent
        await asyncio.sleep(0.05)

    # All in one step of our loop: it still has something to read when it sends to a peer that is gone.
    peer.sendall(b"PING\r\n" * 8000)
    peer.setblocking(False)
    with contextlib.suppress(BlockingIOError):
        while peer.recv(MIB):
            pass
    peer.close()
    await asyncio.wait_for(wire.wait_closed(), SOON_S)
    await asyncio.sleep(0)
    await asyncio.sleep(0)

    assert complaints == []
    assert wire.queued > 16 * MIB
