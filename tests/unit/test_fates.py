"""The table of fates, as it is printed."""

from __future__ import annotations

import json

import pytest

from atoll.base.clock import SystemClock
from atoll.bus.memory import MemoryBroker, MemoryBus
from atoll.cli.fates import show
from atoll.client.membership import claim
from atoll.protocol.ledger import Account, FormerLives, Ledger
from atoll.run import ledger
from atoll.run.ledger import IncarnationAccount
from atoll.run.record import RecordedProgress
from atoll.wire.subjects import Subjects
from support.founded_run import run_record


@pytest.mark.parametrize("over", [False, True])
async def test_who_has_not_left_when_the_run_is_over_has_died(
    run: str, monkeypatch: pytest.MonkeyPatch, *, over: bool
) -> None:
    """Killed, it is there as long as it may come back; its record alone would keep it there for ever."""

    async def read(*_: object) -> Ledger:
        return Ledger({"ada/1": Account(trained=50, merged=150)})

    async def progress(*_: object) -> RecordedProgress:
        return RecordedProgress(50, over)

    monkeypatch.setattr(ledger, "read_ledger", read)
    monkeypatch.setattr(ledger, "recorded_progress", progress)
    bus = MemoryBus(run, MemoryBroker())
    await bus.provision(1 << 20)
    await claim(bus, Subjects(run), "ada", SystemClock())
    [life] = await ledger.read_lives(bus, run_record(run))

    assert life.state == ("died" if over else "present")
    assert life.fates(4)["lost" if over else "open"] == 50


def test_former_lives_are_one_row_and_count(capsys: pytest.CaptureFixture[str]) -> None:
    known = Ledger({"ada/9": Account(trained=50, merged=100, pushed=100, left=True)}, fragments=2)
    known.former = FormerLives(lives=1_234, tokens=500, merged=901, superseded=90, refused={"stale": 7}, lost=1)

    lives = ledger.ended_lives(known)
    show(lives, 2)
    said = capsys.readouterr().out
    told = json.loads(ledger.as_json(lives, 2))

    assert [life.name for life in lives] == ["1,234 former lives", "ada/9"]
    assert "every token has one fate" in said
    assert told["trained"] == (999 + 100) // 2
    assert sum(told["fates"].values()) == 999 + 100
    assert told["fates"]["refused:stale"] == 7


def test_what_has_two_fates_is_not_called_one(capsys: pytest.CaptureFixture[str]) -> None:
    """For a life that is over `lost` is what is left, so a sum alone would always be right."""
    show([IncarnationAccount("ada/1", Account(trained=100, merged=120), "died")], 1)

    said = capsys.readouterr().out
    assert "every token has one fate" not in said
    assert "wrong: ada/1: 20 token-fragments have more than one fate" in said


def test_an_account_that_was_wrong_when_it_was_folded_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    """Its sums are exact, since nothing is negative there; what its learner said was not."""
    former = FormerLives(lives=2, tokens=10, merged=10, wrong=["liar/3"])
    show(ledger.former_of(Ledger(former=former)), 1)

    said = capsys.readouterr().out
    assert "wrong: liar/3" in said
    assert "every token has one fate" not in said
