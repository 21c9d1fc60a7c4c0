"""Belief in what a member says of itself: as far as time and the run's declared batch allow.

A shard cannot see a learner's steps. It can see that no learner takes more steps a second than the run has agreed on
(`steps_per_s_max`), that a step has no more tokens than agreed (`step_tokens_max`), and that what is pushed, overwritten and
refused is no more than what was trained. So the weight of one contribution, tokens^2 / steps, grows no faster than time. Where
the run declares no batch, that of the others bounds what a step weighs and counts (`step_tokens_max`), and what they
contribute bounds a contribution (`tokens_bound`). Only what is merged counts towards the run's target, so no report ends a
run.

A claim beyond that is none of a learner of ours. Such a heartbeat is dropped whole, so a learner that goes on like that is
silent, and no round waits for it. Such a contribution is refused as `implausible`, which is an offence. A farewell always ends
its life; the totals in it are cut to what can be.

The first claim of a life that an owner hears is bounded by the time that the life can have lasted (`lived_s`): since the owner
read the members without it, or since the run was founded, by clocks that may be an hour apart. The claims after it are bounded
by the time since it. A learner keeps the same bound from its own side (`StepAllowance`), so nothing of an honest loop is
beyond belief, whichever owner hears it. It believes a call's claim of how far the run is likewise (`RunProgress`).
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

import msgspec

from atoll.protocol.settings import ProtocolSettings

AT_ONCE_S: Final = 60.0
"""Messages may wait on their way: the steps of so long are believed at any moment."""
HELD_AHEAD_S: Final = 30.0
"""A loop may be ahead of the allowed pace by the steps of so long; messages may be on their way for the rest of `AT_ONCE_S`."""
HELD_SHARE: Final = 0.99
"""A loop is held to so much of the allowed pace: its clock may be a little faster than a shard's."""
CLOCKS_APART_S: Final = 3600.0
"""The founding of a run is dated by another machine's clock."""
BATCHES_MAX: Final = 16
"""How many times the founder's tokens per step, or the others', a step may have, where the run does not say it."""
FLEET_MAX: Final = 64.0
"""Tokens of the run for each of ours, while the leases were not read twice."""
LATELY_MAX: Final = 2.0
"""Between two readings of the leases, a fleet is believed to come so many times as far for each of our tokens as lately."""
INTERVALS_MAX: Final = 16
OTHERS_MIN: Final = 2


def with_declared_batch(settings: ProtocolSettings, step_tokens: int) -> ProtocolSettings:
    """Return what a founder proposes whose steps have so many tokens: others may have `BATCHES_MAX` times as many."""
    most = settings.step_tokens_max or BATCHES_MAX * step_tokens
    return msgspec.structs.replace(settings, step_tokens_max=most)


def step_tokens_max(sizes: Sequence[float], own: float, declared: int) -> float:
    """Return how many tokens of a learner's step weigh and count: what is declared, or `BATCHES_MAX` times what others take.

    `sizes` are the tokens per step of all learners, ascending; `own` is this one's among them, 0 for none. Of the others' it
    is the upper median: one of two may say that its steps are small. Of one other nobody knows which of both lies: no bound.
    """
    return min(_most_beside(sizes, own), declared or math.inf)


class TokensBound(NamedTuple):
    """How many tokens of one contribution count towards the target, and how many weigh in its round, at most."""

    counted: float = math.inf
    weighed: float = math.inf


def tokens_bound(
    totals: Sequence[int], own: int, interval_steps: int, step_tokens: float, step_tokens_max: float
) -> TokensBound:
    """Return how much of a contribution of `step_tokens` a step counts and weighs at most.

    `totals` are the tokens that counted of each learner's last contribution, ascending; `own` is this one's among them, 0 for
    none. That is `BATCHES_MAX` times the upper median of two or more others. Of one other nobody knows which of both lies: a
    contribution counts as many tokens as those of `INTERVALS_MAX` intervals, or `BATCHES_MAX` times the other's.
    """
    if (most := _most_beside(totals, own)) < math.inf:
        most = max(most, interval_steps * step_tokens_max)
        return TokensBound(most, most)
    other = sum(totals) - own  # of one learner at most
    return TokensBound(max(INTERVALS_MAX * interval_steps * min(step_tokens, step_tokens_max), BATCHES_MAX * other))


