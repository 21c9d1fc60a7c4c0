"""The report's ledgers: what heartbeats add to what shards have closed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from atoll.base.clock import SystemClock
from atoll.bus.memory import MemoryBroker, MemoryBus
from atoll.local.run_store import last_facts
from atoll.protocol.ledger import ACCOUNTS_MAX, FormerLives, Ledger, parts, settle
from atoll.report.collect import BrokerFacts, believe_the_dead, collect
from atoll.report.write import STATIC, page_frames, page_with, summary, write_report
from atoll.run.folder import RunFile, RunFolder
from atoll.run.history import History
from atoll.run.process_views import LearnerLife, LearnerView
from atoll.run.watch import Watch
from atoll.wire.events import LedgerEvent, QuarantinedEvent, ServingEvent
from atoll.wire.messages import DOCUMENT_BYTES_MAX, encode
from atoll.wire.traffic import LinkTraffic
from atoll_synchronizer.shard_context import EventLog
from support.events import closing_ledger, event, fields
from support.founded_run import run_record
from support.watched_runs import beat


def test_tokens_of_a_dead_life_that_only_its_heartbeats_told_of_are_lost() -> None:
    """The shards that heard the last heartbeat died before they could write it down; the next life has its own account."""
    lives = {1: LearnerLife(1, tokens=1000), 2: LearnerLife(2, tokens=700)}
    view = History(learners={"a": LearnerView("a", lives=lives)})
    ledger = Ledger()
    ledger.take_report("a", 1, 900, 0, 0, 0)
    ledger.take_report("a", 2, 600, 0, 0, 0)
    believe_the_dead(view, ledger)

    assert ledger.accounts["a/1"].trained == 1000
    assert ledger.accounts["a/2"].trained == 600
    assert settle(ledger, 1).fates["lost"] == 1600


def test_former_lives_are_not_entered_again() -> None:
    """The event log names them for ever; the ledgers have the sums of all of them, of which some are not even named."""
    lives = {number: LearnerLife(number, tokens=100) for number in (1, 2, 3)}
    view = History(learners={name: LearnerView(name, lives=dict(lives)) for name in ("a", "b")})
    ledger = Ledger(former=FormerLives(lives=4, tokens=400, merged=400, until={"a": 2}, forgotten=1))
    ledger.take_report("a", 3, 100, 0, 0, 0)
    believe_the_dead(view, ledger)

    assert set(ledger.accounts) == {"a/3"}
    assert settle(ledger, 1).trained == 500


def test_who_was_isolated_is_kept_with_the_reason() -> None:
    """A quarantine on the event log reaches the report; one that is malformed is counted as unreadable."""
    view = History()
    view.on_event(event("quarantined", "shard-0", 1.0, learner="a", incarnation=2, offences=3, reason="outlier"))
    view.on_event(event("quarantined", "shard-0", 1.0, learner="a"))

    assert [note.fields for note in view.quarantined] == [
        QuarantinedEvent(learner="a", incarnation=2, offences=3, reason="outlier")
    ]
    assert view.unreadable == 1


def test_tokens_of_a_last_life_that_could_not_say_goodbye_are_lost() -> None:
    """Cut off when the run ended, or killed before its next life was heard: its process is over, and so are its tokens."""
    lives = {1: LearnerLife(1, tokens=1000)}
    view = History(learners={"a": LearnerView("a", lives=lives)})
    ledger = Ledger()
    ledger.take_report("a", 1, 900, 0, 0, 0)
    believe_the_dead(view, ledger, ["a"])

    assert ledger.accounts["a/1"].trained == 1000
    assert settle(ledger, 1).fates["lost"] == 1000


def test_a_learner_of_somebody_else_may_train_on_after_the_books_were_closed() -> None:
    view = History(learners={"theirs": LearnerView("theirs", lives={1: LearnerLife(1, tokens=1000)})})
    ledger = Ledger()
    ledger.take_report("theirs", 1, 900, 0, 0, 0)
    believe_the_dead(view, ledger, ["a"])

    assert ledger.accounts["theirs/1"].trained == 900


def run_file(fragments: int = 1, shards: int = 1) -> RunFile:
    """Return the file of a run of one learner."""
    settings = {"protocol.fragments": fragments, "protocol.shards": shards}
    return RunFile(run="r", learners=1, settings=settings, broker="embedded")


def test_where_a_shard_did_not_close_its_books_those_of_the_heads_are_read() -> None:
    """What was merged stays merged, what a learner said when it left is trained, and nothing is said to be closed."""
    heads, closing = Ledger(), Ledger()
    heads.take_report("a", 1, 800, 0, 0, 0)
    heads.book("a", 1, 1500, "merged")
    closing.take_report("a", 1, 900, 0, 0, 0)
    closing.book("a", 1, 700, "merged")
    view = History(learners={"a": LearnerView("a", lives={1: LearnerLife(1, tokens=1000, left=True)})})
    view.on_event(event("ledger", "shard-0", 1.0, ledger=closing))
    run = run_file(fragments=2, shards=2)

    report = collect(view, run, BrokerFacts(ledger=heads), validation={}, ended=["a"])

    assert report["tokens_trained"] == 1000
    assert report["token_fragments_by_fate"]["merged"] == 1500
    assert report["token_fragments_by_fate"]["lost"] == 500
    assert not report["fates_exact"]
    (said,) = report["fates_errors"]
    assert said.startswith("shard-1 did not close its ledger: what it merged into fragments 1 is known, ")
    assert said.endswith("counts as lost; losses and bytes do not depend on it")
    assert said in summary(report, Path("out"))
    assert "trained nothing" not in summary(report, Path("out"))
    report["learners"] += [{"learner": f"late-{number}", "tokens": 0} for number in range(6)]
    assert "  trained nothing: late-0, late-1, late-2, late-3 and 2 more, ready too late or never" in summary(
        report, Path("out")
    )

    (said,) = collect(view, run, BrokerFacts(), validation={}, ended=["a"])["fates_errors"]
    assert "what became of the tokens in fragments 1 is not known, and counts as lost" in said


def test_bytes_of_a_life_that_died_in_an_earlier_session_are_over_the_tokens_that_the_books_know() -> None:
    """The event log has its bytes and no tokens; without the ledgers' its bytes would be paid for by everybody else's."""
    closing = Ledger()
    closing.take_report("a", 1, 500, 0, 0, 0)
    closing.take_report("a", 2, 300, 0, 0, 0)
    view = History(learners={"a": LearnerView("a", lives={2: LearnerLife(2, tokens=300, left=True)})})
    for incarnation in (1, 2):
        moved = LinkTraffic(wire_up=2000 * incarnation, wire_down=400)
        view.on_event(event("moved", "a", 1.0, role="learner", incarnation=incarnation, moved=moved))
    view.on_event(event("ledger", "shard-0", 2.0, ledger=closing))
    report = collect(view, run_file(), BrokerFacts(), validation={})

    assert report["moved"]["tokens"] == 800
    assert report["moved"]["bytes_per_token"] == 6800 / 800
    assert [life["tokens"] for life in report["learners"][0]["incarnations"]] == [500, 300]


def test_large_books_come_in_parts_that_add_up() -> None:
    """One message cannot carry every incarnation of a long run; a later tenure's ledgers replace all parts of the former."""
    former, ledger = Ledger(), Ledger()
    former.take_report("a", 1, 1, 0, 0, 0)
    for incarnation in range(1, 2 * ACCOUNTS_MAX + 2):
        ledger.take_report("a", incarnation, 10, 5, 3, 2)
        ledger.book("a", incarnation, 5, "merged")
    told = [
        event("ledger", "shard-0", 1.0, ledger=part, part=number)
        for whole in (former, ledger)
        for number, part in enumerate(parts(whole))
    ]
    view = History()
    for one in told:
        assert len(encode(one)) <= DOCUMENT_BYTES_MAX
        view.on_event(one)

    assert len(told) == 4
    assert view.ledgers["shard-0"].ledger.accounts == ledger.accounts
    assert closing_ledger(told).accounts == ledger.accounts


