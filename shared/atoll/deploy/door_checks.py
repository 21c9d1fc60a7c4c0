"""What a doctor finds out from outside: whether each address of the broker is there, and whose certificate it shows.

Each step explains the failure of the next: a name that nobody knows, a port that nobody has, a server that says nothing or is
none of ours, a certificate for other names, ended, or of another authority. So each is asked by itself, before any client.
"""

from __future__ import annotations

import json
import socket
import ssl
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final
from urllib.parse import urlsplit

from atoll.base.units import DAY_S, as_bytes, as_time
from atoll.bus.addresses import PORT, addresses
from atoll.bus.greeting import LINE_BYTES_MAX, unchecked_tls
from atoll.bus.nats.admission import OTHER_TIME
from atoll.bus.nats.provision import HEADROOM_BYTES, VERSION_MIN
from atoll.deploy.findings import Finding, as_date
from atoll.keys.certificates import WARN_DAYS, begins_at_s, ends_at_s, hosts_of, pin
from atoll.wire.limits import CHUNK_BYTES

WAIT_S: Final = 4.0
_OTHER_NAME: Final = (62, 64)
"""What OpenSSL calls a certificate of another name, and of another address."""


@dataclass(frozen=True, slots=True)
class ExpectedDoor:
    """What the door must be like.

    Attributes:
        authority: whose certificate we believe, as PEM; empty for an open door.
        certificate: the one that is to be shown, as PEM; empty if that is not known.
        now_s: the time, by this machine's clock.
        ours: whether the door is that of the seat itself, whose broker need not run yet.
    """

    authority: str
    certificate: str
    now_s: float
    ours: bool = False


def doors_of(url: str, expected: ExpectedDoor) -> tuple[list[Finding], int]:
    """Return the findings of all addresses of a broker, and how many of them can be used."""
    findings: list[Finding] = []
    greetings: list[dict[str, Any]] = []
    usable = 0
    for address in addresses(url):
        found = list(_door(address, expected, greetings))
        grades = {finding.grade for finding in found}
        usable += "ok" in grades and "FAIL" not in grades
        findings += found
    for name, what in (("version", "versions of nats-server"), ("max_payload", "bounds on a message (max_payload)")):
        if len(values := {str(told.get(name)) for told in greetings}) > 1:
            todo = "give all nodes the same"
            findings.append(Finding("note", "nodes", f"different {what}: {', '.join(sorted(values))}", todo))
    return findings, usable


def _door(address: str, expected: ExpectedDoor, greetings: list[dict[str, Any]]) -> Iterator[Finding]:
    parts = urlsplit(address)
    host, port = parts.hostname or "", parts.port or PORT
    about = f"{host}:{port}"
    try:
        connection = socket.create_connection((host, port), timeout=WAIT_S)
    except socket.gaierror as error:
        unknown = error.errno in (socket.EAI_NONAME, getattr(socket, "EAI_NODATA", socket.EAI_NONAME))
        todo = (
            "correct the host in broker.url, or its name server" if unknown else "see whether the name server answers"
        )
        yield Finding("FAIL", about, f"no name server knows {host}" if unknown else f"{host}: {error.strerror}", todo)
        return
    except ConnectionRefusedError:
        if expected.ours:
            todo = "start it, and look again: then its door and its link are examined, too"
            yield Finding("note", about, "nobody listens on this port: the broker of this seat does not run yet", todo)
            return
        yield Finding("FAIL", about, "nobody listens on this port", "start the broker there, or correct the port")
        return
    except OSError as error:
        why = "no answer" if isinstance(error, TimeoutError) else str(error.strerror or error)
        yield Finding("FAIL", about, why, f"let outbound TCP to port {port} through, and see whether the machine is up")
        return
    with connection:
        told = _greeting(connection)
        if told is None:
            todo = "see whether the server is frozen, or something else has this port"
            yield Finding("FAIL", about, "it is connected and does not greet as a nats-server does", todo)
            return
        greetings.append(told)
        yield from _greeted(about, told)
        if told.get("tls_required"):
            yield from _certificate(about, host, connection, expected)
        elif expected.authority:
            yield Finding("FAIL", about, "the server offers no TLS, and we have an identity", "start it with --keys")


def _greeting(connection: socket.socket) -> dict[str, Any] | None:
    try:
        line = connection.makefile("rb", buffering=0).readline(LINE_BYTES_MAX)
        told = json.loads(line.removeprefix(b"INFO "))
    except (OSError, ValueError, RecursionError):
        return None
    return told if isinstance(told, dict) and "server_id" in told else None


