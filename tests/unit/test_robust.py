"""Robust merging: capped shares, clipped lengths, and the gate; each against numbers computed apart."""

from __future__ import annotations

import itertools
import math

import msgspec
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from atoll.base.errors import SettingsError
from atoll.codec import Encoded, format_of
from atoll.merge.fold import FragmentFold, MergeResult, slice_norms
from atoll.merge.robust import (
    CLIP,
    RUN,
    SAMPLE,
    CollectedFold,
    cap_weights,
    compared_runs,
    fold_of,
    others_cosines,
    shares,
)
from atoll.model.layout import FragmentSlice
from atoll.protocol.settings import ProtocolSettings

Vector = npt.NDArray[np.float32]

SLICES = (
    FragmentSlice(tensor_name="w", offset=0, start=0, stop=60, size=6000, direct=False),
    FragmentSlice(tensor_name="e", offset=6000, start=0, stop=20, size=2000, direct=True),
    FragmentSlice(tensor_name="b", offset=8000, start=0, stop=40, size=40, direct=False),
)
SIZE = 8040


def settings(**changes: object) -> ProtocolSettings:
    return msgspec.convert({"quorum": 3, "correction": "none", **changes}, ProtocolSettings).check()


def honest(count: int, seed: int = 0, agreement: float = 0.5) -> list[Vector]:
    dice = np.random.default_rng(seed)
    common = dice.standard_normal(SIZE)
    return [(agreement * common + dice.standard_normal(SIZE)).astype(np.float32) for _ in range(count)]


def merged(
    vectors: list[Vector],
    chosen: ProtocolSettings,
    weights: list[float] | None = None,
    learners: list[str] | None = None,
) -> MergeResult:
    """Return the merge of a round; each vector is another learner's unless `learners` says whose it is."""
    fold, names = fold_of(SLICES, chosen), learners or [str(number) for number in range(len(vectors))]
    for vector, weight, learner in zip(vectors, weights or [1.0] * len(vectors), names, strict=True):
        exact = Encoded.exact(vector)
        if isinstance(fold, CollectedFold):
            fold.add(exact, slice_norms(SLICES, exact), weight, learner=learner)
        else:
            fold.add(exact, slice_norms(SLICES, exact), weight)
    return fold.result()


def cosine(one: npt.ArrayLike, other: npt.ArrayLike) -> float:
    a, b = np.asarray(one, np.float64), np.asarray(other, np.float64)
    return float(a @ b / (np.linalg.norm(a) * np.linalg.norm(b)))


@example([67681087911.0, 67681087911.0, 67681087912.0, 1e-05], 1.0 / 3.0)  # the third is at the cap, but for rounding
@given(
    st.lists(st.floats(1e-6, 1e12), min_size=1, max_size=20),
    st.sampled_from([0.05, 0.1, 0.25, 1.0 / 3.0, 0.5, 0.9, 1.0]),
)
def test_no_share_is_larger_than_the_cap(weights: list[float], share_max: float) -> None:
    """Light ones keep their weight, heavy ones have the cap exactly; where too few contribute, all weigh the same."""
    found = cap_weights(weights, share_max)
    total = math.fsum(found)

    assert all(0.0 < after <= before for before, after in zip(weights, found, strict=True))
    if share_max * len(weights) > 1.0 + 1e-9:
        assert max(found) <= share_max * total * (1.0 + 1e-9)
        cut = [after for before, after in zip(weights, found, strict=True) if after < before * (1.0 - 1e-9)]
        assert all(math.isclose(after, share_max * total, rel_tol=1e-6) for after in cut)
    else:
        assert len(set(found)) == 1


def test_a_contribution_without_weight_gets_none() -> None:
    assert cap_weights([4.0, 0.0, 1.0, 1.0], 0.5) == [2.0, 0.0, 1.0, 1.0]
    assert cap_weights([0.0, 0.0], 0.5) == [0.0, 0.0]


@pytest.mark.parametrize("merge", ["mean", "rda"])
def test_a_run_without_robustness_folds_on_arrival(merge: str) -> None:
    vectors = honest(6)
    plain = merged(vectors, settings(merge=merge))
    judged = merged(vectors, settings(merge=merge, robust="gate"))

    assert isinstance(fold_of(SLICES, settings()), FragmentFold)
    assert isinstance(fold_of(SLICES, settings(share_max=0.5)), CollectedFold)
    assert judged.pseudo_gradient.tobytes() == plain.pseudo_gradient.tobytes()
    assert all(all(judgement.heard) and set(judgement.clips) == {1.0} for judgement in judged.judgements)