def frames_of(view: History, history: History | None) -> dict[str, Any]:
    run = run_file()
    report = collect(view, run, BrokerFacts(history=history), validation={})
    return page_frames(report, view, run, history, Path("/nowhere"))


def test_the_page_of_a_report_is_that_of_the_run_which_is_over() -> None:
    """What was slow has a command for this folder; whoever was heard until now has left or ended, and is not silent."""
    view, history = History(), History()
    shares = [{"learner": "a", "incarnation": 1, "age": 0, "tokens": 10, "weight": 1.0, "steps": 5, "step_s": 1.0}]
    fields = {
        "fragment": 0,
        "version": 1,
        "contributors": shares,
        "quorum_wait_s": 3.0,
        "waited_s": 3.0,
        "commit_s": 1.0,
    }
    told = [
        event("joined", "a", 10.0, incarnation=1, took_s=10.0),
        event("sample", "a", 12.0, incarnation=1, step=2, tokens=20, step_s=1.0, loss=4.0, lag_versions=1),
        event("sample", "a", 20.0, incarnation=1, step=5, tokens=50, step_s=1.0, loss=3.0),
        event("round", "shard-0", 20.0, **fields),
    ]
    for one in told:
        view.on_event(one)
        history.take(f"ev.{one.kind}.{one.who}", encode(one))
    view.on_beat(beat("a"), 1000.0)
    frames, unread = frames_of(view, history), frames_of(view, None)

    assert [(part["what"], part["share"], part["command"]) for part in frames["causes"]["slow"][:2]] == [
        ("quorum", 0.75, "atoll why --out /nowhere"),
        ("joining", 0.5, "atoll why learner a --out /nowhere"),
    ]
    assert frames["curves"]["losses"] == [{"learner": "a", "at_s": [2.0, 10.0], "loss": [4.0, 3.0]}]
    assert frames["curves"]["rounds"]["contributors"] == [1]
    assert frames["state"]["status"] == "over"
    assert [(one["state"], one["heard_s"]) for one in frames["state"]["learners"]] == [("ended", None)]
    assert not [mark for mark in frames["state"]["marks"] if mark["kind"] == "silent"]
    assert unread["causes"] is None
    assert unread["curves"]["losses"] == frames["curves"]["losses"]


