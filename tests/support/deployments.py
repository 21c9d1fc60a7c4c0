"""Descriptions of deployments for tests, and a deployment on this machine whose broker runs."""

from __future__ import annotations

import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from atoll.bus.interface import Bus
from atoll.bus.open import open_bus
from atoll.bus.options import BusOptions
from atoll.bus.server import EmbeddedBroker
from atoll.deploy.checks import Seat, seat_of_service
from atoll.deploy.description import read_description
from atoll.deploy.rendering import render
from atoll.keys.identity import read_identity
from atoll.keys.locked import LockedDoor
from atoll.keys.roll import KeyFolder
from atoll.wire.messages import encode
from atoll.wire.subjects import Subjects
from support.founded_run import run_record
from support.links import unique_run

PROGRAM = Path(sys.executable).with_name("atoll")

EXAMPLE = Path(__file__).parents[2] / "examples" / "deployment.toml"


def every_target(folder: Path, hub: str = "kubernetes") -> Path:
    """Write the example, which has a region for every target, with its hub for one of them; return its file."""
    text = EXAMPLE.read_text(encoding="utf-8").replace('target = "kubernetes"', f'target = "{hub}"', 1)
    if hub == "compose":
        hosts = '["hub-1.example.org", "hub-2.example.org", "hub-3.example.org"]'
        text = text.replace(f"hosts = {hosts}", 'hosts = ["hub.example.org"]\nnodes = 3')
    path = folder / f"{hub}.toml"
    path.write_text(f'{text}\n[software]\nprogram = "{PROGRAM}"\n', encoding="utf-8")
    return path


@dataclass
class Deployed:
    """A rendered deployment and its broker, which runs; the run is founded."""

    file: Path
    out: Path
    port: int
    door: LockedDoor
    server: EmbeddedBroker
    run: str

    @property
    def url(self) -> str:
        return f"tls://127.0.0.1:{self.port}"

    def seat(self, service: str | None = "home-1", *changes: str) -> Seat:
        """Return a seat of it, with some settings changed."""
        return seat_of_service(read_description(self.file), self.out, service, list(changes))

    def identity(self, name: str) -> Path:
        """Return the identity of a service of its region."""
        return self.out / "home" / "services" / name / "identity.toml"

    def follow(self) -> None:
        """Render again, and let the broker take over what has changed."""
        render(read_description(self.file), self.out)
        if self.door.has_changed():
            self.server.reload()

    async def found(self) -> None:
        """Write the run record, as its first learner."""
        bus = await open_signed(self.url, self.run, self.identity("home-1"))
        await bus.provision(64 << 20)
        await bus.put_record(Subjects(self.run).run_record, encode(run_record(self.run)), expected=0)
        await bus.close()


def free_port() -> int:
    """Return a port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


async def open_signed(url: str, run: str, identity: Path | None = None) -> Bus:
    credentials = None if identity is None else read_identity(identity).credentials()
    return await open_bus(url, run, name="test", options=BusOptions(credentials=credentials))


@contextmanager
def deployed_here(folder: Path) -> Iterator[Deployed]:
    """Yield a deployment on this machine, whose broker runs."""
    port, run, corpus = free_port(), unique_run(), folder / "corpus"
    corpus.mkdir()
    file = folder / "deployment.toml"
    file.write_text(
        f'run = "{run}"\n[hub]\nhosts = ["127.0.0.1"]\nport = {port}\nsynchronizers = 1\n'
        f'[regions.home]\nlearners = 3\ndata = "{corpus}"\n'
        f'settings.learner.checkpoint_dir = "{folder / "state"}"\n[settings]\nprotocol.fragments = 4\nprotocol.shards = 2\n',
        encoding="utf-8",
    )
    out = folder / "out"
    render(read_description(file), out)
    door = LockedDoor(KeyFolder(out / "hub" / "services" / "broker"), folder / "store")
    with EmbeddedBroker(folder / "store", port, include=door.config) as server:
        yield Deployed(file, out, port, door, server, run)
