"""When a learner was gone: its *absences*, and the tokens that were lost with a life that ended without a farewell.

    last sign of a life ──(dead)──► the next life begins ──► it joins

No event says that a learner died. A life that has not left in order is over if the learner joined once more, or if the event
log goes on for more than `SIGN_S` without a sign of it. The death is between the last sign and the next thing that the life
would have written, so an absence is at most as long as told here. While the whole run was stopped, nobody was gone.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

from atoll.protocol.ledger import Ledger
from atoll.story.goodput import SIGN_S
from atoll.story.history import History, RoundMoments
from atoll.story.lives import RecordedLife, lives_of


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

    def lost_told(self) -> str:
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
    if not history.closed or set(history.shards()) != set(history.ledgers):
        return None
    whole = Ledger()
    for each in history.ledgers.values():
        whole.absorb(each)
    return whole


def _lost_tokens(history: History, ledger: Ledger | None, learner: str, incarnation: int) -> float | None:
    account = None if ledger is None else ledger.accounts.get(f"{learner}/{incarnation}")
    if account is None:
        return None
    fragments = len({fragment for shard in history.shards() for fragment in history.fragments_of(shard)})
    return max(0, account.fates(fragments)["lost"]) / fragments if fragments else None
