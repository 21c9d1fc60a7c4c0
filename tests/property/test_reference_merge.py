"""Every merge rule beside a float64 reference of a few lines: rule x correction x size of a slice x codec.

The reference reads what its learners sent as a reader would decode it, and does with it what the formulas of
`atoll.merge.fold` and `atoll.merge.correction` say, slice by slice. Slices of no number, of one and around the bound of
small slices lie side by side in one vector. Learners point anywhere, along the outer momentum, against it so that all
directions cancel, or nowhere.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import pytest

from atoll.base import large_arrays
from atoll.base.errors import ProtocolMisuse
from atoll.codec import FORMATS, Encoded
from atoll.merge.correction import Heloco, MomentumReference
from atoll.merge.fold import FragmentFold, Method, slice_norms
from atoll.model.layout import FragmentSlice

Vector = npt.NDArray[np.float32]
Wide = npt.NDArray[np.float64]
SIZES = (0, 1, 127, 128, 129, 0, 300, 1, 0)
DIRECT = 6
RULE = Heloco(0.2, 0.5, 0.5, 1.0, 3.0)
TINY = 1e-20
SMALL = 128
METHODS: tuple[Method, ...] = ("mean", "rda")


@pytest.fixture(autouse=True)
def _memory_holds_anything(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hand out memory that holds no numbers: what is not written before it is read is noticed."""
    empty = large_arrays.empty

    def poisoned(elements: int) -> Vector:
        made = empty(elements)
        made.fill(np.nan)
        return made

    monkeypatch.setattr(large_arrays, "empty", poisoned)


def slices_of(sizes: Sequence[int] = SIZES) -> tuple[FragmentSlice, ...]:
    """Return the slices of a fragment that lie one behind the other; one of them takes the mean whatever the rule."""
    made, at = [], 0
    for number, size in enumerate(sizes):
        made.append(FragmentSlice(f"t{number}", 0, size, at, size, number == DIRECT))
        at += size
    return tuple(made)


def bent(v: Wide, m: Wide) -> Wide:
    length, reference = float(np.linalg.norm(v)), float(np.linalg.norm(m))
    if min(length, reference) <= TINY:
        return v
    v_hat, m_hat = v / length, m / reference
    cosine = float(v_hat @ m_hat)
    if cosine >= RULE.cosine:
        return v
    confidence = length / (length + RULE.doubt * reference)
    if cosine < 0.0:
        beta = min(-RULE.shrink * cosine * confidence, RULE.shrink_max)
        shortened: Wide = v - beta * cosine * length * m_hat
        return shortened
    turn = min(RULE.rotate * (1.0 - cosine) * confidence, 1.0)
    mixed = (1.0 - turn) * v_hat + turn * m_hat
    turned: Wide = length * mixed / np.linalg.norm(mixed)
    return turned


def merged(parts: Sequence[Wide], weights: Wide, *, radially: bool) -> Wide:
    mean: Wide = np.average(parts, axis=0, weights=weights)
    if not radially or len(parts) == 1 or not mean.size:
        return mean
    norms = np.array([np.linalg.norm(part) for part in parts])
    hats = [part / norm if norm > TINY else 0.0 * part for part, norm in zip(parts, norms, strict=True)]
    direction = np.average(hats, axis=0, weights=weights)
    heard = float(np.average(norms > TINY, weights=weights))
    length = float(np.linalg.norm(direction))
    if length <= heard * len(parts) * 2.0**-23:
        return mean if mean.size <= SMALL else 0.0 * mean
    rda: Wide = float(np.average(norms, weights=weights)) * direction / length
    return rda


def reference(
    vectors: Sequence[Wide], weights: Sequence[float], fresh: Sequence[float], method: Method, momentum: Wide | None
) -> Wide:
    heard = [(v, w * f) for v, w, f in zip(vectors, weights, fresh, strict=True) if f > 0.0]
    out = np.zeros(sum(SIZES))
    for each in slices_of():
        here = slice(each.offset, each.offset + each.size)
        parts = [v[here] if momentum is None else bent(v[here], momentum[here]) for v, _ in heard]
        if parts:
            out[here] = merged(parts, np.array([w for _, w in heard]), radially=method == "rda" and not each.direct)
    return max(fresh) * out


