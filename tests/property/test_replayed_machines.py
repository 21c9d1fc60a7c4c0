"""A dump of a machine's last facts, replayed, gives the very commands that the machine gave: whatever was forgotten before."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.base.errors import DataError, ProtocolMisuse
from atoll.protocol.events import Committed, FetchFailed, TimerFired
from atoll.protocol.island import Island
from atoll.protocol.ownership import Balance, HostHeard, LeaseSeen, LeaseWritten, Tenure
from atoll.protocol.recorder import FactRecorder, Replay, freeze, thaw
from atoll.protocol.settings import ProtocolSettings
from atoll.protocol.shard import Shard
from support.protocol_world import ProtocolWorld

SETTINGS = ProtocolSettings(fragments=3, shards=1, interval_steps=6, quorum=2, silence_s=8.0, outer_momentum=0.9)
ACTS = ("step", "beat", "tick", "deliver", "again", "read", "spoil", "hear", "lose", "work", "commit", "join", "die")


def recorded(machine: Any, name: str, facts_min: int) -> tuple[FactRecorder[Any], list[list[Any]]]:  # noqa: ANN401  (any machine)
    recorder, answers = FactRecorder(name, machine, facts_min), list[list[Any]]()
    handle = type(machine).handle

    def told(fact: Any) -> list[Any]:  # noqa: ANN401
        machine.handle = lambda fact: handle(machine, fact)
        try:
            answers.append([])
            answers[-1] = list(recorder.handle(fact))
            return answers[-1]
        finally:
            machine.handle = told

    machine.handle = told
    return recorder, answers


def act(world: ProtocolWorld, name: str, learner: str, number: int) -> None:
    there = learner in world.lives
    if name in ("step", "beat", "die") and there:
        getattr(world, name)(learner)
    elif name == "join" and not there:
        world.join(learner)
    elif name == "tick":
        world.tick(0.5 + number % 4)
    elif name in ("deliver", "again"):
        world.deliver(number, again=name == "again")
    elif name in ("read", "spoil"):
        world.read(number, "corrupt" if name == "spoil" else "")
    elif name in ("hear", "lose"):
        world.core_message(number, lose=name == "lose")
    elif name in ("work", "commit"):
        getattr(world, name)(number)


@settings(max_examples=60, deadline=None)
@given(
    facts_min=st.integers(1, 20),
    acts=st.lists(st.tuples(st.sampled_from(ACTS), st.sampled_from("abc"), st.integers(0, 9)), max_size=150),
)
def test_a_dump_of_a_shard_replays_to_the_same_commands(facts_min: int, acts: list[tuple[str, str, int]]) -> None:
    world = ProtocolWorld(SETTINGS)
    recorder, answers = recorded(world.shard, "shard-0", facts_min)
    islands: dict[int, tuple[FactRecorder[Any], list[list[Any]]]] = {}
    for learner in "abc":
        world.join(learner)
    for name, learner, number in acts:
        for life in world.lives.values():
            if id(life) not in islands:
                islands[id(life)] = recorded(life.island, life.name, facts_min)
        act(world, name, learner, number)
    for one, answered in ((recorder, answers), *islands.values()):
        replay = Replay(list(one.lines("a test")))
        again = [commands for _, commands in replay.play()]

        assert replay.header.facts <= 2 * max(facts_min, len(freeze(one.machine)) // 256 + 1) + facts_min
        assert again == (answered[-len(again) :] if again else [])
        assert replay.header.facts_before == len(answered) - len(again)
        assert freeze(replay.machine) == freeze(one.machine)


def test_a_dump_of_a_tenure_and_of_a_balance_replays() -> None:
    tenure = FactRecorder("tenure-0", Tenure(3.0), 2)
    seen = [tenure.handle(LeaseSeen(at_s=float(n), revision=7, epoch=4)) for n in range(6)]
    seen.append(tenure.handle(LeaseWritten(at_s=6.0, revision=8)))
    balance = FactRecorder("host-a", Balance("a", 3.0), 2)
    heard = [
        balance.handle(HostHeard(at_s=n / 10, host="ba"[n % 2], wants=frozenset({0, 1, 2}), owns=owns))
        for n, owns in enumerate([frozenset(), frozenset({0, 1, 2})] * 3)
    ]
    for recorder, answered in ((tenure, seen), (balance, heard)):
        again = [commands for _, commands in Replay(list(recorder.lines("a test"))).play()]

        assert again == answered[-len(again) :]
        assert any(again) or any(answered)


def test_a_host_remembers_a_hand_over_in_vain_after_it_was_frozen() -> None:
    balance = Balance("a", 3.0)
    for at_s in (0.0, 10.0, 30.0):
        balance.handle(HostHeard(at_s=at_s, host="b", wants=frozenset({0, 1, 2}), owns=frozenset()))
        balance.handle(HostHeard(at_s=at_s, host="a", wants=frozenset(), owns=frozenset({0, 1, 2})))
        again = thaw(freeze(balance))

        assert vars(again) == vars(balance)
    assert balance.vain


def test_a_dump_ends_with_the_fact_that_broke_the_machine_and_so_does_its_logbook() -> None:
    recorder = FactRecorder("shard-0", Shard(SETTINGS, 0, dict.fromkeys(range(3), 0)))
    recorder.handle(TimerFired(at_s=1.0, name="due/0"))
    with pytest.raises(ProtocolMisuse, match="durable"):
        recorder.handle(Committed(at_s=2.0, fragment=0, version=1))
    replay, lines = Replay(list(recorder.lines("it broke"))), list[str]()
    with pytest.raises(ProtocolMisuse, match="durable"):
        lines.extend(replay.logbook())

    assert "ProtocolMisuse" in replay.header.broke
    broken = Replay(list(recorder.lines("it broke"))).logbook()
    assert next(broken).endswith("TimerFired(due/0) -> nothing")
    assert next(broken).endswith("Committed(f0 v1) -> BREAKS: ProtocolMisuse")


def test_a_dump_holds_no_password_and_garbage_is_no_dump() -> None:
    recorder = FactRecorder("a", Island(SETTINGS, {0: 0}))
    recorder.handle(FetchFailed(at_s=0.0, fragment=0, version=1, reason="nats://ann:sec/secret@host:4222 is away"))
    text = b"\n".join(recorder.lines("a test"))

    assert b"secret" not in text
    assert b"//***@host" in text
    for garbage in (b"", b"{}", b'{"name":1}', b"\xff"):
        with pytest.raises(DataError, match="not a dump"):
            Replay([garbage])


def test_every_part_of_a_machine_is_frozen() -> None:
    """A machine that is thawed holds the same attributes: one that is forgotten here would be lost in a replay."""
    for machine in (
        Shard(SETTINGS, 0, dict.fromkeys(range(3), 0)),
        Island(SETTINGS, {0: 0}),
        Tenure(2.0),
        Balance("a", 2.0),
    ):
        again = thaw(freeze(machine))

        assert vars(again).keys() == vars(machine).keys()
        assert freeze(again) == freeze(machine)


def test_a_machine_that_breaks_by_a_bug_of_any_kind_is_told_to_its_last_line() -> None:
    recorder = FactRecorder("shard-0", Shard(SETTINGS, 0, dict.fromkeys(range(3), 0)))
    lines = [*recorder.lines("a test"), b'["TimerFired",{"at_s":1.0,"name":"due/99"}]']
    told = list[str]()
    with pytest.raises(KeyError):
        told.extend(Replay(lines).logbook())
    book = Replay(lines).logbook()

    assert "BREAKS: KeyError" in next(book)


def test_a_dump_whose_last_facts_are_missing_says_how_many() -> None:
    recorder = FactRecorder("shard-0", Shard(SETTINGS, 0, dict.fromkeys(range(3), 0)))
    for second in range(5):
        recorder.handle(TimerFired(at_s=float(second), name="due/0"))
    whole = list(recorder.lines("a test"))

    assert Replay(whole).lost == 0
    assert Replay(whole[:-2]).lost == 2


@pytest.mark.parametrize(
    "damage",
    [
        lambda lines: [lines[0], b"\xff\xfe"],
        lambda lines: [lines[0], b'["TimerFired",' + b"[" * 100_000],
        lambda lines: [lines[0].replace(b'"fragments":3', b'"fragments":0')],
    ],
)
def test_a_damaged_dump_is_refused_as_one(damage: Any) -> None:  # noqa: ANN401
    recorder = FactRecorder("shard-0", Shard(SETTINGS, 0, dict.fromkeys(range(3), 0)))
    damaged = damage(list(recorder.lines("a test")))
    with pytest.raises(DataError, match="not a dump"):
        Replay(damaged)
