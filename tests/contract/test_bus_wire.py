"""What our transport adds under the JetStream bus: lanes for chunks, counted bytes; and what of nats-py must go on working."""

from __future__ import annotations

import asyncio
import contextlib
import datetime as dt
import ipaddress
import json
import ssl
import statistics
import subprocess
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from nats import errors
from nats.aio.client import Client
from nats.aio.msg import Msg

from atoll.base.retry import Unanswered
from atoll.bus.nats.bus import JetStreamBus
from atoll.bus.nats.client import WireClient
from atoll.bus.nats.connection import Connection
from atoll.bus.options import BusOptions
from atoll.bus.server import EmbeddedBroker, find_server
from atoll.bus.streams import GIB
from atoll.wire.subjects import Subjects
from atoll.wire.traffic import BusStats
from support.links import GreetingServer, LinkProxy

pytestmark = pytest.mark.connected
MIB = 1 << 20
SOON_S = 120.0
LINK_BYTES_S = 4e6
PROBE = b"is anybody there?"
OPTIONS = BusOptions(try_s=1.0, watch_s=0.2, echo_s=1.0, reconnect_s=0.1)


@asynccontextmanager
async def opened(url: str, run: str, options: BusOptions = OPTIONS) -> AsyncIterator[JetStreamBus]:
    bus = await JetStreamBus.open(url, run, name="bus", options=options)
    await bus.provision(GIB)
    try:
        yield bus
    finally:
        await bus.close()


@pytest.mark.second_tier
async def test_beats_are_prompt_while_chunks_saturate_a_link_both_ways(broker: EmbeddedBroker, run: str) -> None:
    """Eight megabytes up and eight down at four a second keep a link busy for seconds; a core message waits for none.

    No time-out of a chunk (1 s) and no late echo (1 s, three in a row) is taken for a failure: things move.
    """
    data, subjects = np.random.default_rng(0).bytes(8 * MIB), Subjects(run)
    async with (
        LinkProxy(broker.port, LINK_BYTES_S) as link,
        opened(link.url, run) as bus,
        opened(broker.url, run) as ear,
    ):
        down = await ear.put_blob(subjects.global_stem(1, 1, "n"), data)
        feed = await ear.listen(subjects.beat("*"))
        moving = asyncio.gather(bus.put_blob(subjects.global_stem(0, 1, "n"), data), bus.get_blob(down, len(data)))
        loop, waits = asyncio.get_running_loop(), []
        started_s = loop.time()
        while not moving.done():
            began_s = loop.time()
            await bus.tell(subjects.beat("a"), b"alive")
            assert await feed.next(SOON_S) is not None
            waits.append(loop.time() - began_s)
            await asyncio.sleep(0.05)

        ref, read = await moving

        # A core message that waited for the chunks would wait for seconds, and the first would end with them.
        assert len(waits) > 3
        assert statistics.median(waits) < 0.25 * (loop.time() - started_s)
        assert (read == data, await ear.get_blob(ref, len(data)) == data) == (True, True)
        assert (bus.stats.retries, bus.stats.reconnects) == (0, 0)
        assert link.accepted == 3


async def test_a_lane_is_opened_for_the_first_chunk(broker: EmbeddedBroker, run: str) -> None:
    async with LinkProxy(broker.port) as link, opened(link.url, run, replace(OPTIONS, bulk_connections=3)) as bus:
        await bus.put_record(Subjects(run).head(0), b"a", expected=0)
        before = link.accepted
        ref = await bus.put_blob(Subjects(run).global_stem(0, 1, "n"), bytes(4 * MIB))

        assert await bus.get_blob(ref, 4 * MIB) == bytes(4 * MIB)
        assert (before, link.accepted) == (1, 7)


async def test_a_lost_answer_is_asked_for_again_while_everything_else_moves(broker: EmbeddedBroker, run: str) -> None:
    """One request has no answer and many after it have theirs: it is given up after its try, not after a minute."""
    theirs, lost = Client(), f"lost.{run}"
    await theirs.connect(broker.url)

    async def answer(message: Msg) -> None:
        if message.subject != lost:
            await message.respond(message.data)

    await theirs.subscribe(lost, cb=answer)
    await theirs.subscribe(f"told.{run}", cb=answer)
    await theirs.flush()
    async with opened(broker.url, run, replace(OPTIONS, total_s=SOON_S)) as bus:
        connection = bus._connection

        async def lane() -> Connection:
            return connection.branch()

        bulk = await connection.call(lane())

        async def talk() -> None:
            while True:
                await bulk.request(f"told.{run}", bytes(100_000))

        talking = asyncio.run_coroutine_threadsafe(talk(), connection.loop)
        try:
            async with asyncio.timeout(SOON_S / 2):
                with pytest.raises(Unanswered):
                    await connection.call(bulk.request(lost, b"?"))
        finally:
            talking.cancel()
    await theirs.close()


