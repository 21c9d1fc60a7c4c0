"""Leaves that no optimizer trains, as the libraries name them or mark them by type.

`CONVENTIONS` reads names: paths, split at '/' and at '.', because a state dict of PyTorch has its path in one key
(`1.running_var`). A row fits a leaf

    names     if a part of its name is one of these; with `beside`, the last part
    beside    and the leaves next to it, below the same node, have all these names
    below     and a part above it fits this pattern

`TYPES` reads the nodes of a pytree: an NNX variable says by its class what it is, and a state of Equinox has no names. A type
decides before a name does. Such a leaf becomes one of two: `mean`, the values of all islands are averaged; `local`, it stays
with its island. `looks_untrained` finds leaves that may be such ones and that no row knows.

The `hidden` sums of Haiku's averages are local: Haiku divides them by how far their own counter has come, so a sum from others
beside the counter of a newcomer is an average that is many times too large.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any, Final, Literal, NamedTuple

from atoll.model.layout import TensorSpec
from atoll.model.tree_walk import loaded_jax, path_name

Untrained = Literal["mean", "local"]
Typed = Literal["trained", "mean", "local"]
"""What a type says of the leaves below it."""

BELOW_NORM: Final = re.compile(r"norm|(?<![a-z])bn(?![a-z])", re.IGNORECASE)
EVERYTHING: Final = re.compile("")


class Convention(NamedTuple):
    """A library's names of leaves that no optimizer trains; the module's docstring says when a row fits."""

    library: str
    rule: Untrained
    names: frozenset[str]
    beside: frozenset[str] = frozenset()
    below: re.Pattern[str] = EVERYTHING


def _row(
    library: str, rule: Untrained, names: str, beside: str = "", below: re.Pattern[str] = EVERYTHING
) -> Convention:
    return Convention(library, rule, frozenset(names.split()), frozenset(beside.split()), below)


CONVENTIONS: Final = (
    _row("Optax", "local", "opt_state"),
    _row("Flax Linen", "mean", "batch_stats"),
    _row("Flax NNX", "mean", "mean var", beside="mean var scale"),
    _row("Flax NNX", "mean", "mean var", beside="mean var bias"),
    _row("Flax", "mean", "mean var", beside="mean var", below=BELOW_NORM),
    _row("PyTorch", "mean", "running_mean running_var"),
    _row("PyTorch", "local", "num_batches_tracked n_averaged"),
    _row("Keras", "mean", "moving_mean moving_variance"),
    _row("Keras", "mean", "mean variance", beside="mean variance", below=BELOW_NORM),
    _row("Keras", "local", "seed_generator_state"),
    _row("Haiku", "mean", "average", beside="average hidden counter"),
    _row("Haiku", "local", "hidden counter", beside="average hidden counter"),
)
STATISTICS: Final = frozenset[str]().union(*(row.names for row in CONVENTIONS if row.rule == "mean" and not row.beside))
"""Parts of a name that make a leaf a statistic wherever they are."""
TYPES: Final[Mapping[tuple[str, str], Typed]] = {
    ("flax", "BatchStat"): "mean",
    ("flax", "RngState"): "local",
    ("flax", "Cache"): "local",
    ("flax", "Intermediate"): "local",
    ("flax", "OptState"): "local",
    ("flax", "OptVariable"): "local",
    ("flax", "Param"): "trained",
    ("equinox", "State"): "mean",
}
"""Classes by their package and name; a subclass of one is one."""

VARIANCES: Final = frozenset({"moving_variance", "running_var", "var", "variance"})
HAIKU_VARIANCE: Final = "var_ema"

_AVERAGES: Final = frozenset(
    {"average", "averaged", "averages", "avg", "ema", "ewma", "moving", "running"}
    | {"stat", "statistic", "statistics", "stats"}
)
_COUNTS: Final = frozenset(
    ["count", "counter", "counts", "mean", "num", "std", "step", "steps", "sum", "total", "tracked", "var", "variance"]
)
_INDEXED: Final = "value"
"""The last part of the name of an NNX variable, which holds its array in this attribute."""


def conventional_rules(tensors: Iterable[TensorSpec], types: Mapping[str, Typed]) -> dict[str, Untrained]:
    """Return the rules of those leaves that a convention knows; `types` are those of `leaf_types`."""
    parts = {tensor.name: split_name(tensor.name) for tensor in tensors}
    nodes: defaultdict[tuple[str, ...], set[str]] = defaultdict(set)
    for path in parts.values():
        nodes[path[:-1]].add(path[-1])
    found: dict[str, Untrained] = {}
    for name, path in parts.items():
        kind = types.get(name)
        if kind is None:
            rule = next((row.rule for row in CONVENTIONS if _fits(row, path, nodes[path[:-1]])), None)
        else:
            rule = None if kind == "trained" else kind
        if rule is not None:
            found[name] = rule
    return found


def _fits(row: Convention, path: tuple[str, ...], node: set[str]) -> bool:
    if not row.beside:
        return not row.names.isdisjoint(path)
    below = row.below is EVERYTHING or any(row.below.search(part) for part in path[:-1])
    return path[-1] in row.names and row.beside <= node and below


def split_name(name: str) -> tuple[str, ...]:
    """Return the parts of a leaf's name.

    Examples:
        >>> split_name("state/batch_norm/~/var_ema/average"), split_name("1.running_var"), split_name("norm/var/value")
        (('state', 'batch_norm', '~', 'var_ema', 'average'), ('1', 'running_var'), ('norm', 'var'))
    """
    parts = tuple(re.split(r"[/.]", name))
    return parts[:-1] if len(parts) > 1 and parts[-1] == _INDEXED else parts


def leaf_types(tree: Any) -> dict[str, Typed]:  # noqa: ANN401  (any pytree)
    """Return what the types of its nodes say of the leaves of a pytree, by name; most leaves are below no such type."""
    jax = loaded_jax()
    if jax is None:
        return {}
    found: dict[str, Typed] = {}
    nodes, _ = jax.tree_util.tree_flatten_with_path(tree, is_leaf=lambda node: _said_by(type(node)) is not None)
    for path, node in nodes:
        kind = _said_by(type(node))
        if kind is not None:
            inside, _ = jax.tree_util.tree_flatten_with_path(node)
            found |= {path_name((*path, *below)): kind for below, _ in inside}
    return found


def _said_by(kind: type[Any]) -> Typed | None:
    for base in kind.__mro__:
        said = TYPES.get((base.__module__.partition(".")[0], base.__name__))
        if said is not None:
            return said
    return None


def looks_untrained(name: str) -> bool:
    """Return whether a leaf that no convention knows is called like a statistic, a counter or an average.

    Averages are often whole trees (`ema/dense/kernel`), so any part of the name counts; counters and moments are single leaves.

    Examples:
        >>> [looks_untrained(name) for name in ("ema/w", "norm/var", "steps", "embed/w", "time_step/kernel", "norm/scale")]
        [True, True, True, False, False, False]
    """
    *above, last = (set(re.findall(r"[A-Z]?[a-z]+|[A-Z]+", part)) for part in split_name(name))
    lower = [{word.lower() for word in words} for words in (*above, last)]
    return not all(words.isdisjoint(_AVERAGES) for words in lower) or not lower[-1].isdisjoint(_COUNTS)


def is_variance(name: str) -> bool:
    """Return whether a statistic of this name is a variance, which is never negative.

    Examples:
        >>> [is_variance(name) for name in ("1.running_var", "norm/~/var_ema/average", "norm/mean", "bn/var/value")]
        [True, True, False, True]
    """
    parts = split_name(name)
    return parts[-1] in VARIANCES or (parts[-1] == "average" and HAIKU_VARIANCE in parts)
