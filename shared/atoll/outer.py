r"""The outer optimizer: from a merged displacement to the next global values, in float32 on the shard.

With outer learning rate eta and momentum mu (Sec. 2 of arXiv 2604.21428; the paper does not publish its numbers):

.. math::

    m \leftarrow \mu m + \Delta, \qquad \Theta \leftarrow \Theta - \eta(\Delta + \mu m)

which is SGD with Nesterov momentum. With mu = 0 it is plain SGD and keeps no state; with eta = 1 as well, the new global
value is the weighted average of the learners' values. Any optax transformation serves instead, by name or by
`module:attribute`; only then is JAX needed on a shard.
"""

from __future__ import annotations

import importlib
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from atoll.errors import ProtocolMisuse, SettingsError
from atoll.kernels import Vector, kernels, memory, spill
from atoll.kernels.threads import each, parts

State = dict[str, npt.NDArray[Any]]


class OuterOptimizer(Protocol):
    """Pure pair: neither call changes its arguments.

    `elementwise`: a number of the result depends on the numbers in its place alone, and so does every array of the state.
    """

    elementwise: bool

    def init(self, params: Vector) -> State:
        """Return the state for a fragment with values `params`, flat float32."""

    def update(self, params: Vector, displacement: Vector, state: State) -> tuple[Vector, State]:
        """Return the next values and the next state."""


class Nesterov:
    """SGD with Nesterov momentum; equal to `optax.sgd(lr, momentum, nesterov=True)` on `displacement`."""

    elementwise = True

    def __init__(self, lr: float, momentum: float) -> None:
        """Keep eta and mu."""
        self.lr = np.float32(lr)
        self.momentum = np.float32(momentum)

    def init(self, params: Vector) -> State:
        """Return zero momentum, or nothing when there is none."""
        return {"momentum": spill.zeros(params.size, np.float32)} if self.momentum else {}

    def update(self, params: Vector, displacement: Vector, state: State) -> tuple[Vector, State]:
        """Take one step."""
        if not self.momentum:
            return np.subtract(params, self.lr * displacement, dtype=np.float32), {}
        former = state["momentum"]
        if {displacement.shape, former.shape} != {params.shape} or former.dtype != np.float32:
            got = (params.shape, displacement.shape, former.shape, former.dtype.name)
            raise ProtocolMisuse("values, displacement and momentum that do not belong together", got=got)
        values, momentum = memory.empty(params.size), memory.empty(params.size)
        step, vectors = kernels(params.size).nesterov, (params, displacement, former, values, momentum)

        def take(part: tuple[int, int]) -> None:
            now, delta, before, after, kept = (vector[slice(*part)] for vector in vectors)
            step(now, delta, before, self.lr, self.momentum, after, kept)

        each(take, parts(0, params.size), params.size)
        return values, {"momentum": momentum}


class OptaxOuter:
    """Any optax transformation whose update is added to the parameters (so it holds its own learning rate)."""

    elementwise = False

    def __init__(self, transformation: Any) -> None:  # noqa: ANN401  (optax is loaded lazily)
        """Keep the transformation."""
        self._transformation = transformation

    def init(self, params: Vector) -> State:
        """Return the transformation's state as arrays by leaf number."""
        import jax  # noqa: PLC0415  (a shard without an optax outer optimizer never loads JAX)

        state = self._transformation.init(params)
        return {str(number): np.asarray(leaf) for number, leaf in enumerate(jax.tree.leaves(state))}

    def update(self, params: Vector, displacement: Vector, state: State) -> tuple[Vector, State]:
        """Take one step; the state's structure is that of `init`."""
        import jax  # noqa: PLC0415

        leaves, structure = jax.tree.flatten(self._transformation.init(params))
        held = jax.tree.unflatten(structure, [state[str(number)] for number in range(len(leaves))])
        updates, held = self._transformation.update(displacement, held, params)
        kept = {str(number): np.asarray(leaf) for number, leaf in enumerate(jax.tree.leaves(held))}
        return params + np.asarray(updates, dtype=np.float32), kept


def make_outer(spec: str, lr: float, momentum: float) -> OuterOptimizer:
    """Return the outer optimizer that `spec` names.

    `nesterov`; `optax:<name>` for `optax.<name>(lr)`; `module:attribute` for a callable of the learning rate that returns
    an optax transformation.

    Raises:
        SettingsError: there is no such optimizer here, or what is there makes none from a learning rate.
    """
    if spec == "nesterov":
        return Nesterov(lr, momentum)
    module, _, attribute = spec.partition(":")
    try:
        factory = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        raise SettingsError(
            "unknown outer optimizer",
            got=spec,
            allowed="nesterov, optax:<name> or module:attribute",
            todo="set protocol.outer, and install optax where the synchronizer runs if you name one of its",
        ) from error
    try:
        transformation = factory(lr)
        complete = callable(transformation.init) and callable(transformation.update)
    except (AttributeError, TypeError) as error:
        raise _not_a_factory(spec) from error
    if not complete:
        raise _not_a_factory(spec)
    return OptaxOuter(transformation)


def _not_a_factory(spec: str) -> SettingsError:
    return SettingsError(
        "this makes no outer optimizer from a learning rate",
        got=spec,
        allowed="a callable of one number that returns an optax transformation",
        todo="set protocol.outer to such a callable; its `init` and `update` will be called",
    )
