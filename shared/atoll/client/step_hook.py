"""The step hook: where any kind of training loop meets its island, between two steps.

A loop owns parameters as a pytree, the island as arrays by name. After each step the loop hands them over. The hook
adopts fragments that have arrived, tells the driver of the step, and returns the parameters to train on. Nothing here
waits for the network. A loop that takes more steps a second than the run believes waits for `held_s()` before a step: its
reports would be dropped. Two layers stand between a step and the protocol: this one, and the driver that owns the machine.

    step ─► StepHook: adopt what is ready ─► IslandDriver: facts ─► Island.handle

`IslandHandle` is a hook with a thread for the driver's loop; a simulator runs hook and driver on one loop.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, SupportsFloat

import msgspec
import numpy as np

from atoll.base.clock import Clock
from atoll.base.logs import get
from atoll.client.adoption import adopt
from atoll.client.driver import StepReport
from atoll.client.founding import Origin
from atoll.client.leaf_rules import LeafRules
from atoll.client.parameters import FrozenWatch, ParameterShape, checked_tokens, may_change, refuse_donated
from atoll.client.session import Session
from atoll.model.layout import Layout
from atoll.model.pytrees import describe
from atoll.protocol.claims import StepAllowance

log = get(__name__)


class StepHook:
    """The step boundaries of one incarnation. Structure and array names are those of the given parameters.

    `overhead` is the share of the time since the first step that was spent inside `step`. Of all `leaves`, the run merges those
    that are `travelling`: only they are snapshots that must not change.
    """

    def __init__(self, session: Session, params: Any, clock: Clock, *, donated: bool = False) -> None:  # noqa: ANN401
        """Take the run's values in place of `params`, a pytree.

        A joining learner has learnt nothing yet, so it overwrites its values whatever the rule for later adoptions is.
        """
        layout, protocol = session.run.layout, session.run.protocol
        self.session = session
        self._clock = clock
        self._donated = donated
        self._shape = ParameterShape(params)
        joining = msgspec.structs.replace(protocol, adoption="overwrite")
        ready = session.driver.first_frames()
        self.leaves: Mapping[str, Any] = adopt(layout, joining, self._shape.leaves(params), ready)
        self.travelling: Mapping[str, Any] = self._travelling_of(self.leaves)
        self.frozen = FrozenWatch(session.run.frozen, self.leaves)
        self._last_s = 0.0
        self._began_s = 0.0
        self._steps = 0
        self.inside_s = 0.0
        self.overhead = 0.0
        self._allowance = StepAllowance(protocol)
        self._held_log = HeldLog()

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
        driver = self.session.driver
        return driver.drain_wanted or driver.progress.is_over

    def _travelling_of(self, leaves: Mapping[str, Any]) -> dict[str, Any]:
        return {tensor.name: leaves[tensor.name] for tensor in self.session.run.layout.tensors}

    def _keep_leaf(self, leaf: Any) -> Any:  # noqa: ANN401  (any array)
        """Return a leaf of a snapshot: a copy in host memory if the loop may change or delete it."""
        return np.array(leaf) if self._donated or may_change(leaf) else leaf

    def begin(self) -> None:
        """Note that the first step begins."""
        self._last_s = self._clock.monotonic()

    def held_s(self) -> float:
        """Return for how long the loop must wait before it hands over its next step: 0 at a pace that is believed.

        Where it must, the log says so, once.
        """
        now_s = self._clock.monotonic()
        wait_s = self._allowance.wait_s(now_s)
        if wait_s > 0.0:
            allowed, held_to = self.session.run.protocol.steps_per_s_max, self._allowance.steps_per_s
            self._held_log.tell(self._allowance.fast_steps_per_s(now_s), allowed, held_to)
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
        driver.go_on(snapshot, ready, StepReport(step_s=step_s, loss=loss, overhead=self.overhead, steps=self._steps))
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


class HeldLog:
    """Warns once in a life that its loop is held: it takes more steps a second than the run believes of one learner."""

    def __init__(self) -> None:
        self._warned = False

    def tell(self, steps_per_s: float, allowed: float, held_to: float) -> None:
        """Warn, the first time, of a loop that takes so many steps a second, where fewer are allowed."""
        if self._warned:
            return
        self._warned = True
        log.warning(
            "learner.held",
            steps_per_s=round(steps_per_s, 1),
            allowed=allowed,
            held_to=round(held_to, 1),
            why="a shard believes no learner more steps a second than that: it would drop your heartbeats",
            todo="hand several steps over as one, with the tokens of all; or found the run with a larger "
            "protocol.steps_per_s_max",
        )
