"""What a loop may hand over as parameters, checked: all of it when it joins, in microseconds after each step.

A mistake here is silent otherwise. A leaf that changed its shape, a tree that lost a branch or a complex array travel wrongly
or not at all; NaN in a founder's values is everybody's; and an array that the next step has taken over (donated) cannot be
pushed any more. So each is refused by the name of its leaf.

What is not floating (integers, booleans, keys of random numbers) travels with no run: each island keeps its own.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from atoll.base.errors import SettingsError
from atoll.base.logs import get
from atoll.base.quantities import TOKENS_MAX
from atoll.model.layout import TensorSpec
from atoll.model.pytrees import describe, path_name

log = get(__name__)

NAMED = 6


def checked_parameters(params: Any) -> tuple[TensorSpec, ...]:  # noqa: ANN401  (the caller's pytree)
    """Return the tensors of a pytree that can be parameters of a run.

    Raises:
        SettingsError: there is no leaf, or one is no array, is complex, or holds NaN or an infinity.
    """
    import jax  # noqa: PLC0415  (the kernel loads JAX only where pytrees are JAX's)

    leaves = jax.tree_util.tree_flatten_with_path(params)[0]
    if not leaves:
        raise SettingsError("there are no parameters", got=type(params).__name__, allowed="a pytree of arrays")
    for path, leaf in leaves:
        if fault := _fault(leaf):
            raise SettingsError(
                "a leaf of the parameters cannot be merged",
                got=f"{path_name(path)}: {fault}",
                allowed="arrays of finite numbers; integers, booleans and keys stay with each island",
                todo="leave it out of `params`, or make an array of it (jnp.asarray)",
            )
    tensors = describe(params)
    if local := [tensor.name for tensor in tensors if not tensor.floating]:
        more = f" and {len(local) - NAMED} more" if len(local) > NAMED else ""
        log.info("params.local", leaves=", ".join(local[:NAMED]) + more, why="not floating: each island keeps its own")
    return tensors


def _fault(leaf: Any) -> str:  # noqa: ANN401  (any leaf)
    """Return why a leaf cannot be a parameter, or the empty string."""
    import jax  # noqa: PLC0415
    import jax.numpy as jnp  # noqa: PLC0415

    if isinstance(leaf, jax.ShapeDtypeStruct) or not hasattr(leaf, "dtype") or not hasattr(leaf, "shape"):
        return f"{type(leaf).__name__} is no array"
    if isinstance(leaf, jax.Array) and leaf.is_deleted():
        return "the array was deleted, or donated to a step"
    if jnp.issubdtype(leaf.dtype, jnp.complexfloating):
        return f"{leaf.dtype} numbers"
    if isinstance(leaf, np.ndarray) and (leaf.dtype.kind in "OSUMmc" or leaf.dtype.names):
        return f"{leaf.dtype} is no kind of number"
    if jnp.issubdtype(leaf.dtype, jnp.floating):
        with np.errstate(over="ignore"):
            # As it travels: what float32 cannot hold is infinite.
            wide = jnp.float32(leaf) if isinstance(leaf, jax.Array) else np.asarray(leaf).astype(np.float32)
        return "" if bool(np.isfinite(wide).all()) else "NaN, an infinity or a number beyond float32 in it"
    return ""


class ParameterShape:
    """The structure, names, shapes and dtypes of an island's parameters, as it joined with them."""

    def __init__(self, params: Any) -> None:  # noqa: ANN401  (the caller's pytree)
        """Take the shape of these."""
        import jax  # noqa: PLC0415

        leaves, treedef = jax.tree.flatten(params)
        self.treedef: Any = treedef
        self.names = [tensor.name for tensor in describe(params)]
        self._kinds = [(tuple(leaf.shape), np.dtype(leaf.dtype) if _is_plain(leaf) else leaf.dtype) for leaf in leaves]

    def leaves(self, params: Any) -> dict[str, Any]:  # noqa: ANN401  (the caller's pytree)
        """Return the leaves of such parameters by name.

        Raises:
            SettingsError: they have another structure, or a leaf has another shape or dtype.
        """
        import jax  # noqa: PLC0415

        leaves, treedef = jax.tree.flatten(params)
        if treedef != self.treedef:
            raise SettingsError(
                "these are not the parameters that the island joined with",
                got=self._difference(params),
                allowed="the same tree as in `island.params`",
                todo="hand over what your step returned for `island.params`",
            )
        for name, leaf, (shape, dtype) in zip(self.names, leaves, self._kinds, strict=True):
            if isinstance(leaf, jax.core.Tracer):
                raise SettingsError(
                    "a step is reported from outside of compiled functions",
                    got=f"{name!r} is a tracer",
                    todo="call island.step after the jitted step, not inside it",
                )
            if getattr(leaf, "dtype", None) != dtype or leaf.shape != shape or isinstance(leaf, jax.ShapeDtypeStruct):
                raise SettingsError(
                    f"the leaf {name!r} has changed",
                    got=_kind(leaf),
                    allowed=f"{dtype} of shape {list(shape)}",
                    todo="keep its shape and dtype (a step that mixes precisions changes dtypes)",
                )
        return dict(zip(self.names, leaves, strict=True))

    def whole(self, by_name: Mapping[str, Any]) -> Any:  # noqa: ANN401  (the caller's pytree)
        """Return the pytree of leaves by name."""
        import jax  # noqa: PLC0415

        return jax.tree.unflatten(self.treedef, list(by_name.values()))

    def _difference(self, params: Any) -> str:  # noqa: ANN401  (the caller's pytree)
        """Return the first leaf that is there or missing, or what the tree is made of."""
        import jax  # noqa: PLC0415

        theirs = [path_name(path) for path, _ in jax.tree_util.tree_flatten_with_path(params)[0]]
        added = [name for name in theirs if name not in self.names]
        missing = [name for name in self.names if name not in theirs]
        told = [f"{name!r} is new" for name in added[:1]] + [f"{name!r} is missing" for name in missing[:1]]
        return ", ".join(told) or str(jax.tree.structure(params))[:200]


