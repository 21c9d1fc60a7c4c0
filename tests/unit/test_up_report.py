"""The report's ledgers: what heartbeats add to what shards have closed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from atoll.base.clock import SystemClock
from atoll.bus.memory import MemoryBroker, MemoryBus
from atoll.local.run_store import last_facts
from atoll.protocol.former_lives import FormerLives
from atoll.protocol.ledger import ACCOUNTS_MAX, Ledger, parts, settle
from atoll.report.collect import Facts, believe_the_dead, collect
from atoll.report.html import page
from atoll.report.write import BrokerFacts, summary, write_report
from atoll.run.event_fields import QuarantineEvent
from atoll.run.folder import RunFile, RunFolder
from atoll.run.ledger import closing_ledger
from atoll.run.process_views import LearnerLife, LearnerView
from atoll.run.view import RunView
from atoll.run.watch import Watch
from atoll.story.history import History, HistoryView
from atoll.wire.messages import DOCUMENT_BYTES_MAX, encode, event
from atoll.wire.traffic import LinkTraffic
from atoll_synchronizer.shard_context import EventLog
from support.founded_run import run_record


def test_tokens_of_a_dead_life_that_only_its_heartbeats_told_of_are_lost() -> None:
    """The shards that heard the last heartbeat died before they could write it down; the next life has its own account."""
    lives = {1: LearnerLife(1, tokens=1000), 2: LearnerLife(2, tokens=700)}
    view = RunView(learners={"a": LearnerView("a", lives=lives)})
    fragment_ledger = Ledger()
    fragment_ledger.reported("a", 1, 900, 0, 0, 0)
    fragment_ledger.reported("a", 2, 600, 0, 0, 0)
    believe_the_dead(view, fragment_ledger)

    assert fragment_ledger.accounts["a/1"].trained == 1000
    assert fragment_ledger.accounts["a/2"].trained == 600
    assert settle(fragment_ledger, 1).fates["lost"] == 1600


def test_former_lives_are_not_entered_again() -> None:
    """The event log names them for ever; the ledgers have the sums of all of them, of which some are not even named."""
    lives = {number: LearnerLife(number, tokens=100) for number in (1, 2, 3)}
    view = RunView(learners={name: LearnerView(name, lives=dict(lives)) for name in ("a", "b")})
    fragment_ledger = Ledger(former=FormerLives(lives=4, tokens=400, merged=400, until={"a": 2}, forgotten=1))
    fragment_ledger.reported("a", 3, 100, 0, 0, 0)
    believe_the_dead(view, fragment_ledger)

    assert set(fragment_ledger.accounts) == {"a/3"}
    assert settle(fragment_ledger, 1).trained == 500


def test_who_was_isolated_is_kept_with_the_reason() -> None:
    """A quarantine on the event log reaches the report; one that is malformed is counted as unreadable."""
    view = RunView()
    view.on_event(event("quarantined", "shard-0", 1.0, learner="a", incarnation=2, offences=3, reason="outlier"))
    view.on_event(event("quarantined", "shard-0", 1.0, learner="a"))

    assert view.quarantined == [QuarantineEvent("a", 2, 3, "outlier")]
    assert view.unreadable == 1


def test_tokens_of_a_last_life_that_could_not_say_goodbye_are_lost() -> None:
    """Cut off when the run ended, or killed before its next life was heard: its process is over, and so are its tokens."""
    lives = {1: LearnerLife(1, tokens=1000)}
    view = RunView(learners={"a": LearnerView("a", lives=lives)})
    fragment_ledger = Ledger()
    fragment_ledger.reported("a", 1, 900, 0, 0, 0)
    believe_the_dead(view, fragment_ledger, ["a"])

    assert fragment_ledger.accounts["a/1"].trained == 1000
    assert settle(fragment_ledger, 1).fates["lost"] == 1000


def test_a_learner_of_somebody_else_may_train_on_after_the_books_were_closed() -> None:
    """Nobody can say that its tokens are lost, so the report does not."""
    view = RunView(learners={"theirs": LearnerView("theirs", lives={1: LearnerLife(1, tokens=1000)})})
    fragment_ledger = Ledger()
    fragment_ledger.reported("theirs", 1, 900, 0, 0, 0)
    believe_the_dead(view, fragment_ledger, ["a"])

    assert fragment_ledger.accounts["theirs/1"].trained == 900


def test_where_a_shard_did_not_close_its_books_those_of_the_heads_are_read() -> None:
    """What was merged stays merged, what a learner said when it left is trained, and nothing is said to be closed."""
    heads, closing = Ledger(), Ledger()
    heads.reported("a", 1, 800, 0, 0, 0)
    heads.book("a", 1, 1500, "merged")
    closing.reported("a", 1, 900, 0, 0, 0)
    closing.book("a", 1, 700, "merged")
    view = RunView(learners={"a": LearnerView("a", lives={1: LearnerLife(1, tokens=1000, left=True)})})
    view.on_event(event("ledger", "shard-0", 1.0, ledger=closing))
    settings = {"protocol.fragments": 2, "protocol.shards": 2}
    facts = Facts(
        run="r", settings=settings, sessions=[], validation={}, data_hash="", ended=["a"], fragment_ledger=heads
    )

    report = collect(view, facts)

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

    (said,) = collect(view, replace(facts, fragment_ledger=None))["fates_errors"]
    assert "what became of the tokens in fragments 1 is not known, and counts as lost" in said


def test_a_shard_of_many_fragments_names_a_few_of_those_whose_ledger_is_missing() -> None:
    """A reader learns which counts to doubt; a line stays a line."""
    settings = {"protocol.fragments": 20, "protocol.shards": 2}
    report = collect(RunView(), Facts(run="r", settings=settings, sessions=[], validation={}, data_hash=""))

    assert "in fragments 1, 3, 5, 7, 9, 11, … is not known" in report["fates_errors"][1]


def test_bytes_of_a_life_that_died_in_an_earlier_session_are_over_the_tokens_that_the_books_know() -> None:
    """The event log has its bytes and no tokens; without the ledgers' its bytes would be paid for by everybody else's."""
    closing = Ledger()
    closing.reported("a", 1, 500, 0, 0, 0)
    closing.reported("a", 2, 300, 0, 0, 0)
    view = RunView(learners={"a": LearnerView("a", lives={2: LearnerLife(2, tokens=300, left=True)})})
    for incarnation in (1, 2):
        moved = LinkTraffic(wire_up=2000 * incarnation, wire_down=400)
        view.on_event(event("moved", "a", 1.0, role="learner", incarnation=incarnation, moved=moved))
    view.on_event(event("ledger", "shard-0", 2.0, ledger=closing))
    settings = {"protocol.fragments": 1, "protocol.shards": 1}
    report = collect(view, Facts(run="r", settings=settings, sessions=[], validation={}, data_hash=""))

    assert report["moved"]["tokens"] == 800
    assert report["moved"]["bytes_per_token"] == 6800 / 800
    assert [life["tokens"] for life in report["learners"][0]["incarnations"]] == [500, 300]


def test_large_books_come_in_parts_that_add_up() -> None:
    """One message cannot carry every incarnation of a long run; a later tenure's ledgers replace all parts of the former."""
    former, fragment_ledger = Ledger(), Ledger()
    former.reported("a", 1, 1, 0, 0, 0)
    for incarnation in range(1, 2 * ACCOUNTS_MAX + 2):
        fragment_ledger.reported("a", incarnation, 10, 5, 3, 2)
        fragment_ledger.book("a", incarnation, 5, "merged")
    told = [
        event("ledger", "shard-0", 1.0, ledger=part, part=number)
        for whole in (former, fragment_ledger)
        for number, part in enumerate(parts(whole))
    ]
    view = RunView()
    for one in told:
        assert len(encode(one)) <= DOCUMENT_BYTES_MAX
        view.on_event(one)

    assert len(told) == 4
    assert view.closed["shard-0"].ledger.accounts == fragment_ledger.accounts
    assert closing_ledger(told).accounts == fragment_ledger.accounts


