"""What we use of nats-py that it does not promise: `atoll.bus.nats.client` is the only file that may, and this says what.

`infra/newest_nats.sh` runs these tests on the newest release that `pyproject.toml` allows: a release that moves one of
these parts fails here by name, before a broker shows it by silence.
"""

from __future__ import annotations

import ast
import inspect
from pathlib import Path

import pytest
from nats.aio.client import Client, Srv
from nats.aio.subscription import Subscription
from nats.aio.transport import Transport
from nats.protocol.parser import Parser

import atoll.bus.nats
from atoll.bus.nats.transport import SocketTransport

ROOM = Path(atoll.bus.nats.__file__).parent
MAY = "client.py"
OURS = {"self", "cls", "bus", "branch", "trunk", "each", "super()"}
"""Names of our own objects, whose private parts our own modules may use."""

METHODS = {
    "_connect_to_server": ["s"],
    "_attempt_reconnect": [],
    "_close": ["status", "do_cbs"],
    "_send_ping": ["future"],
    "_send_publish": ["subject", "reply", "payload", "payload_size", "headers"],
    "_process_msg": ["sid", "subject", "reply", "data", "headers"],
    "_process_headers": ["headers"],
    "_remove_sub": ["sid", "max_msgs"],
    "_build_message": ["sid", "subject", "reply", "data", "headers"],
}
PLAIN = ("_build_message", "_remove_sub")
"""Those that are no coroutine functions."""
"""Methods of the client that we override or call, with their parameters in order."""


def private_parts(source: str) -> list[str]:
    """Return private attributes that `source` takes of objects that are not our own."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute) and node.attr.startswith("_") and not node.attr.startswith("__"):
            owner = ast.unparse(node.value)
            if owner not in OURS:
                found.append(f"{owner}.{node.attr}")
    return found


@pytest.mark.parametrize("path", sorted(ROOM.glob("*.py")), ids=lambda path: path.name)
def test_one_file_knows_private_parts_of_nats_py(path: Path) -> None:
    """All other modules of the adapter use what nats-py documents, and derive from its client nowhere."""
    found, source = private_parts(path.read_text(encoding="utf-8")), path.read_text(encoding="utf-8")
    derived = [base for base in ("(Client)", "(Parser)") if base in source]

    assert (found == []) is (path.name != MAY)
    assert (derived == []) is (path.name != MAY)


def test_the_rule_sees_a_private_part() -> None:
    """A rule that sees nothing would hold everywhere."""
    assert private_parts("client._pending.clear(); self._own = branch._own") == ["client._pending"]


@pytest.mark.parametrize("name", METHODS)
def test_a_private_method_has_the_shape_that_we_override(name: str) -> None:
    """Each takes what we take, in our order, and is a coroutine function, but for the plain ones."""
    method = getattr(Client, name)

    assert list(inspect.signature(method).parameters)[1:] == METHODS[name]
    assert inspect.iscoroutinefunction(method) is (name not in PLAIN)


async def test_a_client_holds_the_private_parts_that_we_replace() -> None:
    """The parser, the transport and what is pending are attributes of a new client, with the kinds that we put there."""
    client = Client()

    assert isinstance(client._ps, Parser)
    assert client._ps.nc is client
    assert client._transport is None
    assert (client._pending, client._pending_data_size) == ([], 0)
    assert (client._reading_task, client._ping_interval_task, client._flusher_task) == (None, None, None)
    assert {"out_msgs", "out_bytes"} <= client.stats.keys()
    assert "uri" in inspect.signature(Srv).parameters


async def test_a_subscription_holds_the_private_parts_that_we_read() -> None:
    subscription = Subscription(Client(), id=7)

    assert subscription._id == 7
    assert subscription._pending_queue.empty()


async def test_the_parser_says_when_a_line_was_not_understood() -> None:
    """A line that it knows leaves nothing in its buffer; we take what stays there for an unknown one."""

    class PingCounter(Client):
        pings = 0

        async def _process_ping(self) -> None:
            self.pings += 1

    client = PingCounter()
    parser = Parser(client)
    await parser.parse(b"PING\r\n")

    assert (client.pings, bytes(parser.buf)) == (1, b"")


def test_the_reader_of_a_client_asks_the_transport_and_gives_the_parser_what_it_gets() -> None:
    """Frames reach our parser because nothing between the two looks at them."""
    source = inspect.getsource(Client._read_loop)

    assert "self._transport.at_eof()" in source
    assert "await self._transport.read(" in source
    assert "await self._ps.parse(" in source


def test_our_transport_is_a_whole_one() -> None:
    asked = {name for name in vars(Transport) if not name.startswith("_")} | {"__bool__"}

    assert asked <= set(vars(SocketTransport))
    assert not inspect.isabstract(SocketTransport)
