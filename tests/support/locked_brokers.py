"""A broker behind a locked door for tests: its folder of keys, and identities by name."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any, Self

from atoll.bus.nats.bus import JetStreamBus
from atoll.bus.options import BusOptions
from atoll.bus.server import EmbeddedBroker
from atoll.keys.identity import HeldIdentity, read_identity
from atoll.keys.locked import LockedDoor
from atoll.keys.rights import Kind
from atoll.keys.roll import KeyFolder

HOST = "127.0.0.1"
SOON_S = 30.0
POLL_S = 0.01


class LockedBroker:
    """A nats-server that lets in who is on the roll; a context manager."""

    def __init__(self, folder: Path) -> None:
        """Make keys, a door and a server, which does not run yet."""
        self.keys = KeyFolder(folder / "keys")
        self.operator = read_identity(self.keys.create([HOST], time.time()))
        self.door = LockedDoor(self.keys, folder / "store")
        self.server = EmbeddedBroker(folder / "store", include=self.door.config)

    def add(self, run: str, name: str, kind: Kind = "learner", **more: Any) -> Path:  # noqa: ANN401  (as `KeyFolder.add`)
        """Let one more in and return its file."""
        path = self.keys.add(name, kind, run, time.time(), **more)
        self.follow()
        return path

    def identity(self, run: str, name: str) -> HeldIdentity:
        """Return an identity of the roll."""
        return read_identity(self.keys.path / "identities" / run / f"{name}.toml")

    def follow(self) -> None:
        """Have the server take over what has changed, and return when it has."""
        if self.door.has_changed():
            self.server.reload()

    def await_change(self) -> None:
        """Return once a key has ended by the clock and the server knows."""
        deadline_s = time.monotonic() + SOON_S
        while not self.door.has_changed():
            assert time.monotonic() < deadline_s, "no key ends"
            time.sleep(POLL_S)
        self.server.reload()

    def said(self) -> str:
        """Return the server's log."""
        return self.server.log_path.read_text(encoding="utf-8", errors="replace")

    async def bus(self, run: str, identity: HeldIdentity, **options: Any) -> JetStreamBus:  # noqa: ANN401  (of the bus)
        """Open a bus as `identity`."""
        given = BusOptions(credentials=identity.credentials(), **options)
        return await JetStreamBus.open(self.server.url, run, name=identity.name, options=given)

    def __enter__(self) -> Self:
        self.server.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.server.stop()
