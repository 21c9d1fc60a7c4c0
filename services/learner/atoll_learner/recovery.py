r"""State with which a learner's inner optimizer begins: its own checkpoint, else a healthy peer's state, else fresh.

Moments go with parameters that have moved on meanwhile, and that is meant: the second is an average of squared gradients
over a horizon of 1 / (1 - beta2) steps and changes slowly, and the step count they are corrected by comes with them. With
fresh moments the first steps are of full size in every coordinate, whatever the gradient. How old is too old was measured
(docs/lab/training.md): up to four horizons cost nothing against a state that was kept, a peer's present state is as good, ten
horizons are better than a fresh start, and a state of long ago is worse. Age is counted in tokens of the whole run, which
is how far the parameters have moved; with several learners that judges a checkpoint older than it is, never younger.
A checkpoint from before the run was rebuilt may be ahead of it; then the distance counts, as it does backwards.

What is adopted must be moments that gradients can have made. For Adam from zero, with \beta_1^2 < \beta_2, any sequence
of gradients obeys (Cauchy and Schwarz over the two geometric weights)

.. math::

    m^2 \le v \cdot \frac{(1 - \beta_1)^2}{(1 - \beta_2) (1 - \beta_1^2 / \beta_2)}

so a state that breaks it, has a negative second moment or a negative count is refused: it could throw the parameters
anywhere in one step, finite as it is. Muon's momentum is an average of gradients, which are clipped, so it is no longer
than a gradient may be; and the coefficients of its iteration, which optax keeps in the state, are what a fresh state has.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import jax
import numpy as np
import optax

from atoll.base.logs import get
from atoll.client.checkpoints import (
    Checkpoints,
    LoadedCheckpoint,
    age_of,
    checkpoint_recovery,
    fresh_recovery,
    loan_recovery,
)
from atoll.client.join import IslandHandle
from atoll.client.peer_recovery import Borrowed
from atoll.protocol.data import Key
from atoll_learner.train import init_optimizer
from atoll_learner.train_settings import TrainSettings

log = get(__name__)

GOOD_HORIZONS: Final = 4.0
USABLE_HORIZONS: Final = 10.0
ROUNDING: Final = 1.02
TINY: Final = 1e-12
"""Second moments below this square underflow: such a first moment moves a parameter by less than Adam's epsilon lets it."""


@dataclass(frozen=True, slots=True)
class Recovered:
    """The state to begin from, where it came from, and the place in the data, empty without a checkpoint."""

    state: Any
    source: str
    cursor: Mapping[Key, tuple[int, int]]


def recover(island: IslandHandle, checkpoints: Checkpoints | None, train: TrainSettings, fresh: Any) -> Recovered:  # noqa: ANN401
    """Return the best state there is, and say on log and event log which it was."""
    own = _own(checkpoints, train, fresh)
    # What was read was read: with another optimizer, too, whose checkpoints cannot be used.
    cursor = own.note.progress if own else checkpoints.place() if checkpoints is not None else {}
    age_tokens = age_of(own, island.run_tokens) if own else 0
    horizon_tokens = train.tokens_per_step / (1.0 - train.beta2)
    if own is not None and age_tokens <= GOOD_HORIZONS * horizon_tokens:
        return _from_checkpoint(island, own, age_tokens)
    borrowed = island.recovered_state(fresh) if island.run_tokens > 0 and not island.done else None
    if borrowed is not None and possible(borrowed, train):
        island.note_recovery(loan_recovery(island.incarnation, borrowed, island.run_tokens))
        return Recovered(borrowed.state, "peer", cursor)
    if own is not None and age_tokens <= USABLE_HORIZONS * horizon_tokens:
        return _from_checkpoint(island, own, age_tokens)
    if own is not None:
        log.warning("checkpoint.too_old", age_tokens=age_tokens, allowed=int(USABLE_HORIZONS * horizon_tokens))
    island.note_recovery(fresh_recovery(island.incarnation))
    return Recovered(fresh, "fresh", cursor)


def possible(borrowed: Borrowed, train: TrainSettings) -> bool:
    """Return whether gradients can have led to the peer's state; log a warning if not."""
    reason = impossible(borrowed.state, train)
    if reason:
        log.warning("state.not_borrowed", peer=borrowed.lender, reason=reason)
    return not reason


def impossible(state: Any, train: TrainSettings) -> str:  # noqa: ANN401  (an optax state)
    """Return why no gradients can have led to this state, or "" when they can."""
    reasons = [_impossible_adam(part, train) for part in _parts(state, optax.ScaleByAdamState)]
    reasons += [_impossible_muon(part, train) for part in _parts(state, optax.contrib.MuonState)]
    return next((reason for reason in reasons if reason), "")


def _impossible_adam(adam: Any, train: TrainSettings) -> str:  # noqa: ANN401
    if int(adam.count) < 0:
        return f"a step count of {int(adam.count)}"
    ratio = train.beta1**2 / train.beta2 if train.beta2 else 1.0
    bound = ROUNDING * (1 - train.beta1) ** 2 / ((1 - train.beta2) * (1 - ratio)) if ratio < 1 else None
    for name, first in adam.mu.items():
        if isinstance(first, optax.MaskedNode):
            continue
        size, second = np.abs(np.asarray(first)), np.asarray(adam.nu[name])
        if bool((second < 0).any()):
            return f"a negative second moment in {name}"
        if bound is not None and bool((size > np.sqrt(bound * second) + TINY).any()):
            return f"a first moment in {name} that its second moment rules out"
    return ""


def _impossible_muon(muon: Any, train: TrainSettings) -> str:  # noqa: ANN401
    if int(muon.count) < 0:
        return f"a step count of {int(muon.count)}"
    fresh = _parts(init_optimizer(train, {}), optax.contrib.MuonState)[0]
    if not np.array_equal(np.asarray(muon.ns_coeffs), np.asarray(fresh.ns_coeffs)):
        return "other coefficients of Muon's iteration than ours"
    norm = float(optax.tree.norm(muon.mu))
    return (
        ""
        if norm <= ROUNDING * train.clip
        else f"a momentum of length {norm:g} from gradients of at most {train.clip:g}"
    )


def _own(checkpoints: Checkpoints | None, train: TrainSettings, fresh: Any) -> LoadedCheckpoint | None:  # noqa: ANN401
    own = checkpoints.load(fresh) if checkpoints is not None else None
    if own is not None and (reason := impossible(own.state, train)):
        log.warning("checkpoint.refused", reason=reason)
        return None
    return own


def _from_checkpoint(island: IslandHandle, own: LoadedCheckpoint, age_tokens: int) -> Recovered:
    island.note_recovery(checkpoint_recovery(island.incarnation, own, age_tokens))
    return Recovered(own.state, "checkpoint", own.note.progress)


def _parts(state: Any, kind: type) -> list[Any]:  # noqa: ANN401
    """Return the states of one kind of transformation inside a state."""
    found = jax.tree.leaves(state, is_leaf=lambda node: isinstance(node, kind))
    return [node for node in found if isinstance(node, kind)]
