"""Liveness of a run's learners at a moment, and what each does then: pure, the same for consoles, pages, metrics and alerts.

A view knows what was heard and when; it has no clock. A learner is heard if its newest heartbeat is at most the run's
`silence_s` old, a synchronizer process if its newest presence is at most a lease and two beats old: one of them may be lost on
the way. What a learner does is what its newest heartbeat says, while it is heard:

joining, training, draining   as it says itself; joining also without a heartbeat, if its life began just now
silent                        it was heard or has begun, has not left, and is not heard any more
left                          it has said goodbye
ended                         only the event log tells of it, and nobody heard how it ended
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from atoll.protocol.ownership import BEATS_PER_LEASE
from atoll.protocol.pacing import BEATS_PER_SILENCE
from atoll.protocol.settings import ProtocolSettings
from atoll.run.process_views import HostView, LearnerView

BEATS_UNHEARD: Final = 2.0
"""How many usual pauses between heartbeats one who has just begun to listen waits before it calls a learner silent."""


@dataclass(frozen=True, slots=True)
class Hearing:
    """Times at which a run was listened to.

    Attributes:
        protocol: what the run agreed on.
        now_s: the moment by the clock of the view's arrivals.
        wall_s: the same moment by date; None where no date is known.
        began_s: when the listener began, by the clock of `now_s`.
        over: whether the run has reached its end.
    """

    protocol: ProtocolSettings
    now_s: float
    wall_s: float | None
    began_s: float
    over: bool

    @property
    def has_listened(self) -> bool:
        """Return whether every live learner must have been heard by now: what says nothing since we listen is silent."""
        return self.now_s - self.began_s >= BEATS_UNHEARD * self.protocol.silence_s / BEATS_PER_SILENCE

    def hears(self, learner: LearnerView) -> bool:
        """Return whether a learner is heard, and has not left: its farewell may have come by the event log alone."""
        return (
            not learner.has_left
            and learner.heard_s is not None
            and self.now_s - learner.heard_s <= self.protocol.silence_s
        )

    def hears_host(self, host: HostView) -> bool:
        """Return whether a synchronizer process is heard."""
        bound_s = self.protocol.lease_s * (1.0 + 2.0 / BEATS_PER_LEASE)
        return host.heard_s is not None and self.now_s - host.heard_s <= bound_s

    def state(self, learner: LearnerView) -> str:
        """Return what a learner does."""
        life = learner.latest
        if life is None or learner.has_left:
            return "left"
        if life.beat is not None:
            return life.beat.state if self.hears(learner) else "silent"
        return self._without_beat(life.joined_at_s)

    def _without_beat(self, joined_at_s: float | None) -> str:
        """Return what a learner does of whose life no heartbeat is known; `joined_at_s` is a date."""
        if self.over:
            return "ended"
        if self.wall_s is not None and joined_at_s is not None and self.wall_s - joined_at_s <= self.protocol.silence_s:
            return "joining"
        if self.has_listened:
            return "silent"
        return "joining" if self.wall_s is None else "ended"
