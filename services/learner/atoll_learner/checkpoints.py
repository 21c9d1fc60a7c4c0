"""Checkpoints of an incarnation, and its end within a bound: return the data, push what is left, say goodbye, checkpoint.

A checkpoint is written at intervals while the learner trains, and when it leaves. The order at the end follows what each step
is worth to others. Data that is not returned waits until its lease expires. A pseudo-gradient that is not pushed is lost to
the model. A checkpoint that is not written costs only this learner the steps since the one before. A checkpoint may be slow
(a large state, a network disk), and one is often under way when the signal comes, so nothing that others need waits for it.
It gets the rest of the bound, and a share of its own in any case.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import jax
import msgspec
import numpy as np
import optax

from atoll.base.logs import get
from atoll.client.checkpoints import (
    Checkpoints,
    DataPlace,
    LoadedCheckpoint,
    age_of,
    checkpoint_recovery,
    fresh_recovery,
    life_of,
    loan_recovery,
    note_now,
    rebuilt_from,
)
from atoll.client.join import IslandHandle
from atoll.client.optimizer_state import Arrays, Borrowed, host_copy
from atoll.protocol.data import Key, Progress
from atoll.settings import Settings
from atoll_learner.data.token_source import SourceFeed
from atoll_learner.feed import LeasedFeed
from atoll_learner.train import init_optimizer
from atoll_learner.train_settings import TrainSettings

log = get(__name__)

GOOD_HORIZONS: Final = 4.0
USABLE_HORIZONS: Final = 10.0
ROUNDING: Final = 1.02
TINY: Final = 1e-12
"""Second moments below this square underflow: such a first moment moves a parameter by less than Adam's epsilon lets it."""
RETURN_SHARE: Final = 4.0
"""Of the bound for leaving, this part at most goes into returning the data: pushes matter more."""
KEEP_SHARE: Final = 8.0
"""Of the bound, this part is left to the checkpoint even if the broker never answers."""
PUSH_S_MIN: Final = 0.1


class Keeper:
    """Writes checkpoints of one incarnation's optimizer state if the settings name a folder; for the training thread."""

    def __init__(self, settings: Settings, island: IslandHandle, tokens_per_step: int) -> None:
        """Name the place; nothing is written before the first interval is over."""
        self._island = island
        self._tokens_per_step = tokens_per_step
        self._every_s = settings.learner.checkpoint_every_s
        self._kept_s: float | None = None
        self._steps = 0
        self._arrays: Arrays | None = None
        self._life = life_of(island.run, settings.learner.id, island.incarnation)
        folder = settings.learner.checkpoint_dir
        former = rebuilt_from(island.run)
        self.checkpoints = Checkpoints(folder, self._life, former) if folder is not None else None

    def keep(self, state: Any, cursor: Progress) -> None:  # noqa: ANN401  (an optax state)
        """Note a step, and begin a checkpoint when one is due: a copy to host memory here, the rest in a thread."""
        self._steps += 1
        now_s = time.monotonic()
        if self._kept_s is None and self.checkpoints is not None:
            self.checkpoints.warm()
        self._kept_s = now_s if self._kept_s is None else self._kept_s
        if self.checkpoints is None or now_s - self._kept_s < self._every_s or self.checkpoints.busy:
            return
        self._kept_s = now_s
        self._begin(self.checkpoints, state, cursor)

    def keep_last(self, state: Any, cursor: Progress, deadline_s: float) -> None:  # noqa: ANN401
        """Begin the checkpoint of a life that ends, as soon as one under way is written; a life without steps has none."""
        if self.checkpoints is None or not self._steps:
            return
        if self.checkpoints.finish(deadline_s - time.monotonic()):
            self._begin(self.checkpoints, state, cursor)

    def finish(self, deadline_s: float) -> None:
        """Wait for the checkpoint under way until `deadline_s` of the monotonic clock."""
        if self.checkpoints is not None and not self.checkpoints.finish(deadline_s - time.monotonic()):
            log.warning("checkpoint.unfinished", reason="the bound for leaving (learner.drain_s) is over")

    def _begin(self, checkpoints: Checkpoints, state: Any, cursor: Progress) -> None:  # noqa: ANN401
        began_s = time.monotonic()
        # Nothing is under way, so what was copied for the last checkpoint is written and its memory free.
        self._arrays = host_copy(state, self._arrays)
        copied_s = time.monotonic() - began_s
        island, tokens = self._island, self._steps * self._tokens_per_step
        machine = island.session.driver.machine
        note = note_now(self._life, machine, steps=self._steps, tokens=tokens, run_tokens=island.run_tokens)
        places = tuple(DataPlace(unit, read, of) for unit, (read, of) in cursor.items())
        note = msgspec.structs.replace(note, cursor=places)
        checkpoints.save(self._arrays, note, copied_s)


