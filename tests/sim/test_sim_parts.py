"""The parts of the simulated world, one rule each: time, clocks, processes, links, the broker, the line to it."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

import pytest

from atoll.protocol.events import LearnerLeft, PublishCall
from atoll.sim.dst.broker import ACK_WAIT_S, Broker, Full, Gone, NoReader, Queue, ReaderConflict, Record, WrongRevision
from atoll.sim.dst.faults import ALWAYS, CALM, CHOICES, Faults, drawn
from atoll.sim.dst.line import Conflict, Line, Unavailable, patiently
from atoll.sim.dst.network import Network
from atoll.sim.dst.process import Clock, Mailbox, Process, Scope, Work
from atoll.sim.dst.telling import told
from atoll_simulator.engine import Engine


class Nobody:
    """A witness that looks away, but counts."""

    def __init__(self) -> None:
        """Begin with nothing seen."""
        self.settled: list[object] = []

    def see_record(self, name: str, before: Record, after: Record, blobs: Mapping[str, Any]) -> None:
        """Look away."""

    def see_purged(self, stem: str) -> None:
        """Look away."""

    def see_queued(self, body: object) -> None:
        """Look away."""

    def see_settled(self, body: object, fate: object) -> None:
        """Count."""
        self.settled.append((body, fate))


class Bench:
    """An engine, a network with `faults`, a broker, and processes on demand."""

    def __init__(self, **faults: float) -> None:
        """Begin at zero."""
        self.engine = Engine()
        self.tally: Counter[str] = Counter()
        chosen = Faults(**faults)  # type: ignore[arg-type]
        self.network = Network(self.engine, random.Random(1), chosen, self.tally)
        self.witness = Nobody()
        self.broker = Broker(self.network, self.witness, self.tally)
        self.broker.queues["q"] = Queue()
        self.said: list[object] = []

    def process(self, name: str = "p", rate: float = 1.0) -> Process:
        """Return a new process."""
        return Process(name, self.engine, Clock(self.engine, 100.0, rate))

    def line(self, name: str = "p") -> Line:
        """Return a line of a new process."""
        return Line(self.process(name), self.network, self.broker)

    def outcome(self, line: Line, work: Work, within_s: float = 30.0) -> object:
        """Return what `work` of the line's process comes to, an exception as itself."""
        said: list[object] = []

        def run() -> Work:
            try:
                said.append((yield from work))
            except (Conflict, Unavailable, Full, Gone, NoReader, ReaderConflict) as error:
                said.append(error)

        line.process.spawn(run())
        self.engine.run(self.engine.now_s + within_s, lambda: bool(said))
        return said[0] if said else None


def test_calls_are_made_in_the_order_they_are_due_and_equals_in_the_order_asked_for() -> None:
    """Nothing else decides."""
    engine, said = Engine(), list[str]()
    for wait_s, name in ((2.0, "late"), (1.0, "first"), (1.0, "second"), (-5.0, "now")):
        engine.after(wait_s, said.append, name)

    assert not engine.run(1.5)
    assert (said, engine.now_s) == (["now", "first", "second"], 1.5)
    assert engine.run(9.0, lambda: len(said) == 4)
    assert engine.now_s == 2.0


def test_a_clock_runs_at_its_own_rate_and_jumps_ahead() -> None:
    """It began somewhere; only differences mean something."""
    engine = Engine()
    clock = Clock(engine, 50.0, 1.2)
    engine.run(10.0)
    assert clock.now_s == pytest.approx(62.0)
    clock.jump(3.0)

    assert clock.now_s == pytest.approx(65.0)


def test_a_task_sleeps_by_the_clock_of_its_process() -> None:
    """Who has a fast clock wakes early."""
    bench = Bench()

    def sleeper(name: str) -> Work:
        yield 6.0
        bench.said.append((name, bench.engine.now_s))

    bench.process("fast", 1.2).spawn(sleeper("fast"))
    bench.process("slow", 0.8).spawn(sleeper("slow"))
    bench.engine.run(10.0)

    assert bench.said == [("fast", pytest.approx(5.0)), ("slow", pytest.approx(7.5))]


def test_a_dead_process_hears_nothing_and_a_frozen_one_hears_it_all_when_it_thaws() -> None:
    """What a crash and a freeze mean."""
    bench = Bench()
    dead, frozen = bench.process("dead"), bench.process("frozen")

    def sleeper() -> Work:
        yield 1.0
        bench.said.append("woke")

    for process in (dead, frozen):
        process.spawn(sleeper())
    dead.crash()
    frozen.freeze()
    bench.engine.run(5.0)
    for process in (dead, frozen):
        process.tell(bench.said.append, process.name)
    assert bench.said == []
    for process in (dead, frozen):
        process.thaw(random.Random(0))

    assert sorted(map(str, bench.said)) == ["frozen", "woke"]


