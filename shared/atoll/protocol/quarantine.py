"""Protection against learners that spoil a run: a bad contribution is refused, a bad incarnation is isolated.

A pseudo-gradient that cannot be used is refused whole, with its reason. Some reasons blame no learner (a base that became
too old, chunks that the broker deleted). Others no healthy learner causes: these are *offences* (`OFFENCES`). At the
run's `offences_max`-th offence the shard isolates that incarnation. It refuses the incarnation's later contributions
unread as `quarantined`, no round waits for it, and it is told so; a learner of ours then stops with an error. The next
incarnation begins with a clean record, because a restart mends most of these faults.

**Outliers.** A pseudo-gradient may be finite, of the right size and as long as claimed, and still ruin the model: memory
flips bits, or a learning rate is a hundred times the run's. The measure is the history of the same fragment, with norms
||v_i|| over s_i steps:

    outlier  <=>  ||v|| > outlier_ratio * median(||v_i||) * max(1, s / median(s_i))  and  ||v|| > 0.01 ||theta||

A pseudo-gradient over k times the steps may be k times as long, since every inner step has a bounded length. One that is
short beside the parameters ruins nothing, so it is no outlier. Judging begins with `MEASURES_MIN` measures; the last
`MEASURES_MAX` count. The first pushes of a run cover a step or two, so only local intervals of at least half of H are
measured. Refused contributions are measured as well: if the run has really changed, the median follows within some
rounds. Measures of lives that have ended count no more: a fleet that begins anew, with the rate of a longer schedule say,
is judged anew. An outlier is an offence only if its learner stands alone: another learner's was accepted lately, and no other's
refused. Otherwise it is refused as `unusual`, without blame. The fragment ledger keeps measures and offences, so the next
owner judges as its predecessor did.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import inf
from statistics import median
from typing import Final

import msgspec

from atoll.base.quantities import Incarnation, PeerId, Steps
from atoll.protocol.ledger import Ledger
from atoll.protocol.pacing import KnownLearner

OFFENCES: Final = frozenset(
    {
        "checksum",
        "codec",
        "compression",
        "corrupt",
        "empty",
        "foreign",
        "implausible",
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
    """The length (L2) of a learner's pseudo-gradient, the number of inner steps in it, and whether that length was refused.

    `incarnation` is 0 in ledgers of former releases.
    """

    norm: float
    steps: Steps
    learner: PeerId
    refused: bool = False
    incarnation: Incarnation = 0


def is_of_the_past(learners: Mapping[str, KnownLearner], ledger: Ledger, measure: Measure) -> bool:
    """Return whether the life that a measure is of has ended: the learner has left, or a later one of its learner is known."""
    newest, account = learners.get(measure.learner), ledger.accounts.get(f"{measure.learner}/{measure.incarnation}")
    return (newest is not None and newest.incarnation > measure.incarnation > 0) or (
        account is not None and account.left
    )


def is_outlier(measures: Sequence[Measure], norm: float, steps: int, ratio: float, base_norm: float = 0.0) -> bool:
    """Return whether a pseudo-gradient of this length over so many steps is an outlier; never for ratio 0.

    `base_norm` is the L2 norm of the global fragment that it would move.
    """
    return norm > norm_max(measures, steps, ratio, base_norm)


def norm_max(measures: Sequence[Measure], steps: int, ratio: float, base_norm: float = 0.0) -> float:
    """Return the length beyond which a pseudo-gradient over so many steps is an outlier; infinite where none is."""
    if ratio <= 0.0 or len(measures) < MEASURES_MIN:
        return inf
    usual_norm = median(known.norm for known in measures)
    usual_steps = median(known.steps for known in measures) or 1.0
    if usual_norm <= 0.0:
        return inf
    return max(NEGLIGIBLE_SHARE * base_norm, ratio * usual_norm * max(1.0, steps / usual_steps))


def judged(measures: Sequence[Measure], one: Measure, ratio: float, base_norm: float) -> str:
    """Return why a pseudo-gradient of such a length is refused; empty if it is accepted."""
    if not is_outlier(measures, one.norm, one.steps, ratio, base_norm):
        return ""
    return "outlier" if stands_alone(measures, one.learner) else "unusual"


def stands_alone(measures: Sequence[Measure], learner: str) -> bool:
    """Return whether another learner's pseudo-gradient was accepted lately and no other learner's refused."""
    others = [known for known in measures if known.learner != learner]
    return bool(others) and not any(known.refused for known in others)