def drawn(kind: str, codec: str, seed: int) -> tuple[list[Encoded], list[float], list[float], Vector]:
    """Return contributions as they were sent, their weights and staleness weights, and an outer momentum."""
    rng = np.random.default_rng(seed)
    size = sum(SIZES)
    noise = [(rng.normal(size=size) * 10.0 ** rng.integers(-2, 3)).astype(np.float32) for _ in range(5)]
    towards = rng.normal(size=size).astype(np.float32)
    momentum = Encoded.of(towards, FORMATS[codec]).expanded()
    if kind == "anywhere":
        vectors, weights, fresh = noise[:4], [3.0, 0.5, 800.0, 40.0], [1.0, 0.25, 1.0, 0.0625]
    elif kind == "cancelling":
        # Twice the momentum, and half of it the other way: powers of two survive every codec's rounding.
        vectors, weights, fresh = [2.0 * towards, -0.5 * towards], [7.0, 7.0], [1.0, 1.0]
    elif kind == "alone and late":
        vectors, weights, fresh = noise[:1], [5.0], [0.25]
    elif kind == "one that moves":
        vectors, weights, fresh = (
            [np.zeros(size, np.float32), noise[0], np.zeros(size, np.float32)],
            [9.0] * 3,
            [1.0] * 3,
        )
    elif kind == "nothing left":
        vectors, weights, fresh = noise[:2], [1.0, 2.0], [0.0, 0.0]
    else:
        vectors, weights, fresh = [noise[0], -noise[1], noise[2]], [1.0, 2.0, 4.0], [0.0, 0.25, 0.0625]
    sent = [Encoded.of(np.asarray(vector, np.float32), FORMATS[codec]) for vector in vectors]
    return sent, weights, fresh, momentum


@pytest.mark.parametrize(
    "kind", ["anywhere", "cancelling", "alone and late", "one that moves", "all late", "nothing left"]
)
@pytest.mark.parametrize("codec", list(FORMATS))
@pytest.mark.parametrize("corrected", [False, True])
@pytest.mark.parametrize("method", METHODS)
def test_a_round_is_merged_as_the_reference_says(method: Method, corrected: bool, codec: str, kind: str) -> None:  # noqa: FBT001
    """Slice by slice, to a few units of float32's rounding of the longest contribution."""
    slices = slices_of()
    sent, weights, fresh, momentum = drawn(kind, codec, seed=len(codec) + len(kind))
    fold, momentum_reference = FragmentFold(slices, method), MomentumReference.of(momentum, slices)
    for encoded, weight, staleness_weight in zip(sent, weights, fresh, strict=True):
        norms = slice_norms(slices, encoded)
        corrections = RULE.corrections(encoded, norms, momentum_reference, slices) if corrected else None
        fold.add(encoded, norms, weight, staleness_weight, corrections)

    got = fold.result()

    wide = [encoded.expanded().astype(np.float64) for encoded in sent]
    wanted = reference(wide, weights, fresh, method, momentum.astype(np.float64) if corrected else None)
    assert got.count == len(sent)
    assert got.weight_sum == pytest.approx(sum(w * f for w, f in zip(weights, fresh, strict=True)))
    for each in slices:
        here = slice(each.offset, each.offset + each.size)
        longest = max((float(np.abs(v[here]).max(initial=0.0)) for v in wide), default=0.0)
        np.testing.assert_allclose(
            got.pseudo_gradient[here], wanted[here], rtol=2e-5, atol=4e-6 * longest, err_msg=each.tensor_name
        )


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("sizes", [(0,), (0, 0), (0, 3, 0)])
def test_slices_of_no_number_have_no_say(method: Method, sizes: tuple[int, ...]) -> None:
    """A fragment may hold tensors without elements; all others merge as if those were not there."""
    slices, rng = slices_of(sizes), np.random.default_rng(1)
    vectors = [rng.normal(size=sum(sizes)).astype(np.float32) for _ in range(3)]

    results = []
    for inside in (slices, [each for each in slices if each.size]):
        fold = FragmentFold(inside, method)
        for vector in vectors:
            fold.add(Encoded.exact(vector), slice_norms(inside, Encoded.exact(vector)), 2.0)
        results.append(fold.result().pseudo_gradient)

    assert results[0].tobytes() == results[1].tobytes()


def test_a_fold_gives_its_result_once_and_is_then_spent() -> None:
    """Its result is its own memory: what was added later would change what somebody already holds."""
    slices = slices_of((3,))
    sent = Encoded.exact(np.ones(3, np.float32))
    fold = FragmentFold(slices, "rda")
    with pytest.raises(ProtocolMisuse, match="nothing was folded"):
        fold.result()
    fold.add(sent, slice_norms(slices, sent), 1.0)
    kept = fold.result().pseudo_gradient

    for refused in (fold.result, lambda: fold.add(sent, slice_norms(slices, sent), 1.0)):
        with pytest.raises(ProtocolMisuse, match="given its result"):
            refused()
    assert kept.tolist() == [1.0, 1.0, 1.0]
    assert (fold.count, fold.weight_sum) == (1, 1.0)
