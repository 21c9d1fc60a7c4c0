"""Pytrees to flat fragments, optimizer states to named arrays, and both back: exact; the plain walk of them is JAX's."""

from __future__ import annotations

from collections import OrderedDict, defaultdict, namedtuple
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import numpy.typing as npt
import optax
import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.base.errors import LayoutMismatch, PeerMisbehaved, SettingsError
from atoll.client.optimizer_state import Arrays, host_copy, rebuild_state
from atoll.model.layout import Layout, TensorSpec, plan_layout
from atoll.model.pytrees import Pieces, describe, gather, look, named_dtype, scatter
from atoll.model.tree_walk import JaxShape, PlainShape, TreeShape, flatten, is_jax_array

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


WALKS = [PlainShape, JaxShape]


class Moments(NamedTuple):
    """A named tuple whose fields are not in alphabetical order."""

    nu: Any
    mu: Any


Loose = namedtuple("Loose", ["b", "a"])  # noqa: PYI024  (the other way to make one)
LEAVES = st.one_of(
    st.integers(-9, 9),
    st.floats(allow_nan=False),
    st.text(max_size=2),
    st.booleans(),
    st.just({1, 2}),
    st.integers(0, 3).map(lambda size: np.full(size, 1.5, np.float32)),
)
KEYS = st.one_of(
    st.lists(st.text(max_size=3), max_size=4, unique=True), st.lists(st.integers(-20, 20), max_size=4, unique=True)
)


def containers(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    pairs = KEYS.flatmap(
        lambda keys: st.tuples(*[inner] * len(keys)).map(lambda values: list(zip(keys, values, strict=True)))
    )
    return st.one_of(
        st.none(),
        pairs.map(dict),
        pairs.map(OrderedDict),
        pairs.map(lambda found: defaultdict(list, found)),
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.tuples(inner, inner).map(lambda two: Moments(*two)),
        st.tuples(inner, inner).map(lambda two: Loose(*two)),
    )


TREES = st.recursive(st.one_of(LEAVES, containers(LEAVES)), containers, max_leaves=12)


@given(TREES)
def test_both_walks_find_the_same_leaves_under_the_same_names(tree: Any) -> None:  # noqa: ANN401
    (plain, plain_shape), (known, known_shape) = PlainShape.of(tree), JaxShape.of(tree)

    assert [name for name, _ in plain] == [name for name, _ in known]
    assert all(one is two for (_, one), (_, two) in zip(plain, known, strict=True))
    for shape in (plain_shape, known_shape):
        leaves, again = shape.leaves_of(tree)
        assert [id(leaf) for leaf in leaves] == [id(leaf) for _, leaf in known]
        assert again == shape
        assert JaxShape.of(shape.whole(leaves))[1] == known_shape


@given(TREES, TREES)
def test_both_walks_call_the_same_trees_equal(one: Any, two: Any) -> None:  # noqa: ANN401
    plain = PlainShape.of(one)[1] == PlainShape.of(two)[1]

    assert plain == (JaxShape.of(one)[1] == JaxShape.of(two)[1])


@pytest.mark.parametrize("walk", WALKS)
def test_keys_without_an_order_are_refused(walk: type[TreeShape]) -> None:
    with pytest.raises(SettingsError, match="no order") as refused:
        walk.of({"a": 1, 2: 3})

    assert "strings" in str(refused.value)


def test_with_jax_loaded_its_own_containers_and_arrays_are_known() -> None:
    leaves, shape = flatten({"w": jnp.ones(2), "n": np.ones(2)})

    assert isinstance(shape, JaxShape)
    assert [(name, is_jax_array(leaf)) for name, leaf in leaves] == [("n", False), ("w", True)]


def state(width: int = 3) -> Any:  # noqa: ANN401  (an optax state)
    params = {"a": jnp.ones((width, 2)), "b": jnp.ones((), dtype=jnp.bfloat16)}
    transform = optax.adamw(1e-3)
    return transform.update(params, transform.init(params), params)[1]


def test_a_state_survives_the_round_trip_bit_for_bit() -> None:
    """Counts, moments, bfloat16: the same tree, the same values, no alias."""
    given = state()
    arrays = host_copy(given)
    back = rebuild_state(jax.tree.map(jnp.zeros_like, given), arrays)
    for array in arrays.values():
        array[...] = 0

    assert str(jax.tree.structure(back)) == str(jax.tree.structure(given))
    for one, two in zip(jax.tree.leaves(back), jax.tree.leaves(given), strict=True):
        assert one.dtype == two.dtype
        np.testing.assert_array_equal(np.asarray(one), np.asarray(two))


def test_a_copy_may_go_into_the_memory_of_an_earlier_one() -> None:
    first, other = host_copy(state()), host_copy(state(width=5))
    again = host_copy(jax.tree.map(lambda leaf: leaf + 1, state()), into=first)
    elsewhere = host_copy(state(), into=other)

    assert again is first
    assert elsewhere is not other
    for name, array in host_copy(state()).items():
        np.testing.assert_array_equal(again[name], array + np.ones((), array.dtype))
        np.testing.assert_array_equal(elsewhere[name], array)


def without(arrays: Arrays, name: str) -> Arrays:
    return {key: array for key, array in arrays.items() if key != name}


@pytest.mark.parametrize("what", ["missing", "more", "shape", "dtype", "nan", "infinite", "bfloat16"])
def test_another_tree_or_a_poisoned_one_is_refused(what: str) -> None:
    arrays = host_copy(state())
    name = next(key for key, array in arrays.items() if array.shape == (3, 2))
    half = next(key for key, array in arrays.items() if array.dtype.name == "bfloat16")
    hostile = {
        "missing": without(arrays, name),
        "more": {**arrays, "more": np.zeros(3)},
        "shape": {**arrays, name: np.zeros((2, 3), np.float32)},
        "dtype": {**arrays, name: arrays[name].astype(np.float64)},
        "nan": {**arrays, name: np.full((3, 2), np.nan, np.float32)},
        "infinite": {**arrays, name: np.full((3, 2), np.inf, np.float32)},
        "bfloat16": {**arrays, half: np.full_like(arrays[half], np.inf)},
    }

    with pytest.raises(PeerMisbehaved, match="a state"):
        rebuild_state(state(), hostile[what])
