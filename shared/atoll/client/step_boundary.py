"""What the training thread hands to the island's driver after each step, and how the driver reads the loss in it.

A training loop may report its loss as a JAX scalar that is still being computed. Turning it into a number waits for the
device: a moment, seconds behind a long queue of steps, or for ever when the device hangs. The island's loop never waits
for that. So a worker thread reads the loss, one reading at a time, and the caller waits at most `PATIENCE_S`. After that
the caller gets the last known loss. In virtual time a worker thread does its work at once, so there the answer is always
the newest step's.

A loss that cannot be read, because the device was lost or because it is no scalar, is NaN, and the reader warns once.
The run goes on: training itself meets such an error soon enough. A learner with such a loss lends its state to no peer.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, SupportsFloat

from atoll.base.logs import get
from atoll.base.quantities import FIGURE_MAX
from atoll.client.adoption import AdoptableFragment

log = get(__name__)

PATIENCE_S: Final = 0.2


@dataclass(slots=True)
class StepReport:
    """What the training thread reports of its newest step; `loss` may be a JAX scalar on its way (see `LossReader`)."""

    step_s: float = 0.0
    loss: SupportsFloat | None = None
    overhead: float = 0.0
    steps: int = 0


@dataclass(frozen=True, slots=True)
class StepBoundary:
    """A step boundary: arrays by name as the step `completed` them, and as training `continued` after the adoptions."""

    tokens: int
    completed: Mapping[str, Any]
    continued: Mapping[str, Any]
    adopted: list[AdoptableFragment]
    report: StepReport


class LossReader:
    """Reads the losses of one learner. Belongs to the island's loop."""

    def __init__(self) -> None:
        """Know no loss yet."""
        self.known: float | None = None
        self._reading: asyncio.Future[float] | None = None
        self._failed = ""

    async def read(self, loss: SupportsFloat | None) -> float | None:
        """Return the newest `loss` as a number, or the last known one if this takes too long.

        Never raises: NaN stands for a loss that cannot be read, None for a loop that reports none. One beyond
        `FIGURE_MAX`, for which messages have no room, has diverged: it is infinite.
        """
        if loss is None or isinstance(loss, float | int):
            self.known = None if loss is None else _told(loss)
            return self.known
        if self._reading is not None and self._reading.done():
            self._take(self._reading)
        if self._reading is None:
            self._reading = asyncio.get_running_loop().run_in_executor(None, self._number, loss)
        reading = self._reading
        await asyncio.wait({reading}, timeout=PATIENCE_S)
        if reading.done():
            self._take(reading)
        return self.known

    def _take(self, reading: asyncio.Future[float]) -> None:
        """Remember the result of a reading, unless a concurrent caller did so already."""
        if reading is self._reading:
            self.known, self._reading = reading.result(), None

    def _number(self, loss: SupportsFloat) -> float:
        """Return a loss as a number, in a worker thread."""
        try:
            return _told(loss)
        except Exception as error:  # noqa: BLE001  (the caller's object: a lost device raises any error)
            if repr(error) != self._failed:
                self._failed = repr(error)
                log.warning("loss.unreadable", reason=self._failed)
            return math.nan


def _told(loss: SupportsFloat) -> float:
    number = float(loss)
    return math.inf if abs(number) > FIGURE_MAX else number
