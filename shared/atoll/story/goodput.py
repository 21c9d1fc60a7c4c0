"""The goodput of a run: learner-seconds stepping over learner-seconds present, by its event log.

For a whole run this is the only definition. Live views estimate it from heartbeats (`atoll.run.history`), curves from samples
(`atoll.run.curves`).

    present     from the beginning of a learner's first start to its farewell. Between a death and the next start it counts
                as present: that time is lost. Between a farewell and the next start it does not, nor while the whole run
                was stopped.
    stepping    its inner steps x its median step time, at most the time present; 0 in a run that never made a version.

The report, the page, `atoll why goodput`, `atoll what-if` and the shares of time lost rest on it, so their figures agree. A
learner that died and never came back was present until the last sign of it. One whose beginning or step time the event log does
not tell has no part in it.

A learner's *share* of a run (`LearnerShare`) is its part of the weight, how it agrees with the others, and how fast it and its
link are: medians over its merged contributions, so a single odd round does not matter. It is compared with the median of the
*other* learners, because there is no absolute measure: honest pseudo-gradients of a late phase agree less than those of an
early one. Of an even number of others that is the higher of the two in the middle for durations, which learners tell
themselves, and the lower for directions: so half of the others cannot make an honest learner stand out.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from statistics import median, median_high, median_low
from typing import Final

from atoll.run.history import History, RoundLine
from atoll.run.process_views import Noted
from atoll.story.lives import SIGN_S, RecordedLife, lives_of
from atoll.wire.events import Contributor, JoinedEvent

LEARNERS_TOLD_APART: Final = 3
"""In a round of two both agree equally well with each other: only three or more tell who is wrong."""
ROUNDS_JUDGED_MIN: Final = 4
AGREES_LESS: Final = 1 / 3
OTHERS_AGREE_MIN: Final = 0.05
"""Where the others hardly agree among themselves (a cosine below this), nobody can be told apart by direction."""


@dataclass(frozen=True, slots=True)
class LearnerShare:
    """One learner's part in the merges: medians over its contributions; None: the event log does not tell.

    Attributes:
        contributions, late: how many were merged, and how many of them late.
        tokens: token-fragments merged.
        weight_share: its mean share of the weight of the rounds that it was in, 0..1, after the staleness weight.
        aligned: cosine with the merge.
        aligned_with_others: cosine with the other learners, over the `judged` rounds of at least three.
        shortened: the mean of what the correction left of its length, 1: nothing was corrected.
        loss: the newest training loss that it told.
    """

    learner: str
    contributions: int
    late: int
    tokens: int
    weight_share: float
    aligned: float | None
    aligned_with_others: float | None
    judged: int
    steps: float | None
    step_s: float | None
    upload_s: float | None
    bytes: float | None
    shortened: float | None
    loss: float | None


def middle(values: Iterable[float | None]) -> float | None:
    """Return the median of the values that are known, None of none."""
    known = [value for value in values if value is not None]
    return median(known) if known else None


def longer_middle(durations_s: Iterable[float | None]) -> float | None:
    """Return the median of the durations that are known, of an even number the longer; None of none."""
    known = [duration_s for duration_s in durations_s if duration_s is not None]
    return median_high(known) if known else None


def weight_of(share: Contributor) -> float:
    """Return the weight with which a contribution counted; one whose damping the event log does not tell counts in full."""
    return share.weight * (1.0 if share.staleness_weight is None else share.staleness_weight)


def shares_of(rounds: Iterable[RoundLine]) -> list[LearnerShare]:
    """Return what each learner contributed to these rounds, by name."""
    merged: defaultdict[str, list[tuple[RoundLine, Contributor, float]]] = defaultdict(list)
    for line in rounds:
        total = sum(weight_of(share) for share in line.round.contributors)
        for share in line.round.contributors:
            merged[share.learner].append((line, share, weight_of(share) / total if total else 0.0))
    return [_share(learner, merged[learner]) for learner in sorted(merged)]


def _share(learner: str, merged: Sequence[tuple[RoundLine, Contributor, float]]) -> LearnerShare:
    shares = [share for _, share, _ in merged]
    judged, lengths = list(_alignments(merged)), [_kept_length(share) for share in shares if share.norm]
    losses = [share.loss for share in shares if share.loss is not None]

    def usual(figure_of: Callable[[Contributor], float | None]) -> float | None:
        return middle(figure_of(share) or None for share in shares)

    return LearnerShare(
        learner=learner,
        contributions=len(shares),
        late=sum(share.age > 0 for share in shares),
        tokens=sum(share.tokens for share in shares),
        weight_share=sum(weight for _, _, weight in merged) / len(merged),
        aligned=middle(share.aligned for share in shares),
        aligned_with_others=middle(judged),
        judged=len(judged),
        steps=usual(lambda share: share.steps),
        step_s=usual(lambda share: share.step_s),
        upload_s=usual(lambda share: None if share.inline else share.upload_s),
        bytes=usual(lambda share: share.bytes),
        shortened=sum(lengths) / len(lengths) if lengths else None,
        loss=losses[-1] if losses else None,
    )


def _alignments(merged: Iterable[tuple[RoundLine, Contributor, float]]) -> Iterator[float]:
    for line, share, _ in merged:
        learners = {each.learner for each in line.round.contributors}
        if share.aligned_with_others is not None and len(learners) >= LEARNERS_TOLD_APART:
            yield share.aligned_with_others


def _kept_length(share: Contributor) -> float:
    if share.corrected and share.corrected_norm is not None and share.norm:
        return share.corrected_norm / share.norm
    return 1.0


def of_others(
    shares: Sequence[LearnerShare], learner: str, figure: Callable[[LearnerShare], float | None]
) -> float | None:
    """Return the median of a figure over the other learners."""
    return middle(figure(share) for share in shares if share.learner != learner)


def duration_of_others(
    shares: Sequence[LearnerShare], learner: str, duration_s: Callable[[LearnerShare], float | None]
) -> float | None:
    """Return the median of a duration over the other learners, of an even number the longer: who is slow takes longer."""
    return longer_middle(duration_s(share) for share in shares if share.learner != learner)


def alignment_of_others(shares: Sequence[LearnerShare], learner: str) -> float | None:
    """Return the median alignment of the other learners, of an even number the lower."""
    known = [share.aligned_with_others for share in shares if share.learner != learner]
    told = [aligned for aligned in known if aligned is not None]
    return median_low(told) if told else None


def points_away(share: LearnerShare, others: float | None) -> bool:
    """Return whether a learner's direction is not that of the others, whose median alignment is `others`.

    Noise has an alignment near 0, a flipped sign a negative one. It is told only if the others agree among themselves.
    """
    own = share.aligned_with_others
    if own is None or others is None or share.judged < ROUNDS_JUDGED_MIN:
        return False
    return others >= OTHERS_AGREE_MIN and own < AGREES_LESS * others


DEFINITION: Final = (
    "goodput: learner-seconds stepping over learner-seconds present; who failed is present until it is back"
)
"""What `atoll why`, `atoll what-if` and `atoll plan` mean by the word, for a person to read."""


@dataclass(frozen=True, slots=True)
class TimePresent:
    """Time of a learner by the event log, in so many lives; `step_s` is its median step time.

    `compiling_s` is the time between joining and the first step: a learner compiles its step then, or waits for its turn to.
    """

    present_s: float
    stepping_s: float
    starting_s: float
    joining_s: float
    compiling_s: float
    lives: int
    step_s: float

    def stepped_s(self, steps: int) -> float:
        """Return the seconds of so many steps, at most the time present."""
        return min(steps * self.step_s, self.present_s)


@dataclass(frozen=True, slots=True)
class RunGoodput:
    """The seconds of all learners."""

    present_s: float
    stepping_s: float

    @property
    def share(self) -> float | None:
        """Return the goodput, 0..1; None where the event log tells of no learner's time."""
        return self.stepping_s / self.present_s if self.present_s > 0.0 else None


