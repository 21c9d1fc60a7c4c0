"""What all rounds of a run add up to, the phases of each, and how its waiting is told."""

from __future__ import annotations

from collections import deque
from typing import Any

import msgspec
import pytest
from structlog.testing import capture_logs

from atoll.bus.memory import MemoryBroker, MemoryBus
from atoll.protocol.events import LearnerBeat, PublishCall, RoundReasons, TimerFired
from atoll.protocol.shard import Shard
from atoll.report.collect import _rounds
from atoll.run.history import NAMES_KEPT, OTHER, History, RoundSums
from atoll.wire.events import RoundEvent, RoundPhases
from atoll_synchronizer.round_report import LONG_CALLS, RoundReporter
from atoll_synchronizer.shard_context import EventLog, ShardContext
from support.clocks import HandClock
from support.events import event, fields
from support.founded_run import run_record

SHARE: dict[str, Any] = {"learner": "a", "incarnation": 1, "push": 1, "tokens": 10, "weight": 1.0}


def rounds(view: History, count: int) -> None:
    """Let two shards commit in turn, each round with a late contribution beside one in time."""
    for number in range(count):
        contributors = [SHARE | {"age": 0, "unheard": 2}, SHARE | {"learner": "b", "age": 1}]
        view.on_event(
            event(
                "round",
                f"shard-{number % 2}",
                float(number),
                fragment=number % 2,
                version=1 + number // 2,
                contributors=contributors,
                end="grace over" if number % 4 else "all answered",
                bytes_up=5,
                bytes_down=7,
            )
        )


def test_totals_are_those_of_all_rounds_and_not_of_those_that_are_kept() -> None:
    view = History(rounds=deque(maxlen=8))
    rounds(view, 100)
    told = _rounds(view)

    assert len(view.rounds) == 8
    assert (told["count"], told["late"], told["contributors_mean"]) == (100, 100, 2.0)
    assert told["ends"] == {"all answered": 25, "grace over": 75}
    assert (told["shortened"], told["unheard"]) == ({}, {"a": 200})
    assert view.sums.commits == {"shard-0": 50, "shard-1": 50}


def test_whoever_writes_the_event_log_makes_no_sum_grow_without_end() -> None:
    sums = RoundSums()
    for number in range(2 * NAMES_KEPT):
        sums.add("shard-0", fields(RoundEvent, fragment=0, version=1, contributors=(), end=f"reason {number}"), 0.0)

    assert len(sums.ends) == NAMES_KEPT + 1
    assert sums.ends[OTHER] == NAMES_KEPT


TIMES = {"waited_s": 5.0, "queued_s": 0.25, "merge_s": 0.5, "commit_s": 1.0}


def a_round(why: RoundReasons | None, quorum_wait_s: float) -> RoundEvent:
    return fields(RoundEvent, fragment=0, version=1, contributors=(), why=why, quorum_wait_s=quorum_wait_s, **TIMES)


def reasons(**known: str) -> RoundReasons:
    """Return the reasons of a round as a reader has them of an event that says no more."""
    return msgspec.convert({"version": 0, **known}, RoundReasons)


@pytest.mark.parametrize("why", [None, reasons(met_by="push/b/1/0/1")])
def test_after_its_quorum_a_round_waits_for_grace(why: RoundReasons | None) -> None:
    """Where nothing tells why a round ended, it has met its quorum when it says so."""
    made = a_round(why, quorum_wait_s=2.0)

    assert made.phases == RoundPhases(2.0, 3.0, 0.25, 0.5, 1.0)
    assert sum(made.phases) == made.took_s


def test_a_round_that_never_met_its_quorum_waited_for_nothing_else() -> None:
    """Its event has a quorum wait of 0, because there was no such moment."""
    made = a_round(reasons(end="nobody left"), quorum_wait_s=0.0)

    assert made.phases == RoundPhases(5.0, 0.0, 0.25, 0.5, 1.0)


def test_a_phase_is_never_negative_nor_a_quorum_later_than_the_end() -> None:
    assert a_round(None, quorum_wait_s=-1.0).phases[:2] == (0.0, 5.0)
    assert a_round(None, quorum_wait_s=9.0).phases[:2] == (5.0, 0.0)


STEP_S = 1.0


async def test_a_usual_wait_is_no_warning_and_one_longer_than_an_interval_is() -> None:
    """A round that a slow step delays is told of quietly, one that has waited longer than it should take aloud."""
    record = run_record("waits")
    clock = HandClock()
    context = ShardContext(MemoryBus(record.run, MemoryBroker()), record, 0, clock)
    machine = Shard(record.protocol, 0, dict.fromkeys(record.protocol.fragments_of(0), 0))
    report = RoundReporter(context, machine, EventLog(context.bus, context.subjects, context.name, clock))
    machine.handle(LearnerBeat(at_s=clock.now_s, learner="a", incarnation=1, training=True, step_s=STEP_S, tokens=0))
    machine.handle(TimerFired(at_s=clock.now_s, name="due/0"))

    async def called_again(attempt: int, waited_s: float) -> dict[str, object]:
        clock.now_s = machine.slots[0].round.called_s + waited_s
        with capture_logs() as lines:
            await report.record_wait(PublishCall(fragment=0, version=0, attempt=attempt, run_tokens=0))
        (line,) = lines
        return dict(line)

    second = await called_again(2, 2 * STEP_S)
    long = await called_again(LONG_CALLS, 2 * LONG_CALLS * STEP_S)
    longer = await called_again(2 * LONG_CALLS, (record.protocol.interval_steps + 1) * STEP_S)

    assert [line["log_level"] for line in (second, long, longer)] == ["info", "info", "warning"]
    assert [line["waited_s"] for line in (second, long, longer)] == [2.0, 16.0, 25.0]
