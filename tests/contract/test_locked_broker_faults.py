"""A locked broker outlives mistakes in its folder: the former doors hold, it is told once, what is corrected is taken over."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import os
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import nkeys
import pytest
from nats.aio.client import Client
from nats.errors import Error as NatsError
from structlog.testing import capture_logs

from atoll.base.errors import AccessDenied, SettingsError
from atoll.bus.server import LOG_FILES, LogReader
from atoll.bus.streams import stream_plan
from atoll.keys.certificates import broker_certificate, new_authority
from atoll.keys.doors import CONNECTIONS_MAX
from atoll.keys.identity import HeldIdentity
from atoll.keys.rights import Kind
from atoll.keys.roll import KeyFolder
from atoll.local import brokers
from atoll.local.brokers import RoomWatch
from support.locked_brokers import HOST, LockedBroker

pytestmark = pytest.mark.connected
RUN, SOON_S, MIB = "demo", 120.0, 1 << 20


@pytest.fixture
def locked(tmp_path: Path) -> Iterator[LockedBroker]:
    """A locked broker with a learner, who is on its roll for good, and one who is not on it yet."""
    with LockedBroker(tmp_path) as made:
        made.add(RUN, "ada")
        yield made


def another_certificate(keys: KeyFolder) -> None:
    """Replace the certificate before its key, as a person does with two commands."""
    keys.certificate_path.write_text(broker_certificate(new_authority("x"), [HOST]).certificate, encoding="utf-8")


def ended_certificate(keys: KeyFolder) -> None:
    """Put in a certificate that holds no more."""
    ended = broker_certificate(new_authority("x"), [HOST], days=0)
    keys.key_path.write_text(ended.key, encoding="utf-8")
    keys.certificate_path.write_text(ended.certificate, encoding="utf-8")


def a_run_of_two_words(keys: KeyFolder) -> None:
    """Write a run into the roll that is no level of a subject."""
    edited(keys, lambda entries: entries[0].update(run="my run"))


def one_key_for_two(keys: KeyFolder) -> None:
    edited(keys, lambda entries: entries.append({**entries[0], "name": "copy"}))


def damaged(keys: KeyFolder) -> None:
    keys.roll_path.write_text(keys.roll_path.read_text(encoding="utf-8")[:100], encoding="utf-8")


def edited(keys: KeyFolder, change: Callable[[list[dict[str, Any]]], object]) -> None:
    tree = json.loads(keys.roll_path.read_text(encoding="utf-8"))
    learners = [one for one in tree["entries"] if one["kind"] == "learner"]
    others = [one for one in tree["entries"] if one["kind"] != "learner"]
    change(learners)
    keys.roll_path.write_text(json.dumps({"entries": others + learners}), encoding="utf-8")


@pytest.mark.parametrize(
    "mistake", [another_certificate, ended_certificate, a_run_of_two_words, one_key_for_two, damaged]
)
async def test_a_mistake_in_the_folder_changes_nothing_and_is_told_once(
    mistake: Callable[[KeyFolder], None], locked: LockedBroker
) -> None:
    files = (locked.keys.roll_path, locked.keys.certificate_path, locked.keys.key_path)
    before = [(path, path.read_bytes()) for path in files]
    mistake(locked.keys)
    with capture_logs() as logs:
        assert [locked.doors[0].has_changed() for _ in range(3)] == [False] * 3
    assert [line["event"] for line in logs] == ["keys.unreadable"]
    locked.servers[0].restart()
    bus = await locked.bus(RUN, locked.identity(RUN, "ada"))
    await bus.close()
    for path, content in before:
        path.write_bytes(content)
    locked.add(RUN, "newcomer")
    bus = await locked.bus(RUN, locked.identity(RUN, "newcomer"))
    await bus.close()


async def test_a_key_ends_and_a_name_is_revoked_although_the_other_file_is_damaged(locked: LockedBroker) -> None:
    """A roll that cannot be read lets no key live longer; a certificate without its key keeps nobody in."""
    until_s = time.time() + 4.0
    locked.add(RUN, "short", until_s=until_s)
    short, ada = locked.identity(RUN, "short"), locked.identity(RUN, "ada")
    roll = locked.keys.roll_path.read_bytes()
    damaged(locked.keys)
    locked.await_end(until_s)
    with pytest.raises(AccessDenied):
        await locked.bus(RUN, short)
    locked.keys.roll_path.write_bytes(roll)
    another_certificate(locked.keys)
    locked.keys.revoke("ada", RUN, time.time())
    locked.follow()
    with pytest.raises(AccessDenied):
        await locked.bus(RUN, ada)


def test_a_server_that_refuses_its_configuration_goes_on_with_the_former_one(
    locked: LockedBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The refusal is told at once; the former text is put back, so a restart does not end the broker either."""
    door, server = locked.doors[0], locked.servers[0]
    former, pid = door.config.read_text(encoding="utf-8"), server.pid
    with monkeypatch.context() as faulty:
        faulty.setattr("atoll.keys.locked.doors", lambda *_: "accounts { core: { users: [ { nkey: x } ] } }\n")
        locked.keys.add("late", "learner", RUN, time.time())
        assert door.has_changed()
        # Had nobody heard it, the wait would end in `BrokerUnavailable`.
        faulty.setattr("atoll.bus.server.READY_S", SOON_S)
        with pytest.raises(SettingsError, match="goes on with the former one"):
            server.reload()
        with capture_logs() as logs:
            brokers._apply_door(server, door)
        assert [line["event"] for line in logs] == ["broker.door_refused"]
        assert not door.has_changed()
    assert (door.config.read_text(encoding="utf-8"), server.pid) == (former, pid)
    locked.add(RUN, "later")
    assert "Reloaded server configuration" in locked.said()[0]


