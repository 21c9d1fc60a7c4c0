"""The broker's disk is lost: real processes, a real broker, an archive in a folder, and a run that goes on from it."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from atoll.archive.checkpoint_store import CheckpointStore
from atoll.archive.checkpoints import Manifest
from atoll.archive.object_store import open_archive
from atoll.bus.open import open_bus
from atoll.bus.server import EmbeddedBroker
from atoll.run.heads import read_heads
from atoll.run.record import read_run
from atoll.wire.blobs import BlobRef
from atoll.wire.messages import Head
from atoll.wire.subjects import Subjects
from support.islands import DEADLINE_S, SMALL, IslandProcess
from support.whole_runs import UNHURRIED

pytestmark = pytest.mark.second_tier

SHARDS = 2
TOKENS = 400_000


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[EmbeddedBroker]:
    with EmbeddedBroker(tmp_path / "nats") as broker:
        yield broker


@pytest.fixture
def founded(tmp_path: Path, broker: EmbeddedBroker, data: Path) -> Iterator[IslandProcess]:
    island = IslandProcess(tmp_path, broker.url, data)
    island.environment |= {
        "ATOLL_PROTOCOL__SHARDS": str(SHARDS),
        "ATOLL_PROTOCOL__TOKENS_TARGET": str(TOKENS),
        "ATOLL_PROTOCOL__SILENCE_S": "2",
        "ATOLL_ARCHIVE__EVERY_S": "2",
        "ATOLL_ARCHIVE__URL": str(tmp_path / "archive"),
    }
    try:
        yield island
    finally:
        island.stop()


async def lie(island: IslandProcess, heads: dict[int, Head]) -> dict[int, list[bytes]]:
    """Return the bytes of frame, outer state and ledgers that heads name, as the broker has them."""
    bus = await open_bus(island.url, island.run, name="reader")
    try:
        found = {}
        for fragment, head in heads.items():
            refs = [ref for ref in (head.keyframe, head.state, head.fragment_ledger) if ref is not None]
            found[fragment] = [await bus.get_blob(ref, 1 << 24) for ref in refs]
        return found
    finally:
        await bus.close()


async def heads_of(island: IslandProcess) -> dict[int, Head]:
    bus = await open_bus(island.url, island.run, name="reader")
    try:
        record = await read_run(bus, Subjects(island.run))
        assert record is not None
        return await read_heads(bus, record)
    finally:
        await bus.close()


def named(head: Head) -> list[BlobRef]:
    return [ref for ref in (head.keyframe, head.state, head.fragment_ledger) if ref is not None]


def archived(store: CheckpointStore, manifests: list[Manifest]) -> dict[int, list[bytes]]:
    return {
        piece.head.fragment: [store.get_object(manifest.shard, found) for found in piece.objects]
        for manifest in manifests
        for piece in manifest.pieces
    }


def start_shards(island: IslandProcess, suffix: str, *words: str) -> None:
    for shard in range(SHARDS):
        island.start(f"shard-{shard}{suffix}", "synchronizer", "--shard", str(shard), *words)


async def test_a_run_outlives_its_brokers_disk(founded: IslandProcess, broker: EmbeddedBroker, tmp_path: Path) -> None:
    """Everything is killed and the store deleted; the run is rebuilt bit for bit and trains on to its target."""
    start_shards(founded, "")
    slow = {"ATOLL_LEARNER__THROTTLE": "30"}
    founded.start("a", "learner", "--id", "a", **slow)
    founded.start("b", "learner", "--id", "b", **slow)
    for shard in range(SHARDS):
        founded.wait_for(f"shard-{shard}", "archive.checkpointed", 3)
        founded.wait_for(f"shard-{shard}", "round.committed", 10)
    broker.kill()
    for name in ("a", "shard-0", "shard-1"):
        founded.process(name).send_signal(signal.SIGKILL)
    shutil.rmtree(tmp_path / "nats")
    await asyncio.to_thread(broker.start)
    survivor = founded.refused(founded.process("b"), "b", 3)
    store = CheckpointStore(open_archive(str(tmp_path / "archive")), founded.run)
    checkpoint, manifests = store.newest()
    shown = founded.answer("archive", "show", str(tmp_path / "archive"), "--verify")
    start_shards(founded, "-again", "--restore", str(tmp_path / "archive"))
    for shard in range(SHARDS):
        founded.wait_for(f"shard-{shard}-again", "shard.serving")
    heads = await heads_of(founded)
    bits = await lie(founded, heads)
    pieces = {piece.head.fragment: piece.head for manifest in manifests for piece in manifest.pieces}

    assert "not the one that this learner joined" in survivor or "no streams of this run" in survivor
    assert f"checkpoint {checkpoint.number:>8}  complete" in shown
    assert bits == archived(store, manifests)
    for fragment, head in heads.items():
        was = pieces[fragment]
        assert head.version == was.version
        # The same bytes, under names that an owner of the lost run does not know.
        for ref, former in zip(named(head), named(was), strict=True):
            assert ref.digest == former.digest
            assert ref.stem != former.stem
        assert head.included == was.included

    fates = json.loads(founded.answer("fates", "--json"))
    assert fates["rebuilt"]["checkpoint"] == checkpoint.number
    assert fates["trained"] >= fates["rebuilt"]["tokens"] < TOKENS
    assert sum(fates["fates"].values()) == fates["fragments"] * fates["trained"]
    assert "that this ledger knows" in founded.answer("fates")

    fast = {"ATOLL_LEARNER__THROTTLE": "1"}
    founded.start("a-again", "learner", "--id", "a", **fast)
    founded.start("b-again", "learner", "--id", "b", **fast)
    for name in ("a-again", "b-again", "shard-0-again", "shard-1-again"):
        assert founded.process(name).wait(DEADLINE_S) == 0, founded.log(name).read_text(encoding="utf-8")[-3000:]
    settled = await founded.settlement()
    after = json.loads(founded.answer("fates", "--json"))

    assert settled.exact, settled.errors
    assert settled.trained >= TOKENS * int(SMALL["ATOLL_PROTOCOL__FRAGMENTS"])
    assert sum(after["fates"].values()) == after["fragments"] * after["trained"]
    assert {row["incarnation"] for row in after["incarnations"]} == {"a/1", "b/1", "a/1001", "b/1001"}
    assert min(head.version for head in (await heads_of(founded)).values()) > min(
        head.version for head in heads.values()
    )


# --- atoll up -------------------------------------------------------------------------------------------------------


def up(out: Path, data: Path, *words: str) -> subprocess.Popen[str]:
    """Start `atoll up` with a small model and an archive every second."""
    told = {name.removeprefix("ATOLL_").lower().replace("__", "."): value for name, value in SMALL.items()}
    told = {name: value for name, value in told.items() if not name.startswith(("log.", "learner.", "protocol.shards"))}
    told |= {"data.dir": str(data), "archive.every_s": "1", "protocol.silence_s": "2"}
    settings = [word for name, value in told.items() for word in ("--set", f"{name}={value}")]
    command = [sys.executable, "-m", "atoll.cli", "up", "--out", str(out), "--learners", "2", *settings, *words]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def wait_for_checkpoints(out: Path, count: int) -> None:
    """Return once both shards of a run have made so many checkpoints and `run.json` knows of commits."""
    deadline_s = time.monotonic() + DEADLINE_S
    logs = [out / "logs" / f"shard-{shard}.jsonl" for shard in range(SHARDS)]
    while time.monotonic() < deadline_s:
        marked = all(
            log.exists() and log.read_text(encoding="utf-8").count("archive.checkpointed") >= count for log in logs
        )
        if marked and json.loads((out / "run.json").read_text(encoding="utf-8"))["versions"] > 0:
            return
        time.sleep(0.05)
    raise AssertionError("no checkpoints were made")


def children_of(out: Path) -> list[int]:
    """Return the processes that `atoll up` started for this folder."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            known = (entry / "environ").read_bytes() + (entry / "cmdline").read_bytes() if entry.name.isdigit() else b""
        except OSError:
            continue
        if str(out).encode() in known and int(entry.name) != os.getpid():
            found.append(int(entry.name))
    return found


