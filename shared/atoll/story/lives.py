"""The lives of learners and the owners of shards by the event log, and the times in which there was none.

    joined ──► samples, merged contributions ──► left, or nothing more
    last sign of an owner ──(dead)──► `serving` of the next owner ──► rounds go on

No event says that a process died, nor how many steps a life made that has not left: its newest sample and its merged
contributions tell, as far as they go. Between two lives, and behind the last one, a learner is *absent*: a life that has not
left is over if the learner joined once more, or if the event log goes on for more than `SIGN_S` without a sign of it.

A shard had an *outage* if a new owner begins to serve it and the former did not close its ledger: from the last sign of the
former until then; or to the end of the event log, if it has been silent for much longer than usual while others wrote on. A
living owner whose rounds wait for a quorum writes why, at growing intervals, and its process a sample of its presence every
`TOLD_EVERY_S`: where there are such signs of a shard, it is missed only after the time of two samples. The clock of a round
begins with the call of its present owner, so one that an outage interrupted stood still for longer than its figures say.

A death lies between the last sign and the next thing that the process would have written, so absences and outages are at most
as long as told here. While the whole run was stopped, nobody was gone.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import median
from typing import Final

from atoll.protocol.ledger import Ledger
from atoll.run.history import History, RoundLine, ServedTenure, base_of
from atoll.run.process_views import Noted, Sample
from atoll.wire.events import Contributor, JoinedEvent, LeftEvent, SampleEvent
from atoll.wire.traffic import TOLD_EVERY_S

SIGN_S: Final = 60.0
"""A learner with a sign of it within this time before the end of the event log counts as present until then."""
SILENT_TIMES: Final = 4.0
"""A shard is missed when it has written nothing for this many of its usual pauses between rounds (`missed_after_s`)."""
PRESENCE_SLACK_S: Final = 5.0
"""How late a sample of presence may be written: a busy machine, a broker that was away for a moment."""
GAPS_MIN: Final = 2
LONG_TIMES: Final = 2.0
LONG_MIN_S: Final = 0.1


@dataclass(slots=True)
class RecordedLife:
    """One incarnation as the event log tells it; `newest` is its newest sample, which a history keeps longer than `samples`."""

    incarnation: int
    joined: Noted[JoinedEvent] | None = None
    left: Noted[LeftEvent] | None = None
    newest: Sample | None = None
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
        """Return when its first step began, seconds since the epoch, by the samples before and after that; it takes `step_s`.

        None if its first samples have a step already or are forgotten. One that never stepped began none before its newest.
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
    for view in history.learners.values():
        for known in view.lives.values():
            if known.newest is not None:
                life(view.learner, known.incarnation).newest = known.newest
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

    `until_s` is when the incarnation `heir` began to start, and `joined_s` when it trained; None if the learner is still gone.
    `gone_s` is without the time in which the run was stopped. `lost_tokens` is None until every shard has closed its ledger.
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
    is_over = history.closed and set(history.shards()) == history.closed == history.ledgers.keys()
    ledger = history.closed_ledger() if is_over else None
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
    last_s, lost = _last_sign_s(life), _lost_tokens(history, ledger, learner, life.incarnation)
    if following is None or following.joined is None:
        # Whatever it wrote is a sign of its newest life: `sample_s` may be long, and then its traffic is told more often.
        last_s = max(last_s, history.last_s.get(learner, last_s))
        # Without samples a learner that trains for long may give no sign.
        gone_s = history.newest_s - last_s - history.paused_s(last_s, history.newest_s)
        if not history.samples or gone_s <= SIGN_S:
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
    signs = [each.at_s for each in (life.joined, life.newest) if each is not None]
    for line, share in life.merged:
        arrived_s = line.at_s if share.arrived_s is None else line.called_s + share.arrived_s
        # A shard merges what a learner sent long before, so the time of the merge is only a bound.
        signs.append(min(arrived_s, line.at_s))
    return max(signs)


