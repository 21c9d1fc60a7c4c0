"""Curves of a monitor's sinks: a run that is founded anew under its old id goes on in no sink of the former one."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import pytest

from atoll.settings.sections import MonitorSettings
from atoll_monitor import records as record_keeper
from atoll_monitor.monitored_run import MonitoredRun
from atoll_monitor.records import RecordKeeper
from support.clocks import SetClock
from support.founded_run import run_record
from support.watched_runs import take_round, watched_run

DEADLINE_S = 60.0


@dataclass(eq=False)
class KeptSink:
    """A sink that keeps in memory what it takes."""

    name: str
    config: Mapping[str, Any]
    steps: list[int] = field(default_factory=list)
    closed: int = 0
    fails: bool = False

    def log(self, step: int, values: Mapping[str, float]) -> None:
        assert values["run_tokens_total"] == step
        self.steps.append(step)

    def close(self) -> None:
        self.closed += 1
        if self.fails:
            raise OSError("no room")


@pytest.fixture
def begun(monkeypatch: pytest.MonkeyPatch) -> list[KeptSink]:
    found: list[KeptSink] = []

    def begin(_folder: Path, name: str, config: Mapping[str, Any]) -> KeptSink:
        found.append(KeptSink(name, config))
        return found[-1]

    monkeypatch.setattr(record_keeper, "SINKS", {"tensorboard": begin})
    monkeypatch.setattr(record_keeper, "require", lambda *_: None)
    monkeypatch.setattr(record_keeper, "FLUSH_S", 0.001)
    return found


def found_anew(watched: MonitoredRun, nonce: str) -> None:
    watched.forget()
    watched.record = msgspec.structs.replace(run_record("r"), nonce=nonce)


async def until_taken(sink: KeptSink, step: int) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while step not in sink.steps:  # noqa: ASYNC110  (a sink tells nobody)
            await asyncio.sleep(0.001)


async def until_begun(begun: list[KeptSink], count: int) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while len(begun) < count:  # noqa: ASYNC110  (a sink tells nobody)
            await asyncio.sleep(0.001)


@pytest.mark.parametrize("fails", [False, True], ids=["ends", "cannot end"])
async def test_a_run_that_is_founded_anew_has_sinks_of_its_own(
    begun: list[KeptSink], tmp_path: Path, *, fails: bool
) -> None:
    """The new run has fewer tokens than the old one for long: its curves are there all the same, and not in the old sink."""
    watched, clock = watched_run()
    found_anew(watched, "first-founding")
    settings = MonitorSettings(sinks=("tensorboard",), folder=tmp_path, sample_s=1.0)
    keeper = RecordKeeper(watched, settings)
    keeping_on = asyncio.create_task(keeper.keep())
    ticking = asyncio.create_task(ticks(clock))
    take_round(watched, 0, 1, clock.now_s, run_tokens=5000)
    await until_begun(begun, 1)
    begun[0].fails = fails
    await until_taken(begun[0], 5000)
    found_anew(watched, "second-founding")
    take_round(watched, 0, 1, clock.now_s, run_tokens=100)
    await until_begun(begun, 2)
    await until_taken(begun[1], 100)
    old, new = begun[0], begun[1]
    held = old.closed, max(old.steps)
    for task in (keeping_on, ticking):
        task.cancel()
    await asyncio.gather(keeping_on, ticking, return_exceptions=True)

    assert held == (1, 5000)
    assert set(new.steps) <= {0, 100}
    assert [old.name, new.name] == ["r-first-fo", "r-second-f"]
    assert [old.closed, new.closed] == [1, 1]
    assert len(begun) == 2
    assert new.config["fragments"] == run_record("r").protocol.fragments


async def ticks(clock: SetClock) -> None:
    while True:
        clock.now_s += 1.0
        await asyncio.sleep(0.001)
