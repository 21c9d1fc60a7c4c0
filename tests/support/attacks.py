"""What a hostile peer sends: messages no correct peer sends, and a connection that sends them as fast as it can.

A peer that has no account, or a broken one, can publish on any subject of a run. `attacks` lists what once ended a run, stopped
its commits or filled its memory; tests send each of them once, the live benchmark sends them for minutes.
"""

from __future__ import annotations

import itertools
import json
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any, Final, NamedTuple
from urllib.parse import urlsplit

from atoll.wire.messages import RunRecord

DEEP = 1100
ABSURD = 1 << 53
STRANGERS = 10_000
BURST_BYTES = 1 << 16


NONE: Final = MappingProxyType[str, str]({})


class HostileMessage(NamedTuple):
    """One message: its subject, its payload, and the headers that come with it, or a header block of any bytes in their place.

    Bytes of a subject that are no text are written as `surrogateescape` reads them.
    """

    subject: str
    data: bytes
    headers: Mapping[str, str] = NONE
    block: bytes = b""


Attack = Callable[[RunRecord], Iterator[HostileMessage]]


def as_json(**fields: Any) -> bytes:  # noqa: ANN401  (any JSON)
    return json.dumps({**fields, "schema": 1}).encode()


def beat(run: RunRecord, learner: str, **changes: Any) -> bytes:  # noqa: ANN401
    fields: dict[str, Any] = {
        "learner": learner,
        "incarnation": 1,
        "run_nonce": run.nonce,
        "state": "training",
        "at_s": 0.0,
        "step": 10,
        "step_s": 0.1,
        "tokens": 1000,
        "tokens_per_s": 100.0,
        "loss": 1.0,
        "pushed": 0,
        "superseded": 0,
    }
    return as_json(**(fields | changes))


def manifest(run: RunRecord, learner: str, **changes: Any) -> HostileMessage:  # noqa: ANN401
    """Return a manifest of fragment 0, as a member's would be, on its subject."""
    fields: dict[str, Any] = {
        "learner": learner,
        "incarnation": 1,
        "fragment": 0,
        "push": 1,
        "base_version": 0,
        "tokens": 1000,
        "steps": 10,
        "trained_tokens": 1000,
        "loss": 1.0,
        "norms": [1.0],
        "layout": run.layout.fingerprint,
        "run_nonce": run.nonce,
        "blob": {
            "stem": run.subjects.contribution_stem(learner, 0, 1, 1, "0" * 16),
            "chunks": 1,
            "size_bytes": 100,
            "digest": "0" * 32,
        },
    }
    return HostileMessage(run.subjects.contribution(0, 0, learner), as_json(**(fields | changes)))


def deep_json(run: RunRecord) -> Iterator[HostileMessage]:
    """JSON that nests deeper than a parser's stack, on every subject, bare and inside an unknown field."""
    s, nested = run.subjects, b"[" * DEEP + b"]" * DEEP
    for body in (nested, b'{"schema":1,"x":' + nested + b"}"):
        for subject in (s.beat("x"), s.call(0), s.control("all"), s.presence("x"), s.contribution(0, 0, "x")):
            yield HostileMessage(subject, body)
        yield HostileMessage(s.tap("gl.head.0"), b"", {"Atoll-Info": body.decode()})


def fat_heartbeats(run: RunRecord) -> Iterator[HostileMessage]:
    """Heartbeats with more tokens than there are."""
    for number, tokens in enumerate((ABSURD, ABSURD, 1 << 48, 1 << 48)):
        yield HostileMessage(
            run.subjects.beat(f"fat{number}"), beat(run, f"fat{number}", tokens=tokens, run_tokens=tokens)
        )


def slow_ghosts(run: RunRecord) -> Iterator[HostileMessage]:
    """Heartbeats of learners whose steps take for ever: they would take the median, and be waited for."""
    for number in range(4):
        yield HostileMessage(run.subjects.beat(f"ghost{number}"), beat(run, f"ghost{number}", step_s=1e12))


def distinct_manifests(run: RunRecord) -> Iterator[HostileMessage]:
    """Manifests of as many learners as there are names."""
    for number in itertools.cycle(range(STRANGERS)):
        yield manifest(run, f"fake{number}")


def wildcard_manifest(run: RunRecord) -> Iterator[HostileMessage]:
    """A manifest whose learner covers everybody's chunks."""
    for learner in ("*", ">", "a.*"):
        yield manifest(run, learner)


def junk_manifests(run: RunRecord) -> Iterator[HostileMessage]:
    """Bytes that are no manifest, under as many names as there are."""
    for number in itertools.cycle(range(STRANGERS)):
        yield HostileMessage(run.subjects.contribution(number % run.protocol.shards, 0, f"junk{number}"), b"\x00" * 200)


