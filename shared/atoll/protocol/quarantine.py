"""Who spoils a run, and what is done about it: one bad contribution is refused, a bad learner is isolated.

A pseudo-gradient that cannot be used is refused whole, with its reason. Some reasons are nobody's fault (a base that became
too old, chunks that the broker let go); others no healthy learner gives, and these are *offences*: `OFFENCES`. At the
run's `offences_max`-th offence of one incarnation the shard isolates that incarnation, and only that one: what it sends
from then on is refused unread as `quarantined`, no round waits for it, and it is told so, upon which a learner of ours
stops with an error. Its next incarnation begins with a clean record: a restart is what mends most of these faults.

**Outliers.** A pseudo-gradient may be finite, of the right size and as long as claimed, and ruin the model all the same: a
learner whose memory flips bits, or whose learning rate is a hundred times the run's. The yardstick is what came of the
same fragment before, with norms ||v_i|| over s_i steps:

    outlier  <=>  ||v|| > outlier_ratio * median(||v_i||) * max(1, s / median(s_i))  and  ||v|| > 0.01 ||theta||

A pseudo-gradient over k times the steps may be k times as long, since every inner step has a bounded length. What is short
beside the parameters themselves ruins nothing: where a run has converged, ten times almost nothing is no offence. Nothing is
judged before `MEASURES_MIN` are known; the last `MEASURES_MAX` count.

A yardstick must follow the run. While the learning rate warms up, what is usual grows with every round, and the first
pushes of a run cover a step or two: so only spans of half an interval or more are measured. What is refused is measured as
well: if the run has really changed, the median follows within some rounds. And an outlier is an offence only while its
learner stands alone with it: somebody else's was accepted lately and nobody else's refused. Otherwise it is refused as
`unusual`, and nobody is isolated for it. Measures and offences are kept in the fragment's books, so an heir judges as
its predecessor did.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import msgspec

from atoll.protocol.grace import median

OFFENCES: Final = frozenset(
    {
        "checksum",
        "codec",
        "compression",
        "corrupt",
        "foreign",
        "norm_bound",
        "norm_claim",
        "not_finite",
        "outlier",
        "oversized",
        "size",
        "truncated",
        "version",
    }
)
"""Reasons of refusals that no healthy learner gives."""

NEGLIGIBLE_SHARE: Final = 0.01
MEASURES_MIN: Final = 4
MEASURES_MAX: Final = 16


class Measure(msgspec.Struct, frozen=True, array_like=True):
    """How long a learner's pseudo-gradient was (L2), over how many inner steps, and whether it was refused for that."""

    norm: float
    steps: int
    learner: str
    refused: bool = False


def is_outlier(measures: Sequence[Measure], norm: float, steps: int, ratio: float, base_norm: float = 0.0) -> bool:
    """Return whether a pseudo-gradient of this length over so many steps is out of all proportion; never for ratio 0.

    `base_norm` is the L2 norm of the global fragment that it would move.
    """
    if ratio <= 0.0 or len(measures) < MEASURES_MIN or norm <= NEGLIGIBLE_SHARE * base_norm:
        return False
    usual_norm = median(known.norm for known in measures) or 0.0
    usual_steps = median(float(known.steps) for known in measures) or 1.0
    return usual_norm > 0.0 and norm > ratio * usual_norm * max(1.0, steps / usual_steps)


def stands_alone(measures: Sequence[Measure], learner: str) -> bool:
    """Return whether somebody else's pseudo-gradient was accepted lately and nobody else's refused."""
    others = [known for known in measures if known.learner != learner]
    return bool(others) and not any(known.refused for known in others)
