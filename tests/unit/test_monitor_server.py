"""The monitor's HTTP server and strangers: foreign names, connections that are only held, headers without end."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from atoll.base.clock import SystemClock
from atoll_monitor import http_server
from atoll_monitor.dashboard import VIEWERS_MAX, Feed, RunScene
from atoll_monitor.http_server import (
    CONNECTIONS_MAX,
    HEADERS_BYTES_MAX,
    AllowedHosts,
    allowed_hosts,
    application,
    listening_socket,
    serve,
)
from atoll_monitor.monitored_run import MonitoredRun
from atoll_monitor.process import routes_of

DEADLINE_S = 60.0
STRANGERS = 300
PATHS = ("/", "/metrics", "/healthz", "/data.json", "/events", "/static/page.css", "/nothing")
LOCAL = AllowedHosts(frozenset({"localhost"}), local_only=True)
OPEN = AllowedHosts(frozenset({"localhost", "monitor"}), local_only=False)
Line = tuple[asyncio.StreamReader, asyncio.StreamWriter]


@asynccontextmanager
async def serving(*names: str) -> AsyncIterator[int]:
    clock, stop = SystemClock(), asyncio.Event()
    watched = MonitoredRun("r", clock)
    feed = Feed({"r": RunScene(watched, "r", ("r",))}, clock)
    listening = listening_socket("127.0.0.1", 0)
    app = application(routes_of(watched, feed), allowed_hosts(listening, names))
    tasks = [asyncio.create_task(serve(app, listening, stop)), asyncio.create_task(feed.stop_with(stop))]
    try:
        yield listening.getsockname()[1]
    finally:
        stop.set()
        await asyncio.wait_for(asyncio.gather(*tasks), DEADLINE_S)


async def sent(port: int, data: bytes) -> Line:
    """Return a connection over which something was sent, or as much of it as the other end has taken."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(data)
    with contextlib.suppress(ConnectionError):
        await writer.drain()
    return reader, writer


async def rest(line: Line) -> bytes:
    reader, writer = line
    try:
        return await asyncio.wait_for(reader.read(), DEADLINE_S)
    except ConnectionError:
        return b""
    finally:
        writer.close()


async def asked(port: int, path: str, *headers: str, host: str = "127.0.0.1") -> tuple[int, bytes]:
    told = "".join(f"{each}\r\n" for each in headers)
    line = await sent(port, f"GET {path} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n{told}\r\n".encode())
    head, _, body = (await rest(line)).partition(b"\r\n\r\n")
    return int(head.split()[1]), body


async def answers(port: int) -> None:
    """Fail unless health and metrics are told, by the monitor itself."""
    _, health = await asked(port, "/healthz")
    status, metrics = await asked(port, "/metrics")

    assert json.loads(health)["run"] == "r"
    assert status == 200
    assert b"atoll_" in metrics


@pytest.mark.parametrize("path", PATHS)
async def test_no_path_answers_a_stranger_s_name_for_this_machine(path: str) -> None:
    """A page elsewhere whose name leads here reads nothing, neither the page nor what Prometheus reads."""
    async with serving() as port:
        status, body = await asked(port, path, host="evil.example:80")

    assert status == 421
    assert b"monitor.names" in body


async def test_a_name_that_was_allowed_is_answered() -> None:
    async with serving("monitor") as port:
        found = [await asked(port, "/metrics", host=host) for host in ("monitor", f"Monitor.:{port}", "monitor.evil")]

    assert [status for status, _ in found] == [200, 200, 421]


@pytest.mark.parametrize(
    ("allowed", "host", "admitted"),
    [
        (LOCAL, "127.0.0.1:9464", True),
        (LOCAL, "localhost", True),
        (LOCAL, "LocalHost.:9464", True),
        (LOCAL, "[::1]:9464", True),
        (LOCAL, "10.0.0.7:9464", False),
        (LOCAL, "monitor", False),
        (LOCAL, "", False),
        (LOCAL, "127.0.0.1.evil.example", False),
        (OPEN, "10.0.0.7:9464", True),
        (OPEN, "[2001:db8::1]:9464", True),
        (OPEN, "monitor:9464", True),
        (OPEN, "evil.example:9464", False),
    ],
)
def test_an_address_cannot_be_led_elsewhere_and_a_name_can(allowed: AllowedHosts, host: str, *, admitted: bool) -> None:
    assert allowed.admits(host) is admitted


async def test_strangers_who_send_half_a_request_keep_nobody_out() -> None:
    """Each has a place while there are some; then the one that has waited longest loses it to a newcomer."""
    async with serving() as port:
        strangers = [await sent(port, b"GET / HTTP/1.1\r\nHost: 127") for _ in range(STRANGERS)]
        await answers(port)
        first = await rest(strangers[0])
        for _, writer in strangers:
            writer.close()

    assert CONNECTIONS_MAX < STRANGERS
    assert first == b""


async def test_strangers_who_fetch_no_answer_keep_nobody_out() -> None:
    async with serving() as port:
        request = b"GET /events HTTP/1.1\r\nHost: localhost\r\n\r\n"
        strangers = [await sent(port, request) for _ in range(STRANGERS)]
        await answers(port)
        for _, writer in strangers:
            writer.close()

    assert VIEWERS_MAX < CONNECTIONS_MAX


@pytest.mark.parametrize(
    "half",
    [
        b"",
        b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\n",
        b"POST /healthz HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 9\r\n\r\n",
        b"GET /events HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 9\r\n\r\n",
        b"GET /healthz HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\nGET",
    ],
)
async def test_a_request_that_is_never_whole_is_closed(monkeypatch: pytest.MonkeyPatch, half: bytes) -> None:
    monkeypatch.setattr(http_server, "REQUEST_S", 0.2)
    async with serving() as port:
        await rest(await sent(port, half))


async def test_an_endless_header_is_refused() -> None:
    async with serving() as port:
        line = await sent(port, b"GET /healthz HTTP/1.1\r\nHost: 127.0.0.1\r\nX: " + b"x" * (4 * HEADERS_BYTES_MAX))
        told = await rest(line)
        await answers(port)

    assert told == b"" or told.startswith(b"HTTP/1.1 400 ")


@pytest.mark.parametrize(
    ("accept", "kind"),
    [
        ("application/openmetrics-text; version=x", b"# HELP"),
        ("application/openmetrics-text;version=1.x.2;q=1", b"# HELP"),
        ("application/openmetrics-text;version=", b"# HELP"),
        ("text/plain; version=x, application/openmetrics-text;version=1.0.0", b"# EOF"),
        ("application/openmetrics-text;version=99999;q=1", b"# HELP"),
        ("application/openmetrics-text;version=1.0.0;q=0.5,text/plain;version=0.0.4;q=0.2,*/*;q=0.1", b"# EOF"),
        (",;=,;version=;=", b"# HELP"),
    ],
)
async def test_a_version_that_is_none_is_answered_as_if_nobody_had_asked_for_it(accept: str, kind: bytes) -> None:
    async with serving() as port:
        status, body = await asked(port, "/metrics", f"Accept: {accept}")

    assert status == 200
    assert kind in body


def test_a_monitor_that_serves_others_answers_to_its_machine_s_name() -> None:
    with listening_socket("0.0.0.0", 0) as everywhere, listening_socket("127.0.0.1", 0) as here:  # noqa: S104  (the case)
        found = [allowed_hosts(each).admits(f"{socket.gethostname()}:9464") for each in (everywhere, here)]

    assert found == [True, False]
