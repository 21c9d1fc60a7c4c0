"""`docker-compose.yml` in containers: the words of docker compose, played by podman-compose on an engine of our own.

Names differ in one sign: docker's `atoll-learner-b-1` is `atoll_learner-b_1` here. The file is used as it is; a second file
makes the model so small that one machine bears three learners.
"""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any, Final

import yaml

from support.podman import Podman

ROOT: Final = Path(__file__).parents[2]
FILE: Final = ROOT / "docker-compose.yml"
PROJECT: Final = "atoll"
POLL_S: Final = 1.0


class ComposedContainers:
    """The services of the file as containers of one engine."""

    def __init__(self, engine: Podman, compose: Path, settings: Mapping[str, str]) -> None:
        """Use the program `compose`; `settings` are more variables for every service that has some of ours."""
        self.engine = engine
        services = yaml.safe_load(FILE.read_text(encoding="utf-8"))["services"]
        self.services: dict[str, Any] = services
        ours = [name for name, service in services.items() if "ATOLL_RUN" in service.get("environment", {})]
        small = engine.folder / "small.yml"
        small.write_text(yaml.safe_dump({"services": {name: {"environment": dict(settings)} for name in ours}}))
        self._words = (str(compose), "-p", PROJECT, "-f", str(FILE), "-f", str(small))

    def compose(self, *words: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        """Run a command of compose; a service that is named has its profile, as with docker and not with podman-compose."""
        profiles = [each for word in words for each in self.services.get(word, {}).get("profiles", ())]
        named = [word for each in profiles for word in ("--profile", each)]
        return self.engine.run(*self._words, *named, *words, check=check)

    def up(self) -> None:
        """Have every container, and start those that do not run in the order of the file.

        They are made in a step of its own. Else podman-compose has each *require* all services before it, and podman starts no
        container again while one that it requires does not run: `keys` has ended. Docker's `depends_on` is for the start only.
        """
        self.compose("up", "--no-start", "--no-deps")
        self.compose("up", "-d")

    def container(self, service: str) -> str:
        """Return the name of a service's container."""
        return f"{PROJECT}_{service}_1"

    def state(self, service: str) -> dict[str, Any]:
        """Return what the engine knows of a container; empty if there is none."""
        told = self.engine.ask("inspect", "--type", "container", self.container(service), check=False)
        found = json.loads(told or "[]")
        return dict(found[0]) if found else {}

    def is_running(self, service: str) -> bool:
        return bool(self.state(service).get("State", {}).get("Running"))

    def is_healthy(self, service: str) -> bool:
        """Run the health check of the file inside the container, as an engine with a timer does."""
        test = self.services[service]["healthcheck"]["test"][1:]
        return self.engine.run("podman", "exec", self.container(service), *test, check=False).returncode == 0

    def cut(self, island: str) -> None:
        """Take the leaf of an island out of the WAN."""
        self.engine.ask("network", "disconnect", f"{PROJECT}_wan", self.container(f"leaf-{island}"))

    def heal(self, island: str) -> None:
        """Bring the leaf of an island back into the WAN."""
        self.engine.ask("network", "connect", f"{PROJECT}_wan", self.container(f"leaf-{island}"))

    def said(self, service: str) -> str:
        """Return all that a service's container has said, to both of its streams."""
        done = self.engine.run("podman", "logs", self.container(service), check=False)
        return done.stdout + done.stderr

    def events(self, service: str, event: str, since_s: float = 0.0) -> Iterator[dict[str, Any]]:
        """Yield the log lines of one kind since a time of the wall clock; each gets it as `at_s`."""
        for line in self.said(service).splitlines():
            if f'"{event}"' not in line:
                continue
            try:
                told = json.loads(line)
            except ValueError:
                continue
            at_s = datetime.fromisoformat(told["timestamp"]).timestamp()
            if told.get("event") == event and at_s >= since_s:
                yield {**told, "at_s": at_s}


def wait_until(what: str, holds: Callable[[], bool], within_s: float) -> float:
    """Return after how many seconds something holds; raise `SystemExit` when it does not in time."""
    began_s = time.monotonic()
    while not holds():
        if time.monotonic() - began_s > within_s:
            raise SystemExit(f"after {within_s:.0f} s this does not hold: {what}")
        time.sleep(POLL_S)
    return time.monotonic() - began_s
