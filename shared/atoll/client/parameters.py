"""The parameters that a loop hands over: the rule of each leaf in the merge, and checks of them.

    pseudo_gradient   pushed and merged as the run's settings say, by RDA unless they say otherwise
    direct            the same, by the plain weighted mean: embeddings, whose rows are rarely touched (App. D.2)
    mean              the new value is the weighted mean of the learners' values: statistics that no optimizer trains
    local             it stays with its island: integers, keys of random numbers, what a loop wants to keep to itself
    frozen            it never travels; every island holds the founder's values: the base under a trained adapter

Rules are given by patterns on names: paths of leaves, their parts joined by '/'. The first pattern that fits decides; `*` also
passes over '/'. Where none fits, the leaf itself decides: integers, booleans and keys are local; what libraries' conventions
know as untrained (`atoll.model.leaf_conventions`) is a mean or local; a part of the path that speaks of an embedding makes it
direct; everything else is a pseudo-gradient. The founder's rules hold for the run: they are in the run record, with the digests
of frozen leaves, and a learner that brings others is refused.

All leaves are checked when a loop joins, in microseconds after each step: a leaf that changed its shape, a complex array or NaN
in a founder's values would be silent otherwise. Of leaves that do not travel only shape and dtype are checked after each step.
Whether a frozen one still has the founder's values costs a digest, so it is checked now and then (`FrozenWatch`).
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from types import MappingProxyType
from typing import Any, Final, Literal, NamedTuple, get_args

import numpy as np
import xxhash

from atoll.base.errors import SettingsError
from atoll.base.logs import get
from atoll.base.quantities import TOKENS_MAX
from atoll.base.wording import few
from atoll.model.layout import FrozenLeaf, Layout, TensorSpec, plan_layout
from atoll.model.leaf_conventions import Typed, conventional_rules, leaf_types, looks_untrained
from atoll.model.pytrees import describe
from atoll.model.tree_walk import TreeShape, flatten, is_array, is_jax_array, loaded_jax

log = get(__name__)

Rule = Literal["pseudo_gradient", "direct", "mean", "local", "frozen"]
RULES: Final[tuple[str, ...]] = get_args(Rule)
UNTRAINED: Final = ("int", "uint", "bool", "key<")
NAMED = 6
FROZEN_EVERY: Final = 1000
"""Steps between two looks at the values of frozen leaves."""


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
    """Return the rules of a loop's leaves, from patterns on their names and what the leaves and their nodes' `types` say.

    Raises:
        SettingsError: a rule is unknown, a pattern fits no leaf, a leaf cannot have its rule, or no leaf is left to merge.
    """
    if unknown := sorted(str(rule) for rule in given.values() if rule not in RULES):
        raise SettingsError(
            "there is no such rule for a leaf", got=unknown[0], allowed=", ".join(RULES), todo="correct `merge`"
        )
    found: dict[str, Rule] = {}
    doubtful: list[str] = []
    idle = dict.fromkeys(given)
    known = conventional_rules(tensors, types)
    for tensor in tensors:
        pattern = next((pattern for pattern in given if fnmatchcase(tensor.name, pattern)), None)
        rule: Any = default_rule(tensor, known.get(tensor.name)) if pattern is None else given[pattern]
        if pattern is not None:
            idle.pop(pattern, None)
            _check_rule(tensor, pattern, rule)
        elif rule in {"pseudo_gradient", "direct"} and tensor.name not in types and looks_untrained(tensor.name):
            doubtful.append(tensor.name)
        found[tensor.name] = rule
    if idle:
        first = ", ".join(list(found)[:NAMED])
        raise SettingsError(
            "a pattern of `merge` decides about no leaf",
            got=next(iter(idle)),
            allowed=f"patterns on names like {first}; the first that fits decides",
            todo="correct `merge`",
        )
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


def default_rule(tensor: TensorSpec, known: Rule | None) -> Rule:
    """Return the rule of a leaf for which no pattern was given, if a convention knows it as `known`."""
    if tensor.dtype.startswith(UNTRAINED):
        return "local"
    if known is not None:
        return known
    return "direct" if "embed" in tensor.name.lower() else "pseudo_gradient"


def frozen_leaves(leaves: Mapping[str, Any], rules: LeafRules) -> tuple[FrozenLeaf, ...]:
    """Return names and digests of the frozen leaves; raise `SettingsError` for one without bytes to compare."""
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


def checked_parameters(params: Any, merge: Mapping[str, str]) -> tuple[tuple[TensorSpec, ...], LeafRules]:  # noqa: ANN401
    """Return the tensors of a pytree that can be parameters of a run, and the rules of its leaves.

    Raises:
        SettingsError: there is no leaf, one is no array, one to be merged is complex or holds NaN or an infinity, or a rule in
            `merge` is wrong.
    """
    leaves, _ = flatten(params)
    if not leaves:
        raise SettingsError("there are no parameters", got=type(params).__name__, allowed="a pytree of arrays")
    named = dict(leaves)
    _refuse((name, _no_array(leaf)) for name, leaf in named.items())
    tensors = describe(params)
    rules = rules_of(tensors, merge, leaf_types(params))
    _refuse((name, _no_numbers(named[name])) for name in named if name not in rules.names_with("local", "frozen"))
    return tensors, rules


class LeafFault(NamedTuple):
    """Why a leaf cannot be merged, and what a person can do about it."""

    said: str
    todo: str


def _refuse(faults: Iterable[tuple[str, LeafFault | None]]) -> None:
    for name, fault in faults:
        if fault is not None:
            raise SettingsError(
                "a leaf of the parameters cannot be merged",
                got=f"{name}: {fault.said}",
                allowed="arrays of finite numbers, of NumPy or JAX; integers, booleans and keys stay with each island",
                todo=fault.todo,
            )


def _no_array(leaf: Any) -> LeafFault | None:  # noqa: ANN401  (any leaf)
    if not is_array(leaf):
        todo = "make an array of it (jnp.asarray, np.asarray, tensor.numpy()), or leave it out of the parameters"
        return LeafFault(f"{type(leaf).__name__} is no array", todo)
    if is_jax_array(leaf) and leaf.is_deleted():
        todo = "join before the step that takes it over, or hand over what that step returned"
        return LeafFault("the array was deleted, or donated to a step", todo)
    return None


def _no_numbers(leaf: Any) -> LeafFault | None:  # noqa: ANN401  (any array)
    if "complex" in str(leaf.dtype):
        todo = "hand over its real and its imaginary part as two arrays, or keep it local with `merge`"
        return LeafFault(f"{leaf.dtype} numbers", todo)
    if not is_jax_array(leaf) and (leaf.dtype.kind in "OSUMmc" or leaf.dtype.names):
        todo = "make numbers of it (astype), keep it local with `merge`, or leave it out of the parameters"
        return LeafFault(f"{leaf.dtype} is no kind of number", todo)
    if "float" in str(leaf.dtype):
        with np.errstate(over="ignore"):
            # As it travels: what float32 cannot hold is infinite.
            wide = leaf.astype(np.float32)
        finite = loaded_jax().numpy.isfinite(wide) if is_jax_array(leaf) else np.isfinite(wide)
        if not bool(finite.all()):
            todo = "look at how it was initialised or loaded; if its values mean nothing, keep it local with `merge`"
            return LeafFault("NaN, an infinity or a number beyond float32 in it", todo)
    return None


class FrozenWatch:
    """Notices that a loop has changed a leaf that it calls frozen.

    A digest reads the whole leaf. So it is taken after the first step, after every `FROZEN_EVERY`-th one and when the
    island leaves, and only of leaves that may have changed since: a JAX array that is still the same object has not.
    """

    def __init__(self, known: Iterable[FrozenLeaf], leaves: Mapping[str, Any]) -> None:
        """Begin with the `leaves` of an island that joined, whose frozen ones are `known` to be right."""
        self._known = {leaf.name: leaf.digest for leaf in known}
        self._seen = {name: leaves[name] for name in self._known}
        self._replaced: set[str] = set()
        self._changed = False
        self._steps = 0

    def step(self, leaves: Mapping[str, Any]) -> None:
        """Look at the leaves after a step; raise `SettingsError` if the values of a frozen one are not the founder's."""
        self._steps += 1
        for name, seen in self._seen.items():
            if leaves[name] is not seen:
                self._seen[name] = leaves[name]
                self._replaced.add(name)
        if self._changed or self._steps == 1 or self._steps % FROZEN_EVERY == 0:
            self.check()

    def check(self) -> None:
        """Compare what may have changed; raise `SettingsError` as `step` does, until the founder's values are back."""
        self._changed = False
        gone = set(_deleted_names(self._seen))
        for name, leaf in self._seen.items():
            if name in gone or not (name in self._replaced or may_change(leaf)):
                continue
            if digest_of(name, leaf) != self._known[name]:
                self._changed = True
                raise SettingsError(
                    f"the frozen leaf {name!r} has changed",
                    got=f"other values at step {self._steps}",
                    allowed="the values that the island joined with",
                    todo="keep your optimizer away from it (optax.masked, say), or give it another rule with `merge`",
                )
            self._replaced.discard(name)


