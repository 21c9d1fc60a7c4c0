"""Turns an optimizer's state into named arrays in host memory, and back: for checkpoints and for peers.

Any pytree of arrays works. A returned state is accepted only if it is finite and the same tree (names, shapes, dtypes)
as `like`, a fresh state of the learner that asks: the learner adopts a state whole or not at all.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from atoll.base.errors import PeerMisbehaved
from atoll.codec.arrays import HEADER_BYTES_MAX
from atoll.model.pytrees import describe

Arrays = dict[str, npt.NDArray[Any]]


def host_copy(tree: Any, into: Arrays | None = None) -> Arrays:  # noqa: ANN401  (any JAX pytree)
    """Copy the leaves of `tree` by name to host memory: the tree may be donated or overwritten afterwards.

    `into` are the arrays of an earlier copy that is no longer needed: writing to used memory is several times faster
    than writing to new memory.
    """
    import jax  # noqa: PLC0415  (the kernel loads JAX only where pytrees are JAX's)

    leaves, specs = jax.tree.leaves(tree), describe(tree)
    if into is None or [(spec.name, spec.shape, spec.dtype) for spec in specs] != _described(into):
        return {spec.name: np.array(leaf) for spec, leaf in zip(specs, leaves, strict=True)}
    for spec, leaf in zip(specs, leaves, strict=True):
        np.copyto(into[spec.name], np.asarray(leaf))
    return into


def _described(arrays: Arrays) -> list[tuple[str, tuple[int, ...], str]]:
    return [(name, array.shape, array.dtype.name) for name, array in arrays.items()]


def packed_bytes_max(like: Any) -> int:  # noqa: ANN401
    """Return the most bytes that `pack_arrays` makes of a state like this one."""
    return 8 + HEADER_BYTES_MAX + sum(int(array.nbytes) for array in host_copy(like).values())


def rebuilt(like: Any, arrays: Mapping[str, npt.NDArray[Any]]) -> Any:  # noqa: ANN401
    """Return `arrays` as a pytree like `like`, each leaf on the device of that leaf in `like`.

    Raises:
        PeerMisbehaved: a name, shape or dtype differs, or a value is not finite.
    """
    import jax  # noqa: PLC0415

    specs, (leaves, treedef) = describe(like), jax.tree.flatten(like)
    wanted = {spec.name: (spec.shape, spec.dtype) for spec in specs}
    for name in sorted(wanted.keys() | arrays.keys()):
        got = (arrays[name].shape, arrays[name].dtype.name) if name in arrays else None
        if got != wanted.get(name):
            raise PeerMisbehaved("a state of another optimizer or model", got=(name, got), allowed=wanted.get(name))
        if not _finite(arrays[name]):
            raise PeerMisbehaved("a state with infinities or NaN", got=name)
    return jax.tree.unflatten(treedef, [_placed(leaf, arrays[s.name]) for s, leaf in zip(specs, leaves, strict=True)])


def _finite(array: npt.NDArray[Any]) -> bool:
    floating = np.issubdtype(array.dtype, np.floating) or array.dtype == ml_dtypes.bfloat16
    return not floating or bool(np.isfinite(array.astype(np.float32) if array.dtype.itemsize < 4 else array).all())


def _placed(leaf: Any, array: npt.NDArray[Any]) -> Any:  # noqa: ANN401
    """Return `array` as the same kind of leaf as `leaf`; never an alias, since a received buffer may be reused."""
    import jax  # noqa: PLC0415
    import jax.numpy as jnp  # noqa: PLC0415

    if not isinstance(leaf, jax.Array):
        return array.copy() if isinstance(leaf, np.ndarray) else array.item()
    return jax.device_put(array, leaf.sharding, may_alias=False) if leaf.committed else jnp.array(array, copy=True)
