"""Pytrees to flat fragments and back: exact for the floats that fit, exact as raw bytes for every dtype."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest

from atoll.base.errors import LayoutMismatch
from atoll.model.layout import Layout, TensorSpec, plan_layout
from atoll.model.pytrees import Pieces, describe, gather, look, named_dtype, scatter

Leaves = dict[str, npt.NDArray[Any]]
FLOATS = ["float16", "bfloat16", "float32"]


def filled(dtype: str) -> Leaves:
    """Return a matrix, a vector, an empty tensor and a scalar of `dtype` with varied values."""
    rng = np.random.default_rng(7)
    shapes = {"w": (13, 5), "b": (7,), "nothing": (0, 3), "s": ()}
    return {name: np.asarray(rng.normal(size=shape) * 9).astype(named_dtype(dtype)) for name, shape in shapes.items()}


def planned(leaves: Leaves, fragments: int) -> Layout:
    return plan_layout([TensorSpec(n, a.shape, str(a.dtype)) for n, a in leaves.items()], fragments)


def put(leaves: Leaves, pieces: Pieces) -> None:
    for name, found in pieces.items():
        for start, stop, rows in found:
            assert rows.dtype == leaves[name].dtype
            if leaves[name].ndim:
                leaves[name][start:stop] = rows
            else:
                leaves[name][...] = rows


def same(ours: Leaves, theirs: Leaves) -> bool:
    return all(ours[name].tobytes() == theirs[name].tobytes() for name in ours)


@pytest.mark.parametrize("fragments", [1, 2, 5])
@pytest.mark.parametrize("dtype", FLOATS)
def test_gather_then_scatter_is_exact(dtype: str, fragments: int) -> None:
    """float16, bfloat16 and float32 come back bit for bit from the flat float32 vectors."""
    leaves = filled(dtype)
    layout = planned(leaves, fragments)
    back = {name: np.zeros_like(array) for name, array in leaves.items()}
    for fragment, size in enumerate(layout.fragment_sizes()):
        vector = gather(layout, leaves, fragment)
        assert vector.dtype == np.float32
        assert vector.shape == (size,)
        put(back, scatter(layout, fragment, vector, leaves))
    assert same(leaves, back)


@pytest.mark.parametrize("dtype", FLOATS)
def test_a_look_is_what_would_be_gathered(dtype: str) -> None:
    """Of any stretch; it shares memory where all of it lies in one float32 tensor, and nowhere else."""
    leaves = filled(dtype)
    layout = planned(leaves, 1)
    first = layout.slices(0)[0]
    size = layout.fragment_sizes()[0]
    for start, stop in ((0, first.size), (2, first.size - 1), (1, size), (first.size - 1, first.size + 1)):
        seen = look(layout, leaves, 0, start, stop)
        assert seen.tobytes() == gather(layout, leaves, 0, start, stop).tobytes()
        shared = any(np.shares_memory(seen, leaf) for leaf in leaves.values())
        assert shared == (dtype == "float32" and stop <= first.size)


def test_describe_names_the_leaves_of_a_pytree() -> None:
    """Names are paths; order is JAX's; Python scalars and bfloat16 are described too."""
    tree = {"b": [np.zeros((2, 3), ml_dtypes.bfloat16), np.zeros((), np.int32)], "a": {"x": np.zeros(4, np.float32)}}
    assert describe(tree) == (
        TensorSpec("a/x", (4,), "float32"),
        TensorSpec("b/0", (2, 3), "bfloat16"),
        TensorSpec("b/1", (), "int32"),
    )
    assert describe(np.zeros(3, np.float16)) == (TensorSpec("value", (3,), "float16"),)
    assert describe({"n": 1.5})[0].shape == ()


@pytest.mark.parametrize("name", ["V1000000000", "O", "f8,i4", "M8[s]", "finfo", "__loader__", "_np", "float32\n", ""])
def test_a_dtype_of_a_run_record_is_the_name_of_numbers(name: str) -> None:
    with pytest.raises(LayoutMismatch, match="a dtype that there is not here"):
        named_dtype(name)
