"""Who is heard, and what each learner does: one rule for consoles, pages, metrics and alerts."""

from __future__ import annotations

import pytest

from atoll.protocol.settings import ProtocolSettings
from atoll.run.process_views import Hearing, HostView, LearnerLife, LearnerView
from atoll.wire.messages import LearnerState
from support.watched_runs import beat

PROTOCOL = ProtocolSettings(silence_s=5.0, lease_s=3.0)
WALL_S = 10_000.0


def hearing(now_s: float, *, dated: bool = True, over: bool = False) -> Hearing:
    return Hearing(PROTOCOL, now_s, WALL_S + now_s if dated else None, 0.0, over)


def beaten(state: LearnerState = "training", *, heard_s: float | None = 10.0, left: bool = False) -> LearnerView:
    life = LearnerLife(1, joined_at_s=WALL_S, left=left, beat=beat("a", state=state))
    return LearnerView("a", {1: life}, heard_s)


def unbeaten(joined_s: float | None) -> LearnerView:
    return LearnerView("a", {1: LearnerLife(1, joined_at_s=None if joined_s is None else WALL_S + joined_s)})


@pytest.mark.parametrize(
    ("learner", "now_s", "expected"),
    [
        (beaten(), 15.0, "training"),
        (beaten("draining"), 15.0, "draining"),
        (beaten(), 15.1, "silent"),
        (beaten(heard_s=None), 15.0, "silent"),
        (beaten(left=True), 10.0, "left"),
        (LearnerView("a"), 10.0, "left"),
    ],
)
def test_a_learner_does_what_it_says_while_it_is_heard(learner: LearnerView, now_s: float, expected: str) -> None:
    assert hearing(now_s).state(learner) == expected
    assert hearing(now_s).hears(learner) is (expected in ("training", "draining"))


@pytest.mark.parametrize(
    ("joined_s", "now_s", "over", "expected"),
    [
        (-100.0, 1.0, False, "ended"),
        (-100.0, 2.0, False, "silent"),
        (-4.0, 1.0, False, "joining"),
        (8.0, 10.0, False, "joining"),
        (8.0, 10.0, True, "ended"),
        (None, 1.0, False, "ended"),
        (-100.0, 2.0, True, "ended"),
    ],
)
def test_without_a_heartbeat_its_beginning_tells(
    joined_s: float | None, now_s: float, *, over: bool, expected: str
) -> None:
    assert hearing(now_s, over=over).state(unbeaten(joined_s)) == expected


def test_without_a_date_a_life_without_a_heartbeat_joins_until_it_must_have_been_heard() -> None:
    assert [hearing(now_s, dated=False).state(unbeaten(-100.0)) for now_s in (1.0, 2.0)] == ["joining", "silent"]


def test_a_synchronizer_may_miss_one_beat() -> None:
    host = HostView(heard_s=10.0)

    assert [hearing(now_s).hears_host(host) for now_s in (14.9, 15.1)] == [True, False]
    assert not hearing(10.0).hears_host(HostView())
