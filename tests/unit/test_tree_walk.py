"""The plain walk of pytrees is JAX's: the same leaves, names and order, and the same tree back."""

from __future__ import annotations

from collections import OrderedDict, defaultdict, namedtuple
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.base.errors import SettingsError
from atoll.model.tree_walk import JaxShape, PlainShape, TreeShape, flatten, is_jax_array

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
