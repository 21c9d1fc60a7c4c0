"""How loudly a shard says that a round waits: healthy rounds are called twice; only an unusual wait is a warning."""

from __future__ import annotations

from structlog.testing import capture_logs

from atoll.bus.memory import MemoryBroker, MemoryBus
from atoll.protocol.events import LearnerBeat, PublishCall, TimerFired
from atoll.protocol.shard import Shard
from atoll_synchronizer.round_report import LONG_CALLS, RoundReporter
from atoll_synchronizer.shard_context import EventLog, ShardContext
from support.clocks import HandClock
from support.founded_run import run_record

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