async def test_the_bytes_of_the_sockets_are_what_the_link_carries(broker: EmbeddedBroker, run: str) -> None:
    async with LinkProxy(broker.port) as link, opened(link.url, run, replace(OPTIONS, watch_s=60.0)) as bus:
        ref = await bus.put_blob(Subjects(run).global_stem(0, 1, "n"), bytes(5 * MIB + 17))
        await bus.get_blob(ref, 6 * MIB)
        await bus.put_record(Subjects(run).head(0), b"a", expected=0)
        async with asyncio.timeout(SOON_S):  # what is on its way arrives
            while (bus.stats.wire_bytes_up, bus.stats.wire_bytes_down) != tuple(link.carried_bytes.values()):  # noqa: ASYNC110
                await asyncio.sleep(0.01)

        assert bus.stats.bytes_up < bus.stats.wire_bytes_up < 1.01 * bus.stats.bytes_up


async def test_a_dead_lane_is_cut_by_its_watchdog_and_comes_back(broker: EmbeddedBroker, run: str) -> None:
    async with LinkProxy(broker.port) as link, opened(link.url, run) as bus:
        first = await bus.put_blob(Subjects(run).global_stem(0, 1, "n"), bytes(MIB))
        link.blackhole("down")
        lane = bus._connection._branches[0]
        async with asyncio.timeout(SOON_S):
            while lane._up.is_set():  # noqa: ASYNC110  # another thread's event
                await asyncio.sleep(0.01)
        link.heal()
        again = await bus.put_blob(first.stem, bytes(MIB))

        assert again == first
        assert await bus.get_blob(first, MIB) == bytes(MIB)
        assert lane._up.is_set()


# -- nats-py over our transport ---------------------------------------------------------------------------------------


@contextmanager
def server(folder: Path, config: str) -> Iterator[str]:
    """Run a nats-server with `config` and yield host and port."""
    (folder / "nats.conf").write_text(config)
    arguments = ["-c", str(folder / "nats.conf"), "-a", "127.0.0.1", "-p", "-1", "--ports_file_dir", str(folder)]
    process = subprocess.Popen([find_server(), *arguments], stderr=subprocess.DEVNULL)
    try:
        ports = folder / f"nats-server_{process.pid}.ports"
        for _ in range(1000):
            if ports.exists() and ports.read_text():
                break
            process.poll()
            subprocess.run(["sleep", "0.01"], check=True)  # noqa: S607
        yield json.loads(ports.read_text())["nats"][0].partition("://")[2]
    finally:
        process.terminate()
        process.wait(SOON_S)


@asynccontextmanager
async def client(url: str, **options: Any) -> AsyncIterator[WireClient]:  # noqa: ANN401  # passed on
    made = WireClient(BusStats())
    await made.connect(
        url, **{"connect_timeout": 5, "max_reconnect_attempts": -1, "reconnect_time_wait": 0.1, **options}
    )
    try:
        yield made
    finally:
        await made.end(SOON_S)


async def reached(sender: WireClient | Client, heard: asyncio.Queue[Msg]) -> None:
    """Publish until a message is heard: stock nats-py lets its ping overtake the subscription."""
    async with asyncio.timeout(SOON_S):
        while heard.empty():  # the queue must keep what it holds
            await sender.publish("talk", PROBE)
            await asyncio.sleep(0.02)


async def next_message(heard: asyncio.Queue[Msg]) -> Msg:
    async with asyncio.timeout(SOON_S):
        while (message := await heard.get()).data == PROBE:
            pass
    return message


async def exchange(ours: WireClient, theirs: Client) -> None:
    """Send messages of many sizes, with and without headers, both ways; they arrive as they were."""
    for sender, hearer in ((ours, theirs), (theirs, ours)):
        heard: asyncio.Queue[Msg] = asyncio.Queue()
        subscription = await hearer.subscribe("talk", cb=heard.put)
        await hearer.flush()
        await reached(sender, heard)
        for size in (0, 1, 100, 65535, 65536, 900_000):
            for headers in (None, {"A": "b c", "Zoë".encode("ascii", "ignore").decode(): "ü"}):
                payload = np.random.default_rng(size).bytes(size)
                await sender.publish("talk", payload, headers=headers)
                message = await next_message(heard)
                assert (message.data == payload, message.headers) == (True, headers)
        await subscription.unsubscribe()


async def test_messages_of_all_kinds_go_both_ways_beside_stock_nats_py(broker: EmbeddedBroker) -> None:
    theirs = Client()
    await theirs.connect(broker.url)
    async with client(broker.url) as ours:
        await exchange(ours, theirs)

        async def answer(message: Msg) -> None:
            await message.respond(message.data[::-1])

        await theirs.subscribe("ask", cb=answer)
        await theirs.flush()
        async with asyncio.timeout(SOON_S):
            while True:
                with contextlib.suppress(errors.NoRespondersError):
                    await ours.request("ask", b"", timeout=SOON_S)
                    break
        assert (await ours.request("ask", b"abc", timeout=SOON_S)).data == b"cba"
        with pytest.raises(errors.NoRespondersError):
            await ours.request("nobody", b"", timeout=SOON_S)
        with pytest.raises(errors.MaxPayloadError):
            await ours.publish("talk", bytes(ours.max_payload + 1))
        with pytest.raises(errors.BadHeaderError):
            await ours.publish("talk", b"", headers={"a b": "c"})
        assert await ours.rtt() > 0.0
    await theirs.close()


