"""The lives of learners by the event log: an index of all that it tells of each incarnation, made in one pass.

    joined ──► samples, merged contributions ──► left, or nothing more

A life that has not left in order ends with the last sign of it. No event tells how many steps such a life made: its newest
sample and its merged contributions do, as far as they go. A history that keeps only the newest rounds and samples still has the
newest sample of every life, so a life does not lose its steps when its rounds are forgotten.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from atoll.run.event_fields import Contributor, JoinedEvent, LeftEvent, SampleEvent
from atoll.run.view import RoundLine
from atoll.story.history import History, Noted, base_of


@dataclass(slots=True)
class RecordedLife:
    """What the event log tells of one incarnation, in order; None where it has no such event.

    `newest` is its newest sample, also where the history has forgotten that among its `samples`.
    """

    incarnation: int
    joined: Noted[JoinedEvent] | None = None
    left: Noted[LeftEvent] | None = None
    newest: Noted[SampleEvent] | None = None
    samples: list[Noted[SampleEvent]] = field(default_factory=list)
    merged: list[tuple[RoundLine, Contributor]] = field(default_factory=list)

    @property
    def steps(self) -> int:
        """Return how many inner steps it made: by its farewell, else by its newest sample and its contributions."""
        if self.left is not None:
            return self.left.fields.steps
        by_fragment: Counter[int] = Counter()
        for line, share in self.merged:
            by_fragment[line.round.fragment] += share.steps
        sampled = [] if self.newest is None else [self.newest.fields.step]
        return max([*sampled, *by_fragment.values()], default=0)

    @property
    def last_s(self) -> float | None:
        """Return the last sign of it, seconds since the epoch; None if the event log has none."""
        signs = [each.at_s for each in (self.joined, self.left, self.newest) if each is not None]
        return max([*signs, *(line.at_s for line, _ in self.merged[-1:])], default=None)

    def first_step_s(self, step_s: float) -> float | None:
        """Return when its first step began, seconds since the epoch, by the samples before and after that.

        `step_s` is the time of a step. None if the event log does not tell, because its first samples have a step already or
        are forgotten. A life that never stepped began no step before its newest sample.
        """
        still = [each.at_s for each in self.samples if each.fields.step == 0]
        if not still or self.samples[0].fields.step > 0:
            return None
        first = next((each for each in self.samples if each.fields.step > 0), None)
        begun_s = still[-1] if first is None else first.at_s - first.fields.step * step_s
        return max(still[-1], begun_s)


def lives_of(history: History) -> dict[str, dict[int, RecordedLife]]:
    """Return all lives by learner and incarnation, both in order."""
    found: dict[str, dict[int, RecordedLife]] = {}

    def life(learner: str, incarnation: int) -> RecordedLife:
        return found.setdefault(learner, {}).setdefault(incarnation, RecordedLife(incarnation))

    for joined in history.joined:
        life(joined.who, joined.fields.incarnation).joined = joined
    for left in history.left:
        life(left.who, left.fields.incarnation).left = left
    for sample in history.samples:
        life(sample.who, sample.fields.incarnation).samples.append(sample)
    for (learner, incarnation), newest in history.newest_samples.items():
        life(learner, incarnation).newest = newest
    for line, share in history.contributions():
        life(share.learner, share.incarnation).merged.append((line, share))
    return {learner: dict(sorted(own.items())) for learner, own in sorted(found.items())}


def adoption_delays(history: History, learner: str) -> list[float]:
    """Return how long after it was visible a learner adopted each version that it contributed on, in seconds, by two clocks."""
    return [
        share.adopted_at_s - based.at_s
        for line, share in history.contributions(learner)
        if share.adopted_at_s and (based := history.find(line.round.fragment, base_of(line, share))) is not None
    ]
