"""Pytrees to flat fragments and back.

A fragment in flight is one flat float32 vector in layout order. float16, bfloat16 and float32 fit into float32 exactly,
so a value that makes the round trip is unchanged. float64 is rounded to float32 on the way: a pseudo-gradient has no more
precision than that. A layout holds floating tensors only.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from atoll.base.errors import LayoutMismatch
from atoll.base.large_arrays import Vector, empty
from atoll.model.layout import FragmentSlice, Layout, TensorSpec
from atoll.model.tree_walk import flatten

NUMPY_DTYPES: Final = tuple(dict.fromkeys(np.dtype(kind).name for kind in "efdg?bhilqBHILQ"))
"""Real numbers, by NumPy's own names."""
Pieces = dict[str, list[tuple[int, int, npt.NDArray[Any]]]]


def describe(tree: Any) -> tuple[TensorSpec, ...]:  # noqa: ANN401  (any pytree)
    """Return the tensors of a pytree in leaf order; a name is the path, its parts joined by '/'."""
    leaves, _ = flatten(tree)
    return tuple(
        TensorSpec(name, tuple(int(n) for n in leaf.shape), str(leaf.dtype))
        for name, leaf in ((name, leaf if hasattr(leaf, "dtype") else np.asarray(leaf)) for name, leaf in leaves)
    )


def leaves_of(layout: Layout, leaves: Mapping[str, Any], fragment: int) -> dict[str, Any]:
    """Return those of the arrays of which the fragment holds rows, by name."""
    return {part.tensor_name: leaves[part.tensor_name] for part in layout.slices(fragment)}


def gather(layout: Layout, leaves: Mapping[str, Any], fragment: int, start: int = 0, stop: int | None = None) -> Vector:
    """Return the fragment, or elements `start` to `stop` of it, as a new flat float32 vector, from arrays by name."""
    stop = layout.fragment_sizes()[fragment] if stop is None else stop
    vector = empty(stop - start)
    for tensor_slice in layout.slices(fragment):
        low, high = max(start, tensor_slice.offset), min(stop, tensor_slice.offset + tensor_slice.size)
        if low < high:
            here = slice(low - tensor_slice.offset, high - tensor_slice.offset)
            vector[low - start : high - start] = _rows(leaves, tensor_slice).reshape(-1)[here]
    return vector


def look(layout: Layout, leaves: Mapping[str, Any], fragment: int, start: int, stop: int) -> Vector:
    """Return what `gather` returns, for reading only; a fragment inside one float32 tensor is not copied."""
    for tensor_slice in layout.slices(fragment):
        if tensor_slice.offset <= start and stop <= tensor_slice.offset + tensor_slice.size:
            rows = _rows(leaves, tensor_slice)
            if rows.dtype == np.float32 and rows.flags.c_contiguous:
                here: Vector = rows.reshape(-1)[start - tensor_slice.offset : stop - tensor_slice.offset]
                return here
    return gather(layout, leaves, fragment, start, stop)


def scatter(layout: Layout, fragment: int, vector: Vector, leaves: Mapping[str, Any]) -> Pieces:
    """Return, by tensor name, the pieces (start row, stop row, array in the tensor's dtype) that `vector` holds.

    Pieces of float32 tensors are views of `vector`.
    """
    pieces: Pieces = {}
    for tensor_slice in layout.slices(fragment):
        leaf = leaves[tensor_slice.tensor_name]
        shape = (tensor_slice.stop - tensor_slice.start, *leaf.shape[1:]) if leaf.ndim else ()
        rows = vector[slice(*tensor_slice.bounds)].reshape(shape).astype(leaf.dtype, copy=False)
        pieces.setdefault(tensor_slice.tensor_name, []).append((tensor_slice.start, tensor_slice.stop, rows))
    return pieces


def named_dtype(name: str) -> np.dtype[Any]:
    """Return the NumPy dtype called `name`, bfloat16 and its like too; raise `LayoutMismatch` if there is none.

    A run record may hold any name. NumPy reads more than names: `V1000000000` is a gigabyte for each number.
    """
    if name in NUMPY_DTYPES:
        return np.dtype(name)
    import ml_dtypes  # noqa: PLC0415  (only where such a tensor exists)

    kinds = {
        key: kind for key, kind in vars(ml_dtypes).items() if isinstance(kind, type) and issubclass(kind, np.generic)
    }
    if name not in kinds:
        raise LayoutMismatch(
            "a tensor of the run has a dtype that there is not here",
            got=name,
            allowed=", ".join((*NUMPY_DTYPES, *kinds)),
            todo="has the run been founded with a newer Atoll or ml_dtypes? then install that",
        )
    return np.dtype(kinds[name])


def _rows(leaves: Mapping[str, Any], tensor_slice: FragmentSlice) -> npt.NDArray[Any]:
    array = np.asarray(leaves[tensor_slice.tensor_name])
    return array[tensor_slice.start : tensor_slice.stop] if array.ndim else array
