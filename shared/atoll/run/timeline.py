"""What happened when: the part of the event log that a view does not keep, reduced to what a page draws.

A view (`atoll.run.view`) knows how things are. The dashboard and the report also tell when they became so: faults and
recoveries as *marks*, measurements with their time, the last contribution of each learner to each fragment, and samples of
heartbeats that are finer than those of the event log. Everything is bounded, and forgets its oldest entry.

No event says that a process died. A learner was *lost* if a newer incarnation joins and the former never left: it was lost at
the last sign of it. A shard was lost if a later tenure begins and the former owner wrote no closing ledger. What is silent at
this moment is judged by its reader, which has a clock. Times are seconds since the epoch, by the writer's clock.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from typing import Final

import msgspec

from atoll.base.errors import PeerMisbehaved
from atoll.base.fair_queue import FairQueue
from atoll.base.units import as_time
from atoll.run.decisions import describe_isolation
from atoll.run.process_views import LearnerView, SampleLine
from atoll.run.view import LEARNERS_KEPT, RunView
from atoll.wire.events import (
    FilledEvent,
    JoinedEvent,
    LeftEvent,
    QuarantinedEvent,
    RoundEvent,
    SampleEvent,
    ServingEvent,
    ValidationEvent,
    fields_of,
    sample_of,
)
from atoll.wire.messages import Event
from atoll.wire.traffic import NOTHING

MARKS_MAX: Final = 400
VALIDATED_MAX: Final = 2048
CELLS_MAX: Final = 1 << 16
RECENT_MAX: Final = 256
RECENT_S: Final = 2.0


@dataclass(frozen=True, slots=True)
class TimeMark:
    """Something that happened to one process: `group` is "fault", "recovery" or "change"."""

    at_s: float
    group: str
    kind: str
    who: str
    text: str


@dataclass(frozen=True, slots=True)
class LastContribution:
    """The newest contribution of a learner to a fragment that was merged: into which version, how many versions late."""

    version: int
    age: int
    tokens: int
    weight: float
    at_s: float

    @property
    def base(self) -> int:
        """Return the version that it was made on."""
        return self.version - 1 - self.age


@dataclass(slots=True)
class LifeSigns:
    """The incarnation of a learner that joined last: the last event or heartbeat of its own, and whether it left."""

    incarnation: int
    last_s: float
    left: bool = False


@dataclass(slots=True)
class Timeline:
    """The reduced event log; `began_s` is its first entry, `newest_s` its newest one; `faults` counts all of them."""

    marks: FairQueue[TimeMark] = field(default_factory=lambda: FairQueue(MARKS_MAX, lambda mark: mark.who))
    validated: deque[tuple[float, ValidationEvent]] = field(default_factory=lambda: deque(maxlen=VALIDATED_MAX))
    contributions: dict[tuple[int, str], LastContribution] = field(default_factory=dict)
    recent: dict[str, deque[SampleLine]] = field(default_factory=dict)
    lives: dict[str, LifeSigns] = field(default_factory=dict)
    began_s: float | None = None
    newest_s: float = 0.0
    faults: int = 0
    _epochs: dict[str, int] = field(default_factory=dict)
    _shard_last_s: dict[str, float] = field(default_factory=dict)
    _closed: set[str] = field(default_factory=set)

    def faults_of_ended(self, learners: Collection[str]) -> int:
        """Return all faults of a run that is over: also the dead that never came back, which no event tells of.

        Those are `learners`, whose processes are certainly over, that have not left, and shards that closed no ledger.
        """
        gone = sum(not life.left for learner, life in self.lives.items() if learner in learners)
        return self.faults + gone + sum(shard not in self._closed for shard in self._epochs)

    def on_event(self, event: Event) -> None:
        """Take an entry of the event log; unknown kinds are skipped, and one that cannot be read says nothing."""
        self.began_s = event.at_s if self.began_s is None else self.began_s
        self.newest_s = max(self.newest_s, event.at_s)
        handler = getattr(self, f"_on_{event.kind}", None) if event.kind in _KINDS else None
        if handler is not None:
            try:
                handler(event)
            except PeerMisbehaved:
                return  # the view has counted it

    def on_heartbeats(self, learners: Iterator[LearnerView]) -> None:
        """Keep the newest heartbeat of each learner as a sample, at most one in `RECENT_S` seconds."""
        for learner in learners:
            life = learner.latest
            if life is None or (beat := life.beat) is None:
                continue
            self._sign(beat.learner, beat.incarnation, beat.at_s)
            if self.began_s is not None and beat.at_s < self.began_s:
                continue  # nobody trained before the run began: the curves of all would begin with that clock
            kept = self.recent.setdefault(learner.learner, deque(maxlen=RECENT_MAX))
            if kept and kept[-1].at_s <= beat.at_s < kept[-1].at_s + RECENT_S:  # a clock that was set back begins anew
                continue
            kept.append(SampleLine(beat.at_s, msgspec.structs.replace(sample_of(beat), moved=NOTHING)))

    def _on_round(self, event: Event) -> None:
        line = fields_of(event, RoundEvent)
        self._shard_last_s[event.who] = event.at_s
        for share in line.contributors:
            # No sign of life: a shard may merge what a learner sent long before.
            key = (line.fragment, share.learner)
            if key not in self.contributions and len(self.contributions) >= CELLS_MAX:
                continue
            self.contributions[key] = LastContribution(line.version, share.age, share.tokens, share.weight, event.at_s)

    def _on_joined(self, event: Event) -> None:
        told = fields_of(event, JoinedEvent)
        former = self.lives.get(event.who)
        if former is None and len(self.lives) >= LEARNERS_KEPT:
            return  # the view has counted it
        self.lives[event.who] = LifeSigns(told.incarnation, event.at_s)
        if former is None or former.incarnation >= told.incarnation:
            text = "founded the run" if told.founder else "joined"
            self._mark(event, "change", "joined", text)
        elif former.left:
            self._mark(event, "change", "joined", f"joined again, as incarnation {told.incarnation}")
        else:
            gone = as_time(max(0.0, event.at_s - former.last_s))
            self._fault(former.last_s, "lost", event.who, "was lost: the last sign of it")
            self._mark(event, "recovery", "back", f"is back after {gone}, as incarnation {told.incarnation}")

    def _on_left(self, event: Event) -> None:
        told = fields_of(event, LeftEvent)
        known = self._sign(event.who, told.incarnation, event.at_s)
        if known is None:
            return
        known.left = True
        self._mark(event, "change", "left", f"left after {told.steps:,} steps")

    def _on_sample(self, event: Event) -> None:
        self._sign(event.who, fields_of(event, SampleEvent).incarnation, event.at_s)

    def _on_serving(self, event: Event) -> None:
        told = fields_of(event, ServingEvent)
        former, self._epochs[event.who] = self._epochs.get(event.who), told.epoch
        process = f"process {told.pid} on {told.host}"
        if former is None:
            self._mark(event, "change", "serving", f"is served by {process}")
        elif event.who in self._closed:
            self._mark(event, "change", "serving", f"changed hands: {process}, tenure {told.epoch}")
        else:
            last_s = min(event.at_s, self._shard_last_s.get(event.who, event.at_s))
            self._fault(last_s, "shard_lost", event.who, "was lost: its last commit")
            gone = as_time(max(0.0, event.at_s - last_s))
            text = f"is served again after {gone}: {process}, tenure {told.epoch}"
            self._mark(event, "recovery", "shard_back", text)
        self._closed.discard(event.who)

    def _on_ledger(self, event: Event) -> None:
        self._closed.add(event.who)

    def _on_quarantined(self, event: Event) -> None:
        told = fields_of(event, QuarantinedEvent)
        text = f"is in quarantine after {describe_isolation(told.offences, told.reason)}"
        self._fault(event.at_s, "quarantined", told.learner, text)

    def _on_filled(self, event: Event) -> None:
        told = fields_of(event, FilledEvent)
        text = f"its subjects were filled: {told.removed:,} messages beyond its share were removed; nobody signs them"
        self._fault(event.at_s, "filled", told.subjects_of, text)

    def _on_validation(self, event: Event) -> None:
        self.validated.append((event.at_s, fields_of(event, ValidationEvent)))

    def _mark(self, event: Event, group: str, kind: str, text: str) -> None:
        self.marks.append(TimeMark(event.at_s, group, kind, event.who, text))

    def _fault(self, at_s: float, kind: str, who: str, text: str) -> None:
        self.marks.append(TimeMark(at_s, "fault", kind, who, text))
        self.faults += 1

    def _sign(self, learner: str, incarnation: int, at_s: float) -> LifeSigns | None:
        """Note a sign of life, and return what is known of the learner; None if there is no room for its name.

        Heartbeats may be heard before the entry that tells that their sender joined. They must not replace the former
        life, whose last sign that entry tells of.
        """
        if learner not in self.lives and len(self.lives) >= LEARNERS_KEPT:
            return None
        known = self.lives.setdefault(learner, LifeSigns(incarnation, at_s))
        if known.incarnation == incarnation:
            known.last_s = max(known.last_s, at_s)
        return known


_KINDS: Final = frozenset(
    {"round", "joined", "left", "sample", "serving", "ledger", "quarantined", "filled", "validation"}
)


@dataclass(slots=True)
class TimedView(RunView):
    """A view with the timeline of the same run, fed by the same events."""

    timeline: Timeline = field(default_factory=Timeline)

    def on_event(self, event: Event) -> None:
        """Let both take an entry of the event log."""
        RunView.on_event(self, event)
        self.timeline.on_event(event)
