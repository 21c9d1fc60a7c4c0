"""The lives of learners by the event log: an index of all that it tells of each incarnation, made in one pass.

    joined ──► samples, merged contributions ──► left, or nothing more

A life that has not left in order ends with the last sign of it. No event tells how many steps such a life made: its newest
sample and its merged contributions do, as far as they go. A history that keeps only the newest rounds and samples still has the
newest sample of every life, so a life does not lose its steps when its rounds are forgotten.

Between two lives, and behind the last one, a learner is *absent*. No event says that it died. A life that has not left in
order is over if the learner joined once more, or if the event log goes on for more than `SIGN_S` without a sign of it. The
death is between the last sign and the next thing that the life would have written, so an absence is at most as long as told
here. While the whole run was stopped, nobody was gone.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Final

from atoll.protocol.ledger import Ledger
from atoll.run.history import History, Noted, RoundLine, RoundMoments, base_of
from atoll.wire.events import Contributor, JoinedEvent, LeftEvent, SampleEvent

SIGN_S: Final = 60.0
"""A learner with a sign of it within this time before the end of the event log counts as present until then."""


@dataclass(slots=True)
class RecordedLife:
    """One incarnation as the event log tells it, in order; None where it has no such event.

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


@dataclass(frozen=True, slots=True)
class LearnerAbsence:
    """A time in which a learner was gone, after its incarnation `former`; seconds since the epoch.

    `until_s` is when the incarnation `heir` began to start, and `joined_s` when it trained. All three are None if the learner
    is still gone at the end of the event log. `gone_s` is without the time in which the whole run was stopped. `lost_tokens`
    is None until every shard has closed its ledger.
    """

    learner: str
    former: int
    from_s: float
    gone_s: float
    until_s: float | None = None
    joined_s: float | None = None
    heir: int | None = None
    lost_tokens: float | None = None

    def describe_loss(self) -> str:
        """Return what was lost with it, as the end of a sentence; empty where the event log does not tell."""
        if self.lost_tokens is None:
            return ""
        return (
            f"; {self.lost_tokens:,.4g} tokens were lost with it" if self.lost_tokens else "; no token was lost with it"
        )


def absences_of(history: History) -> list[LearnerAbsence]:
    """Return the absences of all learners, by learner, the oldest first."""
    ledger = _closing_ledger(history)
    found = []
    for learner, lives in lives_of(history).items():
        begun = [life for life in lives.values() if life.joined is not None]
        for life, following in [*pairwise(begun), *((life, None) for life in begun[-1:])]:
            if life.left is None and (one := _absence(history, learner, life, following, ledger)) is not None:
                found.append(one)
    return found


def _absence(
    history: History, learner: str, life: RecordedLife, following: RecordedLife | None, ledger: Ledger | None
) -> LearnerAbsence | None:
    """Return the absence after a life that has not left; None if it is still there, or if the run was stopped with it."""
    last_s, lost = _last_sign_s(life), _lost_tokens(history, ledger, learner, life.incarnation)
    if following is None or following.joined is None:
        # Whatever it wrote is a sign of its newest life: `sample_s` may be long, and then its traffic is told more often.
        last_s = max(last_s, history.last_s.get(learner, last_s))
        # A run of an earlier release has no samples. There a learner that trains for long gives no sign.
        gone_s = history.newest_s - last_s - history.paused_s(last_s, history.newest_s)
        if not history.newest_samples or gone_s <= SIGN_S:
            return None
        return LearnerAbsence(learner, life.incarnation, last_s, gone_s, lost_tokens=lost)
    joined_s = following.joined.at_s
    begun_s = joined_s - following.joined.fields.began_before_s
    # A contribution may arrive after the death of its learner, and even after the next life began.
    last_s = min(last_s, begun_s)
    paused_s = history.paused_s(last_s, begun_s)
    gone_s = begun_s - last_s - paused_s
    if paused_s and gone_s <= SIGN_S:
        return None  # it was stopped together with all others
    return LearnerAbsence(learner, life.incarnation, last_s, gone_s, begun_s, joined_s, following.incarnation, lost)


def _last_sign_s(life: RecordedLife) -> float:
    """Return when a life that has joined was last heard: it joined, told a sample, or a contribution of it arrived."""
    signs = [each.at_s for each in (life.joined, life.newest) if each is not None]
    for line, share in life.merged:
        arrived_s = line.at_s if share.arrived_s is None else RoundMoments.of(line).called_s + share.arrived_s
        # A shard merges what a learner sent long before, so the time of the merge is only a bound.
        signs.append(min(arrived_s, line.at_s))
    return max(signs)


def _closing_ledger(history: History) -> Ledger | None:
    """Return the ledger of a run that is over; None as long as a shard has not closed its own."""
    if not history.closed or set(history.shards()) != history.closed or not history.closed <= history.ledgers.keys():
        return None
    whole = Ledger()
    for shard in sorted(history.closed):
        whole.absorb(history.ledgers[shard].ledger)
    return whole


def _lost_tokens(history: History, ledger: Ledger | None, learner: str, incarnation: int) -> float | None:
    account = None if ledger is None else ledger.accounts.get(f"{learner}/{incarnation}")
    if account is None:
        return None
    fragments = len({fragment for shard in history.shards() for fragment in history.fragments_of(shard)})
    return max(0, account.fates(fragments)["lost"]) / fragments if fragments else None