def checked_tokens(tokens: Any) -> int:  # noqa: ANN401  (what the caller counts with)
    """Return the tokens of a step, from an integer of Python, NumPy or JAX; raise `SettingsError` for anything else."""
    try:
        number = operator.index(tokens)
    except TypeError as error:
        raise SettingsError(
            "the tokens of a step are counted in whole numbers",
            got=f"tokens = {tokens!r} ({type(tokens).__name__})",
            allowed=f"an integer from 0 to {TOKENS_MAX}",
            todo="round it before the step reports it",
        ) from error
    if not 0 <= number <= TOKENS_MAX:
        raise SettingsError(
            "no step has so many tokens",
            got=f"tokens = {number}",
            allowed=f"0 to {TOKENS_MAX}",
            todo="correct the count",
        )
    return number


def may_change(leaf: Any) -> bool:  # noqa: ANN401  (any array)
    """Return whether a loop may change an array in place: then its snapshot is a copy."""
    return isinstance(leaf, np.ndarray) and leaf.flags.writeable


def refuse_donated(leaves: Mapping[str, Any]) -> None:
    """Raise `SettingsError` if an array of the last snapshot is gone: the step has donated its parameters."""
    if gone := next(_deleted(leaves), None):
        raise SettingsError(
            "the training step donates its parameters, so nothing of them can be pushed",
            got=f"{gone!r} is deleted after the step",
            todo="join with options=JoinOptions(donated=True): each step then copies its parameters; or do not donate them",
        )


def _deleted(leaves: Mapping[str, Any]) -> Iterator[str]:
    for name, leaf in leaves.items():
        is_deleted = getattr(leaf, "is_deleted", None)
        if is_deleted is not None and is_deleted():
            yield name


def _is_plain(leaf: Any) -> bool:  # noqa: ANN401  (any array)
    """Return whether NumPy knows the dtype: it does not know those of random keys."""
    try:
        np.dtype(leaf.dtype)
    except TypeError:
        return False
    return True


def _kind(leaf: Any) -> str:  # noqa: ANN401  (any leaf)
    if hasattr(leaf, "dtype"):
        return f"{leaf.dtype} of shape {list(leaf.shape)}"
    return type(leaf).__name__
