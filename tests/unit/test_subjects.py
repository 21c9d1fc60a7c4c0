"""Subjects: tokens and patterns."""

from __future__ import annotations

import pytest

from atoll.base.errors import SettingsError
from atoll.bus.streams import stream_of, stream_plan
from atoll.wire.subjects import Subjects, filter_below, fragment_level, matches


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
