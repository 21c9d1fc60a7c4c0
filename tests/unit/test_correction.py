"""HeLoCo against the paper's formulas written down in float64, and its edges."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.base.errors import SettingsError
from atoll.codec import Encoded, format_of
from atoll.codec.kernels.in_numpy import STRETCH
from atoll.merge.correction import Heloco, MomentumReference, correction_of
from atoll.merge.fold import FragmentFold, Method, SliceCorrection, slice_norms
from atoll.model.layout import FragmentSlice
from atoll.protocol.settings import ProtocolSettings

Vector = npt.NDArray[np.float32]
Wide = npt.NDArray[np.float64]
PAPER = Heloco(cosine=0.2, shrink=0.5, shrink_max=0.5, rotate=1.0, doubt=3.0)
SIZES = (5, 3, 2 * STRETCH + 7)


def slices_of(*sizes: int) -> tuple[FragmentSlice, ...]:
    """Return spans of these sizes, one after the other; the second is merged directly, which makes no difference."""
    starts = np.cumsum([0, *sizes])
    return tuple(
        FragmentSlice(f"t{number}", 0, size, int(starts[number]), size, direct=number == 1)
        for number, size in enumerate(sizes)
    )


def bent(rule: Heloco, v: Vector, m: Vector, slices: tuple[FragmentSlice, ...]) -> list[SliceCorrection | None]:
    """Return what becomes of each slice of `v`."""
    pseudo_gradient = Encoded.exact(v)
    return list(
        rule.corrections(
            pseudo_gradient, slice_norms(slices, pseudo_gradient), MomentumReference.of(m, slices), slices
        ).by_slice
    )


def corrected(rule: Heloco, v: Vector, m: Vector, slices: tuple[FragmentSlice, ...]) -> Vector:
    """Return `v` as it is folded in, alone; every slice is as long as the rule says."""
    pseudo_gradient = Encoded.exact(v)
    norms = slice_norms(slices, pseudo_gradient)
    corrections = rule.corrections(pseudo_gradient, norms, MomentumReference.of(m, slices), slices)
    fold = FragmentFold(slices)
    fold.add(pseudo_gradient, norms, 1.0, corrections=corrections)
    result = fold.result().pseudo_gradient
    said = [
        norm if correction is None else correction.norm
        for norm, correction in zip(norms, corrections.by_slice, strict=True)
    ]
    assert slice_norms(slices, Encoded.exact(result)) == pytest.approx(said, rel=1e-5, abs=4e-6 * max(norms))
    return result


@pytest.mark.parametrize("method", ["mean", "rda"])
@pytest.mark.parametrize("codec", ["f32", "int4"])
def test_a_fold_of_bent_pseudo_gradients_is_the_merge_of_corrected_ones(method: Method, codec: str) -> None:
    """Three of unequal weights, some slices bent and some kept, beside the formulas in float64."""
    rng, slices = np.random.default_rng(5), slices_of(*SIZES)
    m = rng.normal(size=sum(SIZES)).astype(np.float32)
    weights = [3.0, 1.0, 7.0]
    fold, wide, changed = FragmentFold(slices, method), [], 0
    for weight in weights:
        towards = weight * m if weight == 7.0 else 0.0
        sent = Encoded.of((weight * rng.normal(size=m.size) + towards).astype(np.float32), format_of(codec))
        norms = slice_norms(slices, sent)
        corrections = PAPER.corrections(sent, norms, MomentumReference.of(m, slices), slices)
        changed += sum(correction is not None for correction in corrections.by_slice)
        fold.add(sent, norms, weight, corrections=corrections)
        v = sent.expanded().astype(np.float64)
        parts = [reference(v[s.offset :][: s.size], m[s.offset :][: s.size].astype(np.float64), PAPER) for s in slices]
        wide.append(parts)
    merged = fold.result().pseudo_gradient
    assert 0 < changed < 3 * len(slices)
    for number, tensor_slice in enumerate(slices):
        parts = [each[number] for each in wide]
        wanted = np.average(parts, axis=0, weights=weights)
        if method == "rda" and not tensor_slice.direct:
            lengths = [float(np.linalg.norm(part)) for part in parts]
            direction = np.average([p / n for p, n in zip(parts, lengths, strict=True)], axis=0, weights=weights)
            wanted = np.average(lengths, weights=weights) * direction / np.linalg.norm(direction)
        got = merged[tensor_slice.offset :][: tensor_slice.size]
        np.testing.assert_allclose(got, wanted, rtol=0, atol=1e-5 * float(np.abs(wanted).max()))


def test_what_a_correction_cancels_has_no_length_and_no_direction() -> None:
    """With constants that take all that opposes, rounding is what is left; it turns no other contribution."""
    rule, slices = Heloco(0.2, 4.0, 1.0, 1.0, 0.0), slices_of(1000)
    m = np.random.default_rng(1).normal(size=1000).astype(np.float32)
    other = np.random.default_rng(2).normal(size=1000).astype(np.float32)
    against = Encoded.exact(-m * np.float32(0.37))
    corrections = rule.corrections(against, slice_norms(slices, against), MomentumReference.of(m, slices), slices)
    assert corrections.by_slice[0] is not None
    assert corrections.by_slice[0].norm == 0.0
    fold = FragmentFold(slices, "rda")
    fold.add(Encoded.exact(other), slice_norms(slices, Encoded.exact(other)), 1.0)
    fold.add(against, slice_norms(slices, against), 1.0, corrections=corrections)
    np.testing.assert_allclose(fold.result().pseudo_gradient, 0.5 * other, rtol=1e-5)


def reference(v: Wide, m: Wide, k: Heloco) -> Wide:
    if not np.linalg.norm(v) or not np.linalg.norm(m):
        return v
    u, n = v / np.linalg.norm(v), m / np.linalg.norm(m)
    c = float(u @ n)
    length = float(np.linalg.norm(v))
    conf = length / (length + k.doubt * float(np.linalg.norm(m)))
    if c >= k.cosine:
        return v
    if c < 0:
        return v - min(k.shrink * -c * conf, k.shrink_max) * c * length * n
    turn = min(k.rotate * (1 - c) * conf, 1.0)
    mixed: Wide = (1 - turn) * u + turn * n
    turned: Wide = length * mixed / np.linalg.norm(mixed)
    return turned


@settings(max_examples=80, deadline=None)
@given(
    seed=st.integers(0, 1 << 32),
    towards=st.floats(-1.0, 1.0),
    lengths=st.tuples(st.floats(-6, 3), st.floats(-6, 3)),
    constants=st.tuples(st.floats(0, 1), st.floats(0, 4), st.floats(0, 1), st.floats(0, 4), st.floats(0, 10)),
)
def test_every_slice_is_corrected_as_the_paper_says(
    seed: int, towards: float, lengths: tuple[float, float], constants: tuple[float, float, float, float, float]
) -> None:
    rng = np.random.default_rng(seed)
    size = sum(SIZES[:2])
    m = (rng.normal(size=size) * 10.0 ** lengths[0]).astype(np.float32)
    noise = rng.normal(size=size) * 10.0 ** lengths[1]
    v = (noise * (1 - abs(towards)) + towards * m * 10.0 ** (lengths[1] - lengths[0])).astype(np.float32)
    rule = Heloco(*constants)

    got = corrected(rule, v, m, slices_of(*SIZES[:2]))

    for tensor_slice in slices_of(*SIZES[:2]):
        here = slice(tensor_slice.offset, tensor_slice.offset + tensor_slice.size)
        wanted = reference(v[here].astype(np.float64), m[here].astype(np.float64), rule)
        # A correction may take nearly all of v away: what is left is as exact as v was.
        np.testing.assert_allclose(got[here], wanted, rtol=0, atol=4e-6 * np.abs(v[here]).max(initial=1e-30))


def test_what_opposes_the_momentum_is_shortened_and_what_crosses_it_is_turned() -> None:
    """By the paper's constants: by hand, for a pseudo-gradient straight against, and one straight across."""
    m = np.array([1.0, 0.0], np.float32)
    against, across = np.array([-3.0, 0.0], np.float32), np.array([0.0, 3.0], np.float32)

    shortened, turned = (corrected(PAPER, v, m, slices_of(2)) for v in (against, across))

    # conf = 3 / (3 + 3) = 1/2: beta = 0.5 * 1 * 1/2 = 1/4, so a quarter of what opposes is gone; lambda = 1/2.
    np.testing.assert_allclose(shortened, [-2.25, 0.0], rtol=1e-6)
    np.testing.assert_allclose(turned, [3 / 2**0.5, 3 / 2**0.5], rtol=1e-6)


