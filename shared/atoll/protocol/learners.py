"""A shard's view of a learner: its incarnation, when it was last heard, and its step time."""

from __future__ import annotations

from dataclasses import dataclass

PATIENCE_STEPS = 10.0


STEP_S_MIN = 1e-6
STEP_S_MAX = 3600.0
"""A step time out of these bounds is no training: one absurd heartbeat must neither stop a rhythm nor make a learner live
for ever, so it counts as the nearest bound."""


def plausible(step_s: float) -> float:
    """Return the step time that counts for one that a learner reported, seconds."""
    return min(max(step_s, STEP_S_MIN), STEP_S_MAX)


@dataclass(slots=True)
class KnownLearner:
    """A learner's newest incarnation: `training` now, or at least `present` (not left).

    `step_s` is the step time of its last heartbeat, which is a mean over many steps already (`atoll.protocol.steps`).
    """

    incarnation: int
    heard_s: float
    step_s: float | None = None
    training: bool = False
    present: bool = True

    def heard(self, at_s: float, silence_s: float) -> bool:
        """Return whether it was heard recently enough; it may be silent for ten of its own steps."""
        return at_s - self.heard_s <= max(silence_s, PATIENCE_STEPS * (self.step_s or 0.0))
