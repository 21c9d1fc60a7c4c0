"""The status of a run for programs: what it says of runs that train, wait and are over, and that its schema holds."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
from typer.testing import CliRunner

from atoll.cli.main import build
from atoll.cli.watch import has_heard_all
from atoll.local.console import ConsolePicture
from atoll.local.console_tables import TopMoment, standing_at, status_lines, status_of
from atoll.protocol.settings import ProtocolSettings
from atoll.run.history import History, RoundLine
from atoll.run.standing import RunStatus, Standing, Storing, stalled_fragments, standing_of, status_schema
from atoll.wire.events import RoundEvent
from atoll.wire.messages import Presence
from support.events import event, fields
from support.founded_run import run_record
from support.watched_runs import beat

PROTOCOL = ProtocolSettings(fragments=4, shards=2, quorum=2, silence_s=5)


@pytest.mark.parametrize(
    ("states", "owned", "ended", "expected"),
    [
        (["training", "training"], {0, 1}, False, Standing("training")),
        (["training", "silent"], {0, 1}, False, Standing("waiting", ("a quorum of 2: 1 training",))),
        (["training", "training"], {1}, False, Standing("waiting", ("a synchronizer for shard 0",))),
        (["left"], set(), False, Standing("waiting", ("a learner: none is heard", "a synchronizer for shard 0, 1"))),
        (["draining"], {0}, True, Standing("ending")),
        (["left", "silent"], set(), True, Standing("over")),
    ],
)
def test_a_run_says_all_that_it_waits_for(
    states: list[str], owned: set[int], *, ended: bool, expected: Standing
) -> None:
    assert standing_of(PROTOCOL, states, owned, ended=ended) == expected


def test_a_broker_that_carries_messages_and_stores_none_is_waited_for() -> None:
    states = ["training", "training"]
    soon, late = (
        standing_of(PROTOCOL, states, {0, 1}, ended=False, storing=Storing(after_s)) for after_s in (100.0, 130.0)
    )

    assert soon == Standing("training")
    assert late.line == ("waiting for a broker that stores something: for 130 s it has not. Is its disk full?")


def rounds_of(fragments: Iterable[int]) -> list[RoundLine]:
    return [
        RoundLine(1.0, "shard-0", fields(RoundEvent, fragment=p, version=1, contributors=(), tokens=1, end="x", live=2))
        for p in fragments
    ]


def test_a_fragment_that_comes_to_a_stop_is_waited_for() -> None:
    """Half of the model stood still behind a broker that was dead, and the run was said to train."""
    healthy, half = rounds_of([0, 1, 2, 3] * 8), rounds_of([0, 1, 2, 3, *[0, 2] * 8])
    states = ["training", "training"]

    assert stalled_fragments(healthy, 4) == stalled_fragments(rounds_of([0, 2] * 7), 4) == ()
    assert stalled_fragments(half, 4) == (1, 3)
    assert standing_of(PROTOCOL, states, {0, 1}, ended=False, storing=Storing(stalled=(1, 3))).line == (
        "waiting for versions of fragment 1, 3, while others are made. Is a broker that keeps them away or full?"
    )
    assert standing_of(
        PROTOCOL, states, {0}, ended=False, storing=Storing(stalled=PROTOCOL.fragments_of(1))
    ).waits_for == ("a synchronizer for shard 1",)


def moment(now_s: float) -> TopMoment:
    """Return a run of two learners and one of two shards, heard at 10 s."""
    view = History()
    view.on_beat(beat("a", step=40), 10.0)
    view.on_beat(beat("b"), 10.0)
    view.on_presence(Presence(name="p", host="h", pid=1, wants=(), owns=(1,)), 10.0)
    view.on_event(
        event("round", "shard-1", 9.0, fragment=1, version=3, contributors=[], tokens=100, end="all answered", live=2)
    )
    view.on_event(event("quarantined", "shard-1", 1009.0, learner="c", incarnation=1, offences=3, reason="stale"))
    return TopMoment(ConsolePicture(view, "demo", PROTOCOL, 0.0, now_s), 1000.0 + now_s)


def test_the_status_names_learners_shards_lag_and_fragments() -> None:
    told = status_of(moment(11.0), "nats://hub:4222")

    assert (told.standing, told.waits_for) == ("waiting", ("a synchronizer for shard 0",))
    assert [(each.learner, each.state, each.step, each.lag_versions, each.heard_s) for each in told.learners] == [
        ("a", "training", 40, 3, 1.0),
        ("b", "training", 10, 3, 1.0),
    ]
    assert [(each.shard, each.served, each.heard_s) for each in told.shards] == [(0, False, None), (1, True, 1.0)]
    assert [(each.fragment, each.version) for each in told.fragments] == [(1, 3)]
    assert (told.commits, told.lag_versions_max, told.quarantined, told.faults) == (1, 3, ("c",), 1)
    assert (told.broker, told.bits_per_byte) == ("nats://hub:4222", None)
    later = status_of(moment(60.0), "nats://hub:4222")
    assert [each.state for each in later.learners] == ["silent", "silent"]
    assert later.lag_versions_max is None


def test_a_learner_that_has_not_left_and_is_not_heard_is_named() -> None:
    """Its region is cut off, or its process is gone: for how long is told by its newest entry in the event log."""
    told = moment(11.0)
    view = told.picture.view
    assert isinstance(view, History)
    view.on_presence(Presence(name="q", host="h", pid=2, wants=(), owns=(0,)), 10.0)
    view.on_event(event("joined", "far", 900.0, incarnation=1, took_s=1.0, founder=False))
    view.on_event(event("sample", "far", 954.0, incarnation=1, step=9, tokens=90))
    view.on_event(event("joined", "gone", 900.0, incarnation=1, took_s=1.0, founder=False))
    view.on_event(event("left", "gone", 950.0, incarnation=1, tokens=90, steps=9))
    just_begun = replace(told, picture=replace(told.picture, began_s=10.9))
    status = status_of(told, "nats://hub:4222")

    assert (status.standing, status.waits_for, status.unheard) == ("training", (), ("far for 57 s",))
    assert [(each.learner, each.state, each.heard_s) for each in status.learners if each.learner not in "ab"] == [
        ("far", "silent", 57.0),
        ("gone", "left", 111.0),
    ]
    assert status_lines(told).splitlines()[0] == "demo: training; not heard, and has not left: far for 57 s"
    assert "2 training · 1 not heard" in status_lines(told)
    assert status_of(just_begun, "").unheard == ()
    assert status_of(replace(told, closing=True), "").unheard == ()


def test_how_long_nothing_was_stored_is_told_by_the_clocks_of_those_who_write() -> None:
    """By that of whoever looks a healthy run would have a full disk, if it is minutes ahead."""
    told = moment(11.0)
    assert isinstance(told.picture.view, History)
    told.picture.view.on_presence(Presence(name="q", host="h", pid=2, wants=(), owns=(0,)), 10.0)
    ahead = replace(told, wall_s=5000.0)
    assert standing_at(ahead).word == "training"
    for name in ("a", "b"):
        told.picture.view.on_beat(msgspec.structs.replace(beat(name, step=50), at_s=1200.0), 10.5)
    assert standing_at(told).waits_for == ("a broker that stores something: for 191 s it has not. Is its disk full?",)


@pytest.mark.parametrize(
    ("target", "tokens", "closing", "word"),
    [
        (1000, 999, True, "stopped"),
        (0, 5000, True, "stopped"),
        (1000, 1000, True, "over"),
        (1000, 1000, False, "over"),
        (1000, 999, False, "waiting"),
    ],
)
def test_a_run_that_was_ended_before_its_target_is_stopped_and_not_over(
    target: int, tokens: int, word: str, *, closing: bool
) -> None:
    """Nobody is heard any more; it may go on, where one that has reached its target may not."""
    told = moment(11.0)
    picture = replace(told.picture, now_s=1000.0, protocol=msgspec.structs.replace(PROTOCOL, tokens_target=target))
    picture.view.run_tokens = tokens

    assert standing_at(replace(told, picture=picture, closing=closing)).word == word


def test_a_look_is_over_once_nobody_is_missing() -> None:
    """Two heartbeats of each learner that has not left, one of each shard's owner; of a run that is over nobody is awaited."""
    record = run_record("r")
    view, heard = History(), list[bool]()

    def take(name: str, at_s: float) -> None:
        if name.startswith("host"):
            view.on_presence(Presence(name=name, host="h", pid=1, owns=(int(name[-1]),), wants=()), at_s)
        else:
            view.on_beat(beat(name), at_s)
        heard.append(has_heard_all(record, view))

    view.on_event(event("joined", "a", 1.0, incarnation=1))
    view.on_event(event("joined", "gone", 1.0, incarnation=1))
    view.on_event(event("left", "gone", 2.0, incarnation=1, tokens=0, steps=0))
    for at_s, name in enumerate(("a", "host-0", "a", "host-1", "b", "b")):
        take(name, float(at_s))

    assert heard == [False, False, False, True, False, True]
    assert not has_heard_all(record, History())


