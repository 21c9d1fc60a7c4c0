"""A real run for tests of the monitor: a locked broker with an open endpoint, a shard, learners, a monitor, a Prometheus.

Every part but the broker is a process of its own, which a test may kill and start again.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Self

import yaml
from prometheus_client.parser import text_string_to_metric_families

from support.deployments import free_port
from support.links import unique_run
from support.locked_brokers import LockedBroker

DEADLINE_S = 120.0
POLL_S = 0.05
MINUTE_S = 3
LEARNER = Path(__file__).with_name("steady_learner.py")
RULES = Path(__file__).resolve().parents[2] / "infra" / "monitor" / "alerts.yml"
WITHOUT = shutil.which("prometheus") is None
WHY_WITHOUT = "prometheus is not installed (apt: prometheus)"


def until(what: str, found: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + DEADLINE_S
    while not found():
        assert time.monotonic() < deadline_s, what
        time.sleep(POLL_S)


def answer_of(url: str) -> str:
    with urllib.request.urlopen(url, timeout=10) as answer:  # noqa: S310  (ours)
        return str(answer.read().decode())


class MonitorProcess:
    """A real `atoll monitor` and what it answers."""

    def __init__(self, folder: Path, run: str, broker: str, identity: Path, *settings: str) -> None:
        self.log = folder / "monitor.log"
        given = [f"run={run}", f"broker.url={broker}", f"broker.identity={identity}", "broker.patience_s=2"]
        given += ["monitor.port=0", f'monitor.disks=["{folder}"]', "log.format=json", *settings]
        with self.log.open("w") as log:
            command = [sys.executable, "-m", "atoll_monitor", *_flags(given)]
            self.process = subprocess.Popen(command, stderr=log, cwd=folder)
        until("it serves", lambda: '"monitor.serving"' in self.log.read_text())
        lines = [json.loads(line) for line in self.log.read_text().splitlines() if '"monitor.serving"' in line]
        self.url = str(lines[0]["url"])

    def health(self) -> int:
        try:
            with urllib.request.urlopen(f"{self.url}/healthz", timeout=10) as answer:  # noqa: S310  (ours)
                return int(answer.status)
        except urllib.error.HTTPError as error:
            return error.code

    def value(self, name: str, **labels: str) -> float | None:
        """Return the first sample of a name that has these labels."""
        for family in text_string_to_metric_families(answer_of(f"{self.url}/metrics")):
            for sample in family.samples:
                if sample.name == name and labels.items() <= sample.labels.items():
                    return float(sample.value)
        return None

    def count(self, name: str) -> float:
        """Return a number, 0 where there is none yet."""
        return self.value(name) or 0.0


@contextmanager
def monitoring(folder: Path, run: str, broker: str, identity: Path, *settings: str) -> Iterator[MonitorProcess]:
    """Yield a monitor that is gone afterwards."""
    monitor = MonitorProcess(folder, run, broker, identity, *settings)
    try:
        yield monitor
    finally:
        monitor.process.kill()
        monitor.process.wait(DEADLINE_S)


class SteadyRun:
    """A run on a locked broker of its own, of one node with an open endpoint, or of several; a context manager."""

    def __init__(self, folder: Path, nodes: int = 1) -> None:
        """Make keys; nothing runs yet. Of a broker of several nodes each has a copy of everything."""
        self.folder, self.run = folder, unique_run()
        self.broker, self._nodes = LockedBroker(folder, nodes), nodes
        self.endpoint = f"http://127.0.0.1:{free_port()}"
        if nodes == 1:
            self.broker.open_endpoint(self.endpoint)
        self._parts: dict[str, subprocess.Popen[bytes]] = {}
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        self._stack.enter_context(self.broker)
        self._stack.callback(self.stop)
        self.reader = self.broker.add(self.run, "eye", "reader")
        self._keys = {"s": self.broker.add(self.run, "s", "synchronizer")}
        for name in ("a", "b"):
            self._keys[name] = self.broker.add(self.run, name, founds=True)
        for name in self._keys:
            self.start(name)
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def start(self, name: str) -> None:
        """Start the shard's process `s`, or a learner."""
        url, key = self.broker.url, str(self._keys[name])
        given = [f"run={self.run}", f"broker.url={url}", f"broker.identity={key}", "log.level=error"]
        command = ["-m", "atoll_synchronizer", *_flags(given)]
        if name != "s":
            command = [str(LEARNER), url, self.run, name, key, str(self._nodes)]
        with (self.folder / f"{name}.log").open("ab") as log:
            self._parts[name] = subprocess.Popen(
                [sys.executable, *command], cwd=self.folder, stdout=log, stderr=subprocess.STDOUT
            )

    def kill(self, name: str) -> None:
        """End a part without a word (SIGKILL)."""
        self._parts[name].kill()
        self._parts[name].wait(DEADLINE_S)

    def stop(self) -> None:
        for name in self._parts:
            self.kill(name)