def _most_beside(sizes: Sequence[float], own: float) -> float:
    """Return `BATCHES_MAX` times the upper median of the others' sizes; infinite for fewer than two others."""
    here = bisect_left(sizes, own) if own else len(sizes)
    others = len(sizes) - bool(own)
    middle = others // 2
    return BATCHES_MAX * sizes[middle + (middle >= here)] if others >= OTHERS_MIN else math.inf


@dataclass(frozen=True, slots=True)
class Claim:
    """A learner's totals: steps and tokens trained, token-fragments pushed, superseded and refused at home."""

    steps: int
    tokens: int
    pushed: int
    superseded: int = 0
    refused_local: int = 0

    @property
    def spent(self) -> int:
        """Return the token-fragments that have met a fate."""
        return self.pushed + self.superseded + self.refused_local

    def cut(self, steps: int, tokens: int, spent: int) -> Claim:
        """Return the claim with no more than that; what was pushed is cut last, as shards know it themselves."""
        pushed = min(self.pushed, spent)
        refused_local = min(self.refused_local, spent - pushed)
        superseded = min(self.superseded, spent - pushed - refused_local)
        return Claim(min(self.steps, steps), min(self.tokens, tokens), pushed, superseded, refused_local)


@dataclass(frozen=True, slots=True)
class PushClaim:
    """The claim of a contribution: its steps and tokens, and the tokens that its learner had trained when it was made."""

    steps: int
    tokens: int
    trained_tokens: int


def lived_since_s(founded_at_s: float, wall_s: float) -> float:
    """Return for how long a life of a run founded then can have lasted by now, both by clocks of machines (s).

    Where both are found to disagree by more than `CLOCKS_APART_S`, nobody knows: infinity.
    """
    lived_s = wall_s - founded_at_s + CLOCKS_APART_S
    return lived_s if lived_s >= 0.0 else math.inf


def claim_fault(settings: ProtocolSettings, claim: Claim, steps_max: float) -> str:
    """Return why totals of a learner that can have taken so many steps are not believed, or the empty string."""
    most = settings.step_tokens_max
    if claim.spent > settings.fragments * claim.tokens:
        return f"{claim.spent} token-fragments of {claim.tokens} tokens"
    if 0 < most * claim.steps < claim.tokens:
        return f"{claim.tokens} tokens in {claim.steps} steps, of {most} tokens at most"
    if claim.steps > steps_max:
        return f"{claim.steps} steps, {steps_max:.0f} of them possible"
    return ""


def cut_claim(settings: ProtocolSettings, claim: Claim, steps_max: float) -> Claim:
    """Return what is believed of the totals in a farewell of a learner that can have taken so many steps."""
    steps = int(min(claim.steps, steps_max))
    most = settings.step_tokens_max
    tokens = min(claim.tokens, most * steps) if most else claim.tokens
    return claim.cut(steps, tokens, settings.fragments * tokens)


def steps_possible(settings: ProtocolSettings, lived_s: float) -> float:
    """Return the most steps that a life can have taken which has lasted so long: one at any moment, then so many a second."""
    return 1 + settings.steps_per_s_max * (AT_ONCE_S + lived_s)


class ClaimJudge:
    """Judges the claims of one owner's time; it knows what each learner claimed when it was heard first."""

    def __init__(self, settings: ProtocolSettings) -> None:
        self._settings = settings
        self._first: dict[str, tuple[int, float, int]] = {}

    def fault(self, learner: str, incarnation: int, claim: Claim, at_s: float, lived_s: float = math.inf) -> str:
        """Return why a heartbeat's claim that arrived at `at_s` is not believed, or the empty string.

        By then its life had lasted `lived_s` at most.
        """
        steps_max = self._steps_max(learner, incarnation, at_s, lived_s)
        if fault := claim_fault(self._settings, claim, steps_max):
            return fault
        known = self._first.get(learner)
        if known is None or incarnation > known[0]:
            self._first[learner] = (incarnation, at_s, claim.steps)
        return ""

    def push_fault(
        self, learner: str, incarnation: int, claim: PushClaim, at_s: float, lived_s: float = math.inf
    ) -> str:
        """Return why a contribution's claim that arrived at `at_s` is not believed, or the empty string; `lived_s` as above."""
        steps_max = self._steps_max(learner, incarnation, at_s, lived_s)
        if claim.tokens > claim.trained_tokens:
            return f"a push of {claim.tokens} tokens of {claim.trained_tokens} trained"
        if claim.steps > steps_max:
            return f"a push of {claim.steps} steps, {steps_max:.0f} of them possible"
        if 0 < self._settings.step_tokens_max * steps_max < claim.trained_tokens:
            return f"{claim.trained_tokens} tokens trained, in {steps_max:.0f} steps at most"
        return ""

    def last_claim(self, learner: str, incarnation: int, claim: Claim, at_s: float, lived_s: float = math.inf) -> Claim:
        """Return what is believed of the totals in a farewell: a life that ends has no later report that could be right."""
        if not self.fault(learner, incarnation, claim, at_s, lived_s):
            return claim
        return cut_claim(self._settings, claim, self._steps_max(learner, incarnation, at_s, lived_s))

    def _steps_max(self, learner: str, incarnation: int, at_s: float, lived_s: float) -> float:
        known = self._first.get(learner)
        heard, since_s = (known[2], at_s - known[1]) if known and known[0] == incarnation else (0, lived_s)
        return heard + steps_possible(self._settings, since_s)


