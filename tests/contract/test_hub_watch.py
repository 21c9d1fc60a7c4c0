"""Whether the hub of a region answers: said at once when the link is closed, and in time when it swallows everything."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from atoll.base.errors import AccessDenied
from atoll.bus.nats import region_keeper
from atoll.bus.nats.connection import Connection
from atoll.bus.nats.region_keeper import HubWatch
from atoll.bus.options import BusOptions
from atoll.bus.regions import RegionSide
from atoll.wire.traffic import BusStats
from support.command_line import atoll
from support.regions import RelayedRegion, free_port, until

pytestmark = pytest.mark.connected
SILENT_S = 1.5
WITHIN_S = 120.0


async def test_a_hub_that_is_away_does_not_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before the first answer it is not there either; when the link is back, it is there again."""
    monkeypatch.setattr(region_keeper, "WATCH_HUB_S", 0.1)
    there = RelayedRegion(tmp_path)
    await asyncio.to_thread(there.__enter__)
    connection = Connection(there.leaf.url, "look", BusOptions(), BusStats())
    try:
        await connection.call(connection.connect(WITHIN_S))
        watch = HubWatch(connection)
        assert not watch.answers
        watching = asyncio.run_coroutine_threadsafe(watch.watch(), connection.loop)
        await until(lambda: _so(lambda: watch.answers))
        there.cut()
        await until(lambda: _so(lambda: not watch.answers))
        there.heal()
        await until(lambda: _so(lambda: watch.answers))
        refused: list[str] = []

        async def refuse(question: str, **_: float) -> None:
            refused.append(question)
            raise AccessDenied("the leaf's certificate does not hold at this time")

        with monkeypatch.context() as shut:
            shut.setattr(connection, "request", refuse)
            await until(lambda: _so(lambda: len(refused) > 2))
        assert not watching.done()  # the certificate is renewed
        monkeypatch.setattr(region_keeper, "STALE_S", SILENT_S)
        there.link.blackhole("down")
        await until(lambda: _so(lambda: not watch.answers))
    finally:
        await connection.stop()
        await asyncio.to_thread(there.__exit__)


async def _so(holds: Callable[[], bool]) -> bool:
    return holds()


@pytest.mark.second_tier
def test_a_leaf_without_its_hub_is_unhealthy(tmp_path: Path) -> None:
    """The file of `atoll broker --leaf-of` is touched while the hub answers, and not after the hub has gone."""
    health = tmp_path / "health"
    with RelayedRegion(tmp_path / "brokers") as there:
        assert isinstance(there.leaf.link, RegionSide)
        words = ["broker", "--leaf-of", there.link.url, "--region", "us", "--store", str(tmp_path / "us")]
        with (tmp_path / "log").open("wb") as log:
            leaf = subprocess.Popen(
                [sys.executable, "-m", "atoll.cli", *words, "--port", str(free_port())],
                env={**os.environ, "ATOLL_HEALTH_FILE": str(health)},
                stdout=log,
                stderr=log,
            )
        try:
            _await(health.exists, leaf, tmp_path)
            assert atoll("health", "--file", str(health)).returncode == 0
            there.cut()
            _await(lambda: time.time() - health.stat().st_mtime > 3.0, leaf, tmp_path)
            assert atoll("health", "--file", str(health), "--age", "3").returncode == 1
            there.heal()
            since = health.stat().st_mtime
            _await(lambda: health.stat().st_mtime > since, leaf, tmp_path)
            leaf.send_signal(signal.SIGTERM)
            assert leaf.wait(WITHIN_S) == 0
        finally:
            leaf.kill()
            leaf.wait()


def _await(holds: Callable[[], bool], leaf: subprocess.Popen[bytes], folder: Path) -> None:
    deadline_s = time.monotonic() + WITHIN_S
    while not holds():
        assert leaf.poll() is None, (folder / "log").read_text(encoding="utf-8")
        assert time.monotonic() < deadline_s, (folder / "log").read_text(encoding="utf-8")
        time.sleep(0.1)
