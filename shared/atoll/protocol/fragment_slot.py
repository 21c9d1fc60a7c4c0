"""What a shard keeps for one fragment: its present round, its ledger, what waits, and when it was last called."""

from __future__ import annotations

from dataclasses import dataclass, field

from atoll.protocol.events import PushKey
from atoll.protocol.fragment_ledger import FragmentLedger
from atoll.protocol.reasons import Opened, Opening
from atoll.protocol.round import FragmentRound, Offer


@dataclass(slots=True)
class FragmentSlot:
    """One fragment of a shard. `due_s` is its next beat; `parked` offers wait for the next round."""

    round: FragmentRound
    fragment_ledger: FragmentLedger
    offers: dict[PushKey, Offer] = field(default_factory=dict)
    parked: list[PushKey] = field(default_factory=list)
    called_s: float | None = None
    due_s: float | None = None

    def opening(self, at_s: float, opened: Opened, step_s: float, cause_id: str) -> Opening:
        """Return how its round comes to be called at `at_s`; the round only notes it."""
        began_s = at_s if self.round.began_s is None else self.round.began_s
        due_s = at_s if self.due_s is None else self.due_s
        return Opening(
            opened="first" if opened == "due" and self.called_s is None else opened,
            rested_s=at_s - began_s,
            late_s=max(0.0, at_s - due_s),
            behind_commit=began_s > due_s,
            interval_steps=self.round.settings.interval_steps,
            step_s=step_s,
            cause_id=cause_id,
        )