LOST_GRACE = {"share": 0.5, "seconds": 3.29, "what": "grace", "sentence": "waited after the quorum"}


def reported(average: float | None) -> tuple[dict[str, Any], str]:
    """Return the report of a run with two validations, and its page."""
    view = RunView()
    kept = {} if average is None else {"average": average}
    for tokens, bits in ((10, 4.0), (20, 2.0)):
        view.on_event(event("validation", "evaluator", 1.0, run_tokens=tokens, bits_per_byte=bits, **kept))
    exported = {} if average is None else {"final_bits_per_byte": 2.5, "average_bits_per_byte": average}
    settings = {"protocol.fragments": 2, "protocol.shards": 1}
    report = collect(view, Facts(run="r", settings=settings, sessions=[], validation=exported, data_hash=""))
    return report, page(report, view, "")


def test_figures_that_look_alike_say_which_they_are() -> None:
    """Grace that was granted is not grace that was waited, and payload is not what the wire carries."""
    report, shown = reported(None)
    waited = {**LOST_GRACE, "of": "rounds", "who": "", "command": "atoll why grace"}
    report["slow"] = {"lost": [waited], "findings": [], "notes": []}
    slow = page(report, RunView(), "")

    assert "grace that was granted per round" in shown
    assert "3.29 s (grace that was waited): " in slow
    assert "payload bytes that the learners sent, read" in shown
    assert "bytes on the wire of the learners&#x27; links, up, down" in shown
    assert "fetched (with each learner&#x27;s first reading of the whole model)" in shown
    assert "on the wire of the learners' links" in summary(report, Path("out"))


