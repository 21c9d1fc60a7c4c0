"""Streams as data, as JetStream writes them and as several founders create them; their subjects."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any, cast

import pytest

from atoll.base.errors import AtollError, SettingsError
from atoll.bus.nats import provision as module
from atoll.bus.nats.connection import Connection
from atoll.bus.nats.jetstream_api import NO_STREAM, STREAM_EXISTS, ApiError, ApiRefusal, JetStream
from atoll.bus.nats.provision import provision, stream_config
from atoll.bus.options import BusOptions
from atoll.bus.streams import live_plan, stream_of, stream_plan
from atoll.wire.subjects import Subjects, filter_below, fragment_level, matches

EVERY = (*stream_plan("r"), live_plan("r"))


@pytest.mark.parametrize("bodies", [True, False])
def test_taps_lead_to_a_tree_no_stream_keeps(*, bodies: bool) -> None:
    """A republish that a stream kept would loop. Without bodies a tap is as those of a release before, to the letter."""
    for plan in stream_plan("r"):
        tap = stream_config(plan, "atoll.r", bodies=bodies).get("republish")
        if tap:
            ends = {"src": f"atoll.r.{plan.tap}.>", "dest": f"atoll.r.tap.{plan.tap}.>"}
            assert tap == (ends if bodies else {**ends, "headers_only": True})
            assert matches(plan.subjects[0], tap["src"])
            assert not any(matches(kept, tap["dest"]) for other in EVERY for kept in other.subjects)


def test_no_tap_covers_tensors_or_leases() -> None:
    s = Subjects("r")
    stems = (
        s.global_stem(0, 1, "1.n"), s.delta_stem(0, 1, "1.n"), s.contribution_stem("a", 0, 1, 1, "0" * 16),
        s.state_stem(0, 1, "1.n"), s.ledger_stem(0, "1.n"), s.lent_stem("a", 1, "n"),
    )  # fmt: skip
    for subject in (*(f"{stem}.0" for stem in stems), s.lease(0), s.data):
        keeper = stream_of(EVERY, subject)
        assert keeper.tap is None or not matches(f"atoll.r.{keeper.tap}.>", subject), subject


PLAN = stream_plan("demo")[0]


class CreatedElsewhere(JetStream):
    """A cluster on which another founder creates a stream: it refuses the name, and has the stream `looks` looks later."""

    def __init__(self, looks: int) -> None:
        connection = SimpleNamespace(loop=asyncio.get_running_loop(), options=BusOptions(peers_s=0.2))
        super().__init__(cast("Connection", connection))
        self.looks = looks

    async def api(self, call: str, body: Mapping[str, Any] | None = None) -> dict[str, Any]:
        if call.startswith("STREAM.CREATE"):
            assert body is not None
            raise ApiRefusal(ApiError(code=400, err_code=STREAM_EXISTS, description="stream name already in use"))
        self.looks -= 1
        if self.looks > 0:
            raise ApiRefusal(ApiError(code=404, err_code=NO_STREAM, description="stream not found"))
        return {"config": stream_config(PLAN, "atoll.demo")}


async def test_a_stream_that_another_founder_creates_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """A cluster refuses its name before it is there; so a learner once left that founded beside others."""
    monkeypatch.setattr(module, "_PEERS_PAUSE_S", 0.001)
    late = CreatedElsewhere(looks=5)
    await provision(late, (PLAN,), "atoll.demo")
    assert late.looks == 0

    never = CreatedElsewhere(looks=1_000_000)
    with pytest.raises(AtollError, match="already in use"):
        await provision(never, (PLAN,), "atoll.demo")


@pytest.mark.parametrize("bad", ["", "a.b", "a b", "*", ">", "ä", "a" * 65, "a\n", "-a", "-"])
def test_a_token_cannot_open_a_level(bad: str) -> None:
    """Dots, wildcards, blanks, overlong names and what a program would take for an option are refused with the value."""
    with pytest.raises(SettingsError, match="run id"):
        Subjects(bad)


@pytest.mark.parametrize(
    ("pattern", "subject", "covered"),
    [
        ("a.b", "a.b", True),
        ("a.b", "a.c", False),
        ("a.*", "a.b", True),
        ("a.*", "a.*", True),
        ("a.*", "a.b.c", False),
        ("a.*", "a", False),
        ("a.>", "a.b.c", True),
        ("a.>", "a", False),
        ("a.>", "a.>", True),
        ("a.>", "a.*.x", True),
        ("a.*", "a.>", False),
        ("a.b", "a.*", False),
        (">", "a", True),
        ("*.b", "a.b", True),
        ("a.*.c", "a.b.d", False),
    ],
)
def test_patterns_cover_as_on_the_broker(pattern: str, subject: str, *, covered: bool) -> None:
    """`*` is one level, `>` is one or more, and a narrower pattern is covered by a wider one."""
    assert covered == matches(pattern, subject)


@pytest.mark.parametrize("good", [">", "*", "ev.>", "gl.head.*", "ev.round.shard-0", "*.x_1.>"])
def test_a_filter_below_a_level_is_returned(good: str) -> None:
    assert filter_below(good, "the tap") == good


@pytest.mark.parametrize("bad", ["", ".", "a..b", "a b", ">.a", "a>", "a*", "a.", ".a", "a\n", "ü"])
def test_what_the_broker_would_refuse_is_no_filter(bad: str) -> None:
    """It would close the connection, or be refused by the client without a word of what is allowed."""
    with pytest.raises(SettingsError, match="the tap is no filter"):
        filter_below(bad, "the tap")


def test_every_subject_lies_in_the_run_and_core_messages_in_no_stream() -> None:
    """Durable subjects belong to exactly one stream; calls, beats, commands and taps to none."""
    subjects, plans = Subjects("r"), stream_plan("r")
    durable = [
        subjects.contribution_stem("a", 0, 1, 2, "0" * 16) + ".0",
        subjects.partial_stem("eu", 0, 1, "n") + ".0",
        subjects.contribution(0, 1, "a"),
        subjects.run_record,
        subjects.head("*"),
        subjects.lease(0),
        subjects.global_stem(0, 1, "n") + ".0",
        subjects.state_stem(0, 1, "n") + ".0",
        subjects.member("*"),
        subjects.data,
        subjects.event("a", "b"),
    ]
    whispered = [subjects.call("*"), subjects.beat("a"), subjects.control("all"), subjects.tap()]
    whispered += [subjects.premerge_answer("eu", "n"), subjects.region_kept("eu"), subjects.region_answer("eu", "n")]

    for subject in durable:
        homes = [plan for plan in plans if any(matches(kept, subject) for kept in plan.subjects)]
        assert [stream_of(plans, subject)] == homes
        assert subject.startswith("atoll.r.")
    for subject in whispered:
        assert not any(matches(kept, subject) for plan in plans for kept in plan.subjects)


def test_a_sum_is_no_contribution_whatever_its_region_is_called() -> None:
    """The chunks of contributions stay at a leaf; those of sums leave it, and are kept with their fragment."""
    subjects = Subjects("r")
    assert subjects.is_contribution(subjects.contribution_stem("a", 0, 1, 2, "0123456789abcdef"))
    for region in ("eu", "1-2"):
        assert not subjects.is_contribution(subjects.partial_stem(region, 7, 1, "n"))
        assert fragment_level(subjects.partial_stem(region, 7, 1, "n")) == "7"
