"""Merging pseudo-gradients against references of a few lines, their weights, and the refusals of what cannot be merged."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import pytest

from atoll.base.errors import FrameRejected, ProtocolMisuse
from atoll.codec import Encoded
from atoll.codec.kernels.in_numpy import STRETCH
from atoll.merge.fold import FragmentFold, MergeResult, Method, l2_norm, slice_norms, validated_norms
from atoll.model.layout import FragmentSlice
from atoll.protocol.events import PushKey
from atoll.protocol.round import FragmentRound, Offer, staleness_weight, token_weight
from atoll.protocol.settings import ProtocolSettings

Vector = npt.NDArray[np.float32]
Wide = npt.NDArray[np.float64]
SIZES = {"w": 2 * STRETCH + 77, "b": 5, "embed": 300}
METHODS: list[Method] = ["mean", "rda"]


def slices_of(sizes: dict[str, int], direct: Sequence[str] = ()) -> tuple[FragmentSlice, ...]:
    slices, at = [], 0
    for name, size in sizes.items():
        slices.append(FragmentSlice(name, 0, size, at, size, name in direct))
        at += size
    return tuple(slices)


def drawn(count: int, seed: int = 3) -> tuple[list[Vector], list[float]]:
    """Return `count` random pseudo-gradients of `SIZES` with weights of different magnitude."""
    rng = np.random.default_rng(seed)
    size = sum(SIZES.values())
    vectors = [(rng.normal(size=size) * 10.0 ** rng.integers(-3, 2)).astype(np.float32) for _ in range(count)]
    return vectors, [float(w) for w in rng.uniform(0.5, 5e5, count)]


def add(
    fold: FragmentFold,
    slices: Sequence[FragmentSlice],
    vector: Sequence[float] | Vector,
    weight: float,
    staleness_weight: float = 1.0,
) -> None:
    pseudo_gradient = Encoded.exact(np.asarray(vector, dtype=np.float32))
    fold.add(pseudo_gradient, slice_norms(slices, pseudo_gradient), weight, staleness_weight)


def folded(
    slices: Sequence[FragmentSlice], method: Method, vectors: Sequence[Vector], weights: Sequence[float]
) -> MergeResult:
    fold = FragmentFold(slices, method)
    for vector, weight in zip(vectors, weights, strict=True):
        add(fold, slices, vector, weight)
    return fold.result()


def mean_reference(vectors: Sequence[Vector], weights: Sequence[float]) -> Wide:
    mean: Wide = np.average(np.asarray(vectors, dtype=np.float64), axis=0, weights=weights)
    return mean


def rda_reference(vectors: Sequence[Vector], weights: Sequence[float]) -> Wide:
    """Return the mean norm times the unit mean direction, in float64."""
    wide = np.asarray(vectors, dtype=np.float64)
    norms = np.linalg.norm(wide, axis=1)
    direction = np.average(wide / norms[:, None], axis=0, weights=weights)
    rda: Wide = np.average(norms, weights=weights) * direction / np.linalg.norm(direction)
    return rda


@pytest.mark.parametrize("count", [2, 5, 9])
def test_rda_keeps_norm_and_direction_per_slice(count: int) -> None:
    vectors, weights = drawn(count)
    slices = slices_of(SIZES, direct=["embed"])
    merged = folded(slices, "rda", vectors, weights).pseudo_gradient
    for tensor_slice in slices:
        here = slice(tensor_slice.offset, tensor_slice.offset + tensor_slice.size)
        parts = [vector[here] for vector in vectors]
        reference = (mean_reference if tensor_slice.direct else rda_reference)(parts, weights)
        np.testing.assert_allclose(merged[here], reference, rtol=0, atol=4e-6 * np.abs(reference).max())
        if not tensor_slice.direct:
            radius = np.average([np.linalg.norm(part.astype(np.float64)) for part in parts], weights=weights)
            assert np.linalg.norm(merged[here].astype(np.float64)) == pytest.approx(radius, rel=1e-5)


def test_a_direction_is_one_above_the_rounding_of_those_in_it() -> None:
    """Two that nearly cancel: below 2 x 2^-23 nothing moves, above it the slice is as long as they were."""
    slices, first = slices_of({"w": 2}), np.array([1.0, 0.0], np.float32)
    below, above = (
        folded(slices, "rda", [first, np.array([-1.0, y], np.float32)], [1.0, 1.0]) for y in (4.4e-7, 5.6e-7)
    )
    np.testing.assert_allclose(below.pseudo_gradient, [0.0, 2.2e-7], atol=1e-8)
    np.testing.assert_allclose(above.pseudo_gradient, [0.0, 1.0], atol=0.3)


def test_lengths_that_are_far_apart_stay_finite() -> None:
    short, long = np.array([1e-19, 0.0], np.float32), np.array([0.0, 1e12], np.float32)
    for vectors in ([short, long], [long, short]):
        merged = folded(slices_of({"w": 2}), "rda", vectors, [1.0, 1.0]).pseudo_gradient
        np.testing.assert_allclose(merged, [0.5e12 / 2**0.5] * 2, rtol=1e-5)


def test_a_vanishing_slice_does_not_overflow() -> None:
    """A weight divided by a tiny norm would be infinite in float32; what is so short has no direction."""
    tiny, long = np.full(3, 1e-35, np.float32), np.full(3, 2.0, np.float32)
    for vectors, wanted in (([tiny, 2 * tiny], 1.5e-35), ([tiny, long], 1.0), ([long, tiny], 1.0), ([tiny], 1e-35)):
        merged = folded(slices_of({"w": 3}), "rda", vectors, [1e9] * len(vectors)).pseudo_gradient
        np.testing.assert_allclose(merged, wanted, rtol=1e-5)


@pytest.mark.parametrize("method", METHODS)
def test_one_contribution_is_returned_bit_for_bit(method: Method) -> None:
    vectors, _ = drawn(1)
    sent = vectors[0].copy()
    fold = FragmentFold(slices_of(SIZES), method)
    add(fold, slices_of(SIZES), vectors[0], 0.3)
    vectors[0][:] = 0.0
    assert fold.result().pseudo_gradient.tobytes() == sent.tobytes()


@pytest.mark.parametrize("method", METHODS)
def test_a_replay_gives_the_same_bits(method: Method) -> None:
    vectors, weights = drawn(6)
    first = folded(slices_of(SIZES), method, vectors, weights)
    again = folded(slices_of(SIZES), method, vectors, weights)
    assert first.pseudo_gradient.tobytes() == again.pseudo_gradient.tobytes()


@pytest.mark.parametrize("method", METHODS)
def test_another_order_gives_the_same_numbers(method: Method) -> None:
    vectors, weights = drawn(6)
    first = folded(slices_of(SIZES), method, vectors, weights).pseudo_gradient
    other = folded(slices_of(SIZES), method, vectors[::-1], weights[::-1]).pseudo_gradient
    np.testing.assert_allclose(first, other, rtol=0, atol=4e-6 * float(np.abs(first).max()))


def test_adding_does_not_change_the_contribution() -> None:
    vectors, weights = drawn(3)
    copies = [vector.copy() for vector in vectors]
    folded(slices_of(SIZES), "rda", vectors, weights)
    assert all(a.tobytes() == b.tobytes() for a, b in zip(vectors, copies, strict=True))


@pytest.mark.parametrize(
    ("weight", "staleness_weight"),
    [(0.0, 1.0), (-1.0, 1.0), (math.nan, 1.0), (math.inf, 1.0), (1.0, -0.1), (1.0, 1.1), (1.0, math.nan)],
)
def test_a_weight_is_positive_and_finite_and_a_staleness_weight_a_share(weight: float, staleness_weight: float) -> None:
    """Nothing else is folded."""
    with pytest.raises(ProtocolMisuse, match="weight"):
        add(FragmentFold(slices_of({"w": 2})), slices_of({"w": 2}), [1.0, 1.0], weight, staleness_weight)


def test_an_empty_fold_has_no_result() -> None:
    with pytest.raises(ProtocolMisuse, match="nothing"):
        FragmentFold(slices_of({"w": 2})).result()


@pytest.mark.parametrize("method", ["mean", "rda"])
@pytest.mark.parametrize("staleness_weight", [0.0, 1e-300])
def test_a_staleness_weight_of_nothing_leaves_nothing(method: Method, staleness_weight: float) -> None:
    """Before, after and without what is fresh; it is counted, since its tokens have a fate."""
    slices, gone = slices_of({"a": 2}), np.array([4.0, -9.0], np.float32)
    fresh = [np.array([1.0, 2.0], np.float32), np.array([3.0, -1.0], np.float32)]
    wanted = folded(slices, method, fresh, [1e-10, 1e-10]).pseudo_gradient
    for silent in range(3):
        fold = FragmentFold(slices, method)
        for number in range(3):
            late = number == silent
            vector = gone if late else fresh[number - (number > silent)]
            add(fold, slices, vector, 1e-10, staleness_weight if late else 1.0)
        merged = fold.result()
        np.testing.assert_array_equal(merged.pseudo_gradient, wanted)
        assert merged.count == 3
    alone = FragmentFold(slices_of({"a": 2}), method)
    add(alone, slices, gone, 1e-300, staleness_weight)

    np.testing.assert_array_equal(alone.result().pseudo_gradient, [0.0, 0.0])


def test_norms_are_taken_per_slice_in_float64() -> None:
    """Norms whose squares overflow float32 are right, and long slices are summed across blocks."""
    slices = slices_of({"a": 2, "b": 1, "c": 3 * STRETCH + 1})
    vector = np.concatenate([np.array([3e30, 4e30, 2.0]), np.ones(3 * STRETCH + 1)]).astype(np.float32)
    norms = slice_norms(slices, Encoded.exact(vector))
    assert norms == pytest.approx([5e30, 2.0, math.sqrt(3 * STRETCH + 1)], rel=1e-6)


@pytest.mark.parametrize("factor", [1.0, 0.9995, 1.0005])
def test_an_honest_pseudo_gradient_is_accepted(factor: float) -> None:
    """Claims within what another order of addition changes pass; what was computed is what counts."""
    assert validated_norms([5.0, 0.0], slices_of({"w": 2, "b": 1}), [5.0 * factor, 0.0], 5.0) == [5.0, 0.0]


@pytest.mark.parametrize(
    ("norms", "claims", "norm_max", "reason"),
    [
        ([5.0, 0.0], [5.0], 10.0, "norm_claim"),
        ([5.0, 0.0], [5.0, 0.0, 0.0], 10.0, "norm_claim"),
        ([5.0, 0.0], [5.006, 0.0], 10.0, "norm_claim"),
        ([5.0, 0.0], [4.994, 0.0], 10.0, "norm_claim"),
        ([5.0, 0.0], [-5.0, 0.0], 10.0, "norm_claim"),
        ([5.0, 0.0], [math.nan, 0.0], 10.0, "norm_claim"),
        ([5.0, 0.0], [math.inf, 0.0], 10.0, "norm_claim"),
        ([5.0, 0.0], [5.0, 0.1], 10.0, "norm_claim"),
        ([5.0, 0.0], [5.0, 0.0], 4.9, "norm_bound"),
    ],
)
def test_a_false_pseudo_gradient_is_refused(
    norms: list[float], claims: list[float], norm_max: float, reason: str
) -> None:
    with pytest.raises(FrameRejected) as caught:
        validated_norms(norms, slices_of({"w": 2, "b": 1}), claims, norm_max)
    assert caught.value.reason == reason


def test_a_norm_is_summed_in_float64() -> None:
    """Of nothing it is zero, and of what float32 could not square it is finite."""
    assert l2_norm(np.array([3.0, 4.0], np.float32)) == 5.0
    assert l2_norm(np.empty(0, np.float32)) == 0.0
    assert l2_norm(np.full(4, 1e30, np.float32)) == pytest.approx(2e30, rel=1e-6)


@pytest.mark.parametrize("age_max", [0, 1, 2, 8])
@pytest.mark.parametrize("factor", [0.0, 0.5, 1.0])
def test_the_gate_falls_from_one_to_nothing_where_contributions_are_refused(age_max: int, factor: float) -> None:
    """sigma(age) = cosine gate times the power, the gate's end one version after the oldest that is taken."""
    gate, power = (ProtocolSettings(age_law=law, age_max=age_max, age_damping=factor) for law in ("gate", "power"))
    ages = np.arange(age_max + 2)
    wanted = 0.5 * (1.0 + np.cos(np.pi * ages / (age_max + 1)))

    assert [staleness_weight(power, int(age)) for age in ages] == [factor ** int(age) for age in ages]
    np.testing.assert_allclose([staleness_weight(gate, int(age)) for age in ages], wanted * factor**ages, atol=1e-12)
    assert staleness_weight(gate, 0) == 1.0
    assert staleness_weight(gate, age_max + 1) < 1e-12


def test_weights_are_quantity_times_rate() -> None:
    """Twice the tokens in the same steps weigh four times as much; the same tokens in half the steps, twice."""
    assert token_weight(1000, 10) == 100_000.0
    assert token_weight(2000, 10) == 4 * token_weight(1000, 10)
    assert token_weight(1000, 5) == 2 * token_weight(1000, 10)


def test_a_fold_says_how_fresh_it_is() -> None:
    settings = ProtocolSettings(age_law="gate", age_max=2, age_damping=0.5)
    now = FragmentRound(0, 5, settings)
    folds = [now.fold(Offer(PushKey("a", 1, 0, n), 5 - n, 8, 4, final=False), "") for n in range(3)]

    np.testing.assert_allclose([fold.staleness_weight for fold in folds], [1.0, 0.5 * 0.75, 0.25 * 0.25])
    assert {fold.weight for fold in folds} == {16.0}
