"""A contribution that is clipped: folded as if it had come shorter, with and without a correction, judged or not."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from atoll.base.large_arrays import Vector
from atoll.codec.encoded import Encoded
from atoll.merge.fold import slice_norms
from atoll.merge.outer import MOMENTUM
from atoll.merge.round_merge import RoundMerge
from atoll.model.layout import FragmentSlice
from atoll.protocol.events import Fold, PushKey
from atoll.protocol.settings import ProtocolSettings

SLICES = (
    FragmentSlice(tensor_name="w", offset=0, start=0, stop=60, size=600, direct=False),
    FragmentSlice(tensor_name="e", offset=600, start=0, stop=20, size=200, direct=True),
    FragmentSlice(tensor_name="b", offset=800, start=0, stop=40, size=40, direct=False),
)
SIZE = 840
SCALE = 0.25  # a power of two: then a shorter vector is exactly that much shorter


def merged(vectors: list[Vector], scales: list[float], momentum: Vector, **changes: object) -> Vector:
    protocol = msgspec.convert({"fragments": 1, "shards": 1, **changes}, ProtocolSettings).check()
    merge = RoundMerge(protocol, 0, SLICES)
    for number, (vector, scale) in enumerate(zip(vectors, scales, strict=True)):
        encoded = Encoded.exact(vector)
        fold = Fold(key=PushKey(f"l{number}", 1, 0, 1), weight=8.0, staleness_weight=1.0, age=0, scale=scale)
        merge.add(encoded, slice_norms(SLICES, encoded), fold, {MOMENTUM: momentum})
    return merge.result({MOMENTUM: momentum}, 1).pseudo_gradient


@pytest.mark.parametrize("merge", ["mean", "rda"])
@pytest.mark.parametrize(
    "changes", [{}, {"share_max": 0.9}, {"robust": "clip", "quorum": 3}], ids=["folded", "capped", "judged"]
)
@pytest.mark.parametrize("alone", [True, False])
def test_a_clipped_contribution_counts_as_one_that_came_shorter(
    merge: str,
    changes: dict[str, object],
    alone: bool,  # noqa: FBT001
) -> None:
    """Also alone in its round, where a weight would cancel."""
    draw = np.random.default_rng(3)
    vectors = [draw.normal(size=SIZE).astype(np.float32) for _ in range(1 if alone else 4)]
    vectors[0] *= np.float32(1.0 / SCALE)  # as long as the others only when it is clipped
    scales = [SCALE] + [1.0] * (len(vectors) - 1)
    shorter = [np.float32(scale) * vector for scale, vector in zip(scales, vectors, strict=True)]
    rules = {"merge": merge, "correction": "none", **changes}
    still = np.zeros(SIZE, np.float32)

    clipped, due = merged(vectors, scales, still, **rules), merged(shorter, [1.0] * len(vectors), still, **rules)
    np.testing.assert_allclose(clipped, due, rtol=1e-5, atol=1e-6)


def test_it_is_corrected_first_and_then_clipped() -> None:
    draw = np.random.default_rng(4)
    vector, momentum = (draw.normal(size=SIZE).astype(np.float32) for _ in range(2))
    whole, clipped = (merged([vector], [scale], momentum, correction="heloco") for scale in (1.0, SCALE))

    assert not np.allclose(whole, vector)
    np.testing.assert_allclose(clipped, SCALE * whole, rtol=1e-5, atol=1e-7)
