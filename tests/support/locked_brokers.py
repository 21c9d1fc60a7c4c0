"""A broker behind a locked door for tests, of one node or several: its folder of keys, and identities by name."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any, Self
from urllib.parse import urlsplit

from atoll.bus.nats.bus import JetStreamBus
from atoll.bus.options import BusOptions
from atoll.bus.server import EmbeddedBroker, LocalCluster
from atoll.keys.identity import HeldIdentity, read_identity
from atoll.keys.locked import LockedDoor
from atoll.keys.rights import Kind
from atoll.keys.roll import KeyFolder

HOST = "127.0.0.1"
SOON_S = 120.0
POLL_S = 0.01


class LockedBroker:
    """One nats-server, or a cluster of some, that lets in who is on the roll; a context manager."""

    def __init__(self, folder: Path, nodes: int = 1) -> None:
        """Make keys, a door and a server for each node, which do not run yet."""
        self.keys = KeyFolder(folder / "keys")
        self.operator = read_identity(self.keys.create([HOST], time.time()))
        self.doors: list[LockedDoor] = []
        self.servers: list[EmbeddedBroker] = []
        self._copies = nodes
        if nodes > 1:
            self.servers += LocalCluster(folder / "store", nodes, door=self._door).nodes
        else:
            self.servers.append(EmbeddedBroker(folder / "store", include=self._door(folder / "store").config))

    def _door(self, store: Path) -> LockedDoor:
        self.doors.append(LockedDoor(self.keys, store, node=self._copies > 1))
        return self.doors[-1]

    def open_endpoint(self, url: str) -> None:
        """Have the only server answer questions about itself at `url`, from its next start on."""
        [server] = self.servers
        file = server.store_dir / "endpoint.conf"
        file.write_text(f'http: "{urlsplit(url).netloc}"\ninclude "{self.doors[0].config.name}"\n')
        server._include = file

    @property
    def url(self) -> str:
        return ",".join(server.url for server in self.servers)

    def add(self, run: str, name: str, kind: Kind = "learner", **more: Any) -> Path:  # noqa: ANN401  (as `KeyFolder.add`)
        """Let one more in and return its file."""
        path = self.keys.add(name, kind, run, time.time(), **more)
        self.follow()
        return path

    def identity(self, run: str, name: str) -> HeldIdentity:
        return read_identity(self.keys.path / "identities" / run / f"{name}.toml")

    def follow(self) -> None:
        """Have the server take over what has changed, and return when it has."""
        for door, server in zip(self.doors, self.servers, strict=True):
            if door.has_changed():
                server.reload()

    def await_end(self, until_s: float) -> None:
        """Return once a key has ended by the clock, at `until_s`, and the server knows."""
        # A node that was told late may never have heard of the key: it has nothing to change.
        while time.time() <= until_s:
            time.sleep(POLL_S)
        self.follow()

    def said(self) -> list[str]:
        return [server.log_path.read_text(encoding="utf-8", errors="replace") for server in self.servers]

    async def bus(self, run: str, identity: HeldIdentity, **options: Any) -> JetStreamBus:  # noqa: ANN401  (of the bus)
        """Open a bus as `identity`."""
        given = BusOptions(**{"credentials": identity.credentials(), "replicas": self._copies, **options})
        return await JetStreamBus.open(self.url, run, name=identity.name, options=given)

    def __enter__(self) -> Self:
        for server in self.servers:
            server.start()
        return self

    def __exit__(self, *error: object) -> None:
        for server in self.servers:
            server.stop()