def test_json_is_what_the_schema_says(tmp_path: Path) -> None:
    encoded = msgspec.json.encode(status_of(moment(11.0), "nats://hub:4222"))
    schema, file = tmp_path / "schema.json", tmp_path / "status.json"
    done = CliRunner().invoke(build(), ["status", "--schema"])
    schema.write_text(done.output, encoding="utf-8")
    file.write_bytes(encoded)

    assert json.loads(done.output) == status_schema()
    assert msgspec.json.decode(encoded, type=RunStatus).schema == 1
    told = status_schema()["$defs"]["RunStatus"]
    assert set(json.loads(encoded)) == set(told["properties"])
    assert set(told["required"]) < set(told["properties"])


def stalled(*, tokens: int, rounds_at_s: float | None = None, now_s: float = 60.0) -> TopMoment:
    """Return a run of two learners that join at second 0 and train, of which `b` reports so many tokens, at `now_s`."""
    view = History()
    for name in "ab":
        view.on_event(event("joined", name, 0.5, incarnation=1, took_s=0.5))
    for at_s in (now_s - 2.0, now_s - 1.0):
        for name in "ab":
            told = beat(name, step=int(10 * at_s))
            mine = told.tokens if name == "a" else tokens
            view.on_beat(msgspec.structs.replace(told, at_s=at_s, tokens=mine, step_s=0.1), at_s)
    if rounds_at_s is not None:
        shares = [{"learner": name, "incarnation": 1, "age": 0, "tokens": 5, "weight": 1.0} for name in "ab"]
        fields = {"fragment": 0, "version": 3, "contributors": shares, "tokens": 9, "end": "all answered", "live": 2}
        view.on_event(event("round", "shard-0", rounds_at_s, **fields))
    for version, at_s in ((3, 4.0), (4, 50.0)):
        why = "call 64: it needs 2 of 2 live learners, and has 1; not yet b"
        view.on_event(event("waiting", "shard-0", at_s, fragment=0, version=version, why=why, waited_s=3.0))
    view.on_presence(Presence(name="p", host="h", pid=1, wants=(), owns=(0, 1)), now_s - 0.5)
    return TopMoment(ConsolePicture(view, "demo", PROTOCOL, now_s - 3.0, now_s), now_s)