class ParameterShape:
    """The structure, names, shapes and dtypes of an island's parameters, as it joined with them."""

    def __init__(self, params: Any) -> None:  # noqa: ANN401  (the caller's pytree)
        named, shape = flatten(params)
        self.shape: TreeShape = shape
        self.names = [name for name, _ in named]
        leaves = [leaf for _, leaf in named]
        self._kinds = [(tuple(leaf.shape), leaf.dtype) for leaf in leaves]

    def leaves(self, params: Any) -> dict[str, Any]:  # noqa: ANN401  (the caller's pytree)
        """Return the leaves of such parameters by name; raise `SettingsError` for another structure, shape or dtype."""
        jax = loaded_jax()
        leaves, shape = self.shape.leaves_of(params)
        if shape != self.shape:
            raise SettingsError(
                "these are not the parameters that the island joined with",
                got=self._difference(params),
                allowed="the same tree as in `island.params`",
                todo="hand over what your step returned for `island.params`",
            )
        for name, leaf, (extent, dtype) in zip(self.names, leaves, self._kinds, strict=True):
            if jax is not None and isinstance(leaf, jax.core.Tracer):
                raise SettingsError(
                    "a step is reported from outside of compiled functions",
                    got=f"{name!r} is a tracer",
                    todo="call island.step after the jitted step, not inside it",
                )
            if not is_array(leaf) or leaf.dtype != dtype or leaf.shape != extent:
                raise SettingsError(
                    f"the leaf {name!r} has changed",
                    got=_kind(leaf),
                    allowed=f"{dtype} of shape {list(extent)}",
                    todo="keep its shape and dtype (a step that mixes precisions changes dtypes)",
                )
        return dict(zip(self.names, leaves, strict=True))

    def whole(self, by_name: Mapping[str, Any]) -> Any:  # noqa: ANN401  (the caller's pytree)
        """Return the pytree of leaves by name."""
        return self.shape.whole(by_name.values())

    def _difference(self, params: Any) -> str:  # noqa: ANN401  (the caller's pytree)
        named, shape = self.shape.of(params)
        theirs = [name for name, _ in named]
        added = [name for name in theirs if name not in self.names]
        missing = [name for name in self.names if name not in theirs]
        told = [f"{name!r} is new" for name in added[:1]] + [f"{name!r} is missing" for name in missing[:1]]
        return ", ".join(told) or str(shape)[:200]


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
    if gone := next(_deleted_names(leaves), None):
        raise SettingsError(
            "the training step donates its parameters, so nothing of them can be pushed",
            got=f"{gone!r} is deleted after the step",
            todo="join with options=JoinOptions(donated=True): each step then copies its parameters; or do not donate them",
        )


def _deleted_names(leaves: Mapping[str, Any]) -> Iterator[str]:
    for name, leaf in leaves.items():
        is_deleted = getattr(leaf, "is_deleted", None)
        if is_deleted is not None and is_deleted():
            yield name


def _kind(leaf: Any) -> str:  # noqa: ANN401  (any leaf)
    if hasattr(leaf, "dtype"):
        return f"{leaf.dtype} of shape {list(leaf.shape)}"
    return type(leaf).__name__
