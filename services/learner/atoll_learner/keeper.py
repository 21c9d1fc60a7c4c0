"""When a learner writes a checkpoint (at intervals while it trains, and when it leaves) and what its note holds."""

from __future__ import annotations

import time
from typing import Any

import msgspec

from atoll.base.logs import get
from atoll.client.checkpoints import Checkpoints, DataPlace, life_of, note_now, rebuilt_from
from atoll.client.join import IslandHandle
from atoll.client.optimizer_state import Arrays, host_copy
from atoll.protocol.data import Progress
from atoll.settings import Settings

log = get(__name__)


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
        self._life = life_of(island, settings.learner.id)
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
        note = note_now(self._life, self._island, self._steps, self._steps * self._tokens_per_step)
        places = tuple(DataPlace(unit, read, of) for unit, (read, of) in cursor.items())
        note = msgspec.structs.replace(note, cursor=places)
        checkpoints.save(self._arrays, note, copied_s)
