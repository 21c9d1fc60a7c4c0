"""Pre-merge: folds of parts of a round, entered into one another, against one fold of all of it."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import pytest

from atoll.base.errors import FrameRejected
from atoll.codec import Encoded, FrameDecoder, format_of
from atoll.merge.correction import Heloco, MomentumReference
from atoll.merge.fold import FragmentFold, PartialMerge, slice_norms
from atoll.merge.partial import PartialShape, RegionShare, is_partial, partial_codec
from atoll.model.layout import FragmentSlice
from atoll.protocol.settings import ProtocolSettings

Vector = npt.NDArray[np.float32]
SIZES = {"w": 3000, "bias": 5, "embed": 300, "scale": 128, "one": 1}
SLICES = tuple(
    FragmentSlice(name, 0, size, at, size, name == "embed")
    for (name, size), at in zip(SIZES.items(), itertools.accumulate(SIZES.values(), initial=0), strict=False)
)
ELEMENTS = sum(SIZES.values())
RDA = ProtocolSettings(merge="rda")


def drawn(count: int, seed: int = 7) -> list[tuple[Vector, float, float]]:
    """Return pseudo-gradients of different lengths with a weight and a staleness weight each."""
    rng = np.random.default_rng(seed)
    towards = rng.normal(size=ELEMENTS)
    return [
        (
            ((towards + rng.normal(size=ELEMENTS)) * 10.0 ** rng.uniform(-2, 1)).astype(np.float32),
            float(rng.uniform(1.0, 1e5)),
            float(rng.choice([1.0, 0.25])),
        )
        for _ in range(count)
    ]


def fold_of(
    drawn: Sequence[tuple[Vector, float, float]], method: str = "rda", momentum: Vector | None = None
) -> FragmentFold:
    fold = FragmentFold(SLICES, "rda" if method == "rda" else "mean")
    for vector, weight, staleness in drawn:
        sent = Encoded.exact(vector)
        norms = slice_norms(SLICES, sent)
        bent = None
        if momentum is not None:
            bent = Heloco().corrections(sent, norms, MomentumReference.of(momentum, SLICES), SLICES)
        fold.add(sent, norms, weight, staleness, bent)
    return fold


def travelled(partial: PartialMerge, shares: Sequence[RegionShare], settings: ProtocolSettings = RDA) -> PartialMerge:
    shape, codec = PartialShape.of(SLICES, ELEMENTS, settings), partial_codec(settings)
    frame = shape.encode(partial, codec)
    arriving = FrameDecoder(shape.elements_sent, codec, shape.measured)
    arriving.take([(number, frame.piece(number)) for number in range(len(frame))])
    return shape.decode(arriving.vector, arriving.norms(), partial.lengths, shares)


def shares_of(drawn: Sequence[tuple[Vector, float, float]]) -> list[RegionShare]:
    return [RegionShare(slice_norms(SLICES, Encoded.exact(v)), w, s) for v, w, s in drawn]


@pytest.mark.parametrize("method", ["mean", "rda"])
@pytest.mark.parametrize("bent", [False, True])
@pytest.mark.parametrize("cuts", [(2,), (1, 2), (3, 3, 6), (7,)])
def test_parts_make_the_same_merge_as_the_whole(method: str, bent: bool, cuts: Sequence[int]) -> None:  # noqa: FBT001
    """Wherever the round is cut, and also where a part is empty or one contribution is added after a part."""
    all_of, momentum = drawn(8), (drawn(1, seed=1)[0][0] if bent else None)
    whole = fold_of(all_of, method, momentum).result()
    fold = FragmentFold(SLICES, "rda" if method == "rda" else "mean")
    for start, stop in itertools.pairwise([0, *cuts, len(all_of)]):
        if start < stop:
            fold.enter(fold_of(all_of[start:stop], method, momentum).partial())
    parts = fold.result()

    assert parts.count == whole.count
    assert parts.weight_sum == pytest.approx(whole.weight_sum)
    for one in SLICES:
        here = slice(*one.bounds)
        far = np.linalg.norm(parts.pseudo_gradient[here] - whole.pseudo_gradient[here])
        assert far <= 1e-5 * np.linalg.norm(whole.pseudo_gradient[here])


def test_a_part_that_travels_is_rounded_once() -> None:
    """In bfloat16 by a part in 256 of each element; exact where the run sends float32."""
    all_of = drawn(6)
    rest, part = all_of[:2], all_of[2:]
    whole = fold_of(all_of).result().pseudo_gradient
    for codec, most in (("f32", 1e-5), ("bf16", 2.0**-8), ("int4", 2.0**-8)):
        fold = fold_of(rest)
        settings = ProtocolSettings(merge="rda", codec_up=codec)
        fold.enter(travelled(fold_of(part).partial(), shares_of(part), settings))
        assert np.linalg.norm(fold.result().pseudo_gradient - whole) <= most * np.linalg.norm(whole)


def test_one_contribution_of_a_bfloat16_run_is_the_same_bits() -> None:
    vector = Encoded.of(drawn(1)[0][0], format_of("bf16")).expanded()
    fold = FragmentFold(SLICES, "rda")
    fold.enter(travelled(fold_of([(vector, 3.0, 1.0)]).partial(), shares_of([(vector, 3.0, 1.0)])))

    np.testing.assert_array_equal(fold.result().pseudo_gradient, vector)


def test_slices_of_length_zero_have_no_direction_in_a_part_either() -> None:
    """A part without a direction neither turns nor shortens more than its weight says; ignored weights count only."""
    vector = drawn(1)[0][0]
    silent = np.zeros_like(vector)
    whole = fold_of([(vector, 1.0, 1.0), (silent, 1.0, 1.0), (vector, 5.0, 0.0)]).result()
    fold = fold_of([(vector, 1.0, 1.0)])
    fold.enter(travelled(fold_of([(silent, 1.0, 1.0)]).partial(), shares_of([(silent, 1.0, 1.0)])))
    fold.enter(fold_of([(vector, 5.0, 0.0)]).partial())
    parts = fold.result()

    assert (parts.count, parts.weight_sum) == (whole.count, whole.weight_sum) == (3, 2.0)
    np.testing.assert_allclose(parts.pseudo_gradient, whole.pseudo_gradient, rtol=1e-6)


@pytest.mark.parametrize(
    ("what", "lie"),
    [
        ("sum", lambda part: Encoded.exact(2.0 * part.total.expanded())),
        ("unit", lambda part: [one._replace(unit=100.0 * one.unit) for one in part.lengths]),
        ("length", lambda part: [one._replace(radial=1.1 * one.radial) for one in part.lengths]),
        ("direction", lambda part: [one._replace(heard=1.5) for one in part.lengths]),
        ("unit", lambda part: [one._replace(unit=-1.0) for one in part.lengths]),
        ("length", lambda part: [one._replace(radial=float("nan")) for one in part.lengths]),
        ("another layout", lambda part: part.lengths[:1]),
        # Others are divided by the unit: one that is too short would make this region's direction the only one.
        ("sum", lambda part: [one._replace(unit=1e-30 if one.unit else 0.0) for one in part.lengths]),
        ("sum", lambda part: [one._replace(unit=1e-3 * one.unit) for one in part.lengths]),
        ("direction", lambda part: [one._replace(unit=0.0) for one in part.lengths]),
        ("sum", lambda part: [one._replace(unit=0.0, heard=0.0) for one in part.lengths]),
        ("unit", lambda part: [one._replace(unit=1.0) for one in part.lengths]),
        ("values", lambda part: {n: 2.0 * values for n, values in part.values.items()}),
    ],
)
def test_a_sum_that_its_contributions_cannot_have_is_refused(what: str, lie: object) -> None:
    [one] = drawn(1)
    honest = fold_of([one]).partial()
    told = lie(honest)  # type: ignore[operator]
    forged = PartialMerge(
        told if isinstance(told, Encoded) else honest.total,
        told if isinstance(told, list) else honest.lengths,
        told if isinstance(told, dict) else honest.values,
        honest.weight_sum,
        honest.count,
        honest.freshest,
    )
    travelled(honest, shares_of([one]))
    with pytest.raises(FrameRejected, match=what) as refusal:
        travelled(forged, shares_of([one]))
    assert refusal.value.reason == "partial_claim"


def test_only_plain_folds_have_parts() -> None:
    assert is_partial(ProtocolSettings(), 0, 1 << 20)
    assert not is_partial(ProtocolSettings(robust="gate", quorum=3), 0, 1 << 20)
    assert not is_partial(ProtocolSettings(share_max=0.5), 0, 1 << 20)
    values = ProtocolSettings(fragments=2, value_fragments=1)
    assert [is_partial(values, fragment, 100) for fragment in (0, 1)] == [True, False]
    assert is_partial(values, 1, 1 << 20), "too large to be remembered"
