"""What becomes of each leaf of a loop's parameters in the merge: a rule per leaf, by patterns on its name.

    pseudo_gradient   pushed and merged as the run's settings say, by RDA unless they say otherwise
    direct            the same, by the plain weighted mean: embeddings, whose rows are rarely touched (App. D.2)
    mean              the new value is the weighted mean of the learners' values: statistics that no optimizer trains
    local             it stays with its island: integers, keys of random numbers, what a loop wants to keep to itself
    frozen            it never travels; every island holds the founder's values: the base under a trained adapter

A name is the path of the leaf, its parts joined by '/'. The first pattern that fits a leaf decides; `*` also passes over '/'.
Where none fits, the leaf itself decides: integers, booleans and keys are local, a part of the path that names running
statistics makes it a mean, one that speaks of an embedding makes it direct, and everything else is a pseudo-gradient.

The founder's rules hold for the run. Which leaves are merged, and the digests of frozen ones, are in the run record; a learner
that brings others is refused.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, Final, Literal, get_args

import numpy as np
import xxhash

from atoll.base.errors import SettingsError
from atoll.base.logs import get
from atoll.base.wording import few
from atoll.model.layout import FrozenLeaf, Layout, TensorSpec, plan_layout

log = get(__name__)

Rule = Literal["pseudo_gradient", "direct", "mean", "local", "frozen"]
RULES: Final[tuple[str, ...]] = get_args(Rule)
STATISTICS: Final = frozenset({"batch_stats", "moving_mean", "moving_variance", "running_mean", "running_var"})
"""What Flax, Keras and PyTorch call the statistics of batch normalisation."""
UNTRAINED: Final = ("int", "uint", "bool", "key<")
NAMED = 6


@dataclass(frozen=True, slots=True)
class LeafRules:
    """The rule of each leaf by name, in the order of the leaves."""

    by_name: Mapping[str, Rule]

    def named(self, *rules: Rule) -> tuple[str, ...]:
        """Return the names of the leaves with one of these rules."""
        return tuple(name for name, rule in self.by_name.items() if rule in rules)

    @property
    def merged(self) -> tuple[str, ...]:
        """Return the names of the leaves that travel."""
        return self.named("pseudo_gradient", "direct", "mean")

    def layout(self, tensors: Iterable[TensorSpec], fragments: int) -> Layout:
        """Return how the leaves that travel, of these tensors, are divided into fragments."""
        merged = set(self.merged)
        travel = [tensor for tensor in tensors if tensor.name in merged]
        return plan_layout(travel, fragments, self.named("direct"), self.named("mean"))


def rules_of(tensors: Iterable[TensorSpec], given: Mapping[str, str]) -> LeafRules:
    """Return the rules of a loop's leaves, from patterns on their names and what the leaves themselves say.

    Raises:
        SettingsError: a rule is unknown, a pattern fits no leaf, a leaf cannot have its rule, or no leaf is left to merge.
    """
    if unknown := sorted(str(rule) for rule in given.values() if rule not in RULES):
        raise SettingsError(
            "there is no such rule for a leaf", got=unknown[0], allowed=", ".join(RULES), todo="correct `merge`"
        )
    found: dict[str, Rule] = {}
    used = Counter[str]()
    for tensor in tensors:
        pattern = next((pattern for pattern in given if fnmatchcase(tensor.name, pattern)), None)
        used[pattern or ""] += 1
        rule: Any = usual(tensor) if pattern is None else given[pattern]
        if pattern is not None and not tensor.floating and rule not in {"local", "frozen"}:
            raise SettingsError(
                f"the leaf {tensor.name!r} cannot be averaged",
                got=f"{tensor.dtype}, and merge[{pattern!r}] = {rule!r}",
                allowed="local or frozen",
                todo="correct `merge`",
            )
        found[tensor.name] = rule
    if idle := [pattern for pattern in given if not used[pattern]]:
        first = ", ".join(list(found)[:NAMED])
        raise SettingsError(
            "a pattern of `merge` decides about no leaf",
            got=idle[0],
            allowed=f"patterns on names like {first}; the first that fits decides",
            todo="correct `merge`",
        )
    rules = LeafRules(found)
    if not rules.merged:
        raise SettingsError(
            "there is nothing to merge",
            got="every leaf is local or frozen",
            allowed="at least one leaf of floating numbers that travels",
            todo="correct `merge`, or hand over the parameters that are trained",
        )
    return rules


def usual(tensor: TensorSpec) -> Rule:
    """Return the rule of a leaf for which no pattern was given."""
    parts = tensor.name.split("/")
    if tensor.dtype.startswith(UNTRAINED):
        return "local"
    if not STATISTICS.isdisjoint(parts):
        return "mean"
    return "direct" if any("embed" in part.lower() for part in parts) else "pseudo_gradient"


def frozen_leaves(leaves: Mapping[str, Any], rules: LeafRules) -> tuple[FrozenLeaf, ...]:
    """Return names and digests of the frozen leaves.

    Raises:
        SettingsError: one has no bytes to compare, as a key of random numbers.
    """
    return tuple(FrozenLeaf(name, digest_of(name, leaves[name])) for name in rules.named("frozen"))


def digest_of(name: str, leaf: Any) -> str:  # noqa: ANN401  (any array)
    """Return 32 hex digits that follow from the shape, dtype and values of an array."""
    try:
        array = np.ascontiguousarray(leaf)
        values = array.reshape(-1).view(np.uint8).data
    except TypeError as error:
        raise SettingsError(
            f"the leaf {name!r} cannot be frozen",
            got=str(leaf.dtype),
            allowed="an array of numbers",
            todo="make it local",
        ) from error
    digest = xxhash.xxh3_128(f"{leaf.dtype}{tuple(leaf.shape)}".encode())
    digest.update(values)
    return digest.hexdigest()


def tell(rules: LeafRules) -> None:
    """Log what happens to leaves that are not merged like most."""
    for rule in ("direct", "mean", "local", "frozen"):
        if names := rules.named(rule):
            log.info("leaves.ruled", rule=rule, leaves=few(names, NAMED))