def test_the_storm_strikes_between_two_acts() -> None:
    """After as many boundaries as were counted, and only once."""
    process = Bench().process()
    process.actions_left = 3
    process.boundary()
    process.boundary()
    assert process.alive
    process.boundary()

    assert not process.alive


def test_a_stopped_scope_resumes_nothing() -> None:
    """A candidacy that ended leaves no task behind."""
    bench, scope = Bench(), Scope()

    def sleeper() -> Work:
        yield 1.0
        bench.said.append("woke")

    bench.process().spawn(sleeper(), scope)
    scope.stop()
    bench.engine.run(5.0)

    assert bench.said == []


def test_a_mailbox_gives_items_in_order_and_nothing_after_the_time_out() -> None:
    """One task waits; an item that comes too late is there for the next."""
    bench = Bench()
    process = bench.process()
    box = Mailbox(process)

    def reader() -> Work:
        while True:
            item = yield from box.get(2.0)
            bench.said.append((bench.engine.now_s, item))

    process.spawn(reader())
    bench.engine.after(1.0, box.put, "a")
    bench.engine.after(1.0, box.put, "b")
    bench.engine.after(3.5, box.put, "c")
    bench.engine.run(4.0)

    assert bench.said == [(1.0, "a"), (1.0, "b"), (3.0, None), (3.5, "c")]


def test_a_write_whose_answer_was_lost_is_read_back_and_not_repeated() -> None:
    """It took effect: its writer learns so, and nobody else is told that it did not."""
    bench = Bench(lost_answers=1.0)
    line = bench.line()
    bench.engine.after(1.0, bench.network.heal, CALM)

    assert bench.outcome(line, line.put_record("r", "mine", 0)) == bench.broker.get("r").revision
    assert bench.tally["answers lost"] >= 1
    assert bench.tally["lost writes found"] == 1


def test_who_writes_second_has_a_conflict() -> None:
    """Compare-and-set by revision; what lies there is somebody else's."""
    bench = Bench()
    one, other = bench.line("one"), bench.line("other")
    assert bench.outcome(one, one.put_record("r", "one", 0)) == 1

    assert isinstance(bench.outcome(other, other.put_record("r", "other", 0)), Conflict)
    assert bench.broker.get("r").value == "one"
    with pytest.raises(WrongRevision):
        bench.broker.put("r", "again", 7, "n")


def test_a_cut_line_is_unavailable_after_its_patience() -> None:
    """Both ways, or only the way back: then the request took effect."""
    for cut in ("up", "down"):
        bench = Bench()
        line = bench.line()
        (bench.network.cut_up if cut == "up" else bench.network.cut_down).add(line.process)

        assert isinstance(bench.outcome(line, line.ask(bench.broker.put_blob, "s", b"x")), Unavailable)
        assert ("s" in bench.broker.blobs) == (cut == "down")


def test_patience_outlasts_a_full_disk_and_a_broker_that_is_down() -> None:
    """Nothing is stored meanwhile, and nothing that was stored is lost."""
    bench = Bench()
    line = bench.line()
    bench.broker.put_blob("old", b"x")
    bench.broker.full = True
    bench.engine.after(3.0, setattr, bench.broker, "full", False)
    bench.engine.after(3.1, bench.broker.crash)
    bench.engine.after(9.0, bench.broker.restart)

    assert isinstance(bench.outcome(line, line.ask(bench.broker.put_blob, "new", b"y")), Full)
    assert bench.outcome(line, patiently(line.ask, bench.broker.put_blob, "new", b"y")) is None
    bench.engine.run(20.0)
    assert bench.broker.blobs == {"old": b"x", "new": b"y"}


def test_a_blob_is_purged_by_name_or_by_pattern() -> None:
    """The sweep of a former epoch takes its blobs and no others."""
    bench = Bench()
    for stem in ("gl/0/1/1.aa", "gl/0/2/2.bb", "gl/1/1/1.cc"):
        bench.broker.put_blob(stem, b"")
    bench.broker.purge("*/0/*/1.*")
    bench.broker.purge("gl/1/1/1.cc")

    assert list(bench.broker.blobs) == ["gl/0/2/2.bb"]
    with pytest.raises(Gone):
        bench.broker.get_blob("gl/0/1/1.aa")