class StepAllowance:
    """The pace of a learner's loop, by its own clock, at which every report of its steps is believed.

    In any time of `t` seconds it lets through at most `1 + HELD_SHARE * steps_per_s_max * (HELD_AHEAD_S + t)` steps, so no
    more than a shard believes (`ClaimJudge`) that heard the first report of them late by less than what `HELD_AHEAD_S` leaves
    of `AT_ONCE_S`. Time in which the loop was slow is not saved up: a shard that has just taken over has not seen it.
    """

    def __init__(self, settings: ProtocolSettings) -> None:
        self.steps_per_s = HELD_SHARE * settings.steps_per_s_max
        self._even_s = -math.inf  # when the steps so far have taken no less time than they must
        self._fast_s = 0.0  # since when they take less
        self._fast_steps = 0

    def fast_steps_per_s(self, at_s: float) -> float:
        """Return the pace of the loop since it last was no faster than allowed, 0 if it is not."""
        return self._fast_steps / (at_s - self._fast_s) if self._fast_steps and at_s > self._fast_s else 0.0

    def wait_s(self, at_s: float) -> float:
        """Return for how long the next step is held, 0 for not at all."""
        return max(0.0, self._even_s - HELD_AHEAD_S - at_s)

    def take(self, at_s: float) -> None:
        """Count a step that ended at `at_s`."""
        if self._even_s <= at_s:
            self._even_s, self._fast_s, self._fast_steps = at_s, at_s, 0
        self._even_s += 1.0 / self.steps_per_s
        self._fast_steps += 1


class RunProgress:
    """The run's tokens, for a learner that has trained `own` itself: what records say was merged, and what calls claim since.

    A run ends by the tokens merged in the fragment that is the furthest, which heads and leases say (`is_over`). Every call
    says where the run is by now, and schedules go by that number (`tokens`); but a call may be wrong. So the leases are read
    at intervals. In between a call is believed as far as the fleet can have come since then: for each token of this learner's,
    twice as many as it came lately by the leases' word. `target` is the run's, 0 for none.
    """

    def __init__(self, target: int) -> None:
        self._target = target
        self._proven = 0
        self._own_then = 0
        self._per_own = FLEET_MAX
        self._proofs = 0
        self.tokens = 0

    def hear(self, claimed: int, own: int) -> bool:
        """Take a call's number; return whether it is beyond belief, or the end, so that the leases should be read."""
        bound = self._bound(own)
        self.tokens = max(self.tokens, min(claimed, bound))
        return claimed > bound or 0 < self._target <= claimed

    def prove(self, tokens: int, own: int) -> None:
        """Take the number that the leases say, read after this learner had trained `own`.

        They are a moment old, so calls stay believed; but no further beyond the leases than before.
        """
        ahead = self._bound(own) - self._proven
        if self._proofs and own > self._own_then:
            lately = LATELY_MAX * max(0, tokens - self._proven) / (own - self._own_then)
            # Leases may stand still for a moment, and a fleet does not shrink in one.
            self._per_own = min(FLEET_MAX, max(lately, self._per_own / 2.0, LATELY_MAX))
        self._proofs += 1
        self._proven, self._own_then = max(self._proven, tokens), own
        self.tokens = max(self._proven, min(self.tokens, self._proven + ahead))

    def record(self, tokens: int) -> None:
        """Take the count of a head: its fragment's alone."""
        self._proven = max(self._proven, tokens)
        self.tokens = max(self.tokens, tokens)

    @property
    def is_over(self) -> bool:
        """Return whether the target is reached, by what heads and leases say."""
        return 0 < self._target <= self._proven

    def _bound(self, own: int) -> int:
        return self._proven + int(self._per_own * (own - self._own_then))
