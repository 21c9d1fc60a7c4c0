r"""The outer optimizer: from a merged pseudo-gradient to the next global values, in float32 on the shard.

With outer learning rate eta and momentum mu (Sec. 2 of arXiv 2604.21428; the paper does not publish its numbers):

.. math::

    m \leftarrow \mu m + \Delta, \qquad \Theta \leftarrow \Theta - \eta(\Delta + \mu m)

which is SGD with Nesterov momentum. Solved for m, the values of two versions tell the momentum of the later one:

.. math::

    m_{v+1} = (\mu m_v + (\Theta_v - \Theta_{v+1}) / \eta) / (1 + \mu)

so whoever follows the values need not be sent the momentum (`Nesterov.derive`). Large vectors take compiled loops, which give
the same bits. Optax transformations can replace it; only then does a shard need JAX.

**Data names no code.** A run record, and so an archive, names an optimizer of a fixed list (`atoll.protocol.settings.OUTERS`).
Any other name, `module:attribute`, is imported only where the process's own settings name the same: who founded a run, or
edited an archive, chooses nothing that runs elsewhere.
"""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import partial
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from atoll.base import large_arrays
from atoll.base.errors import ProtocolMisuse, SettingsError
from atoll.base.large_arrays import Vector
from atoll.base.parallel import for_each, parts
from atoll.codec import KEYFRAME
from atoll.codec.formats.bf16 import widen
from atoll.codec.formats.interface import Halves
from atoll.codec.kernels import FAST_ELEMENTS
from atoll.codec.kernels.background import CompiledLater
from atoll.protocol.settings import NESTEROV, OUTER_ALLOWED, OUTERS, ProtocolSettings

State = dict[str, npt.NDArray[Any]]

MOMENTUM: Final = "momentum"
STRETCH: Final = 1024
"""Elements that stay in the first cache between the loops of a compiled step."""

_NO_MOMENTUM = np.empty(0, dtype=np.float32)
NO_CARRY: Final = np.empty(0, dtype=np.uint16)


class OuterOptimizer(ABC):
    """Pure pair, as in optax: neither call changes its arguments."""

    @abstractmethod
    def init(self, params: Vector) -> State:
        """Return the state for a fragment with values `params`, flat float32."""

    @abstractmethod
    def update(self, params: Vector, pseudo_gradient: Vector, state: State) -> tuple[Vector, State]:
        """Return the next values and the next state."""


class PartwiseOptimizer(OuterOptimizer):
    """An optimizer of our own: each number depends only on those at its index, so any stretch of a fragment can be stepped."""

    def update(self, params: Vector, pseudo_gradient: Vector, state: State) -> tuple[Vector, State]:
        """Take one step, part by part."""
        mine = {name: state[name] for name in self.init(params[:0]) if name in state}
        values, kept = large_arrays.empty(params.size), {name: large_arrays.empty(params.size) for name in mine}

        def take(part: tuple[int, int]) -> None:
            now = slice(*part)
            ours, newer = ({name: array[now] for name, array in arrays.items()} for arrays in (mine, kept))
            self.step(params[now], NO_CARRY, pseudo_gradient[now], ours, values[now], newer)

        for_each(take, parts(0, params.size), params.size)
        return values, kept

    @abstractmethod
    def step(
        self,
        params: Vector,
        carry: Halves,
        pseudo_gradient: Vector,
        state: State,
        following: Vector,
        kept: State,
    ) -> None:
        """Take one step from `params` plus `carry` (bits of bfloat16, may be empty); write to `following` and `kept`.

        `state` may hold others' arrays, which are passed over. Raises `ProtocolMisuse` for vectors that do not belong
        together.
        """

    @abstractmethod
    def derive(self, state: State, before: Vector, after: Vector, kept: State) -> None:
        """Write to `kept`, which may be `state`, the state of the version with values `after`, from that with `before`."""


