"""What a broker keeps of its runs: listed, measured, removed; and `atoll broker`, which serves them."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

import atoll
from atoll.base.errors import SettingsError
from atoll.bus.nats.bus import JetStreamBus
from atoll.bus.options import BusOptions
from atoll.bus.server import EmbeddedBroker
from atoll.bus.streams import GIB, stream_plan
from atoll.protocol.settings import ProtocolSettings
from atoll.run.record import read_run
from atoll.wire.messages import SCHEMA_NEWEST
from atoll.wire.subjects import Subjects

pytestmark = pytest.mark.connected
DEADLINE_S = 120.0
PROTOCOL = ProtocolSettings(fragments=2, shards=1, interval_steps=8)


def said(*words: str, status: int = 0) -> str:
    command = [sys.executable, "-m", "atoll.cli", *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    assert done.returncode == status, done.stderr
    return done.stdout + done.stderr


def limits_at(port: int) -> dict[str, Any]:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/varz") as answer:
        told: dict[str, Any] = json.loads(answer.read())
    return told


@pytest.fixture
async def bus(broker: EmbeddedBroker, run: str) -> AsyncIterator[JetStreamBus]:
    made = await JetStreamBus.open(broker.url, run, name="test")
    yield made
    await made.close()


async def tap_of_a_head(bus: JetStreamBus, version: int) -> bytes:
    tap = await bus.listen(bus.subjects.tap("gl.head.*"))
    await bus.put_record(bus.subjects.head(0), b"head %d" % version, expected=None, info={"version": version})
    heard = await tap.next(DEADLINE_S)
    await tap.close()
    assert heard is not None
    assert json.loads(heard.headers["Atoll-Info"]) == {"version": version}
    return heard.data


@pytest.mark.second_tier
async def test_taps_get_bodies_and_lose_them_while_a_run_lives(
    broker: EmbeddedBroker, bus: JetStreamBus, run: str
) -> None:
    """Its founder chose; a founder who would have chosen otherwise takes it as it is. Stored messages stay."""
    old = await JetStreamBus.open(broker.url, run, name="old", options=BusOptions(taps="headers"))
    await old.provision(GIB)
    assert await tap_of_a_head(bus, 1) == b""
    await bus.provision(GIB)
    assert await tap_of_a_head(bus, 2) == b""

    for words, changed in ((("bodies",), "4"), (("bodies",), "no"), (("headers",), "4"), (("bodies",), "4")):
        told = await asyncio.to_thread(said, "runs", "taps", run, *words, "--broker", broker.url)
        assert f"{changed} streams changed" in told
    assert await tap_of_a_head(bus, 3) == b"head 3"
    await old.provision(GIB)
    assert await tap_of_a_head(bus, 4) == b"head 4"
    record = await bus.get_record(bus.subjects.head(0))
    assert record is not None
    assert record.data == b"head 4"
    refused = await asyncio.to_thread(said, "runs", "taps", "absent", "bodies", "--broker", broker.url, status=2)
    assert "the broker keeps no such run" in refused
    await old.close()


async def test_a_run_is_listed_with_its_size_and_removed_whole(bus: JetStreamBus, run: str) -> None:
    other, began_s = bus.beside(f"{run}_2"), time.time()
    for each in (bus, other):
        await each.provision(GIB)
        await each.put_blob(each.subjects.global_stem(0, 1, "n"), bytes(1000))

    found = {stored.run: stored for stored in await bus.stored_runs()}
    assert {run, f"{run}_2"} <= set(found)
    assert found[run].streams == len(stream_plan(run))
    assert 1000 <= found[run].size_bytes < 3000
    assert found[run].bounds_bytes == sum(plan.bytes_max for plan in stream_plan(run, GIB))
    assert began_s <= (found[run].written_s or 0.0) <= time.time()

    assert await bus.remove_run() == len(stream_plan(run))
    left = {stored.run for stored in await bus.stored_runs()}
    assert run not in left
    assert f"{run}_2" in left
    assert await bus.remove_run() == 0
    assert await read_run(bus, Subjects(run)) is None


@pytest.mark.second_tier
def test_the_program_lists_and_removes_and_refuses_what_lives(broker: EmbeddedBroker, run: str) -> None:
    """A run whose learner is heard stays unless it is forced; a run that is not there is named, and nothing is removed."""
    at = ("--broker", broker.url)
    with atoll.join(broker.url, run=run, learner="a", params={"w": jnp.ones((8, 4))}, protocol=PROTOCOL) as island:
        read = atoll.read_model(broker.url, run=run)
        merged = island.merged()
        (row,) = [row for row in json.loads(said("runs", *at, "--json")) if row["run"] == run]
        alive = said("runs", "remove", run, *at, "--yes", status=3)
        absent = said("runs", "remove", run, "mistyped", *at, "--yes", "--force", status=2)
    listed = said("runs", *at)
    removed = said("runs", "remove", run, *at, "--yes", "--force")

    assert (read.versions_max, read.settled, float(read.params["w"].sum())) == (0, False, 32.0)
    assert float(merged.params["w"].sum()) == 32.0
    assert (row["state"], row["wire"], row["parameters"], row["members"]) == ("open", SCHEMA_NEWEST, 32, 1)
    assert "still heard" in alive
    assert f"{run} (a)" in alive
    assert "mistyped" in absent
    assert run in listed
    assert f"removed {run}" in removed
    assert run not in said("runs", *at)


def test_the_model_of_an_own_loop_is_exported_from_its_layout(broker: EmbeddedBroker, run: str, tmp_path: Path) -> None:
    given = {"w": jnp.full((8, 4), 0.5, jnp.bfloat16), "b": jnp.ones(4)}
    with atoll.join(broker.url, run=run, learner="a", params=given, protocol=PROTOCOL):
        said("export", "--run", run, "--broker", broker.url, "--out", str(tmp_path / "out"))

    found = load_file(tmp_path / "out" / "model.safetensors")
    assert {name: (str(array.dtype), array.shape) for name, array in found.items()} == {
        "w": ("bfloat16", (8, 4)),
        "b": ("float32", (4,)),
    }
    assert float(found["w"].astype(np.float32).sum()) == 16.0
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["model.safetensors"]


@pytest.mark.second_tier
def test_a_mistyped_run_leaves_nothing_behind(broker: EmbeddedBroker, run: str) -> None:
    with pytest.raises(SettingsError, match="nobody has founded this run"):
        atoll.read_model(broker.url, run=run)
    for verb in (["fates"], ["why"], ["top", "--once"]):
        assert "nobody has founded this run" in said(*verb, "--run", run, "--broker", broker.url, status=2)

    assert run not in said("runs", "--broker", broker.url)


async def test_a_broker_of_the_program_serves_until_it_is_told_to_stop(tmp_path: Path) -> None:
    """It says where it is, where its data are and when they are durable; another on the same folder is refused."""
    extra = tmp_path / "extra.conf"
    with EmbeddedBroker(tmp_path / "one") as one, EmbeddedBroker(tmp_path / "two") as two:
        port, watched_port = one.port, two.port
    extra.write_text(f"http: 127.0.0.1:{watched_port}\n", encoding="utf-8")
    store, words = tmp_path / "store", ["--port", str(port), "--include", str(extra)]
    command = [sys.executable, "-m", "atoll.cli", "broker", "--store", str(store), *words]
    process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE, env=os.environ)
    assert process.stdout is not None
    try:
        async with asyncio.timeout(DEADLINE_S):
            lines = [(await process.stdout.readline()).decode() for _ in range(3)]
        bus = await JetStreamBus.open(f"nats://127.0.0.1:{port}", "r", name="test")
        await bus.provision(GIB)
        await bus.close()
        limits = await asyncio.to_thread(limits_at, watched_port)
        taken = await asyncio.to_thread(said, "broker", "--store", str(store), "--port", str(port + 1), status=3)
    finally:
        process.send_signal(signal.SIGTERM)
        async with asyncio.timeout(DEADLINE_S):
            status = await process.wait()

    assert f"broker at nats://127.0.0.1:{port}" in lines[0]
    assert f"data in {store}; sync always" in lines[1]
    assert status == 0
    assert "another broker uses this directory" in taken
    assert limits["max_payload"] == 4 << 20
    assert "No such file" in said("broker", "--include", str(tmp_path / "none"), status=2)