@pytest.mark.parametrize("merge", ["mean", "rda"])
def test_a_capped_share_is_that_of_the_weights_that_are_left(merge: str) -> None:
    """A weight of 2^90 is half of the round, no more."""
    vectors = honest(3)
    found = merged(vectors, settings(merge=merge, share_max=0.5), [1.0, 1.0, 2.0**90])
    wanted = merged(vectors, settings(merge=merge), [1.0, 1.0, 2.0])

    np.testing.assert_allclose(found.pseudo_gradient, wanted.pseudo_gradient, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("merge", ["mean", "rda"])
def test_a_long_slice_is_cut_to_twice_the_median(merge: str) -> None:
    vectors = honest(5)
    norms = np.array([slice_norms(SLICES, Encoded.exact(vector)) for vector in vectors])
    loud = vectors[0] * np.float32(1e6)
    lengths = np.array(slice_norms(SLICES, Encoded.exact(loud)))
    bound = CLIP * np.median(np.vstack([norms[1:], lengths]), axis=0)
    cut = loud.copy()
    for number, piece in enumerate(SLICES):
        cut[slice(*piece.bounds)] *= np.float32(bound[number] / lengths[number])

    found = merged([*vectors[1:], loud], settings(merge=merge, robust="clip"))
    wanted = merged([*vectors[1:], cut], settings(merge=merge))

    np.testing.assert_allclose(found.pseudo_gradient, wanted.pseudo_gradient, rtol=1e-4, atol=1e-4)
    assert [set(judgement.clips) == {1.0} for judgement in found.judgements] == [True] * 4 + [False]


@pytest.mark.parametrize("merge", ["mean", "rda"])
@pytest.mark.parametrize("liars", [1, 2])
@pytest.mark.parametrize("codec", ["f32", "int4"])
def test_who_points_away_from_most_is_not_heard(merge: str, liars: int, codec: str) -> None:
    """The merge is that of the others alone, wherever the liars are in the order, the first place included."""
    vectors = [Encoded.of(vector, format_of(codec)).expanded() for vector in honest(8)]
    truth = merged(vectors[liars:], settings(merge=merge)).pseudo_gradient
    for place in (0, 3, 6):
        told = vectors[liars:]
        told[place:place] = [-vector for vector in vectors[:liars]]
        found = merged(told, settings(merge=merge, robust="gate"))

        silent = [number for number, judgement in enumerate(found.judgements) if not any(judgement.heard[:2])]
        assert silent == list(range(place, place + liars))
        big = slice(0, 8000)
        np.testing.assert_allclose(found.pseudo_gradient[big], truth[big], rtol=2e-4, atol=2e-5)


def test_a_lie_in_one_slice_is_left_out_of_that_slice_alone() -> None:
    vectors = honest(6)
    vectors[2][:6000] *= -1.0
    found = merged(vectors, settings(robust="gate"))

    assert [judgement.heard[:2] for judgement in found.judgements] == [(number != 2, True) for number in range(6)]


def test_without_a_majority_all_are_heard() -> None:
    """Half against half, and rounds of two: nobody knows who lies."""
    vectors = honest(4)
    opposed = [vectors[0], vectors[1], -vectors[2], -vectors[3]]
    assert all(all(judgement.heard) for judgement in merged(opposed, settings(robust="gate")).judgements)

    two = merged([vectors[0], -1e6 * vectors[1]], settings(robust="gate"))
    assert all(all(judgement.heard) and set(judgement.clips) == {1.0} for judgement in two.judgements)


def test_chance_leaves_hardly_anybody_out() -> None:
    """Learners whose directions have nothing in common are all heard, but for a few small slices."""
    dice = np.random.default_rng(3)
    left_out = 0
    for _ in range(20):
        vectors = [dice.standard_normal(SIZE).astype(np.float32) for _ in range(8)]
        left_out += sum(
            judgement.heard.count(False) for judgement in merged(vectors, settings(robust="gate")).judgements
        )
    assert left_out <= 0.04 * 20 * 8 * len(SLICES)


def test_weight_is_no_vote() -> None:
    """A liar that claims all the tokens there are is left out all the same."""
    vectors = honest(5)
    found = merged([-vectors[0], *vectors[1:]], settings(robust="gate"), [2.0**90, 1.0, 1.0, 1.0, 1.0])
    wanted = merged(vectors[1:], settings())

    big = slice(0, 8000)
    np.testing.assert_allclose(found.pseudo_gradient[big], wanted.pseudo_gradient[big], rtol=2e-4, atol=2e-5)


@pytest.mark.parametrize("times", [2, 3, 5])
def test_a_learner_has_one_vote_however_many_of_its_contributions_are_in_the_round(times: int) -> None:
    vectors = honest(2 + times)
    told = [*vectors[:2], *(-vector for vector in vectors[2:])]
    learners = ["a", "b", *["liar"] * times]
    found = merged(told, settings(robust="gate"), learners=learners)
    truth = merged(vectors[:2], settings()).pseudo_gradient

    assert [all(judgement.heard[:2]) for judgement in found.judgements] == [True, True, *[False] * times]
    big = slice(0, 8000)
    np.testing.assert_allclose(found.pseudo_gradient[big], truth[big], rtol=2e-4, atol=2e-5)
    assert shares([1.0, 1.0, *[5.0] * times], learners, 0.4)[:2] == [1.0, 1.0]
    assert math.isclose(sum(shares([1.0, 1.0, *[5.0] * times], learners, 0.4)[2:]), 0.4 / 0.6 * 2.0)


def test_two_contributions_of_one_learner_and_one_of_another_are_no_round_of_three() -> None:
    vectors = honest(3)
    found = merged([vectors[0], -vectors[1], -vectors[2]], settings(robust="gate"), learners=["a", "b", "b"])

    assert all(all(judgement.heard) for judgement in found.judgements)


def test_zeros_have_no_direction_and_are_heard() -> None:
    vectors = honest(5)
    found = merged([np.zeros(SIZE, np.float32), *vectors[1:]], settings(robust="gate")).pseudo_gradient
    wanted = merged(vectors[1:], settings()).pseudo_gradient

    assert cosine(found[:6000], wanted[:6000]) > 0.9999
    assert 0.75 < np.linalg.norm(found[:6000]) / np.linalg.norm(wanted[:6000]) < 0.85


def test_the_cosine_with_the_others_is_that_of_their_directions() -> None:
    dice = np.random.default_rng(1)
    vectors = dice.standard_normal((5, 400)) * np.array([[1.0], [10.0], [0.1], [3.0], [0.0]])
    found = others_cosines(vectors @ vectors.T, list("abcde"), np.ones(5))
    units = [vector / max(1e-30, float(np.linalg.norm(vector))) for vector in vectors]
    for one in range(4):
        assert math.isclose(
            found[one], cosine(vectors[one], np.sum([units[k] for k in range(5) if k != one], axis=0)), abs_tol=1e-9
        )
    assert found[4] == 0.0


@pytest.mark.parametrize("size", [0, 1, 2 * SAMPLE, 2 * SAMPLE + 1, 10 * SAMPLE, 500 * SAMPLE])
def test_the_sample_lies_within_the_slice_and_is_a_small_part_of_a_large_one(size: int) -> None:
    for offset in (0, 1, 2**63 + 5, 2**64 - 1):
        runs = compared_runs(size, offset)
        compared = sum(high - low for low, high in runs)
        assert all(0 <= low < high <= size for low, high in runs)
        assert all(before[1] <= after[0] for before, after in itertools.pairwise(runs))
        if size <= 2 * SAMPLE:
            assert compared == size
        else:
            assert SAMPLE <= compared <= max(SAMPLE, size // 256 + RUN)


def test_robustness_needs_a_quorum_of_three() -> None:
    with pytest.raises(SettingsError, match="two are no majority"):
        settings(robust="clip", quorum=2)


@pytest.mark.parametrize("robust", ["clip", "gate"])
def test_a_tensor_without_elements_is_merged_like_any_other(robust: str) -> None:
    """A layout may hold one; its fragment must still make versions."""
    empty = FragmentSlice(tensor_name="none", offset=8, start=0, stop=0, size=0, direct=False)
    slices = (FragmentSlice(tensor_name="w", offset=0, start=0, stop=8, size=8, direct=False), empty)
    fold = fold_of(slices, settings(robust=robust))
    assert isinstance(fold, CollectedFold)
    for learner in "abc":
        vector = Encoded.exact(np.ones(8, np.float32))
        fold.add(vector, slice_norms(slices, vector), 1.0, learner=learner)

    assert np.allclose(fold.result().pseudo_gradient, 1.0)
