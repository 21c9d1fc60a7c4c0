"""The names to which the monitor answers: whoever asks by another one is turned away, whatever the path.

A stranger's page can lead a name of the stranger's to this machine (DNS rebinding). A browser then takes the monitor for that
page's own server and lets the page read every answer. The browser still sends the stranger's name as `Host`, and by it the
request is told. An address in place of a name cannot be led elsewhere, so a monitor that serves other machines answers to any.
"""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Iterable
from dataclasses import dataclass

from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Receive, Scope, Send

MISDIRECTED = 421
REFUSAL = "this monitor does not answer to that name: ask it by its address, or add the name to monitor.names\n"


@dataclass(frozen=True, slots=True)
class AllowedHosts:
    """What may stand in `Host`: these names, and addresses; with `local_only` those of this machine's loopback alone."""

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
        """Wrap an application."""
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