def false_calls(run: RunRecord) -> Iterator[HostileMessage]:
    """Calls for versions that nobody has made, at the end of the run, and the same call over and over."""
    for fragment in range(run.protocol.fragments):
        for version in (1 << 40, 0, 1):
            yield HostileMessage(
                run.subjects.call(fragment), as_json(fragment=fragment, version=version, attempt=3, run_tokens=ABSURD)
            )


def false_heads(run: RunRecord) -> Iterator[HostileMessage]:
    """Taps of heads that are not there."""
    for fragment in range(run.protocol.fragments):
        info = json.dumps({"fragment": fragment, "version": 1 << 40})
        yield HostileMessage(run.subjects.tap(f"gl.head.{fragment}"), b"", {"Atoll-Info": info})


def false_commands(run: RunRecord) -> Iterator[HostileMessage]:
    """Commands and verdicts of nobody: leave, you are in quarantine, your push was refused."""
    s = run.subjects
    yield HostileMessage(s.control("all"), as_json(verb="drain", sender="up"))
    for number, push in itertools.product(range(1, 4), range(1, 40)):
        learner = f"learner-{number}"
        fields = {"learner": learner, "incarnation": 1, "fragment": 0, "push": push, "fate": "refused"}
        for reason in ("quarantined", "stale"):
            yield HostileMessage(s.verdict(learner), as_json(**fields, reason=reason))


def false_presences(run: RunRecord) -> Iterator[HostileMessage]:
    """Synchronizers that want shards and are not there."""
    shards = list(range(run.protocol.shards))
    for number in range(8):
        yield HostileMessage(
            run.subjects.presence(f"host{number}"),
            as_json(name=f"host{number}", host="h", pid=1, wants=shards, owns=[], leaving=False),
        )


ATTACKS: dict[str, Attack] = {
    "deep JSON": deep_json,
    "fat heartbeats": fat_heartbeats,
    "slow ghosts": slow_ghosts,
    "distinct manifests": distinct_manifests,
    "wildcard manifest": wildcard_manifest,
    "junk manifests": junk_manifests,
    "false calls": false_calls,
    "false heads": false_heads,
    "false commands": false_commands,
    "false presences": false_presences,
}


class HostileConnection:
    """A connection to a NATS broker that publishes and never waits for an answer."""

    def __init__(self, url: str) -> None:
        address = urlsplit(url)
        self._socket = socket.create_connection((address.hostname or "127.0.0.1", address.port or 4222), timeout=10.0)
        self._socket.sendall(b'CONNECT {"verbose":false,"pedantic":false,"headers":true,"name":"hostile"}\r\n')
        self.sent = 0

    def send(self, messages: Iterator[HostileMessage], rate: float, for_s: float) -> None:
        """Publish messages at `rate` a second for `for_s` seconds, or as long as there are any."""
        began_s, first = time.monotonic(), self.sent
        while (passed_s := time.monotonic() - began_s) < for_s:
            due = int(passed_s * rate) - (self.sent - first)
            batch = list(itertools.islice(messages, max(0, min(due, 1000))))
            if due > 0 and not batch:
                return
            self._socket.sendall(b"".join(wired(each) for each in batch))
            self.sent += len(batch)
            self._drain()
            time.sleep(0.005)

    def put(self, message: HostileMessage) -> None:
        """Publish one message, and return when the broker has read it."""
        self._socket.sendall(wired(message) + b"PING\r\n")
        said = b""
        while b"PONG\r\n" not in said:
            data = self._socket.recv(BURST_BYTES)
            assert data, "the broker has hung up"
            said += data

    def close(self) -> None:
        self._socket.close()

    def _drain(self) -> None:
        """Answer nothing but pings, so that the broker keeps us."""
        self._socket.setblocking(False)
        try:
            while data := self._socket.recv(BURST_BYTES):
                if b"PING" in data:
                    self._socket.setblocking(True)
                    self._socket.sendall(b"PONG\r\n")
                    self._socket.setblocking(False)
        except BlockingIOError:
            pass
        finally:
            self._socket.setblocking(True)


def wired(sent: HostileMessage) -> bytes:
    """Return a message as a NATS client writes it."""
    subject = sent.subject.encode("utf-8", "surrogateescape")
    if not sent.headers and not sent.block:
        return b"PUB %s %d\r\n%s\r\n" % (subject, len(sent.data), sent.data)
    fields = "".join(f"{name}: {value}\r\n" for name, value in sent.headers.items())
    block = sent.block or f"NATS/1.0\r\n{fields}\r\n".encode()
    return b"HPUB %s %d %d\r\n%s%s\r\n" % (subject, len(block), len(block) + len(sent.data), block, sent.data)