def test_the_page_of_a_report_has_its_parts_inside() -> None:
    view = History()
    view.on_event(event("joined", "</script><script>alert(1)</script>", 1.0, incarnation=1))
    shown = page_with(frames_of(view, None))

    assert "static/" not in shown
    assert shown.count("</script>") == 3
    assert all(f'"{path.name}":"data:' in shown for path in STATIC.glob("*.js"))


def test_processes_that_died_and_never_came_back_are_faults() -> None:
    """No event tells of them: a learner of ours that did not leave, and a shard that closed no ledger."""
    history = History()
    for one in (
        event("joined", "dead", 1.0, incarnation=1),
        event("joined", "gone", 1.0, incarnation=1),
        event("left", "gone", 2.0, incarnation=1, tokens=1, steps=1),
        event("joined", "elsewhere", 1.0, incarnation=1),
        event("serving", "shard-0", 1.0, epoch=1, versions={}),
        event("serving", "shard-1", 1.0, epoch=1, versions={}),
        event("ledger", "shard-1", 3.0, ledger=Ledger()),
    ):
        history.take(f"ev.{one.kind}.{one.who}", encode(one))
    last = BrokerFacts(history=history)
    report = collect(History(), run_file(shards=2), last, validation={}, ended=["dead", "gone"])

    assert report["faults"] == 2


async def test_the_end_of_a_run_reads_its_event_log_no_second_time(run: str) -> None:
    """Who followed the run has its history: the broker is asked for the record, and for nothing of the event log."""

    class Asked(MemoryBus):
        """A bus that counts how often somebody reads its event log."""

        replays = 0

        async def replay(self, *words: Any, **more: Any) -> Any:  # noqa: ANN401  (as of the bus)
            self.replays += 1
            return await super().replay(*words, **more)

    bus, view, record = Asked(run, MemoryBroker()), History(), run_record(run)
    await bus.provision(1 << 20)
    await bus.put_record(record.subjects.run_record, encode(record), expected=0)
    log = EventLog(bus, record.subjects, "shard-0", SystemClock())
    await log.record(fields(ServingEvent, epoch=1, versions={0: 0}))
    for shard in range(record.protocol.shards):
        await EventLog(bus, record.subjects, f"shard-{shard}", SystemClock()).record(fields(LedgerEvent, ledger={}))
    await Watch(bus, run, view, SystemClock()).catch_up()
    read = bus.replays
    last = await last_facts(bus, run, view)

    assert bus.replays == read > 0
    assert last.history is view
    assert [each.shard for each in view.tenures] == ["shard-0"]
    assert view.closed == set(view.ledgers) == {f"shard-{shard}" for shard in range(record.protocol.shards)}


def test_a_report_that_cannot_be_written_is_told_all_the_same(tmp_path: Path) -> None:
    out = tmp_path / "run"
    with RunFolder(out) as folder:
        (out / "report.json" / "inside").mkdir(parents=True)
        report, unwritten = write_report(folder, History(), run_file(), BrokerFacts())

    assert report["commits"] == 0
    assert "cannot be used" in str(unwritten)
    assert (out / "report.html").read_text(encoding="utf-8").startswith("<!doctype html>")