@pytest.mark.parametrize(("v", "m"), [([1.0, 1.0], [1.0, 0.5]), ([1.0, 1.0], [0.0, 0.0]), ([0.0, 0.0], [1.0, 0.0])])
def test_what_agrees_or_has_no_direction_is_kept_bit_for_bit(v: list[float], m: list[float]) -> None:
    pseudo_gradient, momentum = np.array(v, np.float32), np.array(m, np.float32)
    assert bent(PAPER, pseudo_gradient, momentum, slices_of(2)) == [None]
    assert corrected(PAPER, pseudo_gradient, momentum, slices_of(2)).tobytes() == pseudo_gradient.tobytes()


@pytest.mark.parametrize(("size", "length", "tiny"), [(50, 1e28, 1e-11), (50, 3e38, 1.0), (2, 1e20, 1e-19)])
def test_what_is_finite_stays_finite(size: int, length: float, tiny: float) -> None:
    """A correction that float32 cannot hold is not made, whichever way the slice points."""
    m = np.full(size, tiny, np.float32)
    across = np.where(np.arange(size) % 2, length, -length).astype(np.float32)
    for v in (across, np.full(size, -length, np.float32)):
        with np.errstate(all="raise"):
            assert bent(PAPER, v, m, slices_of(size)) == [None]


def test_the_argument_is_left_alone() -> None:
    v, m = np.array([-1.0, 0.5], np.float32), np.array([1.0, 0.0], np.float32)
    corrected(PAPER, v, m, slices_of(2))
    assert v.tolist() == [-1.0, 0.5]


def test_the_defaults_are_the_papers_and_none_is_none() -> None:
    """Table 3 of arXiv 2606.00271."""
    assert correction_of(ProtocolSettings(correction="none")) is None
    assert correction_of(ProtocolSettings().check()) == PAPER


@pytest.mark.parametrize(
    "changes",
    [
        {"correction": "heloco", "outer_momentum": 0.0},
        {"correction": "heloco", "outer_momentum": 0.9, "outer": "optax:sgd"},
    ],
)
def test_without_an_outer_momentum_there_is_nothing_to_compare_with(changes: dict[str, str]) -> None:
    with pytest.raises(SettingsError, match="outer momentum, and there is none"):
        ProtocolSettings(**changes).check()  # type: ignore[arg-type]
