"""How far a run is, as a learner knows it: what records say was merged, and what calls claim since.

A run ends by its count, the tokens merged in the fragment that is the furthest, which heads and leases say: only these end it
for a learner. Every call says where the run is by now, and schedules go by that number. But a call is a message that may be
wrong. So the leases are read at intervals. In between a call is believed as far as the fleet can have come since then: for each
token of this learner's, twice as many as it came lately by the leases' word.
"""

from __future__ import annotations

from typing import Final

FLEET_MAX: Final = 64.0
"""Tokens of the run for each of ours, while the leases were not read twice."""
LATELY_MAX: Final = 2.0


class RunProgress:
    """The run's tokens, for a learner that has trained `own` itself.

    `tokens` goes by calls, too, and is for schedules. Only records end a run for its learner (`reached`).
    """

    def __init__(self, target: int) -> None:
        """Know of none; `target` is the run's, 0 for none."""
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
    def reached(self) -> bool:
        """Return whether the target is reached, by what heads and leases say."""
        return 0 < self._target <= self._proven

    def _bound(self, own: int) -> int:
        return self._proven + int(self._per_own * (own - self._own_then))