class Nesterov(PartwiseOptimizer):
    """SGD with Nesterov momentum; equal to `optax.sgd(lr, momentum, nesterov=True)` on `pseudo-gradient`."""

    def __init__(self, lr: float, momentum: float) -> None:
        self.lr = np.float32(lr)
        self.momentum = np.float32(momentum)
        self._per_lr = np.float32(1.0 / lr)
        self._share = np.float32(1.0 / (1.0 + momentum))

    def init(self, params: Vector) -> State:
        """Return zero momentum, or nothing when there is none."""
        return {MOMENTUM: large_arrays.zeros(params.size, np.float32)} if self.momentum else {}

    def step(
        self,
        params: Vector,
        carry: Halves,
        pseudo_gradient: Vector,
        state: State,
        following: Vector,
        kept: State,
    ) -> None:
        """Take one step, compiled where the vectors are long."""
        former, newer = (arrays.get(MOMENTUM, _NO_MOMENTUM) for arrays in (state, kept))
        vectors = [params, pseudo_gradient, following, *([former, newer] if self.momentum else [])]
        alike = all(vector.shape == (params.size,) and vector.dtype == np.float32 for vector in vectors)
        if not alike or carry.size not in (0, params.size) or (former.size and not self.momentum):
            got = [(vector.shape, vector.dtype.name) for vector in (*vectors, carry)]
            raise ProtocolMisuse("values, pseudo-gradient and momentum that do not belong together", got=got)
        compiled = compiled_step.found(params.size) if params.size >= FAST_ELEMENTS else None
        if compiled is not None:
            compiled(params, carry, pseudo_gradient, former, self.lr, self.momentum, following, newer)
            return
        step: npt.NDArray[Any] = pseudo_gradient
        if former.size:
            np.add(self.momentum * former, pseudo_gradient, out=newer)
            step = pseudo_gradient + self.momentum * newer
        unrounded = params + widen(carry) if carry.size else params
        np.subtract(unrounded, self.lr * step, out=following)

    def derive(self, state: State, before: Vector, after: Vector, kept: State) -> None:
        """Derive the momentum."""
        if MOMENTUM not in state:
            return
        momentum, newer = state[MOMENTUM], kept[MOMENTUM]
        compiled = compiled_derive.found(momentum.size) if momentum.size >= FAST_ELEMENTS else None
        if compiled is not None:
            compiled(momentum, before, after, self.momentum, self._per_lr, self._share, newer)
            return
        stepped = np.subtract(before, after)
        np.multiply(stepped, self._per_lr, out=stepped)
        np.multiply(momentum, self.momentum, out=newer)
        np.add(newer, stepped, out=newer)
        np.multiply(newer, self._share, out=newer)


def derivable(settings: ProtocolSettings) -> bool:
    """Return whether the values of versions tell the outer state: they are sent as deltas, and it is a momentum at most.

    Such a state is not stored with every version: momentum and what rounding took are six bytes per parameter, a delta of four
    bits half a byte. So the momentum is *defined* by the values sent. A share of mu^2 / (1 + mu) of rounding's error (0.07 at
    mu = 0.3) enters the next step, where the residue takes it back. A keyframe is stored with its momentum; a reader of it and
    the deltas after it has the newest momentum to the bit (`atoll.run.delta_chain`). The residue stays with the owner of a
    shard, and the next one begins with none. Where the state says more than the values do, it is stored with every version,
    residue included.
    """
    return settings.codec_down != KEYFRAME and settings.outer_is_native and not settings.average_versions


class OptaxOuter(OuterOptimizer):
    """Any optax transformation whose update is added to the parameters (so it holds its own learning rate)."""

    def __init__(self, transformation: Any) -> None:  # noqa: ANN401  (optax is loaded lazily)
        self._transformation = transformation

    def init(self, params: Vector) -> State:
        """Return the transformation's state as arrays by leaf number."""
        import jax  # noqa: PLC0415  (a shard without an optax outer optimizer never loads JAX)

        state = self._transformation.init(params)
        return {str(number): np.asarray(leaf) for number, leaf in enumerate(jax.tree.leaves(state))}

    def update(self, params: Vector, pseudo_gradient: Vector, state: State) -> tuple[Vector, State]:
        """Take one step; the state's structure is that of `init`."""
        import jax  # noqa: PLC0415

        leaves, structure = jax.tree.flatten(self._transformation.init(params))
        held = jax.tree.unflatten(structure, [state[str(number)] for number in range(len(leaves))])
        updates, held = self._transformation.update(pseudo_gradient, held, params)
        kept = {str(number): np.asarray(leaf) for number, leaf in enumerate(jax.tree.leaves(held))}
        return params + np.asarray(updates, dtype=np.float32), kept


