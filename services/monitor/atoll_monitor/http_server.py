"""HTTP server of the monitor: its application, `/metrics` and `/healthz`, and the bounds on names and connections.

An application is made of a list of routes, and a page adds its own (`process.routes_of`). Everything runs in the monitor's
event loop. Signals belong to the process: the server stops when its task is cancelled or its event is set. Every route is
checked alike, by the `Host` that a request names (`AllowedHosts`) and by how long its connection waits (`BoundedConnection`).
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import re
import socket
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import uvicorn
from prometheus_client import CollectorRegistry
from prometheus_client.core import Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector
from starlette.applications import Starlette
from starlette.datastructures import MutableHeaders
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import BaseRoute, Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from atoll.base.errors import SettingsError
from atoll.base.logs import get
from atoll_monitor.metrics import families
from atoll_monitor.monitored_run import MonitoredRun

log = get(__name__)

GRACE_S: Final = 2
BACKLOG: Final = 128
VERSION: Final = re.compile(r";\s*version=")
NUMBERED: Final = re.compile(r";\s*version=\d{1,4}(\.\d{1,4}){0,3}\s*(;|$)")
MISDIRECTED = 421
REFUSAL = "this monitor does not answer to that name: ask it by its address, or add the name to monitor.names\n"
CONNECTIONS_MAX: Final = 256
REQUEST_S: Final = 10.0
STALLED_S: Final = 60.0
HEADERS_BYTES_MAX: Final = 16 << 10


class QuietServer(uvicorn.Server):
    """A server that leaves signals to its process."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Capture none."""
        yield


class AnswerHeaders:
    """Headers that each answer gets; it holds nothing back, so endless answers pass."""

    def __init__(self, app: ASGIApp, headers: Mapping[str, str]) -> None:
        self._app, self._headers = app, headers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(self._headers)
            await send(message)

        await self._app(scope, receive, send_with_headers)


def application(routes: Sequence[BaseRoute], allowed: AllowedHosts) -> Starlette:
    """Return the application that answers on these routes, to requests by an allowed name."""
    # No browser is to guess what an answer is.
    headers = Middleware(AnswerHeaders, {"X-Content-Type-Options": "nosniff"})
    return Starlette(routes=list(routes), middleware=[headers, Middleware(HostCheck, allowed)])


def listening_socket(host: str, port: int) -> socket.socket:
    """Return a listening socket; port 0 is a free one.

    Raises:
        SettingsError: the address is not ours, or the port is taken or not allowed.
    """
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((host, port), family=family, backlog=BACKLOG)
    except (OSError, ValueError) as error:  # ValueError: no name, as with an empty label
        raise SettingsError(
            "the monitor cannot serve at this address",
            got=f"{host}:{port} ({getattr(error, 'strerror', None) or error})",
            allowed="an address of this machine and a free port; 0 takes any free one",
            todo="set monitor.host and monitor.port (--host, --port)",
        ) from error


def url_of(listening: socket.socket) -> str:
    """Return the address of the server, as a browser takes it."""
    host, port = listening.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


async def serve(app: Starlette, listening: socket.socket, stop: asyncio.Event) -> None:
    """Serve until `stop`; connections that are still open then have `GRACE_S` seconds."""
    config = uvicorn.Config(
        app,
        http=BoundedConnection,
        ws="none",
        log_config=None,
        log_level="error",  # of what strangers send it says nothing
        access_log=False,
        lifespan="off",
        server_header=False,
        h11_max_incomplete_event_size=HEADERS_BYTES_MAX,
        limit_concurrency=CONNECTIONS_MAX + 1,  # the newest counts, too; `BoundedConnection` makes room for it
        timeout_graceful_shutdown=GRACE_S,
    )
    server = QuietServer(config)
    serving = asyncio.create_task(server.serve(sockets=[listening]))
    stopping = asyncio.create_task(stop.wait())
    try:
        await asyncio.wait({serving, stopping}, return_when=asyncio.FIRST_COMPLETED)
        server.should_exit = True
        await serving
    finally:
        stopping.cancel()
        serving.cancel()


class RunCollector(Collector):
    """Makes the metrics of a run when they are asked for."""

    def __init__(self, watched: MonitoredRun) -> None:
        self._watched = watched

    def collect(self) -> Iterable[Metric]:
        """Return the metrics as they are now."""
        return families(self._watched)


def numbered_formats(accept: str) -> str:
    """Return an `Accept` without the formats whose version is no number: prometheus_client compares versions unseen."""
    return ",".join(each for each in accept.split(",") if not VERSION.search(each) or NUMBERED.search(each))


