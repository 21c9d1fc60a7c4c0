"""Services started one by one against somebody's broker, and what each says to a mistake: real processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from atoll.bus.broker import EmbeddedBroker
from atoll.testing import unique_run

DEADLINE_S = 120.0
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
    "ATOLL_LOG__FORMAT": "json",
    "ATOLL_BROKER__PATIENCE_S": "5",
}


class Island:
    """Starts services of one run and ends them; every process is waited for."""

    def __init__(self, folder: Path, url: str, data: Path) -> None:
        """Name a new run on the broker at `url`."""
        self.folder = folder
        self._environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith("ATOLL_")},
            **SMALL,
            "ATOLL_RUN": unique_run(),
            "ATOLL_BROKER__URL": url,
            "ATOLL_DATA__DIR": str(data),
            "ATOLL_LEARNER__COMPILE_CACHE": str(folder / "cache"),
        }
        self._processes: list[subprocess.Popen[bytes]] = []

    def log(self, name: str) -> Path:
        """Return where a service's output goes."""
        return self.folder / f"{name}.log"

    def start(self, name: str, *words: str, **settings: str) -> subprocess.Popen[bytes]:
        """Start `atoll <words>` with more environment."""
        with self.log(name).open("wb") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "atoll.cli", *words],
                env={**self._environment, **settings},
                stdout=log,
                stderr=log,
                stdin=subprocess.DEVNULL,
            )
        self._processes.append(process)
        return process

    def wait_for(self, name: str, event: str) -> None:
        """Return once a service has logged `event`; fail when it ends before."""
        deadline_s = time.monotonic() + DEADLINE_S
        while time.monotonic() < deadline_s:
            if f'"event": "{event}"' in self.log(name).read_text(encoding="utf-8"):
                return
            time.sleep(0.05)
        raise AssertionError(f"{name} never said {event}: {self.log(name).read_text(encoding='utf-8')[-2000:]}")

    def refused(self, process: subprocess.Popen[bytes], name: str, code: int) -> str:
        """Return what a service said as it refused to go on, checked for its form."""
        process.wait(DEADLINE_S)
        text = self.log(name).read_text(encoding="utf-8")
        said = "\n".join(line for line in text.splitlines() if not line.startswith("{"))
        assert process.returncode == code, text
        assert "Traceback" not in text
        assert 0 < len(said.splitlines()) < 24
        return said

    def stop(self) -> None:
        """End what still runs."""
        for process in self._processes:
            process.kill()
            process.wait(DEADLINE_S)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Token shards of some modules of the standard library."""
    out = tmp_path_factory.mktemp("data") / "corpus"
    texts = [str(path) for path in sorted(Path(os.__file__).parent.glob("*.py"))[:40]]
    words = [sys.executable, "-m", "atoll.cli", "data", "prepare", *texts, "--out", str(out)]
    subprocess.run(words, check=True, capture_output=True, timeout=DEADLINE_S)
    return out


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Somebody's broker."""
    with EmbeddedBroker(tmp_path_factory.mktemp("nats")) as broker:
        yield broker.url


@pytest.fixture
def island(tmp_path: Path, url: str, data: Path) -> Iterator[Island]:
    """A run without processes yet."""
    island = Island(tmp_path, url, data)
    try:
        yield island
    finally:
        island.stop()


def test_a_second_learner_of_one_id_is_refused_and_the_first_trains_on(island: Island) -> None:
    """Exit code 2, the id, the host and process that hold it; the first leaves in good order later."""
    island.start("shard", "synchronizer", "--shard", "0")
    first = island.start("first", "learner", "--id", "a", ATOLL_HEALTH_FILE=str(island.folder / "alive"))
    island.wait_for("first", "learner.first_step")
    second = island.start("second", "learner", "--id", "a")
    said = island.refused(second, "second", 2)

    assert "'a'" in said
    assert str(first.pid) in said
    assert first.poll() is None
    assert (island.folder / "alive").exists()
    first.terminate()
    assert first.wait(DEADLINE_S) == 0, island.log("first").read_text(encoding="utf-8")[-2000:]
    island.wait_for("first", "learner.left")


def test_another_model_and_other_data_are_refused_by_name(island: Island, data: Path, tmp_path: Path) -> None:
    """A learner that would corrupt the run does not join it: exit code 2 and the first difference."""
    island.start("shard", "synchronizer", "--shard", "0")
    island.start("first", "learner", "--id", "a")
    island.wait_for("first", "learner.joined")
    wider = island.start("wider", "learner", "--id", "b", ATOLL_MODEL__WIDTH="48")
    other = tmp_path / "other"
    texts = [str(path) for path in sorted(Path(os.__file__).parent.glob("*.py"))[10:60]]
    prepared = island.start("prepare", "data", "prepare", *texts, "--out", str(other))
    assert prepared.wait(DEADLINE_S) == 0
    stranger = island.start("stranger", "learner", "--id", "c", ATOLL_DATA__DIR=str(other))

    said = island.refused(wider, "wider", 2)
    assert "32" in said
    assert "48" in said
    ours = json.loads((data / "meta.json").read_text(encoding="utf-8"))["fingerprint"]
    assert ours in island.refused(stranger, "stranger", 2)


@pytest.mark.parametrize(
    ("settings", "code", "said"),
    [
        ({"ATOLL_BROKER__URL": "nats://127.0.0.1:9", "ATOLL_BROKER__PATIENCE_S": "1"}, 3, "127.0.0.1:9"),
        ({"ATOLL_BROKER__URL": "http://127.0.0.1:9"}, 2, "nats://"),
        ({"ATOLL_LEARNER__ID": "a.b"}, 2, "a.b"),
        ({"ATOLL_PROTOCOL__QUORUM": "0"}, 2, "quorum"),
        ({"ATOLL_MODEL__LAYERS": "none"}, 2, "layers"),
        ({"ATOLL_COLOUR": "blue"}, 2, "colour"),
    ],
)
def test_a_learner_that_cannot_start_says_why(island: Island, settings: dict[str, str], code: int, said: str) -> None:
    """One screen, the value, the exit code by kind; no JAX traceback."""
    process = island.start("learner", "learner", **settings)

    assert said in island.refused(process, "learner", code)


def test_a_truncated_model_file_is_refused_before_anything_is_founded(island: Island, tmp_path: Path) -> None:
    """`learner.initial_model` must be whole."""
    half = tmp_path / "half.safetensors"
    half.write_bytes(b"\x10\x00\x00\x00\x00\x00\x00\x00{}")
    process = island.start("learner", "learner", "--id", "a", ATOLL_LEARNER__INITIAL_MODEL=str(half))

    assert str(half) in island.refused(process, "learner", 2)
    assert "learner.joined" not in island.log("learner").read_text(encoding="utf-8")
