"""Checkpoints of an incarnation, and its end within a bound: return the data, push what is left, say goodbye, checkpoint.

A checkpoint is written at intervals while the learner trains, and when it leaves. The order at the end follows what each step
is worth to others. Data that is not returned waits until its lease expires. A pseudo-gradient that is not pushed is lost to
the model. A checkpoint that is not written costs only this learner the steps since the one before. A checkpoint may be slow
(a large state, a network disk), and one is often under way when the signal comes, so nothing that others need waits for it.
It gets the rest of the bound, and a share of its own in any case.
"""

from __future__ import annotations

import time
from typing import Any, Final

import msgspec

from atoll.base.logs import get
from atoll.client.checkpoints import Checkpoints, DataPlace, life_of, note_now, rebuilt_from
from atoll.client.join import IslandHandle
from atoll.client.optimizer_state import Arrays, host_copy
from atoll.protocol.data import Progress
from atoll.settings import Settings
from atoll_learner.data.token_source import SourceFeed
from atoll_learner.feed import LeasedFeed

log = get(__name__)
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