def _lost_tokens(history: History, ledger: Ledger | None, learner: str, incarnation: int) -> float | None:
    account = None if ledger is None else ledger.accounts.get(f"{learner}/{incarnation}")
    if account is None:
        return None
    fragments = len({fragment for shard in history.shards() for fragment in history.fragments_of(shard)})
    return max(0, account.fates(fragments)["lost"]) / fragments if fragments else None


@dataclass(frozen=True, slots=True)
class ShardOutage:
    """A time in which a shard had no owner; `heir` is the tenure that ended it, None: it lasts to the end of the event log."""

    shard: str
    from_s: float
    until_s: float
    heir: ServedTenure | None

    @property
    def lasted_s(self) -> float:
        """Return how long it was, in seconds."""
        return self.until_s - self.from_s

    def within_s(self, from_s: float, until_s: float) -> float:
        """Return how much of it lies in a stretch of time, in seconds."""
        return max(0.0, min(self.until_s, until_s) - max(self.from_s, from_s))


def owner_of(tenure: ServedTenure) -> str:
    """Return the process that serves in a tenure, in words."""
    return f"process {tenure.fields.pid} on {tenure.fields.host}" if tenure.fields.host else "another process"


def usual_pause_s(history: History, shard: str) -> float | None:
    """Return the time that usually passes between two rounds of a shard; None with too few of them to tell."""
    made = [line for line in history.rounds if line.shard == shard]
    gaps = [after.at_s - before.at_s for before, after in pairwise(made)]
    if len(gaps) < GAPS_MIN:
        return None
    return max(median(gaps), median(line.round.waited_s for line in made))


def missed_after_s(history: History, shard: str) -> float | None:
    """Return the silence after which a shard is missed; None where neither its rounds nor other signs of it tell."""
    usual_s = usual_pause_s(history, shard)
    patience_s = None if usual_s is None else SILENT_TIMES * usual_s
    if shard not in history.sighted:
        return patience_s
    # A page forgets the rounds of a shard that is dead for long. It is missed all the same.
    return max(patience_s or 0.0, 2 * TOLD_EVERY_S + PRESENCE_SLACK_S)


def outages_of(history: History) -> list[ShardOutage]:
    """Return the outages of all shards, oldest first. While the whole run was stopped no shard is missed."""
    found = []
    for each in history.tenures:
        if each.former_s is None or each.closed or each.from_s <= each.former_s:
            continue
        if not history.paused_s(each.former_s, each.from_s):
            found.append(ShardOutage(each.shard, each.former_s, each.from_s, each))
    for shard in history.shards():
        patience_s, last_s = missed_after_s(history, shard), history.last_s.get(shard, history.newest_s)
        if shard in history.closed or patience_s is None or history.newest_s - last_s <= patience_s:
            continue
        found.append(ShardOutage(shard, last_s, history.newest_s, None))
    return sorted(found, key=lambda each: each.from_s)


def stood_still(history: History, line: RoundLine, outages: Sequence[ShardOutage]) -> list[ShardOutage]:
    """Return the outages of a round's shard since the version before was made: so long it stood still."""
    before = history.find(line.round.fragment, line.round.version - 1)
    since_s = before.at_s if before is not None else history.began_s or 0.0
    return [each for each in outages if each.shard == line.shard and each.within_s(since_s, line.at_s) > 0.0]


@dataclass(frozen=True, slots=True)
class RoundLength:
    """How long a round stood still before its call, without an owner; `whole_s` is that until its version was visible."""

    line: RoundLine
    outage_s: float

    @property
    def whole_s(self) -> float:
        """Return both together."""
        return self.line.round.took_s + self.outage_s


def round_lengths(history: History) -> list[RoundLength]:
    """Return the length of every round, the longest first."""
    outages = outages_of(history)
    lengths = [
        RoundLength(line, sum(each.lasted_s for each in stood_still(history, line, outages))) for line in history.rounds
    ]
    return sorted(lengths, key=lambda each: each.whole_s, reverse=True)


def long_bound_s(lengths: Sequence[RoundLength]) -> float:
    """Return the length beyond which a round is long: twice the median, and at least `LONG_MIN_S` more than it."""
    usual_s = median(each.whole_s for each in lengths)
    return max(LONG_TIMES * usual_s, usual_s + LONG_MIN_S)