def _greeted(about: str, told: dict[str, Any]) -> Iterator[Finding]:
    """Yield what the greeting says: the server's version, and the largest message that it takes."""
    version, least = str(told.get("version", "")), ".".join(map(str, VERSION_MIN))
    numbers = tuple(int(part) for part in version.split(".")[:2] if part.isdecimal())
    if numbers < VERSION_MIN:
        yield Finding("FAIL", about, f"nats-server {version} is too old", f"upgrade to {least} or later")
    else:
        node = f", node {told['server_name']} of cluster {told['cluster']}" if told.get("cluster") else ""
        yield Finding("ok", about, f"nats-server {version}{node}")
    needed, taken = CHUNK_BYTES + HEADROOM_BYTES, told.get("max_payload")
    if not isinstance(taken, int) or taken < needed:
        what = f"it takes messages of {taken} bytes at most, and chunks need {needed}"
        yield Finding("FAIL", about, what, "set max_payload: 4MB in the broker's configuration, on every server")
    else:
        yield Finding("ok", about, f"messages of up to {as_bytes(taken)}")


def _certificate(about: str, host: str, connection: socket.socket, expected: ExpectedDoor) -> Iterator[Finding]:
    """Yield what is wrong with the certificate that is shown, or for how long it holds."""
    try:
        with unchecked_tls().wrap_socket(connection, server_hostname=host) as encrypted:
            shown = ssl.DER_cert_to_PEM_cert(encrypted.getpeercert(binary_form=True) or b"")
    except OSError as error:
        yield Finding(
            "FAIL", about, f"no TLS comes about: {error}", "see whether something on the way answers in its place"
        )
        return
    ends_s, names = ends_at_s(shown), hosts_of(shown)
    until, renew = _day(ends_s), "make another (`atoll keys certificate`), and bring it to every node"
    look = f"look at this machine's clock: it says {as_date(expected.now_s)}"
    if expected.now_s >= ends_s:
        yield Finding("FAIL", about, f"its certificate ended on {until}", f"{look}; if that is right, {renew}")
        return
    if expected.now_s < begins_at_s(shown):
        yield Finding("FAIL", about, f"its certificate holds only from {as_date(begins_at_s(shown))} on", look)
        return
    if expected.certificate and pin(expected.certificate) != pin(shown):
        what = "it shows another certificate than the one in the folder of keys"
        yield Finding(
            "FAIL", about, what, "bring services/broker of the hub to every node; if it was not you, mind who answers"
        )
    refused = _refused(host, int(about.rpartition(":")[2]), expected.authority)
    if isinstance(refused, ssl.SSLCertVerificationError) and refused.verify_code in _OTHER_NAME:
        what = f"its certificate is not for {host}, but for {', '.join(names) or 'nobody'}"
        yield Finding("FAIL", about, what, f"{renew}, or use one of these names")
    elif refused is not None:
        yield Finding("FAIL", about, *_disbelieved(refused, look))
    elif not expected.authority:
        yield Finding("FAIL", about, "it asks for an identity, and we have none", "set broker.identity")
    elif ends_s - expected.now_s < WARN_DAYS * DAY_S:
        yield Finding("note", about, f"its certificate ends on {until}, in {as_time(ends_s - expected.now_s)}", renew)
    else:
        yield Finding("ok", about, f"its certificate is for {host} and holds until {until}")


def _disbelieved(refused: OSError, look: str) -> tuple[str, str]:
    """Return why a certificate for the right host is not believed, and what to do; `look` is what a wrong clock needs."""
    if not isinstance(refused, ssl.SSLCertVerificationError):
        return f"no TLS comes about: {refused}", "try again"
    if refused.verify_code in OTHER_TIME:
        return f"its certificate, or its authority's, does not hold at this time: {refused.verify_message}", look
    return (
        f"its certificate is of another authority than our identity's: {refused.verify_message}",
        "take the identity that this broker's operator made; otherwise this is another broker, or somebody in between",
    )


def _day(at_s: float) -> str:
    return datetime.fromtimestamp(at_s, UTC).strftime("%Y-%m-%d")


def _refused(host: str, port: int, authority: str) -> OSError | None:
    """Return why who trusts this authority does not believe the certificate, by a second connection; None if it does."""
    if not authority:
        return None
    try:
        with socket.create_connection((host, port), timeout=WAIT_S) as connection:
            _greeting(connection)
            ssl.create_default_context(cadata=authority).wrap_socket(connection, server_hostname=host).close()
    except OSError as error:
        return error
    return None