def test_a_measurement_stands_where_the_model_was_that_was_measured() -> None:
    """The run has merged more by the time that the measurement arrives; of a log that does not say it, that much is told."""
    view = RunView()
    view.token_fragments_merged = 90
    view.on_event(event("validation", "evaluator", 1.0, run_tokens=10, bits_per_byte=4.0, token_fragments_merged=8))
    view.on_event(event("validation", "evaluator", 2.0, run_tokens=20, bits_per_byte=3.0))
    settings = {"protocol.fragments": 2, "protocol.shards": 1}
    curve = collect(view, Facts(run="r", settings=settings, sessions=[], validation={}, data_hash=""))["validation"][
        "curve"
    ]

    assert [(point["run_tokens"], point["tokens_merged"]) for point in curve] == [(10, 4), (20, 45)]


def test_a_curve_ends_with_the_model_that_an_export_of_its_own_measured() -> None:
    """The evaluator had left, so the event log knows nothing of it; one that it measured itself is there once."""
    view = RunView()
    view.on_event(event("validation", "evaluator", 1.0, run_tokens=10, bits_per_byte=4.0, token_fragments_merged=8))
    settings = {"protocol.fragments": 2, "protocol.shards": 1}

    def curve(**exported: object) -> list[tuple[int, float]]:
        facts = Facts(run="r", settings=settings, sessions=[], validation=exported, data_hash="")
        points = collect(view, facts)["validation"]["curve"]
        return [(point["tokens_merged"], point["bits_per_byte"]) for point in points]

    assert curve(final_bits_per_byte=3.0, token_fragments_merged=20) == [(4, 4.0), (10, 3.0)]
    assert curve(final_bits_per_byte=4.0, token_fragments_merged=8) == [(4, 4.0)]
    assert curve(final_bits_per_byte=3.0) == [(4, 4.0)], "of an older Atoll"


@pytest.mark.parametrize(("first_tokens", "initial"), [(0, 4.0), (10, None)])
def test_a_curve_that_begins_late_says_nothing_about_the_beginning(first_tokens: int, initial: float | None) -> None:
    """An evaluator may be up after thousands of tokens; its first point was told as what the run began with."""
    view = RunView()
    for tokens, bits in ((first_tokens, 4.0), (20, 3.0)):
        view.on_event(event("validation", "evaluator", 1.0, run_tokens=tokens, bits_per_byte=bits))
    settings = {"protocol.fragments": 2, "protocol.shards": 1}
    found = collect(view, Facts(run="r", settings=settings, sessions=[], validation={}, data_hash=""))["validation"]

    assert (found["initial_bits_per_byte"], found["final_bits_per_byte"]) == (initial, 3.0)


def test_an_average_is_a_second_curve_and_a_second_number() -> None:
    """Where the run keeps one; a report of a run without knows nothing of it."""
    (plain, page_plain), (averaged, page_averaged) = reported(None), reported(1.75)

    assert "average" not in str(plain["validation"])
    assert "its average" not in page_plain
    assert averaged["validation"]["average_bits_per_byte"] == 1.75
    assert [point["average_bits_per_byte"] for point in averaged["validation"]["curve"]] == [1.75, 1.75]
    assert "its average" in page_averaged
    assert "1.75" in page_averaged


def test_the_report_says_whom_the_others_judged() -> None:
    """By learner: in how many slices it was shortened, and in how many left out; who was not, is not named."""
    view = RunView()
    for version in (1, 2):
        liar = {
            "learner": "liar",
            "incarnation": 1,
            "age": 0,
            "tokens": 10,
            "weight": 1.0,
            "shortened": 2,
            "unheard": 3,
        }
        honest = {"learner": "a", "incarnation": 1, "age": 0, "tokens": 10, "weight": 1.0}
        fields = {"fragment": 0, "version": version, "contributors": [liar, honest]}
        view.on_event(event("round", "shard-0", float(version), **fields))
    settings = {"protocol.fragments": 1, "protocol.shards": 1}

    rounds = collect(view, Facts(run="r", settings=settings, sessions=[], validation={}, data_hash=""))["rounds"]

    assert (rounds["shortened"], rounds["unheard"]) == ({"liar": 4}, {"liar": 6})


