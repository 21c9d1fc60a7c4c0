"""A reader in another language reads every message of a real run, and each is what the published document says."""

from __future__ import annotations

import asyncio
import json
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from atoll.bus.nats.bus import JetStreamBus
from atoll.bus.open import open_bus
from atoll.bus.options import BusOptions
from atoll.bus.server import EmbeddedBroker
from atoll.keys.identity import HeldIdentity
from atoll.wire.subjects import Subjects
from support.command_line import atoll
from support.links import unique_run
from support.locked_brokers import LockedBroker
from support.whole_runs import DEADLINE_S, finish, start

pytestmark = pytest.mark.second_tier

READER = Path(__file__).parents[1] / "taps_reader"
GOLDEN: dict[str, str] = json.loads(
    (Path(__file__).parents[1] / "golden" / "messages.json").read_text(encoding="utf-8")
)
NO_REGISTRY = ("ENOTFOUND", "EAI_AGAIN", "ECONNREFUSED", "ETIMEDOUT", "ENOTCACHED")
EXPECTED = {
    *("run", "head", "contribution", "goodbye", "member", "beat", "presence"),
    *("round", "joined", "left", "moved", "hosted", "sample", "validation", "ledger"),
}
"""Of every run that ends well."""


@pytest.fixture(scope="module")
def reader(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Node program with its pinned packages, and the document that the command line prints."""
    for program in ("node", "npm"):
        if shutil.which(program) is None:
            pytest.skip(f"no {program} on this machine")
    folder = tmp_path_factory.mktemp("taps_reader")
    for name in ("package.json", "package-lock.json", "read.mjs"):
        shutil.copy(READER / name, folder)
    command = ["npm", "ci", "--ignore-scripts", "--no-audit", "--no-fund"]
    installed = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    if installed.returncode and any(code in installed.stderr for code in NO_REGISTRY):
        pytest.skip("no registry of npm packages answers")
    assert installed.returncode == 0, installed.stderr
    (folder / "asyncapi.json").write_text(atoll("tap", "--schema").stdout, encoding="utf-8")
    return folder


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[EmbeddedBroker]:
    own = EmbeddedBroker(tmp_path / "store")
    own.start()
    yield own
    own.stop()


@contextmanager
def in_node(folder: Path, url: str, run: str, *more: str) -> Iterator[subprocess.Popen[str]]:
    command = ["node", "read.mjs", "--document", "asyncapi.json", "--server", url, "--run", run, *more]
    with subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as node:
        try:
            assert node.stdout is not None
            assert node.stdout.readline() == "ready\n", node.communicate(timeout=DEADLINE_S)
            yield node
        finally:
            node.kill()


def ended(node: subprocess.Popen[str]) -> dict[str, Any]:
    node.send_signal(signal.SIGINT)
    said, complaints = node.communicate(timeout=DEADLINE_S)
    assert said, complaints
    told: dict[str, Any] = json.loads(said)
    return told


def kinds(lines: Path) -> Counter[str]:
    """Count what `atoll tap` has printed into a file, by kind; a line that is being written does not count."""
    return Counter(json.loads(line)["kind"] for line in lines.read_text().splitlines(keepends=True) if line[-1] == "\n")


@contextmanager
def tapped(run: str, url: str, folder: Path) -> Iterator[Path]:
    """Have `atoll tap --bodies` print into a file while the block runs, from before the run is founded."""
    words = ["tap", "--bodies", "--run", run, "--broker", url]
    lines, complaints = folder / "lines", folder / "complaints"
    with (
        lines.open("wb") as out,
        complaints.open("wb") as err,
        subprocess.Popen([sys.executable, "-m", "atoll.cli", *words], stdout=out, stderr=err) as ours,
    ):
        try:
            until(lambda: "waiting" in complaints.read_text())
            yield lines
        finally:
            ours.send_signal(signal.SIGINT)
            ours.wait(DEADLINE_S)


def test_node_reads_every_message_of_a_run(
    reader: Path, broker: EmbeddedBroker, run_dir: Path, corpus: Path, tmp_path: Path
) -> None:
    """It and `atoll tap` count the same from the founding to the end; afterwards the log tells every round again."""
    run = unique_run()
    with in_node(reader, broker.url, run) as node, tapped(run, broker.url, tmp_path) as lines:
        asked = ("--broker", broker.url, "--learners", "2", "--tokens", "12000", "--set", f"run={run}")
        finish(start(run_dir, corpus, *asked))
        told = ended(node)
        until(lambda: kinds(lines) == told["read"])

    assert told["faults"] == 0, told["first"]
    assert node.returncode == 0
    assert told["read"].keys() >= EXPECTED
    heard = [json.loads(line) for line in lines.read_text().splitlines()]
    assert [one for one in heard if one.get("fault") or not one["body"]] == []

    again = atoll(
        *("tap", "--bodies", "--kind", "round", "--fragment", "1", "--since", "1h", "--no-follow"),
        *("--run", run, "--broker", broker.url),
    )
    rounds = [json.loads(line)["body"] for line in again.stdout.splitlines()]
    assert rounds == [one["body"] for one in heard if one["kind"] == "round" and one["body"]["fields"]["fragment"] == 1]
    assert rounds != []


def test_node_names_what_is_wrong(reader: Path, broker: EmbeddedBroker) -> None:
    """An event that lacks a field, one of no kind that there is, one that is no JSON; what is right beside them is no fault."""
    run = unique_run()
    subjects = Subjects(run)
    events = {
        subjects.event("joined", "a"): b'{"kind":"joined","who":"a","at_s":1,"fields":{"incarnation":1},"schema":1}',
        subjects.event("left", "a"): b'{"kind":"left","who":"a","at_s":1,"fields":{"incarnation":1},"schema":1}',
        subjects.event("unheard_of", "a"): b'{"kind":"unheard_of","who":"a","at_s":1,"fields":{},"schema":1}',
        subjects.event("sample", "a"): b"a sample",
    }

    async def say() -> None:
        bus = await JetStreamBus.open(broker.url, run, name="writer")
        await bus.provision(1 << 30)
        for number, (subject, data) in enumerate(events.items()):
            await bus.publish(subject, data, msg_id=str(number))
        await bus.close()

    with in_node(reader, broker.url, run) as node:
        asyncio.run(say())
        told = ended(node)

    assert told["read"] == {"joined": 1, "left": 1, "unknown": 1, "sample": 1}
    assert told["faults"] == 3
    assert "must have required property 'tokens'" in told["first"][0]
    assert "no channel of the document" in told["first"][1]
    assert "no JSON" in told["first"][2]


def test_node_enters_a_locked_broker_as_a_reader(reader: Path, tmp_path: Path) -> None:
    """With the file that its holder gets; bodies of signed messages are followed by their signature."""
    run = unique_run()
    subjects = Subjects(run)
    head, joined = GOLDEN["Head"].encode(), GOLDEN["Event"].encode()

    async def say(url: str, shard: HeldIdentity) -> bytes:
        options = BusOptions(credentials=shard.credentials())
        bus = await open_bus(url, run, name="shard", options=options)
        bare = await JetStreamBus.open(url, run, name="shard", options=options)
        await bus.provision(1 << 30)
        await bus.put_record(subjects.head(0), head, expected=0)
        await bus.publish(subjects.event("joined", "shard"), joined, msg_id="m")
        record = await bare.get_record(subjects.head(0))
        await bus.close()
        await bare.close()
        assert record is not None
        return record.data

    with LockedBroker(tmp_path) as locked:
        eye, _ = locked.add(run, "eye", "reader"), locked.add(run, "shard", "synchronizer")
        with in_node(reader, locked.url, run, "--identity", str(eye)) as node:
            stored = asyncio.run(say(locked.url, locked.identity(run, "shard")))
            told = ended(node)

    assert stored.startswith(head + b"\nsigned:")
    assert told == {"read": {"head": 1, "joined": 1}, "faults": 0, "first": []}


def until(met: Any) -> None:  # noqa: ANN401  (a condition)
    deadline_s = time.monotonic() + DEADLINE_S
    while not met():
        assert time.monotonic() < deadline_s
        time.sleep(0.05)
