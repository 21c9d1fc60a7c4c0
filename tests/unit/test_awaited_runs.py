"""`atoll dashboard` of a run that is not there says what it waits for, and which runs there are."""

from __future__ import annotations

import asyncio

import pytest

from atoll.base.clock import SystemClock
from atoll.bus.open import open_bus
from atoll.bus.server import EmbeddedBroker
from atoll.run.stream_room import provide
from atoll.settings import Settings, load
from atoll_monitor import process
from atoll_monitor.monitored_run import MonitoredRun
from atoll_monitor.process import announce_wait, describe_founding_wait
from support.founded_run import run_record
from support.links import unique_run


def settings_for(url: str, run: str) -> Settings:
    return load(None, [f"broker.url={url}", f"run={run}"]).settings


@pytest.mark.connected
async def test_the_runs_of_the_broker_are_named_beside_the_one_that_is_missing(broker: EmbeddedBroker) -> None:
    there = unique_run()
    bus = await open_bus(broker.url, there, name="test")
    await provide(bus, run_record(there), None)
    await bus.close()

    told = await describe_founding_wait(settings_for(broker.url, "mistyped"))

    assert told.startswith(f"nobody has founded run 'mistyped' at {broker.url} yet: the page waits for it. ")
    assert f"{there}" in told or "more (`atoll runs`)" in told


@pytest.mark.parametrize("soon", [True, False])
async def test_a_run_that_is_found_soon_needs_no_word(monkeypatch: pytest.MonkeyPatch, soon: bool) -> None:  # noqa: FBT001
    """One that is founded later is told of, so that the first word is not the last."""

    async def missing(_: Settings) -> str:
        return "nobody has founded it"

    monkeypatch.setattr(process, "describe_founding_wait", missing)
    monkeypatch.setattr(process, "SOON_S", 0.0)
    monkeypatch.setattr(process, "LOOK_S", 0.001)
    watched, told = MonitoredRun("mine", SystemClock(), began_s=0.0), list[str]()
    if soon:
        watched.record = run_record("mine")
    telling = asyncio.create_task(announce_wait(watched, settings_for("nats://127.0.0.1:1", "mine"), told.append))
    async with asyncio.timeout(10.0):
        while not soon and not told:  # noqa: ASYNC110  (a list sets no event)
            await asyncio.sleep(0.001)
        watched.record = run_record("mine")
        await telling

    assert told == ([] if soon else ["nobody has founded it", "run 'mine' is there: the page shows it"])
