"""Turns an optimizer's state into named arrays in host memory, and back: for checkpoints and for peers.

Any pytree of arrays works, NumPy's without JAX. A typed key of random numbers travels as its data, which is unsigned integers.
A returned state is accepted only if it is finite and the same tree (names, shapes, dtypes) as `like`, a fresh state of the
learner that asks: the learner adopts a state whole or not at all.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from atoll.base.errors import PeerMisbehaved
from atoll.codec.arrays import HEADER_BYTES_MAX
from atoll.model.tree_walk import flatten, is_jax_array, loaded_jax

Arrays = dict[str, npt.NDArray[Any]]


def host_copy(tree: Any, into: Arrays | None = None) -> Arrays:  # noqa: ANN401  (any pytree)
    """Copy the leaves of `tree` by name to host memory: the tree may be donated or overwritten afterwards.

    `into` are the arrays of an earlier copy that is no longer needed: writing to used memory is several times faster
    than writing to new memory.
    """
    held = {name: _on_host(leaf) for name, leaf in flatten(tree)[0]}
    if into is None or _kinds_of(held) != _kinds_of(into):
        return {name: np.array(array) for name, array in held.items()}
    for name, array in held.items():
        np.copyto(into[name], array)
    return into


def is_key(leaf: Any) -> bool:  # noqa: ANN401  (any leaf)
    """Return whether a leaf is an array of JAX's typed keys of random numbers."""
    return is_jax_array(leaf) and bool(loaded_jax().dtypes.issubdtype(leaf.dtype, loaded_jax().dtypes.prng_key))


def _on_host(leaf: Any) -> npt.NDArray[Any]:  # noqa: ANN401  (any leaf)
    """Return what is copied or sent of a leaf, perhaps as a view of its memory."""
    return np.asarray(loaded_jax().random.key_data(leaf) if is_key(leaf) else leaf)


def _kinds_of(arrays: Arrays) -> list[tuple[str, tuple[int, ...], str]]:
    return [(name, *_kind(array)) for name, array in arrays.items()]


def _kind(leaf: Any) -> tuple[tuple[int, ...], str]:  # noqa: ANN401  (any leaf)
    """Return shape and dtype of what is copied of a leaf; an array stays where it is."""
    array = leaf if hasattr(leaf, "dtype") and not is_key(leaf) else _on_host(leaf)
    return tuple(array.shape), str(array.dtype)


def packed_bytes_max(like: Any) -> int:  # noqa: ANN401
    """Return the most bytes that `pack_arrays` makes of a state like this one."""
    return 8 + HEADER_BYTES_MAX + sum(int(array.nbytes) for array in host_copy(like).values())


def rebuild_state(like: Any, arrays: Mapping[str, npt.NDArray[Any]]) -> Any:  # noqa: ANN401
    """Return `arrays` as a pytree like `like`, each leaf on the device of that leaf in `like`.

    Raises:
        PeerMisbehaved: a name, shape or dtype differs, or a value is not finite.
    """
    named, shape = flatten(like)
    wanted = {name: _kind(leaf) for name, leaf in named}
    for name in sorted(wanted.keys() | arrays.keys()):
        got = (arrays[name].shape, str(arrays[name].dtype)) if name in arrays else None
        if got != wanted.get(name):
            theirs, ours = (
                f"{name} {kind[1]} {list(kind[0])}" if kind else f"no {name}" for kind in (got, wanted.get(name))
            )
            raise PeerMisbehaved("a state of another optimizer or model", got=theirs, allowed=ours)
        if not is_finite(arrays[name]):
            raise PeerMisbehaved("a state with infinities or NaN", got=name)
    return shape.whole(_place_like(leaf, arrays[name]) for name, leaf in named)


def is_finite(array: npt.NDArray[Any]) -> bool:
    """Return whether no value of an array is NaN or an infinity."""
    return "float" not in str(array.dtype) or bool(
        np.isfinite(array.astype(np.float32) if array.dtype.itemsize < 4 else array).all()
    )


def _place_like(leaf: Any, array: npt.NDArray[Any]) -> Any:  # noqa: ANN401
    """Return `array` as the same kind of leaf as `leaf`; never an alias, since a received buffer may be reused."""
    if not is_jax_array(leaf):
        if isinstance(leaf, np.generic):
            return array[()]
        return array.copy() if isinstance(leaf, np.ndarray) else array.item()
    jax = loaded_jax()
    if is_key(leaf):
        key = jax.random.wrap_key_data(jax.numpy.array(array, copy=True), impl=jax.random.key_impl(leaf))
        return jax.device_put(key, leaf.sharding) if leaf.committed else key
    committed = leaf.committed
    return jax.device_put(array, leaf.sharding, may_alias=False) if committed else jax.numpy.array(array, copy=True)