async def test_a_password_is_asked_for(tmp_path: Path) -> None:
    with server(tmp_path, "authorization { user: u, password: p }") as place:
        async with client(f"nats://u:p@{place}") as ours:
            assert ours.is_connected
        refused = WireClient(BusStats())
        with pytest.raises(errors.Error, match="Authorization Violation"):
            await refused.connect(f"nats://u:x@{place}", allow_reconnect=False)


def certificate(folder: Path) -> ssl.SSLContext:
    key, now = ec.generate_private_key(ec.SECP256R1()), dt.datetime.now(dt.UTC)
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "loopback")])
    names = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))])
    signed = (
        x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
        .not_valid_before(now - dt.timedelta(days=1))
        .not_valid_after(now + dt.timedelta(days=1))
        .add_extension(names, critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    (folder / "cert.pem").write_bytes(signed.public_bytes(serialization.Encoding.PEM))
    kind = serialization.PrivateFormat.PKCS8
    plain = serialization.NoEncryption()
    (folder / "key.pem").write_bytes(key.private_bytes(serialization.Encoding.PEM, kind, plain))
    return ssl.create_default_context(cafile=folder / "cert.pem")


@pytest.mark.parametrize("scheme", ["tls", "nats"])
@pytest.mark.parametrize("first", [False, True])
async def test_tls_is_agreed_and_carries_everything(tmp_path: Path, scheme: str, *, first: bool) -> None:
    """After the greeting, by address or because the broker demands it, and before it; a stranger is not believed."""
    trusted = certificate(tmp_path)
    files = f'cert_file: "{tmp_path}/cert.pem", key_file: "{tmp_path}/key.pem"'
    config = f"tls {{ {files}, handshake_first: {str(first).lower()} }}"
    with server(tmp_path, config) as place:
        url, theirs = f"{scheme}://{place}", Client()
        await theirs.connect(url, tls=trusted, tls_handshake_first=first)
        async with client(url, tls=trusted, tls_handshake_first=first) as ours:
            await exchange(ours, theirs)
            assert ours.wire is not None
            assert ours.wire._transport is not None
            assert ours.wire._transport.get_extra_info("cipher") is not None
        await theirs.close()
        refused = WireClient(BusStats())
        with pytest.raises(ssl.SSLError):
            await refused.connect(url, tls_handshake_first=first, allow_reconnect=False)


async def test_a_broker_that_leaves_after_its_greeting_leaves_no_pings_behind() -> None:
    """However often it does: pings of lost connections would take the last one for dead, and outlive the client."""
    async with GreetingServer("2.15.0", leaves=True) as server, client(server.url):
        async with asyncio.timeout(SOON_S):
            while server.greeted < 20:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        coroutines = [str(task.get_coro()) for task in asyncio.all_tasks()]

        assert sum("_ping_interval" in each for each in coroutines) <= 1


class LosingClient(WireClient):
    """Loses the first cancellation of its reconnecting, as `asyncio.wait_for` of Python 3.11 may."""

    lost = 0

    async def _select_next_server(self) -> None:
        try:
            await super()._select_next_server()
        except asyncio.CancelledError:
            self.lost += 1
            if self.lost > 1:
                raise


async def test_a_client_that_lost_a_cancellation_ends_all_the_same(broker: EmbeddedBroker) -> None:
    """It would go on connecting for ever, and a program that waits for its tasks would never leave."""
    async with LinkProxy(broker.port) as link:
        made = LosingClient(BusStats())
        await made.connect(link.url, max_reconnect_attempts=-1, reconnect_time_wait=1)
        await link.cut()
        async with asyncio.timeout(SOON_S):
            while not made.is_reconnecting:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        await made.end(SOON_S)

        assert made.lost > 0
        assert not [task for task in asyncio.all_tasks() if "_attempt_reconnect" in str(task.get_coro())]


async def test_what_was_queued_for_a_lost_connection_is_dropped(broker: EmbeddedBroker) -> None:
    """Subscriptions come back; a publish between two connections is refused, and none is sent late."""
    async with LinkProxy(broker.port) as link, client(link.url) as ours:
        heard: asyncio.Queue[Msg] = asyncio.Queue()
        await ours.subscribe("talk", cb=heard.put)
        await link.cut()
        async with asyncio.timeout(SOON_S):
            while ours.is_connected:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        with pytest.raises(errors.Error):
            await ours.publish("talk", b"lost")
        link.heal()
        async with asyncio.timeout(SOON_S):
            while not ours.is_connected:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        await ours.publish("talk", b"after")

        assert (await asyncio.wait_for(heard.get(), SOON_S)).data == b"after"
        assert ours.wire is not None
        assert ours.wire.sent > 0
