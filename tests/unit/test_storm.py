"""The storm itself: the same faults for everybody, done to who has the role at the time, and undone again."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import psutil
import pytest

from atoll.bus.server import EmbeddedBroker
from benchmarks.faults.chaos import courses
from benchmarks.faults.extracts import Course
from benchmarks.faults.storm import Planned, Storm, StormLinks, Victim, chosen, forecast, seconds_for, storm
from benchmarks.faults.synchronous import Formed, GroupMessage, WorkerGroup
from benchmarks.faults.up_in_storm import UpGround

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


class StormStand:
    """A clock that moves when somebody pauses."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s

    def pause(self, for_s: float) -> None:
        self.now_s += for_s


class Shelter:
    """A ground of names without processes, whose links note what is done to them."""

    def __init__(self, broker: EmbeddedBroker) -> None:
        self.broker = broker
        self.links = NotedLinks()
        self.empty = 0

    def tick(self) -> None:
        """Nobody ends here."""

    def victim(self, planned: Planned) -> Victim | None:
        """Return a learner, after there was none for a while; owners there are none."""
        if self.empty:
            self.empty -= 1
            return None
        name = chosen(planned.pick, ("learner-1", "learner-2"))
        return Victim(name) if name and planned.role == "learner" else None


class NotedLinks(StormLinks):
    """Links that only write down."""

    def __init__(self) -> None:
        self.done: list[str] = []

    def cut(self, name: str) -> None:
        self.done.append(f"cut {name}")

    def swallow(self, name: str, way: str) -> None:
        self.done.append(f"swallow {way} {name}")

    def heal(self, name: str) -> None:
        self.done.append(f"heal {name}")


def test_a_storm_undoes_what_it_did_and_spares_whom_it_has(tmp_path: Path) -> None:
    """A fault that finds nobody, or somebody in the middle of another, is missed; what was begun is ended."""
    planned = [
        Planned(0.0, "cut", "learner", 0.0, 0.1),
        Planned(0.0, "blackhole", "learner", 0.2, 0.1, "up"),
        Planned(0.0, "freeze", "owner", 0.0, 0.1),
        Planned(0.0, "blackhole", "learner", 0.9, 0.1, "both"),
    ]
    shelter, stand = Shelter(EmbeddedBroker(tmp_path)), StormStand()
    raging = Storm(shelter, planned, stand, stand.pause)
    raging.rage(0.01)

    assert raging.missed == 2
    assert [(fault.act, fault.who) for fault in raging.faults] == [("cut", "learner-1"), ("blackhole", "learner-2")]
    assert all(fault.over_at_s >= fault.at_s for fault in raging.faults)
    assert 0.1 <= stand.now_s < 0.2
    assert sorted(shelter.links.done) == ["cut learner-1", "heal learner-1", "heal learner-2", "swallow both learner-2"]


def test_the_partition_waits_for_somebody_who_trains(tmp_path: Path) -> None:
    """It is the one fault that is not missed: a storm has it, if a little later."""
    shelter, stand = Shelter(EmbeddedBroker(tmp_path)), StormStand()
    shelter.empty = 2
    raging = Storm(shelter, [Planned(0.0, "partition", "learner", 0.0, 0.05)], stand, stand.pause)
    raging.rage(4.0)

    assert [fault.who for fault in raging.faults] == ["learner-1"]
    assert raging.missed == 0
    assert shelter.links.done == ["cut learner-1", "heal learner-1"]


def test_a_storm_with_a_number_of_kills_goes_on_until_it_has_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kills that find nobody do not count; without enough victims it ends with its time."""

    class Killed:
        def __init__(self, pid: int) -> None:
            assert pid == 0

        def kill(self) -> None:
            """Be dead."""

    monkeypatch.setattr(psutil, "Process", Killed)
    planned = [Planned(30.0 * i, "kill", "learner" if i % 2 else "owner", 0.0) for i in range(20)]
    ends = []
    for kills in (3, 100):
        stand = StormStand()
        raging = Storm(Shelter(EmbeddedBroker(tmp_path)), planned, stand, stand.pause)
        raging.rage(600.0, kills)
        ends.append((len(raging.faults), round(stand.now_s)))

    assert ends == [(3, 150), (10, 600)]


def test_a_process_that_was_killed_young_three_times_is_spared_the_fourth(tmp_path: Path) -> None:
    """`atoll up` would give it up; one that has lived meanwhile may be killed again."""
    raging = Storm(Shelter(EmbeddedBroker(tmp_path)), [])
    kill = Planned(0.0, "kill", "owner", 0.0)

    assert [raging._may(kill, Victim("shard-0", 1), at_s) for at_s in (0.0, 5.0, 10.0, 15.0, 60.0)] == [
        True,
        True,
        True,
        False,
        True,
    ]


@dataclass
class Child:
    """A process as far as a storm looks at it."""

    name: str
    pid: int
    state: str = psutil.STATUS_RUNNING

    def environ(self) -> dict[str, str]:
        """Return what `atoll up` told it."""
        return {"ATOLL_HEALTH_FILE": f"/run/health/{self.name}"}

    def status(self) -> str:
        return self.state


@dataclass
class StubGroup:
    """An `atoll up` and what is recorded of it."""

    family: list[Child]
    leases: dict[int, int]
    trained: tuple[str, ...] = ()

    def children(self) -> list[Child]:
        return self.family

    def owners(self) -> dict[int, int]:
        return self.leases

    def has_trained(self, learner: str, _: float) -> bool:
        return learner in self.trained


def test_a_role_is_whoever_has_it_at_the_time(tmp_path: Path) -> None:
    """Owners are who the leases name, standbys the others, and who is frozen, dead or not yet training is passed over."""
    family = [Child("learner-1", 1), Child("learner-2", 2, psutil.STATUS_STOPPED), Child("learner-3", 3)]
    family += [Child("shard-0", 4), Child("shard-1", 5), Child("standby-0-1", 6), Child("standby-1-1", 7)]
    fleet: Any = StubGroup(family, {0: 6, 1: 99}, trained=("learner-3",))
    ground = UpGround(EmbeddedBroker(tmp_path), NotedLinks(), fleet, fleet)

    def found(act: str, role: str, pick: float) -> Victim | None:
        return ground.victim(Planned(0.0, act, role, pick))

    assert found("kill", "owner", 0.1) == Victim("standby-0-1", 6, 0)
    assert found("kill", "owner", 0.9) is None
    assert [found("kill", "standby", pick) for pick in (0.0, 0.5, 0.9)] == [
        Victim("shard-0", 4),
        Victim("shard-1", 5),
        Victim("standby-1-1", 7),
    ]
    assert [found("kill", "learner", pick) for pick in (0.0, 0.9)] == [Victim("learner-1", 1), Victim("learner-3", 3)]
    assert found("partition", "learner", 0.0) == Victim("learner-3", 3)
    assert found("kill", "broker", 0.0) is None


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
