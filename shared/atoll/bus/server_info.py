"""Self-description of a nats-server: to everybody in its greeting, and to its operator in the state of each node.

To every new connection a server sends one line, INFO and JSON, before it asks for anything. So the line tells without an
identity whether a server runs, under which name, and what it demands. A server that is frozen says nothing: the kernel takes
the connection, and nobody speaks.

A nats-server answers `$SYS.REQ.SERVER.PING.STATSZ` in its system account, each server for itself: version, peers, and the tags
that it wears. A locked door lets the account of the operator ask that, under the name `NODES` (`atoll.keys.doors`). So one
question brings an answer of every node that the asked one is connected to; a node that has lost the others is heard only where
it is asked itself.
"""

from __future__ import annotations

import contextlib
import json
import socket
import ssl
from collections.abc import Mapping
from datetime import datetime
from typing import Any, Final

import msgspec

from atoll.base.parsing import parsed
from atoll.bus.interface import NodeStatus

LINE_BYTES_MAX: Final = 1 << 16
WAIT_S: Final = 1.0
NODES: Final = "atoll.nodes"
"""Where the operator asks; no run has it, whose subjects have a third part."""
PING: Final = "$SYS.REQ.SERVER.PING.STATSZ"
SYSTEM: Final = "$SYS"


def first_line(host: str, port: int) -> bytes | None:
    """Return the first line said there within `WAIT_S`, whatever it is; empty in silence, None if nobody could be asked."""
    try:
        with socket.create_connection((host, port), timeout=WAIT_S) as connection:
            line = connection.makefile("rb").readline(LINE_BYTES_MAX)
            if b'"tls_required":true' in line:
                _finish_tls(connection)
            return line
    except TimeoutError:
        return b""
    except OSError:
        return None


def _finish_tls(connection: socket.socket) -> None:
    """Let the server finish its TLS before we leave: it logs each of who does not as an error, and refusals drown in those."""
    with contextlib.suppress(OSError), unchecked_tls().wrap_socket(connection):
        pass


def unchecked_tls() -> ssl.SSLContext:
    """Return TLS that checks no certificate, for a client that believes nothing that is said there, and says nothing.

    Not Python's default: that reads all of the system's authorities, which takes fifty times as long, and a host asks its
    server every two seconds.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return context


def greeting(host: str, port: int) -> dict[str, object] | None:
    """Return the INFO of the server there, or None."""
    try:
        said: dict[str, object] = json.loads((first_line(host, port) or b"").removeprefix(b"INFO "))
    except (ValueError, RecursionError):
        return None
    return said


def parse_node_status(data: bytes) -> NodeStatus | None:
    """Return an answer; None for what is none."""
    try:
        answer = parsed(data, dict[str, Any])
    except msgspec.MsgspecError:
        return None
    server, state = _table(answer.get("server")), _table(answer.get("statsz"))
    name = server.get("name")
    if not isinstance(name, str):
        return None
    routes = state.get("routes")
    peers = {str(_table(route).get("name")) for route in (routes if isinstance(routes, list) else ())}
    tags, connections = server.get("tags"), state.get("connections")
    return NodeStatus(
        name=name,
        version=str(server.get("ver", "")),
        tags=tuple(map(str, tags if isinstance(tags, list) else ())),
        peers=tuple(sorted(peers)),
        connections=connections if isinstance(connections, int) else 0,
        up_s=max(0.0, _time_s(server.get("time")) - _time_s(state.get("start"))),
    )


def _table(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}


def _time_s(value: object) -> float:
    """Return a time that a server has written, to the microsecond; 0 for none."""
    try:
        return datetime.fromisoformat(str(value)).timestamp()
    except ValueError:
        return 0.0
