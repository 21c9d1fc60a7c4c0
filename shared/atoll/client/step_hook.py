r"""The step hook: where any kind of training loop meets its island, between two steps.

A loop owns parameters as a pytree, the island as arrays by name. After each step the loop hands them over. The hook adopts
fragments that have arrived, tells the driver of the step, and returns the parameters to train on. Nothing here waits for the
network. A loop that takes more steps a second than the run believes waits for `held_s()` before a step: its reports would be
dropped.

    step ─► StepHook: adopt what is ready ─► IslandDriver: facts ─► Island.handle

Let theta be the learner's values of a fragment, Theta the global ones and theta_s the snapshot that was pushed last:

.. math::

    overwrite: \theta \leftarrow \Theta \qquad
    blend: \theta \leftarrow \alpha\theta + (1-\alpha)\Theta \qquad
    carry: \theta \leftarrow \Theta + (\theta - \theta_s)

Overwrite is the paper's rule, blend Streaming DiLoCo's. Carry keeps the progress made while the round was under way, unless it
is of no use any more (`Island.keeps`). Inner-optimizer moments stay. The learner replaces arrays and never writes to them, and
always copies from host memory: JAX may alias an aligned NumPy buffer, and a frame must not change under a running step. A frame
that is on the leaves' device already is adopted there (`atoll.client.device_encoding`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, SupportsFloat

import msgspec
import numpy as np
import numpy.typing as npt

from atoll.base import large_arrays
from atoll.base.clock import Clock
from atoll.base.logs import get
from atoll.client.device_encoding import adopt_on_device
from atoll.client.driver import AdoptableFragment, StepReport
from atoll.client.membership import Origin
from atoll.client.parameters import FrozenWatch, LeafRules, ParameterShape, checked_tokens, may_change, refuse_donated
from atoll.client.session import Session
from atoll.model.layout import Layout
from atoll.model.pytrees import describe, gather, scatter
from atoll.model.tree_walk import is_jax_array, loaded_jax
from atoll.protocol.claims import StepAllowance
from atoll.protocol.settings import ProtocolSettings

log = get(__name__)


class StepHook:
    """The step boundaries of one incarnation. Structure and array names are those of the given parameters.

    `overhead` is the share of the time since the first step that was spent inside `step`. Of all `leaves`, the run merges those
    that are `travelling`: only they are snapshots that must not change.
    """

    def __init__(self, session: Session, params: Any, clock: Clock, *, donated: bool = False) -> None:  # noqa: ANN401
        """Take the run's values in place of `params`, a pytree."""
        layout, protocol = session.run.layout, session.run.protocol
        self.session = session
        self._clock = clock
        self._donated = donated
        self._shape = ParameterShape(params)
        ready = session.driver.first_frames()
        self.leaves: Mapping[str, Any] = adopt(layout, protocol, self._shape.leaves(params), ready)
        self.travelling: Mapping[str, Any] = self._travelling_of(self.leaves)
        self.frozen = FrozenWatch(session.run.frozen, self.leaves)
        self._last_s = 0.0
        self._began_s = 0.0
        self._steps = 0
        self.inside_s = 0.0
        self.overhead = 0.0
        self._allowance = StepAllowance(protocol)
        self._was_held = False

    @property
    def params(self) -> Any:  # noqa: ANN401  (the caller's pytree)
        """Return the parameters to train from."""
        return self._shape.whole(self.leaves)

    @property
    def run_tokens(self) -> int:
        """Return where the whole run is, tokens: what is merged, and by the last call what was trained since."""
        return self.session.driver.progress.tokens

    @property
    def done(self) -> bool:
        """Return whether the loop should end: the token target is reached or a drain was requested."""
        return self.session.driver.done

    def _travelling_of(self, leaves: Mapping[str, Any]) -> dict[str, Any]:
        return {tensor.name: leaves[tensor.name] for tensor in self.session.run.layout.tensors}

    def _keep_leaf(self, leaf: Any) -> Any:  # noqa: ANN401  (any array)
        return np.array(leaf) if self._donated or may_change(leaf) else leaf

    def begin(self) -> None:
        """Note that the first step begins."""
        self._last_s = self._clock.monotonic()

    def held_s(self) -> float:
        """Return for how long the loop must wait before it hands over its next step: 0 at a pace that is believed."""
        now_s = self._clock.monotonic()
        wait_s = self._allowance.wait_s(now_s)
        if wait_s > 0.0 and not self._was_held:
            self._was_held = True
            log.warning(
                "learner.held",
                steps_per_s=round(self._allowance.fast_steps_per_s(now_s), 1),
                allowed=self.session.run.protocol.steps_per_s_max,
                held_to=round(self._allowance.steps_per_s, 1),
                why="a shard believes no learner more steps a second than that: it would drop your heartbeats",
                todo="hand several steps over as one, with the tokens of all; or found the run with a larger "
                "protocol.steps_per_s_max",
            )
        return wait_s

    def step(self, params: Any, *, tokens: int, loss: SupportsFloat | None = None) -> Any:  # noqa: ANN401
        """Report a completed step over `tokens` tokens and return the parameters to continue from.

        Raises:
            SettingsError: these are not the parameters that the island joined with, or the step has donated them or changed a
                frozen leaf.
            AtollError: the island cannot go on (a newer incarnation took the id over, or the driver failed).
        """
        began_s = self._clock.monotonic()
        driver = self.session.driver
        if driver.failure is not None:
            driver.failure_told = True
            raise driver.failure
        tokens = checked_tokens(tokens)
        if not self._donated:
            refuse_donated(self.travelling)
        self.leaves = self._shape.leaves(params)
        self.frozen.step(self.leaves)
        completed = self.travelling = self._travelling_of(self.leaves)
        snapshot = {name: self._keep_leaf(leaf) for name, leaf in completed.items()}
        ready = driver.end_step(tokens, snapshot)
        if ready:
            self.leaves = adopt(self.session.run.layout, self.session.run.protocol, self.leaves, ready)
            self.travelling = self._travelling_of(self.leaves)
            snapshot = {
                name: snapshot[name] if leaf is completed[name] else self._keep_leaf(leaf)
                for name, leaf in self.travelling.items()
            }
            params = self._shape.whole(self.leaves)
        self._steps += 1
        self._allowance.take(began_s)
        step_s = began_s - self._last_s if self._steps > 1 else 0.0
        driver.go_on(snapshot, ready, StepReport(step_s, loss, self.overhead))
        self._last_s = self._clock.monotonic()
        self.inside_s += self._last_s - began_s
        if self._steps == 1:
            self._began_s, self.inside_s = self._last_s, 0.0
        lived_s = self._last_s - self._began_s
        self.overhead = self.inside_s / lived_s if lived_s > 0 else 0.0
        return params