def test_a_change_within_one_tick_of_the_clock_is_seen(locked: LockedBroker) -> None:
    """Some disks know only seconds: a file that was replaced is another file, whatever its time."""
    seen = locked.keys.roll_path.stat()
    locked.keys.revoke("ada", RUN, time.time())
    os.utime(locked.keys.roll_path, ns=(seen.st_atime_ns, seen.st_mtime_ns))
    assert locked.doors[0].has_changed()


async def test_a_learner_may_read_much_at_once_and_nobody_lets_more_pile_up(locked: LockedBroker) -> None:
    """Eight large blobs together are read over one connection; who asks for more and reads nothing is cut off."""
    locked.add(RUN, "founder", founds=True)
    founder = await locked.bus(RUN, locked.identity(RUN, "founder"))
    await founder.provision(1 << 30)
    stem = founder.subjects.global_stem(0, 0, "n")
    blob = await founder.put_blob(stem, b"x" * (24 * MIB))
    ada = await locked.bus(RUN, locked.identity(RUN, "ada"))
    read = await asyncio.gather(*(ada.get_blob(blob, 24 * MIB) for _ in range(8)))
    assert [len(each) for each in read] == [24 * MIB] * 8
    assert "Slow Consumer" not in locked.said()[0]
    assert ada.stats.reconnects == 0
    lazy = await deaf(locked, "ada")
    ask = json.dumps({"multi_last": [f"{stem}.*"], "batch": 100, "max_bytes": 32 * MIB}).encode()
    inbox = locked.identity(RUN, "ada").credentials().inbox
    lazy.write(f"SUB {inbox}.> 1\r\n".encode())
    for number in range(12):
        subject = f"$JS.API.DIRECT.GET.{stream_plan(RUN)[2].name}"
        lazy.write(f"PUB {subject} {inbox}.{number} {len(ask)}\r\n".encode() + ask + b"\r\n")
    await lazy.drain()
    async with asyncio.timeout(SOON_S):
        while "MaxPending of 67108864 Exceeded" not in locked.said()[0]:  # noqa: ASYNC110  (another process's log sets no event)
            await asyncio.sleep(0.05)
    lazy.close()
    for bus in (founder, ada):
        await bus.close()


@pytest.mark.parametrize(("name", "kind"), [("ada", "learner"), ("eu", "region")])
async def test_one_key_has_so_many_connections_and_no_more(locked: LockedBroker, name: str, kind: Kind) -> None:
    """Enough for two processes of three; the ninth is closed, others enter as before. A region's key opens this door, too."""
    if kind == "region":
        locked.add(RUN, name, kind)
    held = [await deaf(locked, name) for _ in range(CONNECTIONS_MAX)]
    with pytest.raises((AssertionError, OSError)):
        await deaf(locked, name)
    locked.add(RUN, "bob")
    held.append(await deaf(locked, "bob"))
    for each in held:
        each.close()


async def deaf(locked: LockedBroker, name: str) -> asyncio.StreamWriter:
    shown = locked.identity(RUN, name).credentials()
    reader, writer = await asyncio.open_connection(HOST, locked.servers[0].port)
    nonce = json.loads((await reader.readline()).removeprefix(b"INFO "))["nonce"]
    await writer.start_tls(shown.tls(), server_hostname=HOST)
    signed = nkeys.from_seed(bytearray(shown.seed.encode())).sign(nonce.encode())
    told = {"nkey": shown.public, "sig": base64.urlsafe_b64encode(signed).rstrip(b"=").decode(), "verbose": False}
    told |= {"pedantic": False, "lang": "x", "version": "1", "protocol": 1, "headers": True, "no_responders": True}
    writer.write(b"CONNECT " + json.dumps(told).encode() + b"\r\nPING\r\n")
    await writer.drain()
    answer = await reader.readline()
    assert answer == b"PONG\r\n", answer
    writer.transport.pause_reading()  # type: ignore[attr-defined]
    return writer


