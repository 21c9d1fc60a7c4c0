"""Rules of a loop's leaves: what becomes of each in the merge, by patterns on its name.

    pseudo_gradient   pushed and merged as the run's settings say, by RDA unless they say otherwise
    direct            the same, by the plain weighted mean: embeddings, whose rows are rarely touched (App. D.2)
    mean              the new value is the weighted mean of the learners' values: statistics that no optimizer trains
    local             it stays with its island: integers, keys of random numbers, what a loop wants to keep to itself
    frozen            it never travels; every island holds the founder's values: the base under a trained adapter

A name is the path of the leaf, its parts joined by '/'. The first pattern that fits a leaf decides; `*` also passes over '/'.
Where none fits, the leaf itself decides: integers, booleans and keys are local; what libraries' conventions know as untrained
(`atoll.model.leaf_conventions`) is a mean or local; a part of the path that speaks of an embedding makes it direct; everything
else is a pseudo-gradient. A warning names leaves that are called like statistics and are merged as weights all the same.

The founder's rules hold for the run. Which leaves are merged, how, and the digests of frozen ones are in the run record; a
learner that brings others is refused. So learners whose Atoll knows other conventions never mix them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from types import MappingProxyType
from typing import Any, Final, Literal, get_args

import numpy as np
import xxhash

from atoll.base.errors import SettingsError
from atoll.base.logs import get
from atoll.base.wording import few
from atoll.model.layout import FrozenLeaf, Layout, TensorSpec, plan_layout
from atoll.model.leaf_conventions import Typed, conventional_rules, looks_untrained

log = get(__name__)

Rule = Literal["pseudo_gradient", "direct", "mean", "local", "frozen"]
RULES: Final[tuple[str, ...]] = get_args(Rule)
UNTRAINED: Final = ("int", "uint", "bool", "key<")
NAMED = 6


@dataclass(frozen=True, slots=True)
class LeafRules:
    """The rule of each leaf by name, in the order of the leaves.

    `doubtful` are leaves that nobody gave a rule, that are merged as weights, and that are called like statistics.
    """

    by_name: Mapping[str, Rule]
    doubtful: tuple[str, ...] = ()

    def names_with(self, *rules: Rule) -> tuple[str, ...]:
        """Return the names of the leaves with one of these rules."""
        return tuple(name for name, rule in self.by_name.items() if rule in rules)

    @property
    def merged(self) -> tuple[str, ...]:
        """Return the names of the leaves that travel."""
        return self.names_with("pseudo_gradient", "direct", "mean")

    @property
    def fragments_min(self) -> int:
        """Return how many fragments these leaves need: those merged by value share none with others."""
        return 1 + (0 < len(self.names_with("mean")) < len(self.merged))

    def layout(self, tensors: Iterable[TensorSpec], fragments: int) -> Layout:
        """Return how the leaves that travel, of these tensors, are divided into fragments."""
        merged = set(self.merged)
        travel = [tensor for tensor in tensors if tensor.name in merged]
        return plan_layout(travel, fragments, self.names_with("direct"), self.names_with("mean"))


def rules_of(
    tensors: Sequence[TensorSpec], given: Mapping[str, str], types: Mapping[str, Typed] = MappingProxyType({})
) -> LeafRules:
    """Return the rules of a loop's leaves, from patterns on their names and what the leaves themselves say.

    `types` are what the types of nodes say of the leaves below them (`atoll.model.leaf_conventions.leaf_types`).

    Raises:
        SettingsError: a rule is unknown, a pattern fits no leaf, a leaf cannot have its rule, or no leaf is left to merge.
    """
    if unknown := sorted(str(rule) for rule in given.values() if rule not in RULES):
        raise SettingsError(
            "there is no such rule for a leaf", got=unknown[0], allowed=", ".join(RULES), todo="correct `merge`"
        )
    found: dict[str, Rule] = {}
    doubtful: list[str] = []
    used = Counter[str]()
    known = conventional_rules(tensors, types)
    for tensor in tensors:
        pattern = next((pattern for pattern in given if fnmatchcase(tensor.name, pattern)), None)
        used[pattern or ""] += 1
        rule: Any = default_rule(tensor, known.get(tensor.name)) if pattern is None else given[pattern]
        weight = rule in {"pseudo_gradient", "direct"}
        if pattern is None and weight and tensor.name not in types and looks_untrained(tensor.name):
            doubtful.append(tensor.name)
        if pattern is not None:
            _check_rule(tensor, pattern, rule)
        found[tensor.name] = rule
    _check_patterns(given, used, found)
    rules = LeafRules(found, tuple(doubtful))
    if not rules.merged:
        raise SettingsError(
            "there is nothing to merge",
            got="every leaf is local or frozen",
            allowed="at least one leaf of floating numbers that travels",
            todo="correct `merge`, or hand over the parameters that are trained",
        )
    return rules


def _check_rule(tensor: TensorSpec, pattern: str, rule: str) -> None:
    if not tensor.floating and rule not in {"local", "frozen"}:
        raise SettingsError(
            f"the leaf {tensor.name!r} cannot be averaged",
            got=f"{tensor.dtype}, and merge[{pattern!r}] = {rule!r}",
            allowed="local or frozen",
            todo="correct `merge`",
        )


def _check_patterns(given: Iterable[str], used: Mapping[str, int], names: Iterable[str]) -> None:
    if idle := [pattern for pattern in given if not used[pattern]]:
        first = ", ".join(list(names)[:NAMED])
        raise SettingsError(
            "a pattern of `merge` decides about no leaf",
            got=idle[0],
            allowed=f"patterns on names like {first}; the first that fits decides",
            todo="correct `merge`",
        )


def default_rule(tensor: TensorSpec, known: Rule | None) -> Rule:
    """Return the rule of a leaf for which no pattern was given, if a convention knows it as `known`."""
    if tensor.dtype.startswith(UNTRAINED):
        return "local"
    if known is not None:
        return known
    return "direct" if "embed" in tensor.name.lower() else "pseudo_gradient"


def frozen_leaves(leaves: Mapping[str, Any], rules: LeafRules) -> tuple[FrozenLeaf, ...]:
    """Return names and digests of the frozen leaves.

    Raises:
        SettingsError: one has no bytes to compare, as a key of random numbers.
    """
    return tuple(FrozenLeaf(name, digest_of(name, leaves[name])) for name in rules.names_with("frozen"))


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


def log_rules(layout: Layout, rules: LeafRules) -> None:
    """Log how many leaves have which rule in a run with this layout; warn of leaves that seem to have the wrong one."""
    by_value = set(layout.by_value)
    unlike = {
        "direct": layout.direct,
        "mean": layout.by_value,
        "local": rules.names_with("local"),
        "frozen": rules.names_with("frozen"),
    }
    counts = ", ".join(f"{len(unlike[rule])} {rule}" for rule in ("mean", "local", "frozen"))
    told = {rule: few(names, NAMED) for rule, names in unlike.items() if names}
    log.info("leaves.ruled", leaves=f"{len(layout.tensors) - len(by_value)} merged, {counts}", **told)
    if doubtful := [name for name in rules.doubtful if name not in by_value]:
        log.warning(
            "leaves.doubtful",
            leaves=few(doubtful, NAMED),
            why="called like statistics, counters or averages, and merged as weights: momentum can make a variance negative",
            todo=f"found the run with JoinOptions(merge={{{doubtful[0]!r}: 'mean'}}), or 'local', or, if it is trained, "
            "'pseudo_gradient'",
        )