def check_outer(spec: str, own: str) -> None:
    """Raise `SettingsError` unless `spec` is on the list, or is `own`: what the settings of this process name itself."""
    if spec in OUTERS or spec == own:
        return
    raise SettingsError(
        "the run names code as its outer optimizer, and this process was not told to run it",
        got=f"protocol.outer = {spec[:80]} of the run, {own} here",
        allowed=OUTER_ALLOWED,
        todo="if you trust that code, and it is installed here, give this process the same name: --set protocol.outer=…, "
        "ATOLL_PROTOCOL__OUTER, or its configuration",
        setting="protocol.outer",
    )


def make_outer(spec: str, lr: float, momentum: float, own: str = NESTEROV) -> OuterOptimizer:
    """Return the outer optimizer that `spec` names, where `own` is what the settings of this process name.

    `nesterov`; `optax:<name>` for `optax.<name>(lr)`, if it is on the list; `module:attribute` for a callable of the learning
    rate that returns an optax transformation, if `own` is the same. Raises `SettingsError` for code that is not run here, not
    there, or no optimizer.
    """
    check_outer(spec, own)
    if spec == NESTEROV:
        return Nesterov(lr, momentum)
    module, _, attribute = spec.partition(":")
    try:
        factory = getattr(importlib.import_module(module), attribute)
    except (Exception, SystemExit) as error:  # a module of somebody's own fails as it likes
        raise SettingsError(
            "unknown outer optimizer",
            got=f"{spec}: {type(error).__name__}: {error}",
            allowed=OUTER_ALLOWED,
            todo="set protocol.outer, and install optax where the synchronizer runs if you name one of its",
            setting="protocol.outer",
        ) from error
    try:
        transformation = factory(lr)
        complete = callable(transformation.init) and callable(transformation.update)
    except (Exception, SystemExit) as error:
        raise _not_a_factory(f"{spec}: {type(error).__name__}: {error}") from error
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


# The compiled loops look for momentum and carry once per stretch, not once per number: each inner loop is a vector loop, and
# memory is read and written once. No multiplication is fused with an addition, so the bits are those of `Nesterov`.


def _step(
    values: Vector,
    carry: Halves,
    pseudo_gradient: Vector,
    momentum: Vector,
    lr: float,
    mu: float,
    next_values: Vector,
    next_momentum: Vector,
) -> None:
    for start in range(0, values.size, STRETCH):
        now, delta = values[start : start + STRETCH], pseudo_gradient[start : start + STRETCH]
        then, lost = next_values[start : start + STRETCH], carry[start : start + STRETCH]
        if momentum.size:
            before, after = momentum[start : start + STRETCH], next_momentum[start : start + STRETCH]
            for i in range(now.size):
                pushed = mu * before[i] + delta[i]
                after[i] = pushed
                then[i] = lr * (delta[i] + mu * pushed)
        else:
            for i in range(now.size):
                then[i] = lr * delta[i]
        if carry.size:
            for i in range(now.size):
                then[i] = (now[i] + np.uint32(np.uint32(lost[i]) << np.uint32(16)).view(np.float32)) - then[i]
        else:
            for i in range(now.size):
                then[i] = now[i] - then[i]


def _derive(
    momentum: Vector, before: Vector, after: Vector, mu: float, per_lr: float, share: float, kept: Vector
) -> None:
    for i in range(momentum.size):
        kept[i] = (mu * momentum[i] + (before[i] - after[i]) * per_lr) * share


def _compiled(loop: Callable[..., None], *arguments: str) -> Callable[..., None] | None:
    try:
        from numba import types  # noqa: PLC0415  (loaded when there is much to step)

        from atoll.codec.kernels import compiled  # noqa: PLC0415
    except ImportError:
        return None
    signature = types.void(*(getattr(compiled, name) for name in arguments))
    return compiled.compiled(signature)(loop)


_STEP_ARGUMENTS = ("F32_IN", "U16_IN", "F32_IN", "F32_IN", "F32", "F32", "F32_OUT", "F32_OUT")
compiled_step = CompiledLater("nesterov", partial(_compiled, _step, *_STEP_ARGUMENTS))
_DERIVE_ARGUMENTS = ("F32_IN", "F32_IN", "F32_IN", "F32", "F32", "F32", "F32_OUT")
compiled_derive = CompiledLater("nesterov_derive", partial(_compiled, _derive, *_DERIVE_ARGUMENTS))


def compile_steps() -> None:
    """Compile the loops of our own outer optimizer, or load them; wait for it."""
    compiled_step.now()
    compiled_derive.now()
