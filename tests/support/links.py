"""Builders for tests of anything that uses a bus: run ids, a proxy that breaks links, a server that is too old.

No pytest in here; fixtures are one line each in the tests' own `conftest.py`.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import secrets
from typing import Literal, Self

Direction = Literal["up", "down"]
_PIECE_BYTES = 1 << 16
_SHARED_PIECE_BYTES = 1 << 14


def unique_run() -> str:
    """Return a run id that no other test has."""
    return f"t{secrets.token_hex(5)}"


class LinkProxy:
    """A TCP relay on the loopback whose link can be cut, swallowed or healed; an async context manager.

    `up` is from client to server. `blackhole` swallows bytes of one direction and lets the other pass; `cut` closes
    every connection and refuses new ones until `heal`. With `bytes_s` each direction carries so many bytes a second, which
    its connections share piece by piece.
    """

    def __init__(self, port: int, bytes_s: float | None = None) -> None:
        self._target = port
        self._bytes_s = bytes_s
        self._link: dict[Direction, asyncio.Lock] = {"up": asyncio.Lock(), "down": asyncio.Lock()}
        self.carried_bytes: dict[Direction, int] = {"up": 0, "down": 0}
        self.accepted = 0
        self._server: asyncio.Server | None = None
        self._relays: set[asyncio.Task[None]] = set()
        self._writers: set[asyncio.StreamWriter] = set()
        self._swallowed: set[Direction] = set()
        self._cut = False
        self.swallowed_bytes = 0

    @property
    def url(self) -> str:
        if self._server is None:
            raise RuntimeError("the proxy is not open")
        return f"nats://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.cut()
        if self._server is not None:
            self._server.close()
        if self._relays:
            await asyncio.wait(self._relays)

    def blackhole(self, direction: Direction) -> None:
        """Swallow everything that goes in `direction` from now on."""
        self._swallowed.add(direction)

    async def cut(self) -> None:
        self._cut = True
        for writer in list(self._writers):
            writer.transport.abort()
        await asyncio.sleep(0)

    def heal(self) -> None:
        """Relay again; connections that lost bytes must be `cut` first."""
        self._cut = False
        self._swallowed.clear()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Relay one connection until either side ends."""
        if self._cut:
            writer.transport.abort()
            return
        self.accepted += 1
        task = asyncio.current_task()
        if task is not None:
            self._relays.add(task)
            task.add_done_callback(self._relays.discard)
        try:
            there, onward = await asyncio.open_connection("127.0.0.1", self._target)
        except OSError:
            writer.transport.abort()
            return
        self._writers |= {writer, onward}
        try:
            await asyncio.gather(self._relay(reader, onward, "up"), self._relay(there, writer, "down"))
        finally:
            self._writers -= {writer, onward}

    async def _relay(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, direction: Direction) -> None:
        """Copy one direction; its end ends the connection."""
        with contextlib.suppress(OSError):
            while piece := await reader.read(_PIECE_BYTES if self._bytes_s is None else _SHARED_PIECE_BYTES):
                if self._bytes_s is not None:
                    async with self._link[direction]:
                        await asyncio.sleep(len(piece) / self._bytes_s)
                self.carried_bytes[direction] += len(piece)
                if direction in self._swallowed:
                    self.swallowed_bytes += len(piece)
                    continue
                writer.write(piece)
                await writer.drain()
        for end in self._writers & {writer}:
            end.transport.abort()


class GreetingServer:
    """A TCP server that greets like a nats-server of `version` and answers PING, and nothing else.

    With `leaves` it hangs up with its first answer. `greeted` counts connections.
    """

    def __init__(self, version: str, max_payload: int = 4 << 20, *, leaves: bool = False) -> None:
        self.greeted, self._leaves = 0, leaves
        self._info = {
            "server_id": "X",
            "version": version,
            "proto": 1,
            "headers": True,
            "max_payload": max_payload,
            "jetstream": True,
        }
        self._server: asyncio.Server | None = None
        self._writers: set[asyncio.StreamWriter] = set()

    @property
    def url(self) -> str:
        if self._server is None:
            raise RuntimeError("the server is not open")
        return f"nats://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        return self

    async def __aexit__(self, *_: object) -> None:
        for writer in list(self._writers):
            writer.transport.abort()
        if self._server is not None:
            self._server.close()
            await self._server.wait_closed()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        self.greeted += 1
        writer.write(b"INFO " + json.dumps(self._info).encode() + b"\r\n")
        with contextlib.suppress(OSError):
            while line := await reader.readline():
                if line.startswith(b"PING"):
                    writer.write(b"PONG\r\n")
                    if self._leaves:
                        break
        self._writers.discard(writer)
        writer.close()
