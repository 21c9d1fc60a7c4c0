"""Services of one run started one by one against somebody's broker, as real processes; a plugin with its fixtures."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from atoll.base.exits import last_word_in
from atoll.bus.interface import Record
from atoll.bus.open import open_bus
from atoll.bus.options import DEFAULTS
from atoll.bus.server import EmbeddedBroker
from atoll.protocol.ledger import Settlement, settle
from atoll.wire.events import event_of
from atoll.wire.messages import Event, Head, decode
from atoll.wire.subjects import Subjects
from support import caches
from support.events import closing_ledger
from support.links import unique_run

DEADLINE_S = 240.0
SMALL = {
    "ATOLL_MODEL__LAYERS": "1",
    "ATOLL_MODEL__WIDTH": "32",
    "ATOLL_MODEL__HEADS": "2",
    "ATOLL_MODEL__KV_HEADS": "1",
    "ATOLL_MODEL__FFN": "64",
    "ATOLL_MODEL__CONTEXT": "32",
    "ATOLL_TRAIN__BATCH": "4",
    "ATOLL_TRAIN__SEQUENCE": "32",
    "ATOLL_PROTOCOL__FRAGMENTS": "4",
    "ATOLL_PROTOCOL__INTERVAL_STEPS": "8",
    "ATOLL_PROTOCOL__SHARDS": "1",
    "ATOLL_LEARNER__THREADS": "1",
    # They train until a test has seen enough; at full speed they keep the processes waiting that the test starts meanwhile.
    "ATOLL_LEARNER__THROTTLE": "20",
    "ATOLL_LOG__FORMAT": "json",
    "ATOLL_BROKER__PATIENCE_S": "120",
}


class IslandProcess:
    """Starts services of one run and ends them; every process is waited for."""

    def __init__(self, folder: Path, url: str, data: Path, run: str = "") -> None:
        self.folder = folder
        self.url = url
        self.run = run or unique_run()
        self.environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith("ATOLL_")},
            **SMALL,
            "ATOLL_RUN": self.run,
            "ATOLL_BROKER__URL": url,
            "ATOLL_DATA__DIR": str(data),
            "ATOLL_LEARNER__COMPILE_CACHE": str(caches.PROGRAMS),
        }
        self.options = DEFAULTS
        """With what a test reads the run."""
        self._processes: dict[str, subprocess.Popen[bytes]] = {}

    def log(self, name: str) -> Path:
        return self.folder / f"{name}.log"

    def start(self, name: str, *words: str, **settings: str) -> subprocess.Popen[bytes]:
        """Start `atoll <words>` with more environment."""
        with self.log(name).open("wb") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "atoll.cli", *words],
                env={**self.environment, **settings},
                stdout=log,
                stderr=log,
                stdin=subprocess.DEVNULL,
            )
        self._processes[name] = process
        return process

    def answer(self, *words: str) -> str:
        """Return what `atoll <words>` prints about this run; it must succeed."""
        command = [sys.executable, "-m", "atoll.cli", *words]
        done = subprocess.run(
            command, env=self.environment, capture_output=True, text=True, timeout=DEADLINE_S, check=False
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    def process(self, name: str) -> subprocess.Popen[bytes]:
        """Return the process that was started last under a name."""
        return self._processes[name]

    def wait_for(self, name: str, event: str, count: int = 1, **fields: object) -> None:
        """Return once a service has logged `event` with these fields so often."""
        deadline_s = time.monotonic() + DEADLINE_S
        while time.monotonic() < deadline_s:
            if sum(fields.items() <= line.items() for line in self.lines(name, event)) >= count:
                return
            time.sleep(0.05)
        raise AssertionError(f"{name} never said {event}: {self.log(name).read_text(encoding='utf-8')[-2000:]}")

    def refused(self, process: subprocess.Popen[bytes], name: str, code: int) -> str:
        """Return what a service said as it refused to go on, checked for its form."""
        process.wait(DEADLINE_S)
        text = self.log(name).read_text(encoding="utf-8")
        # A service that logs JSON tells its last error in JSON, too.
        said = "\n".join(
            last_word_in(line) or ("" if line.startswith("{") else line) for line in text.splitlines()
        ).strip()
        assert process.returncode == code, text
        assert "Traceback" not in text
        assert 0 < len(said.splitlines()) < 24
        return said

    def stop(self) -> None:
        for process in self._processes.values():
            process.kill()
            process.wait(DEADLINE_S)

    def lines(self, name: str, event: str) -> list[dict[str, Any]]:
        """Return what a service has logged of `event` so far."""
        lines = self.log(name).read_text(encoding="utf-8").splitlines()
        return [json.loads(line) for line in lines if f'"event": "{event}"' in line and line.endswith("}")]

    async def events(self, kind: str) -> list[Event]:
        """Return the events of one kind on the run's event log, in order."""
        bus = await open_bus(self.url, self.run, name="reader", options=self.options)
        try:
            entries = await bus.replay(Subjects(self.run).event(kind, "*"), limit=100_000)
        finally:
            await bus.close()
        return [event_of(entry.subject, entry.data) for entry in entries]

    async def settlement(self) -> Settlement:
        """Return the fates of the run from the ledger each shard closed with last; its heads must know of the same tokens."""
        settled = settle(closing_ledger(await self.events("ledger")), int(SMALL["ATOLL_PROTOCOL__FRAGMENTS"]))
        bus = await open_bus(self.url, self.run, name="reader", options=self.options)
        try:
            check_heads(settled, await bus.get_records(Subjects(self.run).head("*")))
        finally:
            await bus.close()
        return settled


def check_heads(settled: Settlement, heads: Iterable[Record]) -> None:
    """Compare the tokens that a run's heads say they hold with those that its ledgers say were merged."""
    held = sum(decode(Head, record.data).tokens_merged for record in heads)
    merged = settled.fates["merged"] + settled.fates["merged_late"]
    assert held == merged, f"heads hold {held} token-fragments, ledgers {merged}"


def versions(rounds: list[Event]) -> dict[int, list[int]]:
    """Return the versions each fragment was given, in the order of the event log."""
    found: dict[int, list[int]] = defaultdict(list)
    for event in rounds:
        found[msgspec.json.decode(event.fields["fragment"])].append(msgspec.json.decode(event.fields["version"]))
    return found


def unforked(rounds: list[Event]) -> bool:
    """Return whether no version of any fragment was made twice, and none is newer than one that follows it."""
    return all(sorted(set(made)) == made for made in versions(rounds).values())


async def end(island: IslandProcess, learners: list[str]) -> None:
    """Let the learners leave, then the shard, and wait for both."""
    for name in learners:
        island.process(name).terminate()
    for name in learners:
        assert island.process(name).wait(DEADLINE_S) == 0, island.log(name).read_text(encoding="utf-8")[-2000:]


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Token shards of some modules of the standard library."""
    from atoll_learner.data.prepare import prepare  # noqa: PLC0415  (only sessions that train load it)

    out = tmp_path_factory.mktemp("data") / "corpus"
    prepare(sorted(Path(os.__file__).parent.glob("*.py"))[:40], out)
    return out


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with EmbeddedBroker(tmp_path_factory.mktemp("nats")) as broker:
        yield broker.url


@pytest.fixture
def island(tmp_path: Path, url: str, data: Path) -> Iterator[IslandProcess]:
    island = IslandProcess(tmp_path, url, data)
    try:
        yield island
    finally:
        island.stop()
