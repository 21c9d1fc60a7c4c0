"""The phases of a round, as everybody shows them."""

from __future__ import annotations

import pytest

from atoll.protocol.waits import RoundReasons
from atoll.wire.events import RoundEvent, RoundPhases
from support.events import fields

TIMES = {"waited_s": 5.0, "queued_s": 0.25, "merge_s": 0.5, "commit_s": 1.0}


def a_round(why: RoundReasons | None, quorum_wait_s: float) -> RoundEvent:
    return fields(RoundEvent, fragment=0, version=1, contributors=(), why=why, quorum_wait_s=quorum_wait_s, **TIMES)


@pytest.mark.parametrize("why", [None, RoundReasons(version=0, met_by="push/b/1/0/1")])
def test_after_its_quorum_a_round_waits_for_grace(why: RoundReasons | None) -> None:
    """Where nothing tells why a round ended, it has met its quorum when it says so."""
    made = a_round(why, quorum_wait_s=2.0)

    assert made.phases == RoundPhases(2.0, 3.0, 0.25, 0.5, 1.0)
    assert sum(made.phases) == made.took_s


def test_a_round_that_never_met_its_quorum_waited_for_nothing_else() -> None:
    """Its event has a quorum wait of 0, because there was no such moment."""
    made = a_round(RoundReasons(version=0, end="nobody left"), quorum_wait_s=0.0)

    assert made.phases == RoundPhases(5.0, 0.0, 0.25, 0.5, 1.0)


def test_a_phase_is_never_negative_nor_a_quorum_later_than_the_end() -> None:
    """Times of an event are a claim of its writer."""
    assert a_round(None, quorum_wait_s=-1.0).phases[:2] == (0.0, 5.0)
    assert a_round(None, quorum_wait_s=9.0).phases[:2] == (5.0, 0.0)
