"""The page over a real server: its files and policy, frames as events, a browser that fetches nothing, a hundred that do."""

from __future__ import annotations

import asyncio
import json
import re
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from atoll.base.clock import SystemClock
from atoll_monitor import dashboard as feeds
from atoll_monitor import http_server
from atoll_monitor.dashboard import VIEWERS_MAX, Feed, RunScene, page_routes
from atoll_monitor.http_server import allowed_hosts, application, listening_socket, serve
from atoll_monitor.monitored_run import MonitoredRun
from support.events import event

DEADLINE_S = 60.0


class Server:
    """A page of one run over a real socket."""

    def __init__(self) -> None:
        clock = SystemClock()
        self.watched = MonitoredRun("r", clock)
        self.scene = RunScene(self.watched, "r", ("r",))
        self.feed = Feed({"r": self.scene}, clock)
        self.stop = asyncio.Event()
        self.listening = listening_socket("127.0.0.1", 0)
        self.port = self.listening.getsockname()[1]
        self.app = application(page_routes(self.feed), allowed_hosts(self.listening))

    def commit(self, version: int) -> None:
        fields = {"fragment": 0, "version": version, "contributors": [], "end": "all answered"}
        self.watched.view.on_event(event("round", "shard-0", 1000.0 + version, **fields))

    async def get(self, path: str) -> tuple[int, dict[str, str], bytes]:
        reader, writer = await self.connect(path)
        head, _, body = (await asyncio.wait_for(reader.read(), DEADLINE_S)).partition(b"\r\n\r\n")
        writer.close()
        return *parts_of(head), body

    async def connect(self, path: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        writer.write(f"GET {path} HTTP/1.1\r\nHost: 127.0.0.1:{self.port}\r\nConnection: close\r\n\r\n".encode())
        return reader, writer


def parts_of(head: bytes) -> tuple[int, dict[str, str]]:
    first, *lines = head.decode().split("\r\n")
    return int(first.split()[1]), {name.lower(): value for name, _, value in (line.partition(": ") for line in lines)}


@asynccontextmanager
async def serving() -> AsyncIterator[Server]:
    server = Server()
    tasks = [
        asyncio.create_task(serve(server.app, server.listening, server.stop)),
        asyncio.create_task(server.feed.stop_with(server.stop)),
    ]
    making = asyncio.create_task(server.feed.run())
    try:
        yield server
    finally:
        server.stop.set()
        making.cancel()
        await asyncio.wait_for(asyncio.gather(*tasks), DEADLINE_S)


async def until(found: Callable[[], bool]) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while not found():  # noqa: ASYNC110  (the server tells nobody of its viewers)
            await asyncio.sleep(0.01)


async def frame(reader: asyncio.StreamReader, kind: str) -> dict[str, Any]:
    async with asyncio.timeout(DEADLINE_S):
        while (line := await reader.readline()) != f"event: {kind}\n".encode():
            assert line, "the stream ended"
        told: dict[str, Any] = json.loads((await reader.readline()).removeprefix(b"data: "))
        return told


async def test_the_page_loads_nothing_from_elsewhere() -> None:
    async with serving() as server:
        status, headers, body = await server.get("/")
        named = re.findall(r'(?:src|href)="(/?[^"#]+)"', body.decode())
        answers = {path: (await server.get(f"/{path.lstrip('/')}"))[0] for path in named}

    assert status == 200
    assert "default-src 'none'" in headers["content-security-policy"]
    assert "unsafe" not in headers["content-security-policy"]
    assert headers["x-content-type-options"] == "nosniff"
    assert len(answers) >= 2
    assert set(answers.values()) == {200}


async def test_frames_come_as_the_run_goes_on() -> None:
    """A viewer has the state at once, and later ones by themselves."""
    async with serving() as server:
        server.commit(1)
        reader, writer = await server.connect("/events?run=r")
        first = await frame(reader, "state")
        server.commit(2)
        second = await frame(reader, "state")
        writer.close()
        await until(lambda: not len(server.feed))

    assert (first["commits"], second["commits"]) == (1, 2)


@pytest.mark.second_tier
async def test_a_browser_that_fetches_nothing_holds_nobody_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Frames replace each other in its mailbox, others go on seeing every one, and in the end it is sent away."""
    monkeypatch.setattr(feeds, "FRAME_S", 0.01)
    monkeypatch.setattr(http_server, "STALLED_S", 1.0)
    async with serving() as server:
        for version in range(1, 400):
            server.commit(version)  # a frame of many rounds fills the buffers between the two ends soon
        stuck = socket.create_connection(("127.0.0.1", server.port))
        stuck.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        stuck.sendall(b"GET /events HTTP/1.1\r\nHost: localhost\r\n\r\n")
        await until(lambda: len(server.feed) > 0)
        [mailbox] = server.feed._viewers
        await until(lambda: mailbox.missed > 0)
        reader, writer = await server.connect("/events")
        seen = []
        for version in range(400, 420):
            server.commit(version)
            seen.append((await frame(reader, "state"))["commits"])
        await until(lambda: len(server.feed) == 1)
        stuck.close()
        writer.close()

    assert seen == sorted(seen)
    assert seen[-1] > 410, "they go on while another is stuck"
    assert len(mailbox._frames) <= 3, "as many frames wait as there are kinds"


async def test_a_hundred_look_and_one_too_many_is_told_to_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """All hundred see the same run move; beyond the bound the answer is 503 and when to ask again."""
    async with serving() as server:
        server.commit(1)
        lines = [await server.connect("/events") for _ in range(100)]
        firsts = [await frame(reader, "state") for reader, _ in lines]
        server.commit(2)
        for reader, _ in lines:
            while (await frame(reader, "state"))["commits"] < 2:
                pass  # a frame of before was on its way
        monkeypatch.setattr(feeds, "VIEWERS_MAX", len(server.feed))
        status, headers, body = await server.get("/events")
        for _, writer in lines:
            writer.close()

    assert VIEWERS_MAX > 100
    assert {first["commits"] for first in firsts} == {1}
    assert (status, headers["retry-after"]) == (503, "5")
    assert b"too many look" in body


async def test_a_request_for_the_numbers_has_fates_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """It counts as a look for a while, and its answer waits for the first ones, but not for ever."""
    async with serving() as server:
        monkeypatch.setattr(RunScene, "lacks_fates", property(lambda scene: scene.fates is None))
        assert not server.feed.is_looked_at
        asking = asyncio.create_task(server.get("/data.json"))
        await until(lambda: server.feed.is_looked_at)
        server.scene.fates = {"merged": 7}
        _, _, told = await asking
        server.scene.fates = None
        monkeypatch.setattr(feeds, "FATES_WAIT_S", 0.01)
        _, _, later = await server.get("/data.json")
        monkeypatch.setattr(feeds, "ASKED_S", 0.0)

        assert json.loads(told)["state"]["fates"] == {"merged": 7}
        assert json.loads(later)["state"]["fates"] is None
        assert not server.feed.is_looked_at
