"""The page's JSON: what it says of a run that lives, that lost processes, and that is over; and that it has bounds."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from atoll.protocol.settings import ProtocolSettings
from atoll.report.page_data import LEARNERS_MAX, PageFacts, curves_of, state_of
from atoll.run.history import History
from atoll.story.goodput import goodput_of
from atoll.wire.messages import LearnerState, Presence
from atoll.wire.traffic import LinkTraffic
from support.events import event, heartbeat

BEGAN_S = 1000.0
AGREED = ProtocolSettings(fragments=2, shards=1, silence_s=5.0, lease_s=3.0)


class ToldRun:
    """A run as its event log and its heartbeats tell it; the wall clock is 1000 s ahead of the one of arrivals."""

    def __init__(self) -> None:
        self.view = History()

    def log(self, kind: str, who: str, at_s: float, **fields: object) -> None:
        """Write an event, `at_s` after the beginning."""
        self.view.on_event(event(kind, who, BEGAN_S + at_s, **fields))

    def sample(self, who: str, at_s: float, step: int, *, incarnation: int = 1, state: str = "training") -> None:
        fields = {"step": step, "tokens": 100 * step, "step_s": 0.5, "loss": 5.0 - 0.01 * step, "state": state}
        self.log("sample", who, at_s, incarnation=incarnation, **fields)

    def merged(self, at_s: float, fragment: int, version: int, *learners: str, age: int = 0) -> None:
        shares = [{"learner": each, "incarnation": 1, "age": age, "tokens": 50, "weight": 0.5} for each in learners]
        phases = {"quorum_wait_s": 0.2, "waited_s": 0.7, "queued_s": 0.1, "merge_s": 0.03, "commit_s": 0.02}
        more = {"grace_s": 0.6, "end": "all answered", "live": 2, "run_tokens": 50 * version, "parameters": 4}
        fields = {"fragment": fragment, "version": version, "contributors": shares, **phases, **more}
        self.log("round", "shard-0", at_s, **fields)

    def beat(self, who: str, at_s: float, step: int = 10, state: LearnerState = "training") -> None:
        moved = LinkTraffic(payload_up=10 * step, payload_down=20 * step, wire_up=15 * step, wire_down=30 * step)
        known = {"at_s": BEGAN_S + at_s, "step": step, "tokens": 100 * step, "state": state}
        told = heartbeat(who, **known, loss=4.5, overhead=0.02, lag_versions=1, moved=moved)
        self.view.on_beat(told, at_s)

    def facts(self, at_s: float, *, founded: bool = True, answered: bool = True) -> PageFacts:
        told: dict[str, Any] = {"agreement": AGREED, "founder": "a", "founded_at_s": BEGAN_S} if founded else {}
        return PageFacts("r", now_s=at_s, wall_s=BEGAN_S + at_s, answered=answered, **told)

    def state(self, at_s: float, *, founded: bool = True, answered: bool = True) -> dict[str, Any]:
        made = state_of(self.view, self.facts(at_s, founded=founded, answered=answered))
        told: dict[str, Any] = json.loads(json.dumps(made, allow_nan=False))
        return told


@pytest.fixture
def told() -> ToldRun:
    run = ToldRun()
    for who in ("a", "b"):
        run.log("joined", who, 1.0, incarnation=1, founder=who == "a", took_s=0.5)
    run.log("serving", "shard-0", 1.5, epoch=1, versions={0: 0, 1: 0}, host="h", pid=7)
    run.merged(5.0, 0, 1, "a", "b")
    run.merged(6.0, 1, 1, "a", "b")
    run.merged(8.0, 0, 2, "a")
    for at_s, step in ((2.0, 2), (4.0, 6), (8.0, 14)):
        run.sample("a", at_s, step)
        run.sample("b", at_s, step)
    run.beat("a", 8.0, 10)
    run.beat("b", 8.0, 10)
    return run


def kinds(state: dict[str, Any]) -> list[tuple[str, str]]:
    return [(mark["kind"], mark["who"]) for mark in state["marks"]]


def test_a_live_run_tells_who_trains_and_who_is_behind(told: ToldRun) -> None:
    """The map has each learner's last contribution to each fragment; b's to fragment 0 is one version old."""
    state = told.state(9.0)

    assert (state["status"], state["at_s"], state["commits"], state["tokens_per_s"]) == ("live", 9.0, 3, 400.0)
    assert [(one["learner"], one["state"]) for one in state["learners"]] == [("a", "training"), ("b", "training")]
    rows = state["map"]["rows"]
    assert [(row["fragment"], row["version"]) for row in rows] == [(0, 2), (1, 1)]
    assert [(cell["base"], cell["lag"]) for cell in rows[0]["cells"]] == [(1, 0), (0, 1)]


def test_a_silent_learner_is_marked_until_it_is_back(told: ToldRun) -> None:
    """Its last heartbeat is the mark; when a new incarnation joins, the log itself tells of loss and return."""
    told.beat("a", 20.0, 40)
    silent = told.state(20.0)
    told.log("joined", "b", 26.0, incarnation=2)
    back = told.state(26.5)

    assert ("silent", "b") in kinds(silent)
    assert silent["learners"][1]["state"] == "silent"
    assert [mark for mark in kinds(back) if mark[0] in ("lost", "back")] == [("lost", "b"), ("back", "b")]
    lost = next(mark for mark in back["marks"] if mark["kind"] == "lost")
    assert (lost["at_s"], lost["group"]) == (8.0, "fault")


def test_a_goodbye_is_no_fault(told: ToldRun) -> None:
    """A learner that leaves and comes again was never lost, and a shard that closed its ledger was handed over."""
    told.log("left", "b", 10.0, incarnation=1, tokens=1400, steps=14)
    told.log("joined", "b", 30.0, incarnation=2)
    told.beat("a", 31.0, 60)
    told.log("ledger", "shard-0", 31.0, ledger={}, reason="handed over")
    told.log("serving", "shard-0", 32.0, epoch=2, versions={0: 2, 1: 1}, host="h", pid=8)

    assert not [mark for mark in told.state(33.0)["marks"] if mark["group"] != "change"]


@pytest.mark.parametrize(
    ("closed", "over", "hosts"), [(True, True, []), (False, True, ["silent"]), (True, False, ["silent"])]
)
def test_a_shard_that_has_finished_is_not_silent(told: ToldRun, *, closed: bool, over: bool, hosts: list[str]) -> None:
    """An open page shows the same as one that is opened afterwards; a shard that did not close its ledger is still missed."""
    told.view.on_presence(Presence(name="p", host="h", pid=7, wants=(), owns=(0,)), 8.0)
    if closed:
        told.log("ledger", "shard-0", 9.0, ledger={}, reason="finished")
    facts = replace(told.facts(60.0), over=over)
    state = state_of(told.view, facts)

    assert [one["state"] for one in state["hosts"]] == hosts


def test_a_shard_that_dies_is_marked_live_and_from_the_log(told: ToldRun) -> None:
    """Silent processes are seen at once; a later tenure without a closing ledger says so for good."""
    told.view.on_presence(Presence(name="p1", host="h", pid=7, wants=(), owns=(0,)), 8.0)
    told.beat("a", 14.0, 20)
    silent = told.state(14.0)
    told.log("serving", "shard-0", 15.0, epoch=2, versions={0: 2, 1: 1}, host="h", pid=8)
    told.view.on_presence(Presence(name="p2", host="h", pid=8, wants=(), owns=(0,)), 15.0)
    served = told.state(15.0)

    assert ("silent", "shard-0") in kinds(silent)
    assert silent["hosts"] == [{"name": "shard-0", "state": "silent"}]
    assert ("silent", "shard-0") not in kinds(served)
    assert [mark for mark in kinds(served) if mark[0].startswith("shard_")] == [
        ("shard_lost", "shard-0"),
        ("shard_back", "shard-0"),
    ]
    assert served["hosts"] == [{"name": "shard-0", "state": "serving"}]


def test_goodput_counts_the_gap_between_two_lives(told: ToldRun) -> None:
    told.log("joined", "b", 20.0, incarnation=2)
    told.sample("b", 22.0, 4, incarnation=2)
    curves = curves_of(told.view, told.facts(23.0))

    # Both are present from half a second before they had joined to the newest event. a stepped for 7 s, b for 7 s and 2 s.
    assert curves["goodput"]["whole"] == pytest.approx((7.0 + 9.0) / (21.5 + 21.5), abs=1e-3)
    assert curves["goodput"]["whole"] == pytest.approx(goodput_of(told.view).share, abs=1e-4)
    assert sum(each is not None for each in curves["rates"]["goodput"]) == len(curves["rates"]["at_s"])
    assert min(curves["rates"]["goodput"]) < 0.5
    assert [each["learner"] for each in curves["losses"]] == ["a", "b"]
    assert [each["learner"] for each in curves["lags"]] == ["a", "b"]
    assert all(len(each["at_s"]) == len(each["lag"]) == len(each["overhead"]) > 1 for each in curves["lags"])


def goodputs(run: ToldRun, facts: PageFacts) -> tuple[float | None, list[float | None]]:
    made = curves_of(run.view, facts)
    return made["goodput"]["now"], made["rates"]["goodput"][-3:]


def trained(until_s: int) -> ToldRun:
    """Return a run of two learners that both step without a pause, and are heard until then."""
    run = ToldRun()
    for who in ("a", "b"):
        run.log("joined", who, 0.0, incarnation=1, founder=who == "a")
        for at_s in range(2, until_s + 1, 2):
            run.sample(who, at_s, 2 * at_s)
        run.beat(who, until_s, 2 * until_s)
    return run


def test_goodput_falls_while_a_learner_is_silent() -> None:
    run = trained(120)
    before = goodputs(run, run.facts(121.0))
    for at_s in range(122, 241, 2):
        run.sample("a", at_s, 2 * at_s)
    run.beat("a", 240.0, 480)
    silent = goodputs(run, run.facts(241.0))
    run.log("left", "b", 241.0, incarnation=1, tokens=24000, steps=240)
    gone = goodputs(run, run.facts(241.0))

    assert before == (1.0, [1.0, 1.0, 1.0])
    assert silent == (0.5, [0.5, 0.5, 0.5])
    assert gone == (1.0, [1.0, 1.0, 1.0])


def test_a_run_says_what_it_waits_for() -> None:
    run = ToldRun()

    assert run.state(1.0, founded=False, answered=False)["status"] == "away"
    assert run.state(1.0, founded=False)["status"] == "awaited"
    assert run.state(1.0)["status"] == "still"
    run.log("joined", "a", 1.0, incarnation=1)
    assert run.state(2.0)["status"] == "live"
    assert run.state(60.0)["status"] == "still"
    run.log("left", "a", 61.0, incarnation=1, tokens=0, steps=0)
    assert run.state(62.0)["status"] == "over"


def test_many_learners_are_cut_and_counted() -> None:
    run = ToldRun()
    for number in range(LEARNERS_MAX + 6):
        run.beat(f"learner-{number:03}", 5.0)
    state = run.state(5.0)

    assert len(state["learners"]) == LEARNERS_MAX
    assert state["left_out"]["learners"] == 6
    assert state["tokens_per_s"] == 200.0 * (LEARNERS_MAX + 6)
