"""A writer's clock, or its lie about the time, says nothing of others: the broker's clock bounds what an event claims."""

from __future__ import annotations

import asyncio
from contextlib import suppress

import msgspec
import pytest

from atoll.base.clock import SystemClock
from atoll.bus.memory import MemoryBroker, MemoryBus
from atoll.run.history import History
from atoll.run.watch import Watch
from atoll.story.lives import absences_of
from atoll.wire.events import STORING_S_MAX, event_of
from atoll.wire.messages import Member, encode
from atoll.wire.subjects import Subjects
from support.events import event
from support.watched_runs import beat

NOW_S = 1.8e9
FUTURE_S = 3e8
SAMPLE = {"incarnation": 1, "step": 1, "tokens": 10}


def take(history: History, kind: str, who: str, at_s: float, stored_s: float, **fields: object) -> None:
    history.take(f"ev.{kind}.{who}", encode(event(kind, who, at_s, **fields)), stored_s)


def told_run(ahead_s: dict[str, float]) -> History:
    """Return a run of ten minutes, in which each learner writes a sample every 30 s by a clock that is so much ahead."""
    history = History()
    for who, ahead in ahead_s.items():
        take(history, "joined", who, NOW_S + ahead, NOW_S, incarnation=1)
    for number in range(1, 20):
        for who, ahead in ahead_s.items():
            at_s = NOW_S + 30.0 * number
            take(history, "sample", who, at_s + ahead, at_s, **SAMPLE)
    return history


@pytest.mark.parametrize("ahead_s", [61.0, 300.0, FUTURE_S, -61.0, -300.0, -NOW_S])
def test_a_clock_that_is_wrong_makes_nobody_gone(ahead_s: float) -> None:
    history = told_run({"a": 0.0, "b": ahead_s, "c": 0.0})
    assert absences_of(history) == []
    assert history.newest_s == history.newest_s == NOW_S + 570.0


def test_an_event_is_dated_when_it_was_stored_or_shortly_before() -> None:
    """Within that its writer's clock is finer; without a time of storage it is all there is."""
    at_s = [
        event_of("ev.sample.a", encode(event("sample", "a", NOW_S + ahead_s, **SAMPLE)), stored_s).at_s - NOW_S
        for ahead_s, stored_s in ((9.0, NOW_S), (-1.0, NOW_S), (-99.0, NOW_S), (-99.0, None), (9.0, None))
    ]
    assert at_s == [0.0, -1.0, -STORING_S_MAX, -99.0, 9.0]


async def test_a_heartbeat_was_not_sent_after_it_arrived() -> None:
    """Else a learner could say for all that the broker stores nothing: its heartbeat would be newer than every event."""
    clock, subjects, view = SystemClock(), Subjects("r"), History()
    bus = MemoryBus("r", MemoryBroker())
    member = Member(learner="m", incarnation=1, nonce="n", host="h", pid=1, claimed_at_s=0.0)
    await bus.put_record(subjects.member("m"), encode(member), expected=0)
    watch = Watch(bus, "r", view, clock)
    following = asyncio.create_task(watch.follow())
    lie = msgspec.structs.replace(beat("m"), at_s=clock.wall() + FUTURE_S)
    async with asyncio.timeout(60.0):
        while not view.newest_beat_s:
            await bus.tell(subjects.beat("m"), encode(lie))
            await asyncio.sleep(0.01)
    following.cancel()
    with suppress(asyncio.CancelledError):
        await following
    assert view.newest_beat_s <= clock.wall()


def test_no_curve_begins_before_its_run() -> None:
    """A heartbeat that is dated long ago would stretch the curves of all learners over the years since."""
    view = History()
    view.on_event(event("joined", "m", NOW_S, incarnation=1))
    for step, at_s in enumerate((0.0, NOW_S - 1.0, NOW_S + 1.0), start=1):
        view.on_beat(msgspec.structs.replace(beat("m", step=step), at_s=at_s), at_s)
        view.sample_heartbeats()
    assert [line.at_s for line in view.recent["m"]] == [NOW_S + 1.0]
