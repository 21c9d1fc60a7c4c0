"""The monitor's HTTP server: an application made of a list of routes, and uvicorn on a socket that is open before it begins.

Whoever adds a page adds routes to that list (`atoll_monitor.routes`, `process.routes_of`). Everything runs in the event loop
of the monitor. Signals are the process's, not the server's: it stops when its task is told to. Every route has the same checks:
who asks by a foreign name is turned away (`hosts`), and who only holds a connection is closed (`connections`).
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Iterator, Sequence
from typing import Final

import uvicorn
from starlette.applications import Starlette
from starlette.datastructures import MutableHeaders
from starlette.middleware import Middleware
from starlette.routing import BaseRoute
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from atoll.base.errors import SettingsError
from atoll_monitor.connections import CONNECTIONS_MAX, HEADERS_BYTES_MAX, BoundedConnection
from atoll_monitor.hosts import AllowedHosts, HostCheck

GRACE_S: Final = 2
BACKLOG: Final = 128


class QuietServer(uvicorn.Server):
    """A server that leaves signals to its process."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Capture none."""
        yield


class CarefulHeaders:
    """Adds what every answer should say; it holds nothing back, so endless answers pass."""

    def __init__(self, app: ASGIApp) -> None:
        """Wrap an application."""
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer, and let no browser guess what an answer is."""

        async def told(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).setdefault("X-Content-Type-Options", "nosniff")
            await send(message)

        await self._app(scope, receive, told)


def application(routes: Sequence[BaseRoute], allowed: AllowedHosts) -> Starlette:
    """Return the application that answers on these routes, to who asks by an allowed name."""
    return Starlette(routes=list(routes), middleware=[Middleware(CarefulHeaders), Middleware(HostCheck, allowed)])


def opened_socket(host: str, port: int) -> socket.socket:
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
        limit_concurrency=CONNECTIONS_MAX + 1,  # the newest counts, too; `connections` makes room for it
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