class PrometheusProcess:
    """A real Prometheus that scrapes and judges every second; a context manager.

    The rules are those of the repository, with waits that fit a test: `hastened` says what is changed.
    """

    def __init__(self, folder: Path, target: str) -> None:
        self.folder = folder / "prometheus"
        self.folder.mkdir()
        self.url = f"http://127.0.0.1:{free_port()}"
        scraped = {"job_name": "atoll", "static_configs": [{"targets": [target.removeprefix("http://")]}]}
        config = {
            "global": {"scrape_interval": "1s", "evaluation_interval": "1s", "scrape_timeout": "1s"},
            "rule_files": ["alerts.yml"],
            "scrape_configs": [scraped],
        }
        (self.folder / "prometheus.yml").write_text(yaml.safe_dump(config))
        (self.folder / "alerts.yml").write_text(yaml.safe_dump(hastened(yaml.safe_load(RULES.read_text()))))

    def __enter__(self) -> Self:
        address = self.url.removeprefix("http://")
        command = ["prometheus", "--config.file=prometheus.yml", "--storage.tsdb.path=data"]
        self._log = (self.folder / "log").open("wb")
        self._process = subprocess.Popen(
            [*command, f"--web.listen-address={address}"], cwd=self.folder, stdout=self._log, stderr=self._log
        )
        until("Prometheus is ready", self._ready)
        return self

    def __exit__(self, *error: object) -> None:
        self._process.terminate()
        self._process.wait(DEADLINE_S)
        self._log.close()

    def _ready(self) -> bool:
        assert self._process.poll() is None, (self.folder / "log").read_text()
        try:
            return "Ready" in answer_of(f"{self.url}/-/ready")
        except OSError:
            return False

    def _asked(self, path: str, **parameters: str) -> Any:  # noqa: ANN401  (JSON)
        query = f"?{urllib.parse.urlencode(parameters)}" if parameters else ""
        try:
            told = json.loads(answer_of(f"{self.url}/api/v1/{path}{query}"))
        except urllib.error.HTTPError as error:
            raise AssertionError(f"{parameters}: {error.read().decode()}") from error
        return told["data"]

    def data(self, query: str) -> Sequence[dict[str, Any]]:
        """Return the series that a query finds now."""
        found: Sequence[dict[str, Any]] = self._asked("query", query=query)["result"]
        return found

    def firing(self) -> dict[str, dict[str, str]]:
        """Return the labels of the alerts that fire, by name."""
        alerts = self._asked("alerts")["alerts"]
        return {one["labels"]["alertname"]: one["labels"] for one in alerts if one["state"] == "firing"}


def hastened(rules: dict[str, Any]) -> dict[str, Any]:
    """Return rules in which a minute lasts 3 s: how long something is so before it is told, and how old a commit may be."""
    for group in rules["groups"]:
        for rule in group["rules"]:
            if "for" in rule:
                rule["for"] = f"{MINUTE_S * int(rule['for'].removesuffix('m'))}s"
            if rule["alert"] == "AtollNoCommits":
                assert rule["expr"].count("> 900") == 1
                rule["expr"] = rule["expr"].replace("> 900", f"> {15 * MINUTE_S}")
    return rules


def _flags(given: Sequence[str]) -> list[str]:
    return [part for each in given for part in ("--set", each)]
