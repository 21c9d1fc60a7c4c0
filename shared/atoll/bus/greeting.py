"""What a server says first: to every new connection it sends one line, INFO and JSON, before it asks for anything.

So the line tells without an identity whether a server runs, under which name, and what it demands. A server that is frozen
says nothing: the kernel takes the connection, and nobody speaks.
"""

from __future__ import annotations

import contextlib
import json
import socket
import ssl
from typing import Final

LINE_BYTES_MAX: Final = 1 << 16
WAIT_S: Final = 1.0


def heard(host: str, port: int) -> bytes | None:
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
    """Return TLS that checks no certificate, for whoever believes nothing that is said there, and says nothing.

    Not Python's default: that reads all of the system's authorities, which takes fifty times as long, and a host asks its
    server every two seconds.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return context


def greeting(host: str, port: int) -> dict[str, object] | None:
    """Return the INFO of the server there, or None."""
    try:
        said: dict[str, object] = json.loads((heard(host, port) or b"").removeprefix(b"INFO "))
    except (ValueError, RecursionError):
        return None
    return said