def plan_origin(params: Any, fragments: int, rules: LeafRules) -> tuple[Layout, Origin]:  # noqa: ANN401
    """Return how the leaves of `params` that travel are divided into `fragments` parts, and what a founder brings of them."""
    layout = rules.layout(describe(params), fragments)
    return layout, Origin(layout, ParameterShape(params).leaves(params))


def adopt(
    layout: Layout, settings: ProtocolSettings, leaves: Mapping[str, Any], ready: list[AdoptableFragment]
) -> dict[str, Any]:
    """Return `leaves` (name -> array) with every ready fragment adopted; untouched arrays are passed through."""
    adopted = dict(leaves)
    for item in ready:
        slices, rules = layout.slices(item.frame.fragment), settings.of(item.frame.fragment)
        if item.carry_from is None:
            rules = msgspec.structs.replace(rules, adoption="overwrite")
        on_device = None if item.placed is None else adopt_on_device(slices, rules, adopted, item.placed)
        if on_device is not None:
            adopted |= on_device
            continue
        values = item.frame.values
        if rules.adoption == "blend":
            alpha = np.float32(rules.blend_alpha)
            values = alpha * gather(layout, adopted, item.frame.fragment) + (np.float32(1.0) - alpha) * values
        elif rules.adoption == "carry" and item.carry_from is not None:
            carried = gather(layout, adopted, item.frame.fragment)
            carried -= item.carry_from
            carried += values
            values = carried
        shared = values is item.frame.values
        for name, pieces in scatter(layout, item.frame.fragment, values, adopted).items():
            adopted[name] = _with_rows(adopted[name], pieces, shared=shared)
            large_arrays.release_pages(*(rows for _, _, rows in pieces))
    return adopted


def _with_rows(leaf: Any, pieces: list[tuple[int, int, npt.NDArray[Any]]], *, shared: bool) -> Any:  # noqa: ANN401  (any array)
    """Return a new array like `leaf`, on the same device, with the given rows replaced; `shared` rows are somebody else's.

    On the CPU the array is put together in host memory: a copy, and nothing to compile. On an accelerator only the new
    rows are transferred, and the update is one program per pair of shapes, whatever the row. An array that was not
    committed to a device stays uncommitted: otherwise a jitted step would be compiled again for the other kind.
    """
    jax, on_host = loaded_jax(), not is_jax_array(leaf)
    if on_host or all(device.platform == "cpu" for device in leaf.devices()):
        uncommitted = not on_host and not leaf.committed
        # `device_put` aliases aligned memory, whatever its options are.
        array = _assemble(leaf, pieces, copied=shared and not uncommitted)
        if not on_host:
            return jax.numpy.array(array, copy=True) if uncommitted else jax.device_put(array, leaf.sharding)
        if isinstance(leaf, np.ndarray) and not leaf.flags.writeable:
            # A loop that changes no array in place gets none that it could change: a snapshot of it needs no copy.
            array.flags.writeable = False
        return array
    from atoll.codec import on_device  # noqa: PLC0415

    for start, _, rows in pieces:
        leaf = on_device.overwrite(leaf, rows, start) if leaf.ndim else jax.device_put(rows, leaf.sharding)
    return leaf


def _assemble(leaf: Any, pieces: list[tuple[int, int, npt.NDArray[Any]]], *, copied: bool) -> npt.NDArray[Any]:  # noqa: ANN401
    if (rows := pieces[0][2]).shape == leaf.shape:
        return rows.copy() if copied else rows
    array = np.array(leaf)
    for start, stop, rows in pieces:
        array[... if array.ndim == 0 else slice(start, stop)] = rows
    return array
