"""The totals that learners report of themselves, in heartbeats and in the event log, and how far a reader believes them.

A shard judges a report by what it has heard of that life before (`atoll.protocol.claims`). A reader that only shows a run
has its founding: no life can have taken more steps since then than the run allows. It drops a report beyond that whole, as a
shard does, and counts it as a message that no correct peer sends. A farewell always ends its life; its totals are cut.
"""

from __future__ import annotations

from typing import Final

import msgspec

from atoll.base.errors import PeerMisbehaved
from atoll.protocol.claims import Claim, claim_fault, cut_claim, lived_since_s, steps_possible
from atoll.wire.events import LeftEvent, SampleEvent, fields_of
from atoll.wire.messages import Beat, Event, RunRecord

IMPOSSIBLE_CLAIM: Final = "a claim that cannot be"


def claim_of(beat: Beat) -> Claim:
    """Return the totals in a heartbeat."""
    return Claim(beat.step, beat.tokens, beat.pushed, beat.superseded, beat.refused_local)


def with_claim(beat: Beat, claim: Claim) -> Beat:
    """Return a heartbeat with other totals."""
    return msgspec.structs.replace(
        beat,
        step=claim.steps,
        tokens=claim.tokens,
        pushed=claim.pushed,
        superseded=claim.superseded,
        refused_local=claim.refused_local,
    )


class ReportJudge:
    """Believes of a run's learners what can be since its founding, by the wall clock at each message's arrival or storage."""

    def __init__(self, run: RunRecord) -> None:
        self._run = run

    def beat(self, beat: Beat, wall_s: float) -> Beat:
        """Return a heartbeat that arrived at `wall_s`, a farewell with totals that can be.

        Raises:
            PeerMisbehaved: its totals cannot be.
        """
        claim, steps_max = claim_of(beat), self._steps_max(wall_s)
        fault = claim_fault(self._run.protocol, claim, steps_max)
        if fault and beat.state == "left":
            return with_claim(beat, cut_claim(self._run.protocol, claim, steps_max))
        if fault:
            raise PeerMisbehaved(IMPOSSIBLE_CLAIM, got=fault)
        return beat

    def event(self, event: Event) -> Event:
        """Return an entry of the event log, a farewell with totals that can be; raise `PeerMisbehaved` as `beat`."""
        if event.kind == "sample":
            told = fields_of(event, SampleEvent)
            claim = Claim(told.step, told.tokens, 0, told.superseded)
            if fault := claim_fault(self._run.protocol, claim, self._steps_max(event.at_s)):
                raise PeerMisbehaved(IMPOSSIBLE_CLAIM, got=fault)
        elif event.kind == "left":
            left = fields_of(event, LeftEvent)
            now = cut_claim(self._run.protocol, Claim(left.steps, left.tokens, 0), self._steps_max(event.at_s))
            if (now.steps, now.tokens) != (left.steps, left.tokens):
                return msgspec.structs.replace(event, fields={**event.fields, "steps": now.steps, "tokens": now.tokens})
        return event

    def _steps_max(self, wall_s: float) -> float:
        return steps_possible(self._run.protocol, lived_since_s(self._run.founded_at_s, wall_s))
