"""A learner that comes back: from its own checkpoint, from a peer, or fresh. Real processes, a real broker, real text."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import subprocess
from collections.abc import Callable
from typing import Any

import msgspec
import psutil
import pytest

from atoll.bus.open import open_bus
from atoll.protocol.data import DataLedger
from atoll.wire.messages import decode
from atoll.wire.subjects import Subjects
from support.islands import DEADLINE_S, IslandProcess

pytestmark = pytest.mark.second_tier

# Slow enough that a restart costs fewer steps of the run than make a checkpoint stale.
OFTEN = {"ATOLL_LEARNER__CHECKPOINT_EVERY_S": "1", "ATOLL_LEARNER__THROTTLE": "50"}


def learner(island: IslandProcess, name: str, learner_id: str, **settings: str) -> subprocess.Popen[bytes]:
    folder = str(island.folder / "checkpoints")
    told = {"ATOLL_LEARNER__CHECKPOINT_DIR": folder, **OFTEN, **settings}
    return island.start(name, "learner", "--id", learner_id, **told)


def recovered(island: IslandProcess, name: str) -> dict[str, Any]:
    island.wait_for(name, "learner.recovered")
    return island.lines(name, "learner.recovered")[0]


def warm_loss(island: IslandProcess, name: str) -> float:
    island.wait_for(name, "learner.warm")
    return float(island.lines(name, "learner.warm")[0]["loss"])


async def end(island: IslandProcess, *names: str) -> None:
    for name in names:
        island.process(name).terminate()
    for name in names:
        assert island.process(name).wait(DEADLINE_S) == 0, island.log(name).read_text(encoding="utf-8")[-3000:]


async def test_a_killed_learner_comes_back_from_its_checkpoint_then_from_a_peer_then_fresh(
    island: IslandProcess,
) -> None:
    """Three deaths: with its checkpoint, without it beside a peer, and without both; each begins no worse than before."""
    island.start("shard", "synchronizer", "--shard", "0")
    learner(island, "first", "a")
    peer = learner(island, "peer", "b", ATOLL_LEARNER__THROTTLE="150")
    before = warm_loss(island, "first")
    island.wait_for("first", "checkpoint.saved", 2)
    island.process("first").kill()
    learner(island, "second", "a")
    own = recovered(island, "second")
    from_checkpoint = warm_loss(island, "second")
    island.process("second").kill()
    shutil.rmtree(island.folder / "checkpoints" / own_folder(island) / "a")
    island.wait_for("peer", "learner.warm")
    learner(island, "third", "a")
    lent = recovered(island, "third")
    from_peer = warm_loss(island, "third")
    island.process("third").kill()
    peer.kill()
    peer.wait(DEADLINE_S)
    shutil.rmtree(island.folder / "checkpoints")
    learner(island, "fourth", "a")
    alone = recovered(island, "fourth")
    island.wait_for("fourth", "learner.first_step")
    told = [
        msgspec.json.decode(event.fields["source"]) for event in await island.events("recovered") if event.who == "a"
    ]
    await end(island, "fourth")

    assert (own["source"], own["former"]) == ("checkpoint", 1)
    assert own["bytes"] > 0
    assert (lent["source"], lent["peer"]) == ("peer", "b")
    assert alone["source"] == "fresh"
    assert from_checkpoint < before
    assert from_peer < before
    assert told == ["fresh", "checkpoint", "peer", "fresh"]
    assert await lent_blobs(island) == 0


def own_folder(island: IslandProcess) -> str:
    (folder,) = (island.folder / "checkpoints").iterdir()
    return folder.name


async def lent_blobs(island: IslandProcess) -> int:
    """Return how many chunks of lent states are stored; the borrower removed them."""
    bus = await open_bus(island.url, island.run, name="reader")
    try:
        return await bus.purge(f"{Subjects(island.run).prefix}.ps.>")
    finally:
        await bus.close()


async def test_leaving_is_bounded_and_says_what_was_not_pushed(island: IslandProcess) -> None:
    """With a broker that is frozen a learner that is asked to leave does so within its bound: exit code 3, by name."""
    broker_pid = broker_process(island.url)
    island.start("shard", "synchronizer", "--shard", "0")
    process = learner(island, "first", "a", ATOLL_LEARNER__DRAIN_S="3")
    island.wait_for("first", "learner.warm")
    os.kill(broker_pid, signal.SIGSTOP)
    try:
        process.terminate()
        said = island.refused(process, "first", 3)
    finally:
        os.kill(broker_pid, signal.SIGCONT)

    assert "the last pushes are not durable" in said
    assert "fragment" in said
    assert island.lines("first", "checkpoint.saved")


def broker_process(url: str) -> int:
    """Return the process of the broker that listens at `url`."""
    port = int(url.rsplit(":", 1)[1])
    for process in psutil.Process().children(recursive=True):
        listens = (c.laddr.port for c in process.net_connections("tcp") if c.status == psutil.CONN_LISTEN)
        if port in listens:
            return int(process.pid)
    raise AssertionError(f"nobody listens on {port}")


async def test_a_preempted_learner_loses_at_most_what_was_open(island: IslandProcess) -> None:
    """SIGTERM, and SIGKILL a moment later: the ledgers are exact, and what was pushed is merged. Also encoded on a device."""
    shard = island.start("shard", "synchronizer", "--shard", "0")
    process = learner(island, "first", "a", ATOLL_LEARNER__ENCODE="device", ATOLL_PROTOCOL__CODEC_UP="int4")
    island.wait_for("shard", "round.committed", 8)
    process.terminate()
    process.kill()
    process.wait(DEADLINE_S)
    learner(island, "second", "a", ATOLL_LEARNER__ENCODE="device")
    island.wait_for("second", "learner.warm")
    await end(island, "second")
    assert [island.lines(name, "pseudo_gradients.encoded")[0]["where"] for name in ("first", "second")] == [
        "device"
    ] * 2
    shard.terminate()
    assert shard.wait(DEADLINE_S) == 0
    settled = await island.settlement()
    data = json.loads(island.answer("fates", "--json"))["data"]
    page = island.answer("fates")

    assert settled.exact, settled.errors
    assert settled.fates["merged"] > settled.fates["lost"]
    assert all(sums["finished"] + sums["returned"] + sums["untouched"] == data_blocks(page) for sums in data["epochs"])
    assert data["epochs"][0]["leased"] == 0
    assert data["learners"]["a"] > 0


async def test_a_frozen_learner_loses_its_data_and_learns_of_it_when_it_wakes(island: IslandProcess) -> None:
    """Its blocks go to somebody else after a lease; awake again it reads no further in them, and trains on."""
    short = {"ATOLL_PROTOCOL__LEASE_S": "0.3"}
    island.start("shard", "synchronizer", "--shard", "0")
    frozen = learner(island, "first", "a", **short)
    island.wait_for("first", "learner.warm")
    learner(island, "second", "b", **short)
    island.wait_for("second", "learner.warm")
    frozen.send_signal(signal.SIGSTOP)
    await until_it_holds_nothing(island, "a")
    frozen.send_signal(signal.SIGCONT)
    island.wait_for("first", "data.lease_lost")
    await until_it_holds_something(island, "a")
    await end(island, "first", "second")

    assert island.lines("second", "data.lease_lost") == []


async def until_it_holds_nothing(island: IslandProcess, learner_id: str) -> None:
    """Return once the ledger has no lease of a learner."""
    await until(island, lambda ledger: learner_id not in {grant.learner for grant in ledger.grants})


async def until_it_holds_something(island: IslandProcess, learner_id: str) -> None:
    await until(island, lambda ledger: learner_id in {grant.learner for grant in ledger.grants})


async def until(island: IslandProcess, true_of: Callable[[DataLedger], bool]) -> None:
    bus = await open_bus(island.url, island.run, name="reader")
    try:
        async with asyncio.timeout(DEADLINE_S):
            while True:
                record = await bus.get_record(Subjects(island.run).data)
                if record is not None and true_of(decode(DataLedger, record.data)):
                    return
                await asyncio.sleep(0.05)
    finally:
        await bus.close()


def data_blocks(page: str) -> int:
    """Return how many blocks an epoch has, as `atoll fates` says."""
    (line,) = [line for line in page.splitlines() if line.startswith("blocks of data")]
    return int(line.split()[3].replace(",", ""))
