"""What a member says of itself is believed within what time and the run's declared batch allow.

A shard cannot see a learner's steps. It can see that no learner takes `STEPS_PER_S_MAX` steps a second, that a step has no
more tokens than the run has agreed on (`step_tokens_max`, sixteen times the founder's batch where nobody set it), and that
what is pushed, overwritten and refused is no more than what was trained. A claim beyond that is none of a learner of ours.
It is dropped whole: it moves no sum and no clock. So a learner that goes on like that is silent, and no round waits for it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import msgspec

from atoll.protocol.settings import ProtocolSettings

STEPS_PER_S_MAX: Final = 10_000.0
STEPS_AT_ONCE: Final = 10_000
BATCHES_MAX: Final = 16
"""How many times the founder's tokens per step a step may have, where the run does not say it."""


def with_declared_batch(settings: ProtocolSettings, step_tokens: int) -> ProtocolSettings:
    """Return what a founder proposes whose steps have so many tokens: others may have `BATCHES_MAX` times as many."""
    most = settings.step_tokens_max or BATCHES_MAX * step_tokens
    return msgspec.structs.replace(settings, step_tokens_max=most)


@dataclass(frozen=True, slots=True)
class Claim:
    """A learner's totals: steps and tokens trained, token-fragments pushed, superseded and refused at home."""

    steps: int
    tokens: int
    spent: int


class ClaimJudge:
    """Judges the claims of one owner's time; it knows what each learner claimed when it was heard first."""

    def __init__(self, settings: ProtocolSettings) -> None:
        """Know of no learner."""
        self._settings = settings
        self._first: dict[str, tuple[int, float, int]] = {}

    def fault(self, learner: str, incarnation: int, claim: Claim, at_s: float) -> str:
        """Return why a claim that arrived at `at_s` is not believed, or the empty string.

        Where this owner hears an incarnation for the first time, it cannot know for how long that has trained.
        """
        known = self._first.get(learner)
        if known is None or incarnation > known[0]:
            self._first[learner] = known = (incarnation, at_s, claim.steps)
        _, first_s, first_steps = known
        most = self._settings.step_tokens_max
        if claim.spent > self._settings.fragments * claim.tokens:
            return f"{claim.spent} token-fragments of {claim.tokens} tokens"
        if 0 < most * claim.steps < claim.tokens:
            return f"{claim.tokens} tokens in {claim.steps} steps, of {most} tokens at most"
        steps_max = first_steps + STEPS_AT_ONCE + STEPS_PER_S_MAX * (at_s - first_s)
        if incarnation == known[0] and claim.steps > steps_max:
            return f"{claim.steps} steps, {steps_max:.0f} of them possible"
        return ""
