"""Walks pytrees: by JAX where this process has loaded it, else by the same rules for plain containers.

A loop of another framework hands over NumPy arrays and may not have JAX at all, so nothing here imports it. Without JAX in the
process nobody can hold an array or a registered container of its own, and the plain walk is all there is to know:

    dict, defaultdict     by sorted keys                    {"b": x, "a": y}         a, b
    OrderedDict           in its own order                  OrderedDict(b=x, a=y)    b, a
    list, tuple           by position                       [x, {"w": y}]            0, 1/w
    named tuple           by field, in the class's order    Point(x=..., y=...)      x, y
    None                  an empty subtree

Everything else is a leaf, subclasses of these containers and data classes too. Names and order are JAX's: a learner with JAX
and one without can train one model. An island keeps to the walk that it joined with, also when its process loads JAX later.
"""

from __future__ import annotations

import sys
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Self

import numpy as np

from atoll.base.errors import SettingsError

Named = list[tuple[str, Any]]
_Paths = list[tuple[tuple[Any, ...], Any]]
NAMELESS = "value"
"""The name of a leaf that is the whole tree."""


def loaded_jax() -> Any:  # noqa: ANN401  (a module)
    """Return JAX if this process has loaded it, else None."""
    if sys.modules.get("jax") is None:
        return None
    import jax  # noqa: PLC0415  (loaded already; this waits for a thread that is about to)

    return jax


def is_jax_array(leaf: Any) -> bool:  # noqa: ANN401  (any leaf)
    """Return whether a leaf is an array of JAX's; never loads JAX."""
    jax = loaded_jax()
    return jax is not None and isinstance(leaf, jax.Array)


def is_array(leaf: Any) -> bool:  # noqa: ANN401  (any leaf)
    """Return whether a leaf is an array of NumPy or JAX; one of another framework is not."""
    return isinstance(leaf, np.ndarray | np.generic) or is_jax_array(leaf)


def flatten(tree: Any) -> tuple[Named, TreeShape]:  # noqa: ANN401
    """Return the leaves of a pytree by name, in order, and its shape; raise `SettingsError` for keys without an order."""
    return PlainShape.of(tree) if loaded_jax() is None else JaxShape.of(tree)


@dataclass(frozen=True, slots=True)
class JaxShape:
    """The structure of a pytree, as JAX knows it: two are equal if their containers and keys are."""

    treedef: Any

    @classmethod
    def of(cls, tree: Any) -> tuple[Named, Self]:  # noqa: ANN401
        """Return the named leaves and the shape of a pytree."""
        import jax  # noqa: PLC0415  (only where it is loaded)

        try:
            leaves, treedef = jax.tree_util.tree_flatten_with_path(tree)
        except ValueError as error:
            if "sorting" not in str(error):
                raise
            raise _unsorted(error) from error
        return [(path_name(path), leaf) for path, leaf in leaves], cls(treedef)

    @classmethod
    def leaves_of(cls, tree: Any) -> tuple[list[Any], Self]:  # noqa: ANN401
        """Return the leaves, in order, and the shape of a pytree; quicker than `of`."""
        import jax  # noqa: PLC0415  (only where it is loaded)

        leaves, treedef = jax.tree.flatten(tree)
        return leaves, cls(treedef)

    def whole(self, leaves: Iterable[Any]) -> Any:  # noqa: ANN401
        """Return the pytree of this shape that has these leaves, in order."""
        return self.treedef.unflatten(leaves)

    def __str__(self) -> str:
        return str(self.treedef)


@dataclass(frozen=True, slots=True)
class PlainShape:
    """A node of plain containers: its `keys` and `children`, and how its container is `made` of them; a leaf has no `kind`."""

    kind: type | None
    keys: tuple[Any, ...] = ()
    children: tuple[PlainShape, ...] = ()
    made: Callable[[list[Any]], Any] = field(default=list, compare=False, repr=False)

    @classmethod
    def of(cls, tree: Any) -> tuple[Named, PlainShape]:  # noqa: ANN401
        """Return the named leaves and the shape of a pytree."""
        found: _Paths = []
        shape = _walk(tree, (), found)
        return [("/".join(map(str, path)) or NAMELESS, leaf) for path, leaf in found], shape

    @classmethod
    def leaves_of(cls, tree: Any) -> tuple[list[Any], PlainShape]:  # noqa: ANN401
        """Return the leaves, in order, and the shape of a pytree."""
        found: _Paths = []
        shape = _walk(tree, (), found)
        return [leaf for _, leaf in found], shape

    def whole(self, leaves: Iterable[Any]) -> Any:  # noqa: ANN401
        """Return the pytree of this shape that has these leaves, in order."""
        return self._build(iter(leaves))

    def _build(self, leaves: Iterator[Any]) -> Any:  # noqa: ANN401
        return next(leaves) if self.kind is None else self.made([child._build(leaves) for child in self.children])  # noqa: SLF001

    def __str__(self) -> str:
        if self.kind is None:
            return "*"
        inside = ", ".join(f"{key}: {child}" for key, child in zip(self.keys, self.children, strict=True))
        return f"{self.kind.__name__}({inside})"


LEAF = PlainShape(None)
TreeShape = JaxShape | PlainShape


def _walk(tree: Any, path: tuple[Any, ...], found: _Paths) -> PlainShape:  # noqa: ANN401
    opened = _opened(tree)
    if opened is None:
        found.append((path, tree))
        return LEAF
    keys, values, made = opened
    children = tuple(_walk(value, (*path, key), found) for key, value in zip(keys, values, strict=True))
    return PlainShape(type(tree), tuple(keys), children, made)


def _opened(tree: Any) -> tuple[list[Any], list[Any], Callable[[list[Any]], Any]] | None:  # noqa: ANN401
    """Return the keys and values of a plain container and how it is made of other values; None for a leaf."""
    kind = type(tree)
    if tree is None:
        return [], [], lambda _: None
    if kind in (dict, defaultdict, OrderedDict):
        try:
            keys = list(tree) if kind is OrderedDict else sorted(tree)
        except TypeError as error:
            raise _unsorted(error) from error
        factory = getattr(tree, "default_factory", None)
        made: Callable[[Any], Any] = partial(defaultdict, factory) if kind is defaultdict else kind
        return keys, [tree[key] for key in keys], lambda values: made(zip(keys, values, strict=True))
    if kind in (list, tuple):
        return list(range(len(tree))), list(tree), kind
    if isinstance(tree, tuple) and hasattr(kind, "_fields"):
        return list(kind._fields), list(tree), lambda values: kind(*values)
    return None


def _unsorted(error: Exception) -> SettingsError:
    return SettingsError(
        "the keys of a dict in this tree have no order",
        got=str(error),
        allowed="keys of one kind, which can be sorted",
        todo="use strings as keys",
    )


def path_name(path: tuple[Any, ...]) -> str:
    """Return the name of a leaf from JAX's path of keys."""
    return "/".join(_part(key) for key in path) or NAMELESS


def _part(key: Any) -> str:  # noqa: ANN401  (one of JAX's key types)
    for attribute in ("key", "idx", "name"):
        if hasattr(key, attribute):
            return str(getattr(key, attribute))
    return str(key)