async def test_what_strangers_call_themselves_restarts_no_server(locked: LockedBroker) -> None:
    server = locked.servers[0]
    room = RoomWatch(server.log_path)
    for _ in range(4):
        with contextlib.suppress(OSError):
            await refused_as(server.url, "no space left on device")
    while "no space left on device" not in locked.said()[0]:  # noqa: ASYNC110  (another process's log sets no event)
        await asyncio.sleep(0.01)
    assert not room.is_back()
    assert f"logfile_max_num: {LOG_FILES}" in (server.store_dir / "nats-server.conf").read_text(encoding="utf-8")


def test_a_question_whether_it_lives_is_no_error(locked: LockedBroker) -> None:
    """The host asks every two seconds, and what it leaves in the log must hide nobody."""
    server = locked.servers[0]
    log = LogReader(server.log_path)
    assert all(server.answers() for _ in range(3))
    locked.add(RUN, "after")
    assert "Reloaded server configuration" in (news := log.news())
    assert "TLS handshake error" not in news


async def test_who_is_revoked_cannot_say_that_the_server_refuses_it(locked: LockedBroker) -> None:
    locked.add(RUN, "newcomer")
    ada = locked.identity(RUN, "ada")
    liar = await named(ada, locked.servers[0].url, "Failed to reload server configuration")
    stop = threading.Event()

    async def lie() -> None:
        with contextlib.suppress(NatsError, ConnectionError):
            while not stop.is_set():
                for _ in range(50):
                    await liar.publish("forbidden", b"")
                await liar.flush()

    lying = asyncio.create_task(lie())
    while "Failed to reload" not in locked.said()[0]:  # noqa: ASYNC110  (another process's log sets no event)
        await asyncio.sleep(0.01)
    locked.keys.revoke("ada", RUN, time.time())
    with capture_logs() as logs:
        assert locked.doors[0].has_changed()
        await asyncio.to_thread(brokers._apply_door, locked.servers[0], locked.doors[0])
    stop.set()
    await asyncio.gather(lying, return_exceptions=True)
    assert [line["event"] for line in logs if line["event"].startswith("broker.")] == []
    assert ada.credentials().public not in locked.doors[0].config.read_text(encoding="utf-8")
    locked.servers[0].restart()
    with pytest.raises(AccessDenied):
        await locked.bus(RUN, ada)


def test_a_door_of_which_the_server_says_nothing_stays_and_is_told_again(
    locked: LockedBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may hold nobody who was let go. One that the server refuses is put back, and tried again after a while."""
    door, server = locked.doors[0], locked.servers[0]
    ada = locked.identity(RUN, "ada").credentials().public
    locked.keys.revoke("ada", RUN, time.time())
    with monkeypatch.context() as silent:
        silent.setattr("atoll.bus.server.READY_S", 0.0)
        assert door.has_changed()
        with capture_logs() as logs:
            brokers._apply_door(server, door)
    assert [line["event"] for line in logs] == ["broker.door_unconfirmed"]
    assert ada not in door.config.read_text(encoding="utf-8")
    assert door.has_changed()
    brokers._apply_door(server, door)
    assert not door.has_changed()
    with monkeypatch.context() as faulty:
        faulty.setattr("atoll.keys.locked.doors", lambda *_: "accounts { core: { users: [ { nkey: x } ] } }\n")
        locked.keys.add("late", "learner", RUN, time.time())
        assert door.has_changed()
        brokers._apply_door(server, door)
        assert not door.has_changed()
        faulty.setattr("atoll.keys.locked.REFUSED_S", 0.0)
        assert door.has_changed()


async def refused_as(url: str, words: str) -> None:
    """Reach a locked broker over TLS as nobody, and call ourselves by these words."""
    host, _, port = url.rpartition("/")[2].rpartition(":")
    anybody = ssl.create_default_context()
    anybody.check_hostname, anybody.verify_mode = False, ssl.CERT_NONE
    reader, writer = await asyncio.open_connection(host, int(port))
    await reader.readline()
    await writer.start_tls(anybody)
    told = json.dumps({"tls_required": True, "name": words, "lang": "x", "version": "1", "nkey": words, "sig": "aa"})
    writer.write(f"CONNECT {told}\r\nPING\r\n".encode())
    await writer.drain()
    await reader.read(4096)
    writer.close()


async def named(identity: HeldIdentity, url: str, words: str) -> Client:
    """Return a connection of an identity that calls itself by these words."""
    known, client = identity.credentials(), Client()

    async def nothing(error: Exception) -> None:
        del error

    await client.connect(
        url, tls=known.tls(), nkeys_seed_str=known.seed, name=words, error_cb=nothing, allow_reconnect=False
    )
    return client