def goodput_of(history: History) -> RunGoodput:
    """Return the goodput of a run."""
    return summed(presences(history).values())


def summed(there: Iterable[TimePresent]) -> RunGoodput:
    """Return the goodput of these learners together."""
    known = list(there)
    return RunGoodput(sum(one.present_s for one in known), sum(one.stepping_s for one in known))


def presences(history: History) -> dict[str, TimePresent]:
    """Return the time of each learner of which the event log tells its steps and its beginning."""
    found = {learner: _presence(history, list(lives.values())) for learner, lives in lives_of(history).items()}
    return {learner: there for learner, there in found.items() if there is not None}


def _presence(history: History, lives: list[RecordedLife]) -> TimePresent | None:
    step_s = _usual_step_s(lives)
    begun = [(life, life.joined) for life in lives if life.joined is not None]
    if not begun or step_s is None:
        return None
    present_s = starting_s = joining_s = compiling_s = 0.0
    followers = [joined for _, joined in begun[1:]]
    for (life, joined), following in zip_longest(begun, followers):
        starting_s += joined.fields.start_s
        joining_s += joined.fields.took_s
        first_s = life.first_step_s(step_s) or 0.0
        compiling_s += max(0.0, first_s - joined.at_s - history.paused_s(joined.at_s, first_s))
        begun_s = _began_s(joined)
        ended_s = _ended_s(history, life, begun_s, following)
        present_s += max(0.0, ended_s - begun_s - history.paused_s(begun_s, ended_s))
    stepping_s = min(sum(life.steps for life in lives) * step_s, present_s) if history.rounds else 0.0
    return TimePresent(max(present_s, 1e-9), stepping_s, starting_s, joining_s, compiling_s, len(begun), step_s)


def _usual_step_s(lives: Sequence[RecordedLife]) -> float | None:
    """Return a learner's median step time by its merged contributions, else by its samples.

    Where the history has forgotten both, it still has the newest sample of each life.
    """
    step_s = middle(share.step_s or None for life in lives for _, share in life.merged)
    if step_s is None:
        step_s = middle(each.fields.step_s or None for life in lives for each in life.samples)
    if step_s is None:
        step_s = middle(life.newest.fields.step_s or None for life in lives if life.newest is not None)
    return step_s


def _began_s(joined: Noted[JoinedEvent]) -> float:
    return joined.at_s - joined.fields.began_before_s


def _ended_s(history: History, life: RecordedLife, begun_s: float, following: Noted[JoinedEvent] | None) -> float:
    """Return until when a learner counts as present in a life, which another one may follow."""
    if life.left is not None:
        return life.left.at_s
    if following is not None:
        return _began_s(following)
    last_s = life.last_s or begun_s
    return history.newest_s if last_s >= history.newest_s - SIGN_S else last_s
