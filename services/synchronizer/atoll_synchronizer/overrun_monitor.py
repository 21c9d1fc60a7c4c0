"""Notices rounds that last longer than the interval they should fit into: then most tokens come late."""

from __future__ import annotations

from atoll.base.logs import get
from atoll.protocol.settings import ProtocolSettings

log = get(__name__)

HURRIED_ROUNDS = 20


class OverrunMonitor:
    """Counts consecutive hurried rounds of one shard, and logs a warning every `HURRIED_ROUNDS`."""

    def __init__(self, settings: ProtocolSettings) -> None:
        """Begin without rounds."""
        self._interval_steps = settings.interval_steps
        self._hurried = 0

    def see(self, round_s: float, step_s: float | None) -> None:
        """Count a round from call to commit, beside the learners' median step."""
        if step_s is None:
            return
        interval_s = self._interval_steps * step_s
        self._hurried = self._hurried + 1 if round_s > interval_s else 0
        if self._hurried and self._hurried % HURRIED_ROUNDS == 0:
            log.warning(
                "interval.too_short",
                round_s=round(round_s, 4),
                interval_s=round(interval_s, 4),
                todo=f"found a run with protocol.interval_steps={max(2, round(2 * round_s / step_s))} or more",
            )