def test_a_message_is_stored_once_per_id_and_two_per_subject() -> None:
    """As in the stream's plan."""
    broker = Bench().broker
    for number in (1, 1, 2):
        broker.publish("q", "a/0", number, f"id{number}")

    assert [message.body for message in broker.queues["q"].messages.values()] == [1, 2]
    with pytest.raises(Full):
        broker.publish("q", "a/0", 3, "id3")


def test_what_is_not_settled_comes_again_and_a_hold_puts_that_off() -> None:
    """By silence, to the same reader."""
    bench = Bench()
    process, got = bench.process(), list[Any]()
    bench.broker.create_reader("q", "r")
    bench.broker.publish("q", "a/0", "body", "id")
    for _ in range(2):
        bench.broker.pull("q", "r", process, 100.0, got.append)
    bench.engine.after(ACK_WAIT_S - 1.0, bench.broker.hold, "q", "r", 1)
    bench.engine.run(ACK_WAIT_S + 1.0)
    assert [message.body for message in got] == ["body"]
    bench.engine.run(2 * ACK_WAIT_S + 1.0)
    assert [message.body for message in got] == ["body", "body"]
    bench.broker.ack("q", "r", 1, "fate")

    assert bench.witness.settled == [("body", "fate")]
    assert bench.broker.is_drained("q", "r")


def test_a_new_reader_gets_what_the_former_held_and_the_former_can_settle_nothing() -> None:
    """A takeover of the queue."""
    bench = Bench()
    process, got = bench.process(), list[Any]()
    bench.broker.create_reader("q", "old")
    bench.broker.publish("q", "a/0", "body", "id")
    bench.broker.pull("q", "old", process, 100.0, got.append)
    bench.broker.pull("q", "old", process, 100.0, got.append)
    with pytest.raises(ReaderConflict):
        bench.broker.create_reader("q", "new")
    bench.broker.remove_reader("q", "old")
    bench.broker.create_reader("q", "new")
    bench.broker.pull("q", "new", process, 100.0, got.append)
    bench.engine.run(1.0)

    assert [type(each).__name__ for each in got].count("Message") == 2
    assert [type(each).__name__ for each in got].count("NoReader") == 1
    for request in (bench.broker.is_drained, lambda q, r: bench.broker.ack(q, r, 1, "fate")):
        with pytest.raises(NoReader):
            request("q", "old")


def test_a_pull_waits_for_a_message_but_not_for_ever() -> None:
    """What comes later is kept for the next pull; a broker that dies forgets who waits."""
    bench = Bench()
    process, got = bench.process(), list[Any]()
    bench.broker.create_reader("q", "r")
    bench.broker.pull("q", "r", process, 1.0, got.append)
    bench.engine.run(2.0)
    bench.broker.publish("q", "a/0", "late", "id")
    bench.engine.run(3.0)
    assert got == []
    bench.broker.pull("q", "r", process, 1.0, got.append)
    bench.engine.run(4.0)

    assert [message.body for message in got] == ["late"]


def test_whispers_reach_who_listens_or_are_lost() -> None:
    """At most once, unless the network doubles them; a hushed listener hears nothing."""
    for share, count in ((0.0, 1), (1.0, 0)):
        bench = Bench(lost_whispers=share)
        line, hear = bench.line(), bench.said.append
        bench.broker.listen("call", bench.process("other"), hear)
        line.tell("call", "hello")
        bench.engine.run(1.0)
        assert len(bench.said) == count
        bench.broker.hush(hear)
        bench.broker.tell("call", "again")
        bench.engine.run(2.0)
        assert len(bench.said) == count


def test_swarms_leave_most_faults_out_and_every_fault_in_some() -> None:
    """Each schedule draws which kinds of faults it has."""
    swarms = [drawn(random.Random(seed)) for seed in range(400)]
    calm = {field.name: sum(getattr(each, field.name) == field.default for each in swarms) for field in fields(Faults)}

    assert set(CHOICES) == set(calm)
    assert all(200 < count < 400 for name, count in calm.items() if name not in ALWAYS), calm


def test_a_log_line_says_who_did_what_and_what_came_of_it() -> None:
    """Names and the first letters of what is numbered."""
    fact = LearnerLeft(at_s=1.0, learner="a", incarnation=2)
    call = PublishCall(fragment=0, version=3, attempt=1, run_tokens=9)

    assert told(("shard0", fact, [call])) == "shard0     LearnerLeft(l=a i=2) -> PublishCall(f=0 v=3 a=1)"
    assert told(("shard0", fact, [])) == "shard0     LearnerLeft(l=a i=2) -> nothing"
