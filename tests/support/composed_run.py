"""`docker-compose.yml` without an engine: each of its services is a process, and each volume a folder.

A service sees a folder of its own as `/`: its volumes are links there, and every path in its command and its environment that
begins at the root is moved there. The names of the brokers become this machine, with free ports. All else is as the file
says: commands, variables, who has which volume. Networks, limits and users are the engine's part.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, Self

import yaml

COMPOSE: Final[dict[str, Any]] = yaml.safe_load(
    (Path(__file__).parents[2] / "docker-compose.yml").read_text(encoding="utf-8")
)
RUN: Final = "compose"
NODES: Final = ("nats-1", "nats-2", "nats-3")
LEAVES: Final = ("leaf-a", "leaf-b", "leaf-c")
BROKERS: Final = (*NODES, *LEAVES)
CLIENTS_PORT: Final = "4222"
PORTS: Final = {"--port": CLIENTS_PORT, "--cluster-port": "6222", "--leaf-port": "7422"}
"""At which a node listens for clients, for the other nodes and for leaves; a leaf listens for clients."""
ONCE: Final = ("keys", "data")
HEALTHY_S: Final = 240.0
STOP_S: Final = 120.0


class ComposedRun:
    """The services of the file in one folder; a context manager that leaves no process behind."""

    def __init__(self, folder: Path, more: Mapping[str, str]) -> None:
        """Choose a port; `more` are variables that every service gets, for example those of a small model."""
        self.folder = folder
        self._more = more
        self._running: dict[str, subprocess.Popen[bytes]] = {}
        with contextlib.ExitStack() as held:
            free = {
                f"{name}:{port}": held.enter_context(socket.socket()) for name in BROKERS for port in PORTS.values()
            }
            for each in free.values():
                each.bind(("127.0.0.1", 0))
            self._ports = {place: str(each.getsockname()[1]) for place, each in free.items()}

    @property
    def url(self) -> str:
        """Return where the nodes of the hub's broker are."""
        return ",".join(f"tls://127.0.0.1:{self._ports[f'{name}:{CLIENTS_PORT}']}" for name in NODES)

    def volume(self, name: str) -> Path:
        """Return the folder that is a volume."""
        folder = self.folder / "volumes" / name
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    def words(self, service: str, *command: str) -> list[str]:
        """Return the command of a service, or another one in its place."""
        asked = command or tuple(COMPOSE["services"][service]["command"])
        ports: list[str] = []
        if asked[0] == "broker":
            flags = PORTS if service in NODES else ("--port",)
            # The last of two is what counts: a port of the file is replaced.
            ports = [word for flag in flags for word in (flag, self._ports[f"{service}:{PORTS[flag]}"])]
        return [sys.executable, "-m", "atoll.cli", *(self._moved(service, word) for word in (*asked, *ports))]

    def environment(self, service: str) -> dict[str, str]:
        told = {name: str(value) for name, value in COMPOSE["services"][service].get("environment", {}).items()}
        ours = {name: self._moved(service, value) for name, value in told.items()}
        clean = {name: value for name, value in os.environ.items() if not name.startswith("ATOLL_")}
        return {**clean, **ours, **(self._more if "ATOLL_RUN" in told else {})}

    def ask(self, service: str, *command: str) -> subprocess.CompletedProcess[str]:
        """Run the command of a service, or another one in its place, to its end."""
        return subprocess.run(
            self.words(service, *command),
            env=self.environment(service),
            capture_output=True,
            text=True,
            timeout=HEALTHY_S,
            check=False,
        )

    def begin(self, *services: str) -> None:
        """Start services, in this order; return when the healthy ones of them are."""
        for service in services:
            if service in ONCE:
                done = self.ask(service)
                assert done.returncode == 0, done.stderr
                continue
            with (self.folder / f"{service}.log").open("ab") as log:
                self._running[service] = subprocess.Popen(
                    self.words(service), env=self.environment(service), stdout=log, stderr=log
                )
        for service in {*services} & {*BROKERS}:
            self.await_health(service)

    def await_health(self, service: str) -> None:
        """Return once the health check of the file says yes."""
        check = COMPOSE["services"][service]["healthcheck"]["test"]
        assert check[:2] == ["CMD", "atoll"], check
        deadline_s = time.monotonic() + HEALTHY_S
        while self.ask(service, *check[2:]).returncode != 0:
            assert self._running[service].poll() is None, self.log(service)
            assert time.monotonic() < deadline_s, self.log(service)

    def log(self, service: str) -> str:
        return (self.folder / f"{service}.log").read_text(encoding="utf-8", errors="replace")

    def stop(self, *services: str) -> dict[str, int]:
        """End services as `docker compose stop` does, all at once; return with what code each left."""
        stopped = {service: self._running.pop(service) for service in services}
        for process in stopped.values():
            process.send_signal(signal.SIGTERM)
        return {service: process.wait(STOP_S) for service, process in stopped.items()}

    def __enter__(self) -> Self:
        self.folder.mkdir(parents=True, exist_ok=True)
        return self

    def __exit__(self, *error: object) -> None:
        for process in self._running.values():
            process.kill()
            process.wait()

    def _root(self, service: str) -> Path:
        """Return the folder that is `/` for a service, with its volumes in it."""
        root = self.folder / "roots" / service
        (root / "tmp").mkdir(parents=True, exist_ok=True)
        for mount in COMPOSE["services"][service].get("volumes", ()):
            name, place = mount.split(":")[:2]
            at = root / place.lstrip("/")
            at.parent.mkdir(parents=True, exist_ok=True)
            if not at.is_symlink():
                at.symlink_to(self.volume(name).absolute())
        return root

    def _moved(self, service: str, word: str) -> str:
        """Return a word of a command or the environment, with the paths and the host that are true here."""
        if word.startswith("/"):
            return str(self._root(service) / word.lstrip("/"))
        for place, port in self._ports.items():
            word = word.replace(f"//{place}", f"//127.0.0.1:{port}")
        return word


def composed_service(environment: Mapping[str, str]) -> str:
    """Return which service a process of a composed run is, by what it was told; "" for none."""
    health = Path(environment.get("ATOLL_HEALTH_FILE", ""))
    return health.parents[1].name if health.name == "health" and "roots" in health.parts else ""
