"""Three runs on one hub with the configuration that we ship: stopped, started again, mistyped, removed."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import atoll
from atoll.bus.server import EmbeddedBroker, find_server
from atoll.protocol.settings import ProtocolSettings
from support.links import unique_run

pytestmark = [pytest.mark.connected, pytest.mark.second_tier]

DEADLINE_S = 240.0
PROTOCOL = ProtocolSettings(fragments=2, shards=1, interval_steps=4)
CONFIGURATION = Path(__file__).parents[2] / "infra" / "nats" / "hub.conf"


class ShippedHub:
    """nats-server with `hub.conf`: only its addresses and its folder are this test's."""

    def __init__(self, folder: Path) -> None:
        with EmbeddedBroker(folder / "one") as one, EmbeddedBroker(folder / "two") as two:
            self.port, self.http = one.port, two.port
        text = CONFIGURATION.read_text(encoding="utf-8")
        for ours, here in (
            ("listen: 0.0.0.0:4222", f"listen: 127.0.0.1:{self.port}"),
            ("http: 0.0.0.0:8222", f"http: 127.0.0.1:{self.http}"),
            ("store_dir: /data/js", f"store_dir: {json.dumps(str(folder / 'js'))}"),
        ):
            assert text.count(ours) == 1, ours
            text = text.replace(ours, here)
        self._configuration = folder / "hub.conf"
        self._configuration.write_text(text, encoding="utf-8")
        self._log = folder / "hub.log"
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"nats://127.0.0.1:{self.port}"

    def start(self) -> None:
        with self._log.open("ab") as log:
            self._process = subprocess.Popen([find_server(), "-c", self._configuration], stdout=log, stderr=log)
        deadline_s = time.monotonic() + DEADLINE_S
        while time.monotonic() < deadline_s:
            try:
                socket.create_connection(("127.0.0.1", self.port), 1.0).close()
            except OSError:
                assert self._process.poll() is None, self._log.read_text(encoding="utf-8")
                time.sleep(0.02)
            else:
                return
        raise AssertionError(self._log.read_text(encoding="utf-8"))

    def stop(self) -> None:
        if self._process is not None:
            self._process.send_signal(signal.SIGTERM)
            self._process.wait(DEADLINE_S)
            self._process = None

    def told(self) -> dict[str, Any]:
        """Return what JetStream says of itself: streams, bytes promised and bytes used."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self.http}/jsz") as answer:
            told: dict[str, Any] = json.loads(answer.read())
        return told


class OwnLoop:
    """A loop and the synchronizer of its run; the loop steps when it is told to."""

    def __init__(self, url: str, run: str, folder: Path) -> None:
        self.url, self.run = url, run
        self.island = atoll.join(
            url, run=run, learner="a", params={"w": np.zeros((64, 8), np.float32)}, protocol=PROTOCOL
        )
        self.params = self.island.params
        with (folder / f"{run}.log").open("wb") as log:
            self.synchronizer = verb(log, "synchronizer", "--run", run, "--broker", url)

    def version(self) -> int:
        return atoll.read_model(self.url, run=self.run).versions_max

    def until(self, version: int) -> None:
        deadline_s = time.monotonic() + DEADLINE_S
        while self.version() < version:
            assert time.monotonic() < deadline_s, f"{self.run} stays at version {self.version()}, below {version}"
            for _ in range(PROTOCOL.interval_steps):
                self.params = {"w": self.params["w"] + np.float32(1e-3)}
                self.params = self.island.step(self.params, tokens=8, loss=1.0)

    def leave(self) -> None:
        self.island.close()
        self.synchronizer.terminate()
        self.synchronizer.wait(DEADLINE_S)


def verb(log: Any, *words: str) -> subprocess.Popen[bytes]:  # noqa: ANN401  (a file)
    environment = {name: value for name, value in os.environ.items() if not name.startswith("ATOLL_")}
    command = [sys.executable, "-m", "atoll.cli", *words]
    return subprocess.Popen(command, env=environment | {"ATOLL_LOG__FORMAT": "json"}, stdout=log, stderr=log)


def said(*words: str, status: int = 0) -> str:
    command = [sys.executable, "-m", "atoll.cli", *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    assert done.returncode == status, done.stderr
    return done.stdout + done.stderr


def listed(url: str) -> set[str]:
    return {row["run"] for row in json.loads(said("runs", "--broker", url, "--json"))}


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[ShippedHub]:
    made = ShippedHub(tmp_path)
    made.start()
    yield made
    made.stop()


def test_three_runs_share_a_hub_that_stops_and_starts_again(hub: ShippedHub, tmp_path: Path) -> None:
    """All three are merged, before and after; a typo creates nothing; a removed run gives its room back to a new one."""
    names = [unique_run() for _ in range(3)]
    with ExitStack() as ends:
        runs = [OwnLoop(hub.url, name, tmp_path) for name in names]
        for run in runs:
            ends.callback(run.synchronizer.wait, DEADLINE_S)
            ends.callback(run.synchronizer.kill)
        for run in runs:
            run.until(2)

        before = hub.told()
        with (tmp_path / "typo.log").open("w+b") as log:
            mistyped = verb(log, "synchronizer", "--run", "mistyped", "--broker", hub.url)
            ends.callback(mistyped.kill)
            wait_for(tmp_path / "typo.log", "run.awaited")
            mistyped.terminate()
            mistyped.wait(DEADLINE_S)
        for words in (("fates",), ("why",), ("top", "--once"), ("export", "--out", str(tmp_path / "out"))):
            assert "nobody has founded this run" in said(*words, "--run", "mistyped", "--broker", hub.url, status=2)
        assert listed(hub.url) == set(names)
        assert [hub.told()[name] for name in ("streams", "reserved_storage")] == [
            before[name] for name in ("streams", "reserved_storage")
        ]

        hub.stop()
        hub.start()
        for run in runs:
            run.until(run.version() + 2)

        *_, last = runs
        last.leave()
        assert f"removed {last.run}" in said("runs", "remove", last.run, "--broker", hub.url, "--yes")
        assert listed(hub.url) == set(names[:2])
        after = hub.told()
        assert after["streams"] == before["streams"] * 2 // 3
        assert after["reserved_storage"] == pytest.approx(before["reserved_storage"] * 2 / 3)
        again = OwnLoop(hub.url, last.run, tmp_path)
        ends.callback(again.synchronizer.kill)
        assert again.version() == 0
        assert hub.told()["reserved_storage"] == before["reserved_storage"]
        for run in (*runs[:2], again):
            run.until(run.version() + 1)
        for run in (*runs[:2], again):
            run.leave()


def wait_for(path: Path, event: str) -> None:
    deadline_s = time.monotonic() + DEADLINE_S
    while event not in path.read_text(encoding="utf-8"):
        assert time.monotonic() < deadline_s, path.read_text(encoding="utf-8")[-2000:]
        time.sleep(0.05)
