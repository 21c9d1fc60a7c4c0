"""What a member says of itself is believed within what time and the run's declared batch allow.

A shard cannot see a learner's steps. It can see that no learner takes more steps a second than the run has agreed on
(`steps_per_s_max`), that a step has no more tokens than agreed (`step_tokens_max`), and that what is pushed, overwritten and
refused is no more than what was trained. So the weight of one contribution, tokens^2 / steps, grows no faster than time. (The
reference learner declares sixteen times its founder's batch where nobody set `step_tokens_max`. In a loop of one's own there is
no bound until its founder sets one.)

What it pushes of a fragment is no more than what it trained, either: each token may be pushed once (`FragmentSlot.overspends`).
Where the run declares no batch, that of the others bounds what a step weighs and counts (`step_tokens_max`). Only what is
merged counts towards the run's target, so no report ends a run.

A claim beyond that is none of a learner of ours. Such a heartbeat is dropped whole: it moves no sum and no clock. So a learner
that goes on like that is silent, and no round waits for it. Such a contribution is refused as `implausible`, which is an
offence.

Where this owner has not yet heard a learner's heartbeat, it cannot know for how long that has trained, and believes the rate.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import msgspec

from atoll.protocol.settings import ProtocolSettings

AT_ONCE_S: Final = 60.0
"""Messages may wait on their way: the steps of so long are believed at any moment."""
BATCHES_MAX: Final = 16
"""How many times the founder's tokens per step, or the others', a step may have, where the run does not say it."""
OTHERS_MIN: Final = 2


def with_declared_batch(settings: ProtocolSettings, step_tokens: int) -> ProtocolSettings:
    """Return what a founder proposes whose steps have so many tokens: others may have `BATCHES_MAX` times as many."""
    most = settings.step_tokens_max or BATCHES_MAX * step_tokens
    return msgspec.structs.replace(settings, step_tokens_max=most)


def step_tokens_max(sizes: Sequence[float], own: float, declared: int) -> float:
    """Return how many tokens of a learner's step weigh and count: what is declared, or `BATCHES_MAX` times what others take.

    `sizes` are the tokens per step of all learners, ascending; `own` is this one's among them, 0 for none. Of the others' it is
    the upper median: one of two may say that its steps are small. Of one other nobody knows which of both lies: no bound.
    """
    here = bisect_left(sizes, own) if own else len(sizes)
    others = len(sizes) - bool(own)
    middle = others // 2
    most = BATCHES_MAX * sizes[middle + (middle >= here)] if others >= OTHERS_MIN else math.inf
    return min(most, declared or math.inf)


@dataclass(frozen=True, slots=True)
class Claim:
    """A learner's totals: steps and tokens trained, token-fragments pushed, superseded and refused at home."""

    steps: int
    tokens: int
    spent: int


@dataclass(frozen=True, slots=True)
class PushClaim:
    """What a contribution says: its steps and tokens, and the tokens that its learner had trained when it was made."""

    steps: int
    tokens: int
    trained_tokens: int


class ClaimJudge:
    """Judges the claims of one owner's time; it knows what each learner claimed when it was heard first."""

    def __init__(self, settings: ProtocolSettings) -> None:
        """Know of no learner."""
        self._settings = settings
        self._first: dict[str, tuple[int, float, int]] = {}

    def fault(self, learner: str, incarnation: int, claim: Claim, at_s: float) -> str:
        """Return why a heartbeat's claim that arrived at `at_s` is not believed, or the empty string."""
        known = self._first.get(learner)
        if known is None or incarnation > known[0]:
            self._first[learner] = (incarnation, at_s, claim.steps)
        most = self._settings.step_tokens_max
        if claim.spent > self._settings.fragments * claim.tokens:
            return f"{claim.spent} token-fragments of {claim.tokens} tokens"
        if 0 < most * claim.steps < claim.tokens:
            return f"{claim.tokens} tokens in {claim.steps} steps, of {most} tokens at most"
        steps_max = self._steps_max(learner, incarnation, at_s)
        if claim.steps > steps_max:
            return f"{claim.steps} steps, {steps_max:.0f} of them possible"
        return ""

    def push_fault(self, learner: str, incarnation: int, claim: PushClaim, at_s: float) -> str:
        """Return why a contribution's claim that arrived at `at_s` is not believed, or the empty string."""
        steps_max = self._steps_max(learner, incarnation, at_s)
        if claim.tokens > claim.trained_tokens:
            return f"a push of {claim.tokens} tokens of {claim.trained_tokens} trained"
        if claim.steps > steps_max:
            return f"a push of {claim.steps} steps, {steps_max:.0f} of them possible"
        if 0 < self._settings.step_tokens_max * steps_max < claim.trained_tokens:
            return f"{claim.trained_tokens} tokens trained, in {steps_max:.0f} steps at most"
        return ""

    def _steps_max(self, learner: str, incarnation: int, at_s: float) -> float:
        """Return the most steps that this life of a learner can have taken; no bound for one that was never heard."""
        known = self._first.get(learner)
        if known is None or incarnation != known[0]:
            return math.inf
        return known[2] + self._settings.steps_per_s_max * (AT_ONCE_S + at_s - known[1])
