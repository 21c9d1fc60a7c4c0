"""What all rounds of a run add up to, however few a view keeps."""

from __future__ import annotations

from collections import deque
from typing import Any

from atoll.report.collect import _rounds
from atoll.run.history import NAMES_KEPT, OTHER, History, RoundSums
from atoll.wire.events import RoundEvent
from support.events import event, fields

SHARE: dict[str, Any] = {"learner": "a", "incarnation": 1, "push": 1, "tokens": 10, "weight": 1.0}


def rounds(view: History, count: int) -> None:
    """Let two shards commit in turn, each round with a late contribution beside one in time."""
    for number in range(count):
        contributors = [SHARE | {"age": 0, "unheard": 2}, SHARE | {"learner": "b", "age": 1}]
        view.on_event(
            event(
                "round",
                f"shard-{number % 2}",
                float(number),
                fragment=number % 2,
                version=1 + number // 2,
                contributors=contributors,
                end="grace over" if number % 4 else "all answered",
                bytes_up=5,
                bytes_down=7,
            )
        )


def test_totals_are_those_of_all_rounds_and_not_of_those_that_are_kept() -> None:
    """Of a run of days a view keeps the last rounds only; its counts went with them."""
    view = History(rounds=deque(maxlen=8))
    rounds(view, 100)
    told = _rounds(view)

    assert len(view.rounds) == 8
    assert (told["count"], told["late"], told["contributors_mean"]) == (100, 100, 2.0)
    assert told["ends"] == {"all answered": 25, "grace over": 75}
    assert (told["shortened"], told["unheard"]) == ({}, {"a": 200})
    assert view.sums.commits == {"shard-0": 50, "shard-1": 50}


def test_whoever_writes_the_event_log_makes_no_sum_grow_without_end() -> None:
    sums = RoundSums()
    for number in range(2 * NAMES_KEPT):
        sums.add("shard-0", fields(RoundEvent, fragment=0, version=1, contributors=(), end=f"reason {number}"), 0.0)

    assert len(sums.ends) == NAMES_KEPT + 1
    assert sums.ends[OTHER] == NAMES_KEPT