def plain_routes(watched: MonitoredRun) -> list[BaseRoute]:
    """Return the routes that need no page."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(RunCollector(watched))

    async def metrics(request: Request) -> Response:
        encode, content_type = choose_encoder(numbered_formats(request.headers.get("accept", "")))
        return Response(encode(registry), headers={"Content-Type": content_type})

    async def healthz(_: Request) -> Response:
        """Answer 200 while the broker answers the monitor, else 503: metrics are then as old as the outage."""
        answer = {"run": watched.run, "broker": watched.connected, "founded": watched.record is not None}
        return JSONResponse(answer, status_code=200 if watched.connected else 503)

    return [Route("/metrics", metrics), Route("/healthz", healthz)]


@dataclass(frozen=True, slots=True)
class AllowedHosts:
    """Names and addresses that may stand in `Host`; with `local_only` the addresses of this machine's loopback alone.

    A stranger's page can lead a name of the stranger's to this machine (DNS rebinding). A browser then takes the monitor for
    that page's own server and lets the page read every answer, but still sends the stranger's name as `Host`. An address in
    place of a name cannot be led elsewhere, so a monitor that serves other machines answers to any.
    """

    names: frozenset[str]
    local_only: bool

    def admits(self, header: str) -> bool:
        """Return whether a `Host` (a name or an address, with or without a port) is allowed."""
        name = _without_port(header)
        try:
            address = ipaddress.ip_address(name)
        except ValueError:
            return _plain(name) in self.names
        return address.is_loopback or not self.local_only


def allowed_hosts(listening: socket.socket, names: Iterable[str] = ()) -> AllowedHosts:
    """Return what a monitor answers to: `names`, `localhost`, and to other machines also the name of its own."""
    local_only = ipaddress.ip_address(listening.getsockname()[0]).is_loopback
    own = () if local_only else (socket.gethostname(), socket.gethostname().partition(".")[0])
    return AllowedHosts(frozenset(_plain(name) for name in ("localhost", *own, *names)), local_only)


class HostCheck:
    """Answers 421 to a request by a foreign name, and leaves every other to the application."""

    def __init__(self, app: ASGIApp, allowed: AllowedHosts) -> None:
        self._app = app
        self._allowed = allowed

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        answering = self._app
        if scope["type"] == "http" and not self._allowed.admits(Request(scope).headers.get("host", "")):
            answering = PlainTextResponse(REFUSAL, status_code=MISDIRECTED)
        await answering(scope, receive, send)


def _without_port(header: str) -> str:
    if header.startswith("["):
        return header[1:].partition("]")[0]
    return header.partition(":")[0]


def _plain(name: str) -> str:
    """Return a name as names are compared: case does not count, nor the dot that ends a full name."""
    return name.lower().removesuffix(".")


class BoundedConnection(H11Protocol):
    """uvicorn's connection, which waits for its other end within bounds.

    A connection holds a place in one of two ways: the server works on an answer, or it waits for the other end, which sends no
    whole request or fetches no answer. Every wait is bounded:

        no whole request within `REQUEST_S` of the connection, or of the answer before    closed
        nothing fetched of an answer for `STALLED_S` while the buffers are full           closed
        more than `CONNECTIONS_MAX` connections                                           the longest wait of all is closed

    By the last rule strangers who hold connections keep nobody out: a whole request comes with its connection, while theirs
    waits. uvicorn's own bounds count connections and refuse newcomers, which is what such a stranger wants. h11 bounds headers.
    """

    def __init__(self, *given: Any, **named: Any) -> None:  # noqa: ANN401  (as uvicorn makes it)
        super().__init__(*given, **named)
        self._waiting_since_s: float | None = None
        self._end: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn's
        """Wait for a request, and make room for it."""
        super().connection_made(transport)
        self._wait()
        if len(self.connections) > CONNECTIONS_MAX:
            self._close_longest_wait()

    def connection_lost(self, exc: Exception | None) -> None:
        """Wait no more."""
        self._work()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Take a part of a request; the wait ends with the whole of it."""
        super().data_received(data)
        if self._is_answering():
            self._work()

    def on_response_complete(self) -> None:
        """Wait until the answer is fetched and the next request is here, unless it is already."""
        super().on_response_complete()
        if not self._is_answering():
            self._wait()

    def pause_writing(self) -> None:
        """Wait until the other end has fetched what is in the buffers."""
        super().pause_writing()
        self._wait()

    def resume_writing(self) -> None:
        """Go on with the answer; if this was all of it, wait for the rest of the buffers and for the next request."""
        super().resume_writing()
        if self._is_answering():
            self._work()
        else:
            self._wait()

    def _is_answering(self) -> bool:
        return self.cycle is not None and not self.cycle.more_body and not self.cycle.response_complete

    def _wait(self) -> None:
        self._work()
        self._waiting_since_s = self.loop.time()
        bound_s = STALLED_S if self.transport.get_write_buffer_size() else REQUEST_S
        self._end = self.loop.call_later(bound_s, self._give_up)

    def _work(self) -> None:
        self._waiting_since_s = None
        if self._end is not None:
            self._end.cancel()
            self._end = None

    def _give_up(self) -> None:
        """Close at once: what is in the buffers is dropped, because closing in peace would wait for the other end again."""
        if self._is_answering():
            log.info("viewer.stalled", path=self.scope["path"])
        # Counted no more from here on: the loop tells of the end later, and newcomers are counted before that.
        self.connections.discard(self)
        self.transport.abort()

    def _close_longest_wait(self) -> None:
        waiting = [
            (each._waiting_since_s, each)  # noqa: SLF001  (ours)
            for each in self.connections
            if isinstance(each, BoundedConnection) and each is not self and each._waiting_since_s is not None  # noqa: SLF001
        ]
        if waiting:
            min(waiting, key=lambda one: one[0])[1]._give_up()  # noqa: SLF001  (ours)
