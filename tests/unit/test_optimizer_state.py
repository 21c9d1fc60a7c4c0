"""Optimizer states as named arrays: copied whole, taken back only if they are the same tree and finite."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from atoll.base.errors import PeerMisbehaved
from atoll.client.optimizer_state import Arrays, host_copy, rebuild_state


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