def test_up_resumes_a_run_whose_store_was_deleted(tmp_path: Path, data: Path) -> None:
    """Without --resume it is refused by a message that names it; with it the run goes on, and the report says so."""
    out = tmp_path / "run"
    first = up(out, data, "--tokens", "10000000", *UNHURRIED)
    wait_for_checkpoints(out, 4)
    first.send_signal(signal.SIGINT)
    said, _ = first.communicate(timeout=DEADLINE_S)
    assert first.returncode == 0, said
    before = json.loads((out / "report.json").read_text(encoding="utf-8"))
    shutil.rmtree(out / "nats")
    refused = up(out, data)
    said, _ = refused.communicate(timeout=DEADLINE_S)
    assert refused.returncode == 3, said
    assert f"atoll up --resume --out {out}" in said
    resumed = up(out, data, "--resume", "--tokens", str(before["tokens_trained"] + 60_000))
    said, _ = resumed.communicate(timeout=DEADLINE_S)
    report: dict[str, Any] = json.loads((out / "report.json").read_text(encoding="utf-8"))

    assert resumed.returncode == 0, said
    assert "rebuilt from checkpoint" in said
    # It was drained before: the last checkpoints hold everything.
    assert report["rebuilt"][0]["tokens"] == before["tokens_trained"]
    assert report["rebuilt"][0]["versions"] == report["rebuilt"][0]["versions_before"]
    assert report["tokens_trained"] >= before["tokens_trained"] + 60_000
    assert report["fates_exact"] is True, report["fates_errors"]
    assert sum(learner["tokens"] for learner in report["learners"]) == report["tokens_trained"]
    assert (out / "nats-lost-1").exists()
    assert children_of(out) == []
