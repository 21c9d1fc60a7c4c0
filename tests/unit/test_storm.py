"""The storm itself: the same faults for everybody, and the synchronous group that is measured in it."""

from __future__ import annotations

import argparse
from itertools import islice

import msgspec
import numpy as np

from benchmarks.faults.chaos import courses
from benchmarks.faults.extracts import Course
from benchmarks.faults.storm import Planned, forecast, seconds_for, storm
from benchmarks.faults.synchronous import Formed, GroupMessage, WorkerGroup

# --- the faults ---------------------------------------------------------------------------------------------------------


def test_a_forecast_is_its_seed_and_its_rate() -> None:
    """Repeated it is the same, and with another seed or rate another."""
    first = list(islice(forecast(7, 16.0), 50))

    assert first == list(islice(forecast(7, 16.0), 50))
    assert first != list(islice(forecast(8, 16.0), 50))
    assert [f.at_s for f in first] == sorted(f.at_s for f in first)
    assert 1000 / 16.0 * 0.9 < list(islice(forecast(7, 16.0), 1000))[-1].at_s / 60.0 < 1000 / 16.0 * 1.1


def test_both_systems_get_the_same_storm() -> None:
    """Every run of Atoll has a run of the baseline with the same seed, rate, length and partition, so the same faults.

    Only the gauntlet, from which nothing is compared, has none.
    """
    options = argparse.Namespace(minutes=9.0, gauntlet=32.0, kills=20, rates=[1.0, 16.0], partition=60.0, seeds=[3])
    *every, _ = courses(options, 3)
    ours, theirs = ([c for c in every if c.system == system] for system in ("atoll", "synchronous"))

    def faults(course: Course) -> list[Planned]:
        return storm(course.seed, course.per_minute, course.seconds, course.partition_s)

    assert [faults(c) for c in ours] == [faults(c) for c in theirs]
    assert [len(faults(c)) > 0 for c in ours] == [False, True, True]
    assert len({c.name for c in every}) == 6


def test_a_storm_is_long_enough_for_its_kills_and_has_one_partition() -> None:
    """The length follows from the forecast; the partition lies inside."""
    seconds = seconds_for(0, 16.0, 200)
    planned = storm(0, 16.0, seconds, 60.0)
    partitions = [fault for fault in planned if fault.act == "partition"]

    assert sum(fault.act == "kill" for fault in planned) >= 200
    assert [(fault.role, fault.over_s) for fault in partitions] == [("learner", 60.0)]
    assert partitions[0].at_s + 60.0 < seconds
    assert storm(0, 0.0, seconds, 60.0) == []


# --- the synchronous group ----------------------------------------------------------------------------------------------


def gradient(worker: int, generation: int, value: float) -> GroupMessage:
    return GroupMessage(worker, generation, 5, 0.1, np.full(2, value, np.float32).tobytes())


def formed(size: int = 2) -> WorkerGroup:
    """Return a group all of whose workers know that it stands, since second 8."""
    group = WorkerGroup(size)
    for at_s, worker in enumerate((*range(1, size + 1), *range(1, size)), start=1):
        group.on_join(GroupMessage(worker, 0, 0), "reply", 8.0 - size + at_s * 0.1)
    assert group.told == set(range(1, size + 1))
    return group


def test_a_group_forms_when_all_ask_at_once() -> None:
    """Nobody is told before the last has come, and who asked long ago does not count: it may be dead."""
    group = WorkerGroup(2)

    assert group.on_join(GroupMessage(1, 0, 0), "a", 1.0) == [("a", b"")]
    assert group.on_join(GroupMessage(2, 0, 0), "b", 9.0) == [("b", b"")]
    told = group.on_join(GroupMessage(1, 0, 0), "a", 9.5)
    assert [(reply, msgspec.msgpack.decode(data, type=Formed).generation) for reply, data in told] == [("a", 9500)]
    assert group.on_join(GroupMessage(2, 0, 0), "b", 9.7)[0][1] == told[0][1]


def test_a_group_steps_when_all_have_come_and_not_before() -> None:
    """The mean goes to everybody at once."""
    group = formed()
    assert group.on_reduce(gradient(1, group.generation, 1.0), "a") == []
    answers = dict(group.on_reduce(gradient(2, group.generation, 2.0), "b"))

    assert {reply: np.frombuffer(data, np.float32).tolist() for reply, data in answers.items()} == {
        "a": [1.5, 1.5],
        "b": [1.5, 1.5],
    }


def test_a_worker_that_joins_again_breaks_the_group() -> None:
    """Those that wait are told to join again, and so is who comes later with a gradient of the old generation."""
    group = formed()
    former = group.generation
    group.on_reduce(gradient(1, former, 1.0), "a")

    assert group.on_join(GroupMessage(2, 0, 0), "b", 20.0) == [("a", b""), ("b", b"")]
    assert group.on_reduce(gradient(1, former, 1.0), "a") == [("a", b"")]
    assert len(group.on_join(GroupMessage(1, 0, 0), "a", 20.5)[0][1]) > 0
    assert group.generation == 20500


def test_a_worker_that_died_before_it_was_told_is_told_in_its_next_life() -> None:
    """No step can have been taken without it, so nobody has to go back."""
    group = WorkerGroup(2)
    group.on_join(GroupMessage(1, 0, 0), "a", 1.0)
    group.on_join(GroupMessage(2, 0, 0), "b", 1.5)
    group.on_reduce(gradient(2, group.generation, 1.0), "b")
    answers = group.on_join(GroupMessage(1, 0, 0), "a", 9.0)

    assert [(reply, len(data) > 0) for reply, data in answers] == [("a", True)]
    assert list(group.reducing) == [2]
