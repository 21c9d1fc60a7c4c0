"""Properties of layouts, frames, packed arrays and RDA that hold for any input."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from atoll.base.errors import FrameRejected, PeerMisbehaved
from atoll.codec import FORMATS, Encoded, decode_frame, encode_frame, pack_arrays, unpack_arrays
from atoll.merge.fold import FragmentFold, slice_norms
from atoll.model.layout import FragmentSlice, TensorSpec, plan_layout
from atoll.model.pytrees import gather, scatter
from support.formats import FACTS

BYTES_MAX = 1 << 16

quick = settings(max_examples=150, deadline=None)
shapes = st.lists(st.integers(0, 6), max_size=3).map(tuple)
trees = st.lists(st.tuples(shapes, st.sampled_from(["float16", "float32", "float64"])), min_size=1, max_size=6)
finite = st.floats(-(2.0**100), 2.0**100, width=32)
vectors = hnp.arrays(np.float32, st.integers(0, 300), elements=finite)


def grown(tree: list[tuple[tuple[int, ...], str]]) -> dict[str, npt.NDArray[Any]]:
    """Return arrays of the shapes and dtypes of `tree`, no two values alike where the dtype allows."""
    return {
        f"t{number}": np.arange(1, 1 + int(np.prod(shape))).astype(dtype).reshape(shape)
        for number, (shape, dtype) in enumerate(tree)
    }


@quick
@given(tree=trees, data=st.data())
def test_a_layout_covers_and_carries_any_tree(tree: list[tuple[tuple[int, ...], str]], data: st.DataObject) -> None:
    """Every row is in one fragment, of its kind, and float vectors carry all tensors exactly."""
    leaves = grown(tree)
    specs = [TensorSpec(name, array.shape, str(array.dtype)) for name, array in leaves.items()]
    by_value = [spec.name for spec in specs if data.draw(st.booleans())]
    both = 0 < len(by_value) < len(specs)
    rows_in_all = sum(spec.rows for spec in specs)
    assume(rows_in_all >= 2 or not both)
    fragments = data.draw(st.integers(2 if both else 1, max(1, rows_in_all)))
    layout = plan_layout(specs, fragments, by_value=by_value)
    assert layout.fault() == ""
    assert layout.value_fragments == (0 if not by_value else layout.value_fragments if both else fragments)
    rows = sorted((s.tensor, row) for inside in layout.fragments for s in inside for row in range(s.start, s.stop))
    assert rows == [(number, row) for number, spec in enumerate(specs) for row in range(spec.rows)]
    for fragment in range(fragments):
        assert layout.fragments[fragment]
        flat = scatter(layout, fragment, gather(layout, leaves, fragment), leaves)
        for name, found in flat.items():
            for start, stop, piece in found:
                wanted = leaves[name][start:stop] if leaves[name].ndim else leaves[name]
                np.testing.assert_array_equal(piece, wanted)


@quick
@given(vector=vectors, codec=st.sampled_from(list(FORMATS)))
def test_any_vector_travels(vector: npt.NDArray[np.float32], codec: str) -> None:
    """Any finite vector comes back within the encoding's error: half a step, and what rounding its scale up adds."""
    back = decode_frame(encode_frame(vector, codec), elements_expected=vector.size, codec=codec)
    largest = float(np.abs(vector).max(initial=0.0))
    share = FACTS[codec].error
    bound = largest * share + (2e-36 if share else 0.0)
    assert np.abs(back.astype(np.float64) - vector).max(initial=0.0) <= bound


@quick
@given(data=st.binary(max_size=200), elements=st.integers(0, 64), codec=st.sampled_from(list(FORMATS)))
def test_arbitrary_bytes_are_no_frame(data: bytes, elements: int, codec: str) -> None:
    """Noise is refused, and with `FrameRejected` only."""
    with pytest.raises(FrameRejected):
        decode_frame(data, elements_expected=elements, codec=codec)


@quick
@given(
    vector=vectors,
    codec=st.sampled_from(list(FORMATS)),
    changes=st.lists(st.tuples(st.integers(0, 1 << 16), st.integers(0, 255)), max_size=4),
    cut=st.integers(0, 3),
)
def test_a_mutated_frame_is_refused_or_has_the_right_size(
    vector: npt.NDArray[np.float32], codec: str, changes: list[tuple[int, int]], cut: int
) -> None:
    """Whatever bytes change, a reader gets `FrameRejected` or a finite vector of the size it expects."""
    data = encode_frame(vector, codec)
    for place, value in changes:
        data[place % len(data)] = value
    try:
        back = decode_frame(bytes(data[: len(data) - cut]), elements_expected=vector.size, codec=codec)
    except FrameRejected as error:
        assert error.reason  # noqa: PT017  (either outcome is right; both are checked)
    else:
        assert back.shape == vector.shape
        assert np.isfinite(back).all()


@quick
@given(payload=st.binary(max_size=400), entries=st.integers(0, 3), dtype=st.sampled_from(["float32", "int8", "bool"]))
def test_mutated_arrays_are_refused_with_one_error(payload: bytes, entries: int, dtype: str) -> None:
    """Noise, with and without a good beginning, raises `PeerMisbehaved` only or gives arrays within the bound."""
    honest = pack_arrays({str(number): np.zeros(number + 1, dtype) for number in range(entries)})
    middle = len(honest) // 2
    for data in (payload, honest + payload, honest[:middle] + payload, len(payload).to_bytes(8, "little") + payload):
        try:
            arrays = unpack_arrays(data, BYTES_MAX)
        except PeerMisbehaved as error:
            assert error.what  # noqa: PT017  (either outcome is right; both are checked)
        else:
            assert sum(array.nbytes for array in arrays.values()) <= len(data)


@quick
@given(
    vector=hnp.arrays(np.float32, st.integers(1, 50), elements=st.floats(-1e6, 1e6, width=32)),
    weights=st.lists(st.floats(1.0, 1e9), min_size=1, max_size=6),
)
def test_rda_of_identical_vectors_is_that_vector(vector: npt.NDArray[np.float32], weights: list[float]) -> None:
    """Learners that agree are merged to what they agree on: the same norm and the same direction."""
    slices, sent = ([FragmentSlice("w", 0, vector.size, 0, vector.size, direct=False)], Encoded.exact(vector))
    fold = FragmentFold(slices, "rda")
    for weight in weights:
        fold.add(sent, slice_norms(slices, sent), weight)
    merged = fold.result().pseudo_gradient.astype(np.float64)
    norm = float(np.linalg.norm(vector.astype(np.float64)))
    assert float(np.linalg.norm(merged)) == pytest.approx(norm, rel=1e-5, abs=1e-35)
    np.testing.assert_allclose(merged, vector, rtol=0, atol=1e-5 * norm + 1e-35)
