"""A queue that many senders fill: who writes without end loses its own entries, in the queue itself and where it stands."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from atoll.base.fair_queue import FairQueue
from atoll.bus.interface import CoreMessage
from atoll.bus.subscriptions import BYTES_MAX, BufferedSubscription
from atoll.run import history as histories
from atoll.story.goodput import presences
from atoll.story.lives import lives_of
from atoll.wire.traffic import BusStats
from support.told_runs import SteppedRun


def queue(weight_max: int) -> FairQueue[tuple[str, int]]:
    return FairQueue(weight_max, lambda entry: entry[0])


def test_the_sender_of_most_loses_its_oldest() -> None:
    made = queue(6)
    forgotten = sum(map(made.append, [("a", 1), ("b", 1), *(("m", number) for number in range(9)), ("b", 2)]))

    assert list(made) == [("a", 1), ("b", 1), ("m", 6), ("m", 7), ("m", 8), ("b", 2)]
    assert (forgotten, len(made), made.newest) == (6, 6, ("b", 2))
    assert [made.pop() for _ in range(6)] == [("a", 1), ("b", 1), ("m", 6), ("m", 7), ("m", 8), ("b", 2)]


def test_the_newest_stays_where_each_sender_has_one() -> None:
    made = queue(3)
    for name in "abcde":
        made.append((name, 1))
    assert [name for name, _ in made] == ["c", "d", "e"]


@pytest.mark.parametrize("seed", range(5))
def test_a_queue_is_in_order_within_its_bound_and_fair(seed: int) -> None:
    rng, made, sent = random.Random(seed), queue(40), Counter[str]()
    for number in range(200):
        name = rng.choice("ab" + 30 * "m")
        sent[name] += 1
        made.append((name, number))
        kept = Counter(name for name, _ in made)
        assert [each for _, each in made] == sorted(each for _, each in made)
        assert len(made) == min(sent.total(), 40)
        assert all(kept[name] == count for name, count in sent.items() if count <= 40 // len(sent))


async def test_a_flood_pushes_no_message_of_others_out_of_a_feed() -> None:
    stats = BusStats()

    async def close(_: BufferedSubscription) -> None:
        """Do nothing."""

    feed = BufferedSubscription(1024, stats, close)
    for name in ("h0", "h1"):
        feed.push(CoreMessage(f"hb.{name}", b"beat"))
    for _ in range(20_000):
        feed.push(CoreMessage("hb.mallory", b"beat"))
    first = [await feed.next(0.0) for _ in range(3)]
    assert [one.subject for one in first if one is not None] == ["hb.h0", "hb.h1", "hb.mallory"]
    assert stats.core_messages_dropped == 20_002 - 1024
    await feed.close()


async def test_large_messages_of_one_sender_push_out_their_own() -> None:
    async def close(_: BufferedSubscription) -> None:
        """Do nothing."""

    feed = BufferedSubscription(1024, BusStats(), close)
    feed.push(CoreMessage("hb.h0", b"beat"))
    large = bytes(BYTES_MAX // 4)
    for _ in range(9):
        feed.push(CoreMessage("hb.mallory", large))
    taken = [one.subject for _ in range(9) if (one := await feed.next(0.0)) is not None]
    assert taken == ["hb.h0", *["hb.mallory"] * 3]
    await feed.close()


@pytest.mark.parametrize("kind", ["joined", "sample", "left"])
def test_who_writes_without_end_forgets_nobody_else_in_a_history(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    monkeypatch.setattr(histories, "LIVES_MAX", 100)
    run = SteppedRun(notes_kept=100)
    for who in run.steps:
        run.join(who)
        run.log("sample", who, 40.0, incarnation=1, step=30, tokens=300)
    for version in range(1, 11):
        run.round(version)
    before = presences(run.history)
    more = {"joined": {}, "sample": {"step": 1, "tokens": 1}, "left": {"steps": 1, "tokens": 1}}[kind]
    for life in range(1, 1000):
        run.log(kind, "mallory", 111.0, incarnation=life, **more)

    after = presences(run.history)
    assert {name: after[name].lives for name in before} == {name: one.lives for name, one in before.items()}
    assert {name: after[name].stepping_s for name in before} == {name: one.stepping_s for name, one in before.items()}
    assert all(lives_of(run.history)[who][1].newest is not None for who in run.steps)
    assert len(run.history.learners["mallory"].lives) <= 100
    assert {mark.who for mark in run.history.marks} >= set(run.steps)
