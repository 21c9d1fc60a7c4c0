"""Runs that end together, under every kind of fault: the promises are those of any run."""

from __future__ import annotations

import random

import msgspec
import pytest

from atoll.protocol.settings import ProtocolSettings
from atoll.sim.dst import schedule

ONCE_BROKEN = (100591, 100598, 100683, 100927)
SCHEDULES = 40


@pytest.fixture(autouse=True)
def _together(monkeypatch: pytest.MonkeyPatch) -> None:
    """Draw the settings of a schedule as ever, but for the end."""
    drawn = schedule.settings_of

    def together(dice: random.Random) -> ProtocolSettings:
        return msgspec.structs.replace(drawn(dice), ending="together").check()

    monkeypatch.setattr(schedule, "settings_of", together)


@pytest.mark.parametrize("seed", ONCE_BROKEN)
def test_a_schedule_that_once_broke_a_promise_holds_it(seed: int) -> None:
    """A learner that was waited for could not be heard, or never had its quorum; a fetch came after the last push."""
    outcome = schedule.play(seed)
    assert outcome.violation == "", outcome.violation


def test_schedules_that_end_together_hold_every_promise() -> None:
    """Whatever the faults, every token has one fate and everybody leaves."""
    outcomes = [schedule.play(seed) for seed in range(SCHEDULES)]
    assert [(one.seed, one.violation) for one in outcomes if one.violation] == []
    assert sum(one.tally["commits"] for one in outcomes) > 5 * SCHEDULES