def test_the_page_says_what_was_slow_with_its_command_and_draws_the_learners() -> None:
    """Without the event log the page says so, and charts without a point do as well."""
    view, history = RunView(), History()
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
    settings = {"protocol.fragments": 1, "protocol.shards": 1}
    facts = Facts(run="r", settings=settings, sessions=[], validation={}, data_hash="", history=history)
    shown = page(collect(view, facts), view, "")
    silent = page(collect(view, replace(facts, history=None)), view, "")

    assert "75.0%</b> of the rounds' time, 3 s (quorum): rounds waited for the quorum" in shown
    assert "50.0%</b> of the learners' time, 10 s (joining): a joined once" in shown
    assert "<code>atoll story learner a</code>" in shown
    assert shown.count("<polyline") == 4
    assert "the event log could not be read to its end" in silent


def test_the_page_has_a_finding_with_its_time_and_what_it_has_led_to() -> None:
    """In the report seconds since the beginning of its curves; the page puts consequences beneath their cause."""
    view, history = RunView(), History()
    refusals = [{"reason": "outlier", "learner": "a", "incarnation": 1, "push": push} for push in (1, 2, 3)]
    for one in (
        event("joined", "a", 100.0, incarnation=1),
        event("refused", "shard-0", 110.0, refusals=refusals),
        event("quarantined", "shard-0", 112.5, learner="a", incarnation=1, offences=3, reason="outlier"),
    ):
        view.on_event(one)
        history.take(f"ev.{one.kind}.{one.who}", encode(one))
    settings = {"protocol.fragments": 1, "protocol.shards": 0}
    facts = Facts(run="r", settings=settings, sessions=[], validation={}, data_hash="", history=history)
    report = collect(view, facts)
    (found,) = report["slow"]["findings"]
    shown = page(report, view, "")

    assert (found["cause"], found["culprit"], found["from_s"], found["until_s"]) == ("quarantine", "a", 12.5, None)
    assert found["command"] == "atoll why refused a"
    assert [(each["cause"], each["from_s"], each["until_s"]) for each in found["consequences"]] == [
        ("refusals", 10.0, 10.0)
    ]
    assert "(12.5 s to the end). " in shown
    assert "<ul><li>refusals, a: 3 of its contributions were refused: outlier (10.0 s to 10.0 s)." in shown


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
    settings = {"protocol.fragments": 1, "protocol.shards": 2}
    facts = Facts("r", settings, [], {}, "", ended=["dead", "gone"], history=history)

    assert collect(RunView(), facts)["faults"] == 2


async def test_the_end_of_a_run_reads_its_event_log_no_second_time(run: str) -> None:
    """Who followed the run has its history: the broker is asked for the record, and for nothing of the event log."""

    class Asked(MemoryBus):
        """A bus that counts how often somebody reads its event log."""

        replays = 0

        async def replay(self, *words: Any, **more: Any) -> Any:  # noqa: ANN401  (as of the bus)
            self.replays += 1
            return await super().replay(*words, **more)

    bus, view, record = Asked(run, MemoryBroker()), HistoryView(), run_record(run)
    await bus.provision(1 << 20)
    await bus.put_record(record.subjects.run_record, encode(record), expected=0)
    log = EventLog(bus, record.subjects, "shard-0", SystemClock())
    await log.record("serving", epoch=1, versions={0: 0})
    for shard in range(record.protocol.shards):
        await EventLog(bus, record.subjects, f"shard-{shard}", SystemClock()).record("ledger", ledger=Ledger())
    await Watch(bus, run, view, SystemClock()).catch_up()
    read = bus.replays
    last = await last_facts(bus, run, view)

    assert bus.replays == read > 0
    assert last.history is view.history
    assert [each.shard for each in view.history.tenures] == ["shard-0"]
    assert view.history.closed == set(view.closed) == {f"shard-{shard}" for shard in range(record.protocol.shards)}


def test_a_report_that_cannot_be_written_is_told_all_the_same(tmp_path: Path) -> None:
    """Days of training end with their figures, and with the file that can be written."""
    out = tmp_path / "run"
    with RunFolder(out) as folder:
        (out / "report.json" / "inside").mkdir(parents=True)
        settings = {"protocol.fragments": 1, "protocol.shards": 1}
        run = RunFile(run="r", learners=1, settings=settings, broker="embedded")
        report, unwritten = write_report(folder, RunView(), run, BrokerFacts())

    assert report["commits"] == 0
    assert "cannot be used" in str(unwritten)
    assert (out / "report.html").read_text(encoding="utf-8").startswith("<!doctype html>")
