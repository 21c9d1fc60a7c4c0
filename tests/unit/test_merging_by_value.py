"""Merging by value: the mean over all learners, whoever of them is in a round, and what a liar can do to it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

from atoll.base.errors import ProtocolMisuse
from atoll.codec.encoded import Encoded
from atoll.merge.fold import MergeResult
from atoll.merge.outer import State
from atoll.merge.values import FADING, KEPT, KEPT_ELEMENTS, KEPT_VERSIONS, MeanOfValues, ValuesFold, is_remembered
from atoll.model.layout import FragmentSlice
from atoll.protocol.settings import ProtocolSettings

ELEMENTS = 3
SLICES = (FragmentSlice("var", 0, ELEMENTS, 0, ELEMENTS, False),)


class ValueRounds:
    """The versions of one fragment, merged by value."""

    def __init__(self, **settings: Any) -> None:  # noqa: ANN401  (of a run)
        self._settings = ProtocolSettings(fragments=1, shards=1, value_fragments=1, **settings).of(0)
        self._outer = MeanOfValues()
        self.values = np.zeros(ELEMENTS, dtype=np.float32)
        self.state: State = self._outer.init(self.values)
        self.version = 0

    def merge(self, given: Mapping[str, float], weights: Mapping[str, float] | None = None) -> MergeResult:
        self.version += 1
        fold = ValuesFold(SLICES, self._settings)
        for learner, number in given.items():
            difference = np.full(ELEMENTS, -number, dtype=np.float32)
            fold.add(Encoded.exact(difference), [0.0], (weights or {}).get(learner, 1.0), learner=learner)
        merged = fold.result(self.state, self.version)
        assert merged.memory is not None
        shapes = {name: (array.shape, array.dtype) for name, array in self.state.items()}
        assert {name: (array.shape, array.dtype) for name, array in merged.memory.items()} == shapes
        self.values, self.state = self._outer.update(self.values, merged.pseudo_gradient, merged.memory)
        return merged

    def then(self, given: Mapping[str, float], weights: Mapping[str, float] | None = None) -> float:
        self.merge(given, weights)
        assert np.all(self.values == self.values[0])
        return float(self.values[0])


def test_a_round_of_one_leaves_the_mean_of_all() -> None:
    rounds = ValueRounds(quorum=1)
    assert rounds.then({"a": 1.0}) == 1.0
    assert [rounds.then({learner: number}) for learner, number in [("b", 3.0), ("a", 1.0), ("b", 3.0)]] == [2.0] * 3
    assert rounds.then({"a": 2.0, "b": 3.0}) == 2.5
    assert rounds.then({"b": 4.0}) == 3.0


def test_values_count_by_the_weight_that_they_came_with() -> None:
    """Also from memory: three parts of 1 and one of 5."""
    rounds = ValueRounds()
    rounds.merge({"a": 1.0}, {"a": 30.0})
    assert rounds.then({"b": 5.0}, {"b": 10.0}) == 2.0
    assert rounds.then({"b": 5.0, "c": 2.0}, {"b": 30.0, "c": 60.0}) == pytest.approx((30 + 150 + 120) / 120)


def test_a_short_last_push_takes_no_weight_away() -> None:
    """Who leaves has not seen less than the others; a weight that stays small fades in over the rounds."""
    rounds = ValueRounds()
    rounds.merge({"a": 1.0, "b": 3.0}, {"a": 1000.0, "b": 1000.0})
    rounds.merge({"a": 1.0}, {"a": 1.0})
    assert rounds.then({"b": 3.0}, {"b": 1000.0}) == pytest.approx((FADING * 1.0 + 3.0) / (FADING + 1.0))
    for _ in range(100):
        rounds.merge({"a": 1.0, "b": 3.0}, {"a": 1.0, "b": 1000.0})
    assert rounds.then({"b": 3.0}, {"b": 1000.0}) > 2.99


def test_who_has_diverged_and_left_counts_no_more() -> None:
    """Its values are far longer than what is usual among three; with two nobody knows who is right."""
    rounds = ValueRounds()
    rounds.merge({"a": 1.0, "b": 1.0})
    rounds.merge({"mad": 1e9})
    assert rounds.then({"a": 1.0, "b": 1.0}) == 1.0
    careless = ValueRounds(outlier_ratio=0.0)
    careless.merge({"a": 1.0, "b": 1.0, "mad": 1e9})
    assert careless.then({"a": 1.0, "b": 1.0}) > 1e8


@pytest.mark.parametrize(
    ("name", "poison"), [("weights", math.inf), ("weights", math.nan), ("values", math.nan), ("versions", 1 << 62)]
)
def test_a_memory_that_no_shard_has_written_is_passed_over(name: str, poison: float) -> None:
    """A single poisoned number must not become the model."""
    rounds = ValueRounds()
    rounds.merge({"a": 1.0})
    rounds.state = rounds.state | {name: np.full_like(rounds.state[name], poison)}
    assert rounds.then({"b": 3.0}) == 3.0


def test_equal_values_stay_to_the_bit() -> None:
    rounds, number = ValueRounds(), float(np.float32(0.1))
    given = {str(learner): number for learner in range(7)}
    assert rounds.then(given, {str(learner): 1.0 + learner / 3.0 for learner in range(7)}) == number


def test_who_is_gone_for_long_counts_no_more() -> None:
    rounds = ValueRounds()
    rounds.merge({"a": 1.0, "b": 3.0})
    assert [rounds.then({"b": 3.0}) for _ in range(KEPT_VERSIONS)] == [2.0] * KEPT_VERSIONS
    assert rounds.then({"b": 3.0}) == 3.0


def test_the_memory_holds_who_pushed_last() -> None:
    rounds = ValueRounds()
    rounds.merge({f"old{number}": 5.0 for number in range(KEPT + 3)})
    assert rounds.then({f"new{number}": 1.0 for number in range(KEPT)}) > 1.0
    assert rounds.then({"new0": 1.0}) == 1.0


def test_two_contributions_of_one_learner_are_one_value() -> None:
    fold = ValuesFold(SLICES, ProtocolSettings(fragments=1, shards=1, value_fragments=1).of(0))
    for learner, number in (("a", 1.0), ("b", 4.0), ("a", 3.0)):
        fold.add(Encoded.exact(np.full(ELEMENTS, -number, dtype=np.float32)), [0.0], 1.0, learner=learner)
    merged = fold.result(MeanOfValues().init(np.zeros(ELEMENTS, dtype=np.float32)), 1)

    assert merged.pseudo_gradient.tolist() == [-3.0] * ELEMENTS
    assert (merged.count, merged.weight_sum) == (3, 3.0)
    with pytest.raises(ProtocolMisuse, match="given already"):
        fold.result({}, 2)


@pytest.mark.parametrize("robust", ["clip", "gate"])
@pytest.mark.parametrize("lie", [-1e9, 1e9])
def test_a_minority_of_liars_stays_within_what_honest_learners_have(robust: str, lie: float) -> None:
    """Also in a round of its own, when the honest learners are there in memory only, and for elements one by one."""
    rounds = ValueRounds(robust=robust)
    honest = {"a": 1.0, "b": 2.0, "c": 4.0}
    merged = rounds.merge(honest | {"liar": lie}, {"liar": 1e6})
    together = float(rounds.values[0])

    assert 1.0 <= together <= 4.0
    assert len(merged.judgements) == 4
    assert 1.0 <= rounds.then({"liar": lie}) <= 4.0


def test_a_share_has_its_bound_in_the_mean_too() -> None:
    rounds = ValueRounds(share_max=0.5)
    rounds.merge({"a": 1.0})
    assert rounds.then({"b": 3.0}, {"b": 1e9}) == 2.0


def test_large_fragments_have_no_memory() -> None:
    """It would be larger than the model."""
    assert is_remembered(KEPT_ELEMENTS)
    assert not is_remembered(KEPT_ELEMENTS + 1)
    assert MeanOfValues().init(np.zeros(KEPT_ELEMENTS + 1, dtype=np.float32)) == {}