def leave(island: IslandHandle, feed: LeasedFeed | SourceFeed, keeper: Keeper, state: Any, bound_s: float) -> None:  # noqa: ANN401
    """Leave in good order within `bound_s`, or as far as that allows; `state` is None when no checkpoint is wanted.

    Raises:
        AtollError: the island failed, or its last pushes are not durable; the message names them.
    """
    if (failure := island.session.driver.failure) is not None:
        raise failure
    deadline_s = time.monotonic() + bound_s
    returned = feed.close(bound_s / RETURN_SHARE)
    cursor = {} if returned else feed.cursor
    reserved_s = bound_s / KEEP_SHARE if keeper.checkpoints is not None else 0.0
    try:
        island.close(max(PUSH_S_MIN, deadline_s - reserved_s - time.monotonic()))
    finally:
        deadline_s = max(deadline_s, time.monotonic() + reserved_s)
        if state is not None:
            keeper.keep_last(state, cursor, deadline_s)
        keeper.finish(deadline_s)


@dataclass(frozen=True, slots=True)
class Recovered:
    """The state to begin from, where it came from, and the place in the data, empty without a checkpoint."""

    state: Any
    source: str
    cursor: Mapping[Key, tuple[int, int]]


def recover(island: IslandHandle, checkpoints: Checkpoints | None, train: TrainSettings, fresh: Any) -> Recovered:  # noqa: ANN401
    """Return the best state there is, and say on log and event log which it was.

    Moments go with parameters that have moved on meanwhile, and that is meant: the second is an average of squared gradients
    over a horizon of 1 / (1 - beta2) steps and changes slowly. With fresh moments the first steps are of full size in every
    coordinate. By measurement (docs/lab/training.md) up to four horizons cost nothing against a state that was kept, a peer's
    present state is as good, ten horizons are better than a fresh start, and a state of long ago is worse. Age is counted in
    tokens of the whole run, which judges a checkpoint older than it is, never younger; of one from before the run was rebuilt,
    which may be ahead of it, the distance counts.
    """
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
    r"""Return why no gradients can have led to this state, or "" when they can.

    Adopted moments must be such as gradients can have made. For Adam from zero, with \beta_1^2 < \beta_2, any sequence
    of gradients obeys (Cauchy and Schwarz over the two geometric weights)

    .. math::

        m^2 \le v \cdot \frac{(1 - \beta_1)^2}{(1 - \beta_2) (1 - \beta_1^2 / \beta_2)}

    so a state that breaks it, has a negative second moment or a negative count is refused: it could throw the parameters
    anywhere in one step, finite as it is. Muon's momentum is an average of gradients, which are clipped, so it is no longer
    than a gradient may be; and the coefficients of its iteration, which optax keeps in the state, are what a fresh state has.
    """
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
    found = jax.tree.leaves(state, is_leaf=lambda node: isinstance(node, kind))
    return [node for node in found if isinstance(node, kind)]