def test_a_run_that_merges_nothing_does_not_train() -> None:
    """A quorum of two, one of whom reports 0 tokens: 0 commits, and it was told to train with a goodput of 99 %."""
    told = status_of(stalled(tokens=0), "")

    assert told.standing == "waiting"
    assert told.goodput == 0.0
    assert told.waits_for == (
        (
            "a version: none was made for 58 s; the round of version 4 of fragment 0 is open for 12 s (call 64: it needs 2 of "
            "2 live learners, and has 1; not yet b); steps of b count 0 tokens, and nothing of them can be merged"
        ),
    )


def test_a_run_that_makes_versions_trains_whatever_its_rounds_wait_for_now() -> None:
    assert status_of(stalled(tokens=100, rounds_at_s=50.0), "").standing == "training"
    assert status_of(stalled(tokens=100, now_s=10.0), "").standing == "training"


def test_steps_that_no_merge_follows_are_no_goodput() -> None:
    """Beyond the time after which a run stands still; a merge makes those of its contributors good."""
    view = History()
    for second in range(100):
        for name in "ab":
            view.on_beat(msgspec.structs.replace(beat(name, step=10 * second), step_s=0.1), float(second))
    picture = ConsolePicture(view, "demo", PROTOCOL, 0.0, 99.0)
    nothing = picture.goodput
    shares = [{"learner": "a", "incarnation": 1, "age": 0, "tokens": 5, "weight": 1.0}]
    fields = {"fragment": 0, "version": 3, "contributors": shares, "tokens": 9, "end": "all answered", "live": 2}
    view.on_event(event("round", "shard-0", 98.0, **fields))

    assert nothing == pytest.approx(15.0 / 99.0, rel=0.01)
    assert picture.goodput == pytest.approx((99.0 + 15.0) / (2 * 99.0), rel=0.01)
