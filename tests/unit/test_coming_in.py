"""Who comes to a run and has to wait, or finds its id held, is told what to do."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from atoll.base.clock import SystemClock
from atoll.base.errors import AccessDenied, IdentityTaken
from atoll.bus.interface import Bus
from atoll.bus.memory import MemoryBroker, MemoryBus
from atoll.bus.signed import SignedBus
from atoll.client import membership
from atoll.client.membership import claim
from atoll.keys.identity import read_identity
from atoll.keys.roll import KeyFolder
from atoll.wire.messages import encode
from support.founded_run import run_record

SOON_S = 120.0


async def test_who_may_not_found_says_again_and_again_for_whom_it_waits(
    run: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A learner that was to found the run, and whose identity was made without that, would be silent for ten minutes."""
    monkeypatch.setattr(membership, "TOLD_EVERY_S", 0.01)
    monkeypatch.setattr(membership, "ASKED_EVERY_S", 0.001)
    bus, record = MemoryBus(run, MemoryBroker()), run_record(run)
    with capture_logs() as lines:
        waiting = asyncio.create_task(membership.await_founding(bus, record.subjects))
        async with asyncio.timeout(SOON_S):
            while len(lines) < 3:  # noqa: ASYNC110  (a line of the log sets no event)
                await asyncio.sleep(0)
        await bus.provision(1 << 20)
        await bus.put_record(record.subjects.run_record, encode(record), expected=0)
        await waiting
    assert {(line["event"], line["log_level"]) for line in lines} == {("run.awaited", "warning")}
    assert "atoll keys add NAME --run RUN --founds" in lines[-1]["todo"]


@pytest.mark.parametrize(
    ("locked", "todo"), [(False, "choose another learner.id"), (True, "your identity was copied: ask for a new key")]
)
async def test_an_id_that_is_held_names_its_holder(locked: bool, todo: str, run: str, tmp_path: Path) -> None:  # noqa: FBT001
    broker, subjects = MemoryBroker(), run_record(run).subjects
    keys = KeyFolder(tmp_path / "keys")
    keys.create(["127.0.0.1"], time.time())
    identity = read_identity(keys.add("ada", "learner", run, time.time()))

    def opened() -> Bus:
        bus = MemoryBus(run, broker)
        return SignedBus(bus, run, identity.signatures()) if locked else bus

    here, there = opened(), opened()
    await here.provision(1 << 20)
    held = await claim(here, subjects, "ada", SystemClock())
    questions = await here.listen(subjects.control("ada"))

    async def answer() -> None:
        async for question in questions:
            await here.tell(question.reply or "", encode(held))

    answering = asyncio.create_task(answer())
    with pytest.raises(IdentityTaken) as taken:
        await claim(there, subjects, "ada", SystemClock())
    answering.cancel()
    assert f"stop process {held.pid} on {held.host}" in str(taken.value.todo)
    assert todo in str(taken.value.todo)


async def test_waiting_for_a_founder_has_an_end(run: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(membership, "FOUNDED_S", 0.01)
    with pytest.raises(AccessDenied, match="--founds"):
        await membership.await_founding(MemoryBus(run, MemoryBroker()), run_record(run).subjects)
