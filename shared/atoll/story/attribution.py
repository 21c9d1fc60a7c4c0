"""What each learner contributed: its share of the weight, how it agrees with the others, and how fast it and its link are.

All figures are medians over a learner's merged contributions, so a single odd round does not matter. Learners are compared with
the median of the *other* learners, because there is no absolute measure of a good step time or a good direction: honest
pseudo-gradients of a late phase of training agree less than those of an early one. Of an even number of others that is the
higher of the two in the middle for durations, which learners tell themselves, and the lower for directions: so half of the
others cannot make an honest learner stand out.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from statistics import median, median_high, median_low
from typing import Final

from atoll.run.event_fields import Contributor
from atoll.run.view import RoundLine

LEARNERS_TOLD_APART: Final = 3
"""In a round of two both agree equally well with each other: only three or more tell who is wrong."""
ROUNDS_JUDGED_MIN: Final = 4
AGREES_LESS: Final = 1 / 3
OTHERS_AGREE_MIN: Final = 0.05
"""Where the others hardly agree among themselves (a cosine below this), nobody can be told apart by direction."""


@dataclass(frozen=True, slots=True)
class LearnerShare:
    """One learner's part in the merges. Durations are medians in seconds; None: the event log does not tell.

    Attributes:
        contributions, late: how many were merged, and how many of them late.
        tokens: token-fragments merged.
        weight_share: its mean share of the weight of the rounds that it was in, 0..1, after the staleness weight.
        aligned: median cosine with the merge.
        aligned_with_others: median cosine with the other learners, over the `judged` rounds of at least three.
        steps: median inner steps in a contribution.
        step_s, upload_s: median step time and time of an upload.
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
    judged = [
        share.aligned_with_others
        for line, share, _ in merged
        if share.aligned_with_others is not None
        and len({each.learner for each in line.round.contributors}) >= LEARNERS_TOLD_APART
    ]
    lengths = [
        share.corrected_norm / share.norm if share.corrected and share.corrected_norm is not None else 1.0
        for share in shares
        if share.norm
    ]
    losses = [share.loss for share in shares if share.loss is not None]
    return LearnerShare(
        learner=learner,
        contributions=len(shares),
        late=sum(share.age > 0 for share in shares),
        tokens=sum(share.tokens for share in shares),
        weight_share=sum(weight for _, _, weight in merged) / len(merged),
        aligned=middle(share.aligned for share in shares),
        aligned_with_others=middle(judged),
        judged=len(judged),
        steps=middle(share.steps or None for share in shares),
        step_s=middle(share.step_s or None for share in shares),
        upload_s=middle(share.upload_s or None for share in shares if not share.inline),
        bytes=middle(share.bytes or None for share in shares),
        shortened=sum(lengths) / len(lengths) if lengths else None,
        loss=losses[-1] if losses else None,
    )


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
