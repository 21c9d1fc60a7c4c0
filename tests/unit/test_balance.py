"""How hosts share shards: evenly, with few moves, without a tug of war, and away from who leaves."""

from __future__ import annotations

import itertools
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.protocol.ownership import HOSTS_MAX, Balance, HandOver, HostHeard

LEASE_S = 3.0
SHARDS = frozenset(range(8))


def heard(
    host: str, owns: set[int], at_s: float = 0.0, *, wants: frozenset[int] = SHARDS, leaving: bool = False
) -> HostHeard:
    return HostHeard(at_s=at_s, host=host, wants=wants, owns=frozenset(owns), leaving=leaving)


def told(host: str, *others: HostHeard) -> Balance:
    balance = Balance(host, LEASE_S)
    for other in others:
        balance.handle(other)
    return balance


def test_the_one_with_two_more_gives_one() -> None:
    assert told("a", heard("b", set())).handle(heard("a", {0, 1})) == [HandOver(shard=1, to="b")]
    assert told("a", heard("b", set())).handle(heard("a", {0})) == []
    assert told("a", heard("b", {2})).handle(heard("a", {0, 1})) == []


def test_one_shard_moves_at_a_time() -> None:
    balance = told("a", heard("b", set()))

    assert balance.handle(heard("a", {0, 1, 2, 3})) == [HandOver(shard=3, to="b")]
    assert balance.handle(heard("a", {0, 1, 2}, at_s=1.0)) == []
    balance.handle(heard("b", {3}, at_s=7.0))
    assert balance.handle(heard("a", {0, 1, 2}, at_s=7.0)) == [HandOver(shard=2, to="b")]


def test_who_takes_nothing_is_offered_less_and_less() -> None:
    """A host that only says that it wants shards costs the run a lease ten times in an hour and a half, not every lease."""
    balance, moves, at_s = told("a"), list[float](), 0.0
    while at_s < 5400.0:
        balance.handle(heard("b", set(), at_s=at_s))
        if balance.handle(heard("a", {0, 1, 2}, at_s=at_s)):
            moves.append(at_s)
        at_s += LEASE_S / 3.0
    pauses = [later - former for former, later in itertools.pairwise(moves)]

    assert 4 <= len(moves) <= 12
    assert all(later >= 1.5 * former for former, later in itertools.pairwise(pauses[:8]))
    balance.handle(heard("b", {2}, at_s=at_s + 1e6))
    balance.given = HandOver(shard=2, to="b")
    assert balance.handle(heard("a", {0, 1, 3, 4}, at_s=at_s + 1e6))
    assert balance.vain == 0


def test_only_the_richest_gives() -> None:
    """Two hosts that gave to the same third would have to be given back."""
    poor = heard("c", set())

    assert told("a", heard("b", {4, 5, 6}), poor).handle(heard("a", {0, 1})) == []
    assert told("b", heard("a", {0, 1}), poor).handle(heard("b", {4, 5, 6})) == [HandOver(shard=6, to="c")]
    assert told("b", heard("a", {0, 1}), poor).handle(heard("b", {4, 5})) == []


def test_nobody_is_given_what_it_does_not_want() -> None:
    only_five = heard("b", set(), wants=frozenset({5}))

    assert told("a", only_five).handle(heard("a", {0, 1})) == []
    assert told("a", only_five).handle(heard("a", {0, 5})) == [HandOver(shard=5, to="b")]
    assert told("c", only_five, heard("a", {0, 1, 2})).handle(heard("c", {5, 6})) == [HandOver(shard=5, to="b")]


@pytest.mark.parametrize("other", [heard("b", set(), leaving=True), heard("b", set(), at_s=-2.1 * LEASE_S)])
def test_who_leaves_or_is_silent_is_given_nothing(other: HostHeard) -> None:
    """Neither would take it."""
    balance = told("a", other)

    assert balance.handle(heard("a", {0, 1})) == []
    assert balance.successor(0, 0.0) == ""


def test_who_leaves_gives_to_the_least_loaded() -> None:
    balance = told("a", heard("b", {1, 2}), heard("d", {3}), heard("c", {4}), heard("e", set(), wants=frozenset({9})))

    assert balance.successor(0, 0.0) == "c"
    assert balance.successor(9, 0.0) == "e"
    assert balance.handle(heard("a", {0, 5, 6, 7}, leaving=True)) == []


def test_a_lease_given_up_is_news() -> None:
    """A standby looks at the leases at once when somebody has fewer shards than before or is leaving."""
    balance = told("a", heard("b", {0, 1}))

    assert not balance.handle(heard("b", {0, 1}))
    assert balance.handle(heard("b", {0}))
    assert balance.handle(heard("b", {0}, leaving=True))
    assert not balance.handle(heard("a", set()))


def test_a_host_remembers_a_bounded_number_of_others() -> None:
    balance = told("a", heard("old", set()), *(heard(f"h{i}", {1}) for i in range(HOSTS_MAX)))

    assert balance.successor(0, 0.0) == "h0"


@given(hosts=st.integers(1, 6), shards=st.integers(1, 12), seed=st.integers(0, 1 << 30))
def test_shards_settle_evenly_however_they_begin(hosts: int, shards: int, seed: int) -> None:
    """From any distribution, with reports that arrive late, a bounded number of moves ends in an even one that stays."""
    dice = random.Random(seed)
    names = [f"h{i}" for i in range(hosts)]
    owner = {shard: dice.choice(names) for shard in range(shards)}
    balances = {name: Balance(name, LEASE_S) for name in names}
    every = frozenset(range(shards))
    moves, at_s = 0, 0.0
    for _ in range(40 * shards):
        at_s += LEASE_S / 3.0
        for name in names:
            report = heard(name, {s for s, who in owner.items() if who == name}, at_s, wants=every)
            for other in dice.sample(names, len(names) - (dice.random() < 0.3)):
                if other != name:
                    balances[other].handle(report)
            for move in balances[name].handle(report):
                assert isinstance(move, HandOver)
                owner[move.shard] = move.to
                moves += 1
    loads = [sum(1 for who in owner.values() if who == name) for name in names]

    assert max(loads) - min(loads) <= 1
    assert moves <= 2 * shards
